"""PowerSGD: torch's and ours."""

import io
import logging
import pickle
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.compat.libraries import averaged, both, but_torch, close, linear, listening, mean, module, noise
from tests.live import last_ranks, ranks, ranks_within
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights

PATH = "ddp_comm_hooks.powerSGD_hook"
# Threads of torch's hook may kill their process after the test: nobody uses it again.
RANKS: dict[str, Any] = {"torch": last_ranks, "laconic": ranks}
SHAPES = ((24, 18), (24, 18), (13,), (6, 5, 3))  # two alike, a vector, and a small one of three dimensions


def state_of(library: str, **settings: Any) -> Any:
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 1, **settings}
    return module(library, PATH).PowerSGDState(None, **options)


def powered(
    library: str, *shapes: tuple[int, ...], batched: bool = False, **settings: Any
) -> tuple[Any, DistributedDataParallel]:
    model, state = linear(*shapes), state_of(library, **settings)
    power = module(library, PATH)
    model.register_comm_hook(state, power.batched_powerSGD_hook if batched else power.powerSGD_hook)
    return state, model


# Results


def torch_first_q(sides: list[tuple[int, int]], rank: int, together: bool) -> list[Tensor]:
    """What torch's hook begins with: normal numbers by a seed that numpy draws, matrices of one shape after the other."""
    numpy = pytest.importorskip("numpy")
    generator = torch.Generator().manual_seed(int(numpy.random.RandomState(0).randint(1_000_000_000)))
    drawn: dict[int, Tensor] = {}
    for shape in dict.fromkeys(sides):
        places, size = [place for place, each in enumerate(sides) if each == shape], (shape[1], min(rank, *shape))
        if together:
            drawn |= zip(places, torch.randn(len(places), *size, generator=generator), strict=True)
        else:
            drawn |= {place: torch.randn(1, *size, generator=generator)[0] for place in places}
    return [drawn[place] for place in range(len(sides))]


