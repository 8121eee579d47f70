"""What a look into exchanges shows, and that the reducer sees nothing of it."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import laconic
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.collectives import AllReduce
from laconic.comm.dryrun import simulate
from laconic.comm.exchange import Exchange, Reduced
from laconic.comm.inspection import Inspector, Layer, Sync, sync_of_deltas

SEEN: list[Bucket] = []


@dataclass(frozen=True)
class Recording(laconic.Reducer):
    """Loses the last number of each bucket."""

    def reduce(self, bucket: Bucket) -> Exchange:
        SEEN.append(bucket)
        error = torch.zeros_like(bucket.flat)
        error[-1] = bucket.flat[-1]
        bucket.flat[-1] = 0
        mean = yield AllReduce(bucket.flat)
        return Reduced(mean, error, good=torch.tensor(True))


def bucket(feedback: bool) -> Bucket:
    flat = torch.tensor([3.0, 4.0, 6.0, 8.0])
    return Bucket(flat, [flat[:2], flat[2:]], ["a", "b"], [{}, {}], 1, 2, 7, 3, 16.0, feedback)


@pytest.mark.parametrize("feedback", [False, True])
def test_a_reducer_that_is_looked_at_is_told_the_same(feedback: bool) -> None:
    SEEN.clear()
    inspector, given = Inspector(), bucket(feedback)
    inspector.looking = True
    (result,) = simulate([inspector.inspect(Recording().reduce, given)])
    for key in ("flat", "views", "names", "slots", "rank", "world", "step", "exchanges", "scale"):
        assert getattr(SEEN[0], key) is getattr(given, key), key
    assert SEEN[0].feedback
    assert (result.error is not None) == feedback, "nobody else asked for it"
    assert result.good is not None
    assert inspector.layers == {}, "before the exchange is finished"
    result.finish()
    assert [(float(layer.size), layer.error, layer.residual) for layer in inspector.layers.values()] == [
        (5.0, 0.0, None),
        (10.0, 0.8, None),
    ]
    inspector.looking = False
    simulate([inspector.inspect(Recording().reduce, bucket(False))])
    assert not SEEN[1].feedback


def test_residuals_are_those_of_after_the_exchange_and_in_units_of_the_unscaled_loss() -> None:
    slot: Slot = {"error": torch.tensor([0.0, 1.0])}
    flat, inspector = torch.tensor([12.0, 8.0]), Inspector()
    inspector.looking = True
    scaled = Bucket(flat, [flat], ["w"], [slot], 0, 1, 0, 0, torch.tensor(8.0))
    simulate([inspector.inspect(laconic.ErrorFeedback(laconic.TopK(0.5)).reduce, scaled)])[0].finish()
    layer = inspector.layers["w"]  # of 12 and 8 + 8 * 1, the second is sent
    assert slot["error"].tolist() == [1.5, 0.0]
    assert (float(layer.size), layer.error, float(layer.residual or 0)) == (20.0, 12 / 20, 1.5)


def test_of_nothing_nothing_is_lost() -> None:
    assert Layer(torch.tensor(0.0), torch.tensor(0.0), None).error == 0
    assert Layer(torch.tensor(2.0), None, None).error == 0


def test_what_a_sync_says_of_deltas() -> None:
    deltas: Tensor = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deltas = 2 * deltas / deltas.norm(dim=1, keepdim=True)
    deltas[2] += 0.5 * deltas[1]
    mean = deltas.mean(0)
    found = sync_of_deltas(8, deltas.square().sum(1).tolist(), 2, float(mean.square().sum()))
    pairs = [(one, other) for one in range(3) for other in range(3) if one != other]
    products = sum(float(deltas[one] @ deltas[other]) for one, other in pairs)
    norms = sum(float(deltas[one].norm() * deltas[other].norm()) for one, other in pairs)
    assert found.step == 8
    assert found.drift == pytest.approx(math.sqrt(float((deltas - mean).square().sum(1).mean())))
    assert found.norm == pytest.approx(float(deltas[2].norm()))
    assert found.mean_norm == pytest.approx(float(mean.norm()))
    assert found.cosine == pytest.approx(products / norms)
    assert sync_of_deltas(8, [4.0], 0, 4.0).cosine is None, "no pair"
    assert sync_of_deltas(8, [0.0, 0.0], 0, 0.0).cosine is None
    assert sync_of_deltas(8, [1.0, 1.0], 0, 1.1) == Sync(8, 0.0, 1.0, math.sqrt(1.1), 1.0), "a mean that was decoded"
    assert sync_of_deltas(8, [1.0, 1.0], 0, -0.0).cosine == -1
