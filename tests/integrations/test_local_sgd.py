"""`LocalSGD` in the place of Accelerate's."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.accelerate_scripts import Plain, prepared, same, sgd, started, step, weights_of
from tests.integrations.frameworks import Net
from tests.live import ranks


def by_local_sgd(rank: int, ours: bool, accumulate: int, calls: str, net: type[nn.Module] = Plain) -> tuple[Any, Any]:
    from accelerate.local_sgd import LocalSGD as Theirs

    from laconic.integrations.accelerate import LocalSGD as Ours

    kind: Any = Ours if ours else Theirs
    weights: list[dict[str, Tensor]] = []
    with started(rank, gradient_accumulation_steps=accumulate) as (accelerator, said):
        model, optimizer = prepared(accelerator, net(), sgd)
        given: dict[str, Any] = {
            "accelerator": accelerator,
            "model": model,
            "local_sgd_steps": 5,
            "enabled": calls != "disabled",
        }
        for block in range(2):  # epochs: each has its own
            with kind(*given.values()) if calls == "positional" else kind(**given) as local_sgd:
                for number in range(12 * accumulate):
                    step(accelerator, model, optimizer, rank, 100 * block + number)
                    if accelerator.sync_gradients:
                        local_sgd.step()
                    weights.append(weights_of(model))
                assert local_sgd.num_steps == 12
            weights.append(weights_of(model))
    return weights, said


@pytest.mark.parametrize(("accumulate", "calls"), [(1, "positional"), (3, "by name"), (1, "disabled")])
def test_local_sgd_is_accelerates_own_to_the_bit(accumulate: int, calls: str) -> None:
    # Two ranks: (x + y) / 2 and x / 2 + y / 2 are the same float.
    theirs = ranks(2, by_local_sgd, False, accumulate, calls)
    ours = ranks(2, by_local_sgd, True, accumulate, calls)
    for (mine, said), (other, _) in zip(ours, theirs, strict=True):
        assert len(mine) == 2 * (12 * accumulate + 1)
        assert all(same(left, right) for left, right in zip(mine, other, strict=True))
        assert not said
    apart = [not same(left, right) for left, right in zip(ours[0][0], ours[1][0], strict=True)]
    assert any(apart) == (calls != "disabled")
    assert not apart[-1]


def test_local_sgd_of_three_ranks_is_accelerates_own_but_for_rounding() -> None:
    theirs, ours = (ranks(3, by_local_sgd, own, 1, "by name") for own in (False, True))
    for (mine, _), (other, _) in zip(ours, theirs, strict=True):
        for left, right in zip(mine, other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_local_sgd_takes_accelerates_arguments() -> None:
    from accelerate.local_sgd import LocalSGD as Theirs

    from laconic.integrations.accelerate import LocalSGD as Ours

    wanted = inspect.signature(Theirs).parameters
    mine = inspect.signature(Ours).parameters
    assert list(mine)[: len(wanted)] == list(wanted)
    assert all(mine[name].kind == one.kind and mine[name].default == one.default for name, one in wanted.items())


def averaged(rank: int, options: dict[str, Any]) -> tuple[Any, ...]:
    from laconic.integrations.accelerate import LocalSGD

    with started(rank) as (accelerator, _):
        other = prepared(accelerator, Plain(), sgd)  # of another model: not this run's
        model, optimizer = prepared(accelerator, Net(dropout=0.0))
        with LocalSGD(accelerator, model, 4, **options) as local_sgd:
            for number in range(8):
                if rank:
                    model.module.seen.add_(1)  # a buffer that differs
                step(accelerator, model, optimizer, rank, number, 1.0 + rank)
                local_sgd.step()
            run = local_sgd.run
            stats, strategy = run.stats(), str(run.strategy)
            moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
            weights = weights_of(model)
        assert optimizer is not other[1]
    return stats, strategy, moments, weights


def test_local_sgd_averages_moments_and_buffers_too() -> None:
    (stats, strategy, moments, weights), second = ranks(2, averaged, {})
    assert strategy == "local_sgd(period=4, moments='average')"
    assert (stats.steps, stats.syncs) == (8, 2)
    assert all(torch.equal(mine, other) for mine, other in zip(moments, second[2], strict=True))
    assert same(weights, second[3])
    assert float(weights["seen"]) == 8 + 4  # the mean of both, twice


def test_local_sgd_by_another_strategy() -> None:
    (stats, strategy, _, _), _ = ranks(2, averaged, {"strategy": "diloco(8)"})
    assert strategy == "diloco(period=8)"
    assert (stats.steps, stats.syncs) == (8, 1)