def as_torch(rank: int, settings: dict[str, Any]) -> None:
    theirs, their_model = state_of("torch", **settings), linear(*SHAPES)
    ours, our_model = powered("laconic", *SHAPES, **settings)
    order: list[int] = []  # of the parameters in torch's bucket

    def watched(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        order[:] = [
            next(place for place, p in enumerate(their_model.parameters()) if p is each) for each in bucket.parameters()
        ]
        future: torch.futures.Future[Tensor] = module("torch", PATH).powerSGD_hook(state, bucket)
        return future

    their_model.register_comm_hook(theirs, watched)
    for step in range(12):
        if step == 2:  # from the same Q
            matrices = [place for place in order if len(SHAPES[place]) > 1]
            sides = [(SHAPES[place][0], torch.Size(SHAPES[place][1:]).numel()) for place in matrices]
            first = torch_first_q(sides, theirs.matrix_approximation_rank, theirs.batch_tensors_with_same_shape)
            memory = {f"weights.{place}": {"q": q.T.contiguous()} for place, q in zip(matrices, first, strict=True)}
            ours.load_state_dict({**ours.state_dict(), "memory": memory})
        gradients = noise(100 * step + rank, *SHAPES)
        found, wanted = (torch.cat([each.flatten() for each in averaged(m, gradients)]) for m in (our_model, their_model))
        assert (found - wanted).norm() < 1e-5 * wanted.norm(), f"step {step}"
        assert ours.iter == theirs.iter == step + 1
    assert ours.compression_stats() == pytest.approx(theirs.compression_stats())
    if theirs.use_error_feedback:
        # Per rank the errors differ by what all ranks share; over the ranks they add up to the same.
        flat = theirs.error_dict[0].clone()
        dist.all_reduce(flat)
        pieces = dict(zip(order, torch.split(flat, [torch.Size(SHAPES[place]).numel() for place in order]), strict=True))
        for place in matrices:
            total = ours.error_dict[f"weights.{place}"].flatten()
            dist.all_reduce(total)
            assert close([total], [pieces[place]], 1e-4)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_error_feedback": False},
        pytest.param({"matrix_approximation_rank": 1}, marks=pytest.mark.soak),
        pytest.param({"batch_tensors_with_same_shape": True}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_as_torch_from_the_same_start(world: int, settings: dict[str, Any]) -> None:
    last_ranks(world, as_torch, settings)  # torch's threads may kill the process afterwards


def at_full_rank(rank: int, library: str) -> None:
    _, model = powered(library, (24, 18), (13,), matrix_approximation_rank=18, min_compression_rate=0.1)
    for step in range(5):
        found = averaged(model, noise(100 * step + rank, (24, 18), (13,)))
        assert close(found, mean(lambda rank, step=step: noise(100 * step + rank, (24, 18), (13,)), 3), 1e-5)  # type: ignore[misc]


@both
def test_full_rank_is_the_mean(library: str) -> None:
    RANKS[library](3, at_full_rank, library)


def alike(rank: int, library: str) -> list[list[Tensor]]:
    """All ranks have the same gradients."""
    _, model = powered(library, (24, 18), matrix_approximation_rank=1)
    return [averaged(model, noise(step, (24, 18))) for step in range(6)]


@both
def test_ranks_with_equal_gradients_are_as_one(library: str) -> None:
    (alone,) = RANKS[library](1, alike, library)
    for together in RANKS[library](2, alike, library):
        assert all(close(a, b, 1e-5) for a, b in zip(together, alone, strict=True))


def conserved(rank: int, library: str, batched: bool) -> None:
    """What was applied and what is still held back is all there was."""
    state, model = powered(library, (24, 18), matrix_approximation_rank=1, batched=batched)
    applied = torch.zeros(24, 18)
    for step in range(30):
        applied += averaged(model, noise(100 * step + rank, (24, 18)))[0]
    held = next(iter(state.error_dict.values())).clone().view(24, 18) / 2
    dist.all_reduce(held)
    truth = sum(mean(lambda rank, step=step: noise(100 * step + rank, (24, 18)), 2)[0] for step in range(30))  # type: ignore[misc]
    assert close([applied + held], [torch.as_tensor(truth)], 1e-4)
    assert held.norm() > 1, "something was held back"


@both
def test_error_feedback_conserves(library: str) -> None:
    RANKS[library](2, conserved, library, False)


def test_batched_error_feedback_conserves() -> None:
    ranks(2, conserved, "laconic", True)


# What torch gets wrong


def many_buckets(rank: int, library: str, world: int, batched: bool) -> None:
    model = build(chain)
    power = module(library, PATH)
    model.register_comm_hook(state_of(library), power.batched_powerSGD_hook if batched else power.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for step in range(100):
        loss = (model(vectors(rank, step % 5)) - 1).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step % 10 or everywhere_equal(weights(model))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
@but_torch("later rounds leave from callbacks; with several buckets ranks launch them in different orders", hangs=True)
def test_many_buckets_keep_replicas_equal(library: str, world: int) -> None:
    ranks(world, many_buckets, library, world, False)


@but_torch("asserts that its factors have three dimensions", hangs=True)
def test_batched(library: str) -> None:
    ranks(2, many_buckets, library, 2, True)


def batched_once(rank: int, library: str) -> None:
    state, model = powered(library, (20, 21), batched=True, matrix_approximation_rank=21)
    for step in range(4):
        found = averaged(model, noise(100 * step + rank, (20, 21)))
    assert close(found, mean(lambda rank: noise(300 + rank, (20, 21)), 2), 1e-5)
    assert state.compression_stats()[1:] == (2 * 420, 2 * 2 * 21 * 21), "two steps of two factors of a square of 21"


def test_batched_at_full_rank_is_the_mean() -> None:
    ranks(2, batched_once, "laconic")


def with_odd_ones(rank: int, library: str) -> None:
    shapes = ((24, 18), (), (0,), (5, 0), (1, 7), (3,))
    _, model = powered(library, *shapes)
    for step in range(5):
        found = averaged(model, noise(100 * step + rank, *shapes))
    wanted = mean(lambda rank: noise(400 + rank, *shapes), 2)
    assert close(found[1:4] + found[5:], wanted[1:4] + wanted[5:])
    assert everywhere_equal(found)


@but_torch("a scalar has no first dimension to take rows from")
def test_scalar_and_empty_parameters(library: str) -> None:
    ranks(2, with_odd_ones, library)


def all_zero(rank: int, library: str) -> None:
    _, model = powered(library, (24, 18), warm_start=True, use_error_feedback=True)
    for step in range(8):
        gradients = [torch.zeros(24, 18)] if step == 2 else noise(100 * step + rank, (24, 18))  # the first compressed step
        found = averaged(model, gradients)
        assert everywhere_equal(found)
        assert found[0].isfinite().all()
        assert (found[0].norm() > 0.5) == (step != 2)


def overflow(rank: int, library: str) -> None:
    """Eight steps, the fifth with an overflow on rank 1."""
    state, model = powered(library, (24, 18))
    for step in range(8):
        gradients = noise(100 * step + rank, (24, 18))
        if step == 4:
            before = state.state_dict()["memory"] if library == "laconic" else None
            gradients = [torch.full((24, 18), float("inf"))] if rank == 1 else gradients
        found = averaged(model, gradients)
        if step == 4:
            assert not found[0].isfinite().all(), "a GradScaler must see it on every rank"
            if before is not None:
                after = state.state_dict()["memory"]
                assert all(same_bits(list(after[name].values()), list(before[name].values())) for name in before)
        elif step > 4:
            assert found[0].isfinite().all()
            assert found[0].norm() > 0.5
            assert everywhere_equal(found)


@but_torch("divides a column of zeros by its length")
def test_zeros_then_good_steps(library: str) -> None:
    ranks(2, all_zero, library)


@but_torch("keeps the NaN in its errors and factors for ever")
def test_an_overflow_on_one_rank(library: str) -> None:
    ranks(2, overflow, library)


def exact_rest(rank: int, library: str, steps: int) -> None:
    _, model = powered(library, (24, 18), (50,))
    for _ in range(steps):
        model.zero_grad()
        model(torch.zeros(24, 18) + rank, torch.full((50,), 1.1 + 1000 * (-1) ** rank)).backward()
        found = model.module.weights[1].grad
    exact = torch.stack([torch.full((50,), 1.1 + 1000 * sign) for sign in (1, -1)]).mean(0)
    assert torch.equal(found, exact), (found - exact).abs().max()


@but_torch("feeds back an error that uncompressed numbers don't have, and it grows")
def test_what_is_not_compressed_stays_exact(library: str) -> None:
    ranks(2, exact_rest, library, 400)


@pytest.mark.soak
def test_what_is_not_compressed_stays_exact_for_long() -> None:
    ranks_within(280, 2, exact_rest, "laconic", 2000)


# Settings, clocks and logs


def test_settings_that_make_no_sense_are_refused() -> None:
    for library in ("torch", "laconic"):
        with pytest.raises(ValueError, match="start_powerSGD_iter"):
            module(library, PATH).PowerSGDState(None, start_powerSGD_iter=1)
        assert (
            module(library, PATH).PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False).iter
            == 0
        )
    with pytest.raises(ValueError, match="rank must be a whole number, at least 1, got 0"):
        module("laconic", PATH).PowerSGDState(None, matrix_approximation_rank=0)


def logged(rank: int, library: str) -> list[str]:
    with listening(module(library, PATH).logger, logging.INFO) as lines:
        _, model = powered(library, *SHAPES, compression_stats_logging_frequency=3)
        for step in range(9):
            averaged(model, noise(step, *SHAPES))
    return lines


@both
def test_the_log(library: str) -> None:
    (lines,) = RANKS[library](1, logged, library)
    assert sum("matrix_approximation_rank = 2" in line for line in lines) == 1
    assert sum("after 2 iterations" in line for line in lines) == 1
    stats = [line for line in lines if "PowerSGD at iteration" in line or "Compression stats" in line]
    assert [int(re.findall(r"iter\w* (\d+)", line)[0]) for line in stats] == [2, 5, 8], "every third step"


def accumulated(rank: int, library: str, in_data: bool) -> list[int]:
    """Three backwards a step, and no `no_sync`; the warm-up is two steps."""
    state, model = powered(library, (24, 18), start_powerSGD_iter=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        for micro in range(3):
            model(*noise(step + micro, (24, 18))).backward()
        seen.append(state.iter)
        if library == "laconic":
            assert state.compression_stats()[1] == max(step - 1, 0) * 3 * 24 * 18, "all three are of one phase"
        if in_data:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.sub_(0.1 * parameter.grad)
        else:
            optimizer.step()
        model.zero_grad()
    return seen


@but_torch("counts backwards")
def test_the_warm_up_counts_optimizer_steps(library: str) -> None:
    assert ranks(1, accumulated, library, False) == [[1, 2, 3, 4]]


def test_the_warm_up_ends_where_an_optimizer_writes_past_torchs_counters() -> None:
    assert ranks(1, accumulated, "laconic", True) == [[1, 2, 3, 4]]


def other_settings(rank: int) -> None:
    """Settings that are changed on the way count from the next step on."""
    state, model = powered("laconic", (24, 18))
    for step in range(8):
        if step == 4:
            state.matrix_approximation_rank = 18
            state.min_compression_rate = 0.1
        found = averaged(model, noise(100 * step + rank, (24, 18)))
        exact = mean(lambda rank, step=step: noise(100 * step + rank, (24, 18)), 2)  # type: ignore[misc]
        assert close(found, exact, 1e-4) == (step < 2 or step > 4)  # in step 4 the error of the steps before comes out


def test_settings_can_be_changed() -> None:
    ranks(2, other_settings)


# Saving


def trained(rank: int, cap: float, save_at: int, how: str, steps: int = 12) -> list[Tensor]:
    """Train; at `save_at`, save all, build anew with another bucket size, and go on."""
    power = module("laconic", PATH)
    model, state = build(chain), state_of("laconic")
    model.register_comm_hook(state, power.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        if step == save_at:
            file = io.BytesIO()
            saved = {
                "model": model.module.state_dict(),
                "state": state if how == "whole" else state.state_dict(),
                "hook": power.powerSGD_hook,
            }
            torch.save(saved, file)
            file.seek(0)
            loaded = torch.load(file)  # by default, weights_only=True
            model = build(chain, bucket_cap_mb=cap)
            model.module.load_state_dict(loaded["model"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            if how == "whole":
                state = loaded["state"]
            else:
                state = state_of("laconic")
                state.load_state_dict(loaded["state"])
            assert state.iter == save_at
            model.register_comm_hook(state, loaded["hook"])
        model(vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert everywhere_equal(weights(model))
    return weights(model)


@pytest.mark.parametrize("how", ["whole", "state_dict"])
@pytest.mark.parametrize("cap", [0.003, *(pytest.param(cap, marks=pytest.mark.soak) for cap in (0.001, 25))])
def test_resume_with_other_buckets(cap: float, how: str) -> None:
    straight, resumed = ranks(2, trained, 0.001, -1, "")[0], ranks(2, trained, cap, 7, how)[0]
    assert close(resumed, straight, 1e-6), "other buckets move all-reduce rounding only"


def cold(rank: int, save_at: int, how: str, seed: int = 0, batched: bool = False) -> list[Tensor]:
    """The same gradient in every step, and a new Q for it."""
    settings: dict[str, Any] = {"use_error_feedback": False, "warm_start": False, "start_powerSGD_iter": 0}
    state, model = powered("laconic", (24, 18), **settings, batched=batched, random_seed=seed)
    found = []
    for step in range(4):
        if step == save_at:
            saved = pickle.loads(pickle.dumps(state)) if how == "whole" else state.state_dict()
            if how != "in place":
                state, model = powered("laconic", (24, 18), **settings)
            if how == "whole":
                model = linear((24, 18))
                model.register_comm_hook(state := saved, module("laconic", PATH).powerSGD_hook)
            else:
                state.load_state_dict(saved)
            assert state.state_dict()["rounds"] == step, "also before the first backward"
        found += averaged(model, noise(1, (24, 18)))
    return found


@pytest.mark.parametrize("how", ["whole", "state_dict", "in place"])
def test_a_cold_q_is_new_in_every_step_and_goes_on_after_loading(how: str) -> None:
    (straight,), (resumed,) = ranks(1, cold, -1, ""), ranks(1, cold, 2, how)
    assert not any(close([left], [right]) for left, right in pairwise(straight))
    assert same_bits(resumed, straight)


def seeded(rank: int) -> None:
    for batched in (False, True):
        drawn = [each for seed in (1, 2) for each in cold(rank, -1, "", seed, batched)]
        assert not any(close([left], [right]) for place, left in enumerate(drawn) for right in drawn[:place])


def test_a_cold_q_is_of_the_seed() -> None:
    ranks(1, seeded)


def saved_and_loaded(rank: int, library: str) -> None:
    state, model = powered(library, *SHAPES)
    for step in range(5):
        averaged(model, noise(100 * step + rank, *SHAPES))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file)
    assert again.iter == 5
    assert again.process_group is dist.group.WORLD
    theirs, mine = again.error_dict, state.error_dict
    assert mine
    assert all(torch.equal(theirs[key], mine[key]) for key in mine), "each rank has its own error"
    assert not everywhere_equal(list(mine.values()))


@but_torch("weights_only=True refuses the class")
def test_torch_load_reads_a_saved_state(library: str) -> None:
    ranks(2, saved_and_loaded, library)


def pickled(rank: int, library: str) -> list[str]:
    power = module(library, PATH)
    with listening(power.logger, logging.WARNING) as lines:
        given: dict[str, Any] = {
            "matrix_approximation_rank": 3, "start_powerSGD_iter": 7, "min_compression_rate": 5.0, "use_error_feedback": False,
            "warm_start": False, "orthogonalization_epsilon": 0.5, "compression_stats_logging_frequency": 11,
            "batch_tensors_with_same_shape": True,
        }  # fmt: skip
        counted = {"iter": 9, "total_numel_before_compression": 8, "total_numel_after_compression": 4, "next_stats_report": 20}
        state = power.PowerSGDState(dist.new_group([0]), random_seed=6, **given)
        for name, value in counted.items():
            setattr(state, name, value)
        again = pickle.loads(pickle.dumps(state))
    for name, value in {**given, **counted, **({"random_seed": 6} if library == "laconic" else {})}.items():
        assert getattr(again, name) == value, name
    assert again.process_group is dist.group.WORLD
    return lines


@both
def test_pickle_leaves_the_group_out_and_says_so(library: str) -> None:
    (lines,) = ranks(1, pickled, library)
    assert len(lines) == 2
    assert all("rocess group" in line or "process_group" in line for line in lines)


def foreign(rank: int) -> None:
    state, model = powered("laconic", (24, 18))
    for step in range(4):
        averaged(model, noise(step, (24, 18)))
    saved = state.state_dict()
    with pytest.raises(ValueError, match="'iter' is missing"):
        state.load_state_dict({key: value for key, value in saved.items() if key != "iter"})
    other, other_model = powered("laconic", (24, 17))
    other.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"error of 'weights.0' has the shape \(24, 18\), the model's parameter \(24, 17\)"):
        averaged(other_model, noise(0, (24, 17)))


def test_a_state_of_another_model_is_refused() -> None:
    ranks(1, foreign)
