"""The gradient hook over a group of our own, without processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from laconic.comm import group as polling
from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllReduce, Collective
from laconic.comm.exchange import Exchange, Reduced
from laconic.comm.group import CommunicationError
from laconic.comm.ledger import Ledger
from laconic.comm.pipeline import DEPTH
from laconic.gradients.hook import GradientHook
from laconic.reducers.base import Reducer
from laconic.reducers.exact import Exact


class Stuck:
    """A collective whose peers never come; it tells how long it was waited for."""

    waits: list[float] = []  # noqa: RUF012  (one test's)

    def wait(self) -> Tensor:
        raise AssertionError("nobody may wait for it without a limit")

    def future(self) -> Future[Tensor]:
        raise AssertionError("nobody asks for it")

    def when_done(self, call: Callable[[], None]) -> None:
        raise AssertionError("nobody asks for it")

    def settle(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False


class Alone:
    rank, world, who = 0, 2, "2 ranks"

    def check_peers(self) -> None:
        """They are there."""

    def launch(self, collective: Collective) -> Stuck:
        return Stuck()


class Filled:
    """As much of DDP's bucket as the hook reads."""

    def __init__(self, parameter: Tensor, index: int = 0, last: bool = False) -> None:
        self._parameter, self._index, self._last = parameter, index, last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return torch.ones(2)

    def parameters(self) -> list[Tensor]:
        return [self._parameter]

    def gradients(self) -> list[Tensor]:
        return [torch.ones(2)]


def test_how_long_a_failed_backward_is_waited_for_is_set_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "POLL_SECONDS", 0.25)
    parameter = torch.ones(2)
    hook = GradientHook(Exact(), Alone(), {id(parameter): "weight"}, {"weight": {}}, Ledger())
    hook.arrive(Filled(parameter))
    with pytest.warns(UserWarning, match="a peer never launched its part"):
        hook.settle()
    assert Stuck.waits == [pytest.approx(0.25, abs=0.1)]


