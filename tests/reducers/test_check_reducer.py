"""`laconic.check_reducer` passes what is right, and says which law a wrong reducer breaks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import laconic
from tests.own_parts import Clipped


@dataclass(frozen=True)
class Half(laconic.Reducer):
    """Of docs/extending.md: sums on the wire, whose roundings are no rank's error."""

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        sent = bucket.flat.bfloat16()
        error = bucket.flat - sent
        mean = yield laconic.AllReduce(sent)
        return laconic.Reduced(bucket.flat.copy_(mean), error)


RIGHT = [
    laconic.Exact(),
    Half(),
    laconic.ErrorFeedback(Half()),
    laconic.Cast("bf16"),
    laconic.TopK(0.1, phases=1),
    laconic.PowerSGD(2),
    laconic.Warmup(3, laconic.RandomK(0.1)),
]


@pytest.mark.parametrize("reducer", RIGHT, ids=str)
def test_what_is_right_passes(reducer: laconic.Reducer) -> None:
    laconic.check_reducer(reducer)


def test_on_other_numbers_of_ranks_and_in_other_types() -> None:
    for world in (1, 2):
        laconic.check_reducer(Half(), world, seed=world)
    laconic.check_reducer(laconic.Cast("fp16"), 2, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Rows(laconic.Reducer):
    """Every second number, or always the same ones."""

    rotates: bool

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        first = bucket.exchanges % 2 if self.rotates else 0
        alarm = 0 * bucket.flat.sum().view(1)
        half = bucket.flat[first::2]
        mean = yield laconic.AllReduce(torch.cat([half, alarm]))
        error = bucket.flat.clone()
        error[first::2] = 0
        bucket.flat.zero_()
        bucket.flat[first::2] = mean[:-1]
        return laconic.Reduced(bucket.flat.add_(mean[-1]), error)

    @property
    def exchange_cycle(self) -> int:  # type: ignore[override]
        return 2


def test_what_never_sends_some_of_its_numbers_is_refused() -> None:
    laconic.check_reducer(Rows(rotates=True))
    laconic.check_reducer(laconic.ErrorFeedback(Rows(rotates=True)))
    for wrong in (Rows(rotates=False), laconic.ErrorFeedback(Rows(rotates=False))):
        with pytest.raises(ValueError, match=r"Rows never sends [0-9]+ of 1001 numbers, not in 64 exchanges"):
            laconic.check_reducer(wrong)


Change = Callable[[laconic.Bucket], Any]


@dataclass(frozen=True)
class Wrong(laconic.Reducer):
    """An exact mean, but for one mistake."""

    how: str
    memory = {"last": "shared"}  # noqa: RUF012  (declared as a ClassVar)

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        flat, how, error = bucket.flat, self.how, None
        before = flat.clone()
        if how == "half":
            flat.mul_(0.5)
        if how in ("rounded", "wrong error"):
            flat.copy_(flat.bfloat16())
        if how == "wrong error":
            error = flat - before
        if how == "offset":
            flat.add_(1e-7)
        if how == "hidden":
            flat.nan_to_num_()
        if how == ("third exchange" if bucket.exchanges % 3 == 2 else "not on meta" if not flat.is_meta else None):
            yield laconic.AllReduce(before.clone())
        mean = yield laconic.AllReduce(flat[: bucket.rank] if how == "rank 0 sends less" else flat)
        if how == "own mean" and bucket.rank == 1:
            mean = mean * (1 + 1e-6)
        if how == "not shared":
            bucket.slots[0]["last"] = torch.tensor([bucket.rank])
        if how == "dtype":
            mean = mean.double()

        def finish() -> None:
            if how == "spoilt":
                bucket.slots[0]["last"] = mean.sum().reshape(1)

        return laconic.Reduced(mean[1:] if how == "short" else mean, error, finish)


MISTAKES = {
    "half": r"Wrong loses numbers and returns no error: its mean is off by up to .*, and ErrorFeedback would believe",
    "rounded": r"Wrong loses numbers and returns no error",
    "wrong error": r"Wrong: the mean plus the mean of the ranks' errors must be the true mean, and is off by up to 0\.0",
    "offset": r"Wrong makes of zeros on all ranks a mean that is not zero",
    "hidden": r"Wrong hides a number that is not finite: one rank had nan, and the mean on rank 0 is finite",
    "own mean": r"Wrong: all ranks must have the same mean, bit for bit.*rank 1's differs from rank 0's by up to",
    "short": r"Wrong.reduce: the mean must have as many numbers as the bucket, 1, got 0",
    "dtype": r"Wrong: the mean must be of the bucket's dtype, torch.float32, got torch.float64",
    "not shared": r"Wrong: memory 'last' is declared as 'shared', and ranks have different bits",
    "spoilt": r"Wrong: one rank had nan, and memory 'last' has changed",
    "not on meta": r"Wrong: predict works out 6 bytes in 1 collectives, and 12 in 2 were sent",
    "third exchange": r"Wrong sends 12 bytes in exchange 2, and 6 in an earlier one .* set exchange_cycle, which is 2",
    "rank 0 sends less": r"Wrong: every rank must yield the same collectives, of the same shapes: ranks disagree",
}


@pytest.mark.parametrize("how", MISTAKES)
def test_the_law_that_is_broken_is_named(how: str) -> None:
    with pytest.raises(ValueError, match=MISTAKES[how]) as caught:
        laconic.check_reducer(Wrong(how))
    assert any("laconic.check_reducer: 3 ranks, parameters of shapes [" in note for note in caught.value.__notes__)


def test_a_reducer_inside_of_another_is_checked() -> None:
    """Error feedback returns no error by itself: what the inner one loses without a word would be lost."""
    with pytest.raises(ValueError, match="Wrong loses numbers and returns no error"):
        laconic.check_reducer(laconic.ErrorFeedback(Wrong("rounded")))


def test_one_that_may_keep_the_rest_in_memory_of_its_own_is_not_held_to_errors() -> None:
    """It sends a hundredth, and keeps the rest for itself, but where a number is not finite: that alone is said."""
    with pytest.raises(ValueError, match=r"Clipped.*not finite"):
        laconic.check_reducer(Clipped())


def test_arguments() -> None:
    for world in (0, True, 1.5):
        with pytest.raises(ValueError, match="world must be a number of ranks, at least 1, got"):
            laconic.check_reducer(Half(), world)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype must be a floating-point type such as torch.float32, got torch.int32"):
        laconic.check_reducer(Half(), dtype=torch.int32)
    with pytest.raises(TypeError, match=r"give an instance, Half\(\)"):
        laconic.check_reducer(Half)  # type: ignore[arg-type]