class Complete:
    """A collective of one rank, which is over at once."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor

    def future(self) -> Future[Tensor]:
        raise AssertionError("nobody asks for it")

    def when_done(self, call: Callable[[], None]) -> None:
        raise AssertionError("nobody asks for it")

    def settle(self, seconds: float) -> bool:
        return True


class Listed:
    """Lists what leaves: numbers are (parameter, round)."""

    rank, world, who = 1, 3, "3 ranks"

    def __init__(self) -> None:
        self.left: list[tuple[int, ...]] = []
        self.broken = False

    def check_peers(self) -> None:
        """They are there."""

    def launch(self, collective: Collective) -> Complete:
        if self.broken:
            raise RuntimeError("connection reset")
        self.left.append(tuple(int(number) for number in collective.tensor.tolist()))
        return Complete(collective.tensor)


SEEN: list[Bucket] = []


@dataclass(frozen=True)
class Rounds(Reducer):
    """Bucket n takes as many rounds as its place in the list says."""

    counts: Sequence[int]

    def reduce(self, bucket: Bucket) -> Exchange:
        SEEN.append(bucket)
        (name,) = bucket.names
        for number in range(self.counts[int(name)]):
            yield AllReduce(torch.tensor([int(name), number]))
        if self.counts[int(name)] == 0:
            raise ArithmeticError("no rounds")

        def finish() -> None:
            bucket.slots[0]["count"] = bucket.slots[0].get("count", torch.zeros(())) + 1

        return Reduced(bucket.flat, None, finish)


PARAMETERS = [torch.ones(2) for _ in range(4)]


def listed(counts: Sequence[int], depth: int = DEPTH) -> tuple[GradientHook, Listed, dict[str, dict[str, Tensor]]]:
    group, memory = Listed(), {str(place): {} for place in range(4)}  # type: ignore[var-annotated]
    names = {id(parameter): str(place) for place, parameter in enumerate(PARAMETERS)}
    return GradientHook(Rounds(counts), group, names, memory, Ledger(), depth), group, memory


def arrive(hook: GradientHook, *places: int, last: int | None = 3) -> list[Future[Tensor]]:
    return [hook.arrive(Filled(PARAMETERS[place], place, place == last)) for place in places]


IN_BETWEEN = {
    1: [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (3, 0), (3, 1), (3, 2)],
    2: [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0), (0, 2), (1, 1), (3, 1), (3, 2)],
}


@pytest.mark.parametrize("depth", [1, DEPTH])
def test_collectives_leave_in_the_order_that_the_docs_say(depth: int) -> None:
    """docs/ordering.md: rules 1 to 3."""
    hook, group, memory = listed([3, 2, 1, 3], depth)
    at_the_end = [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (3, 1), (0, 2), (3, 2)]
    for wanted in (at_the_end, IN_BETWEEN[depth], IN_BETWEEN[depth]):  # what is expected is what came before
        group.left.clear()
        futures = arrive(hook, 0, 1, 2)
        assert not any(future.done() for future in futures)
        assert not any(slot.get("count", 0) == hook.exchanges + 1 for slot in memory.values()), "memory is written at the end"
        futures += arrive(hook, 3)
        assert group.left == wanted
        assert all(future.done() for future in futures)
    assert [float(slot["count"]) for slot in memory.values()] == [3.0] * 4
    group.left.clear()
    hook.use(Rounds([1, 2, 2, 1]), group)  # nothing is known of another reducer
    arrive(hook, 0, 1, 2, 3)
    assert group.left == [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1)]
    assert hook.exchanges == 4


def test_another_layout_of_buckets_is_expected_anew() -> None:
    hook, group, _ = listed([2, 2, 2, 2], depth=1)
    for _ in range(2):
        arrive(hook, 0, 1, 2, 3)
    assert hook.layout() == [["0"], ["1"], ["2"], ["3"]]
    group.left.clear()
    for number, place in enumerate((0, 2, 1, 3)):
        hook.arrive(Filled(PARAMETERS[place], number, number == 3))
    assert hook.layout() == [["0"], ["2"], ["1"], ["3"]]
    assert group.left == [(0, 0), (2, 0), (0, 1), (1, 0), (3, 0), (2, 1), (1, 1), (3, 1)]
    for number, place in enumerate((0, 2)):
        hook.arrive(Filled(PARAMETERS[place], number, number == 1))
    assert hook.layout() == [["0"], ["2"]], "of the last backward"


def test_a_bucket_knows_where_and_when_it_is() -> None:
    SEEN.clear()
    hook, _, memory = listed([1] * 4)
    hook.step, hook.exchanges, hook.scale = 7, 2, lambda: 16.0
    arrive(hook, 2, last=2)
    (one,) = SEEN
    assert (one.rank, one.world, one.step, one.exchanges, one.scale, one.names) == (1, 3, 7, 2, 16.0, ["2"])
    assert one.slots[0] is memory["2"]
    assert not one.feedback


@pytest.mark.parametrize("again", [(0, 1, 2, 3), (1, 3)])
def test_a_backward_that_never_ended_is_forgotten_by_the_next(again: tuple[int, ...]) -> None:
    hook, group, memory = listed([1] * 4)
    arrive(hook, 0, 1)
    group.left.clear()
    assert all(future.done() for future in arrive(hook, *again))
    assert group.left == [(place, 0) for place in again]
    assert {name for name, slot in memory.items() if slot} == {str(place) for place in again}
    assert (hook.exchanges, hook.idle) == (1, True)


def test_what_fails_says_where_and_leaves_nothing() -> None:
    hook, group, _ = listed([1, 1, 0, 1])
    hook.strategy, hook.step = "mine()", 4
    where = r"mine\(\), step 5, averaging gradients of bucket"
    with pytest.raises(ArithmeticError) as caught:
        arrive(hook, 0, 1, 2, 3)
    assert caught.value.__notes__ == ["laconic: mine(), step 5, averaging gradients of bucket 2"]
    assert hook.idle
    group.broken = True
    with pytest.raises(CommunicationError, match=rf"^{where} 1: AllReduce of 16 bytes among 3 ranks failed: connection reset$"):
        arrive(hook, 1)
    assert hook.idle
