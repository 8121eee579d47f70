"""Timelines with work in them."""

import time

import pytest
import torch
from torch import nn

import laconic
from laconic.comm.bucket import Bucket
from laconic.comm.exchange import Exchange
from laconic.cost.codec import LARGEST, SCATTERED, Codec, _part
from laconic.cost.step_time import Step
from laconic.forecast.prediction import cycle_of, timeline_of
from laconic.reducers.exact import Exact


def steps(text: str, world: int = 4) -> list[Step]:
    torch.set_num_threads(1)
    strategy, model = laconic.strategy(text), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return Codec().steps(strategy, timeline_of(strategy, model, world_size=world, steps=cycle_of(strategy)))


def test_work_is_before_each_round_and_after_the_last() -> None:
    (step,) = steps("int8()")
    for exchange in step.in_backward:
        assert len(exchange.work) == len(exchange.rounds) + 1
        assert all(seconds > 0 for seconds in exchange.work)
    assert step.work > 0, "into the bucket and out of it again"


def test_bytes_are_those_of_predict() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for text in ("ddp()", "int8()", "powersgd(rank=2, warmup=0)"):
        (step,) = steps(text)
        sent = sum(round_.wire_bytes for exchange in step.in_backward for round_ in exchange.rounds)
        assert sent == laconic.predict(text, model, world_size=4).wire_bytes, text


@pytest.mark.parametrize(
    ("text", "part"),
    [("local_sgd(4)", "after"), ("diloco(4)", "after"), ("streaming_diloco(4, fragments=1, delay=2)", "outstanding")],
)
def test_a_heartbeat_goes_before_each_sync(text: str, part: str) -> None:
    (last,) = [step for step in steps(text) if step.after or step.outstanding]
    assert not last.in_backward
    first, *others = getattr(last, part)
    assert ([round_.kind for round_ in first.rounds], first.numbers) == (["AllGather"], 0)
    assert others
    assert last.work > 0
    (alone,) = steps("silent()")
    assert not alone.after
    assert alone.work == 0


def test_crowded_cores_take_longer() -> None:
    strategy, model = laconic.strategy("int8()"), nn.Linear(64, 64)
    found = timeline_of(strategy, model, world_size=2, steps=1)
    known = Codec()
    known.steps(strategy, found)
    crowded = Codec(crowding=3.0)
    crowded.__dict__.update({name: value for name, value in vars(known).items() if name != "_crowding"})
    (once,), (thrice,) = known.steps(strategy, found), crowded.steps(strategy, found)
    assert thrice.work == pytest.approx(3 * once.work)
    assert [sum(each.work) for each in thrice.in_backward] == pytest.approx([3 * sum(each.work) for each in once.in_backward])


class Disturbed(Exact):
    """A reducer on a machine that is busy for a while."""

    def reduce(self, bucket: Bucket) -> Exchange:
        if bucket.exchanges in BUSY:
            time.sleep(0.05)
        return (yield from super().reduce(bucket))


BUSY: set[int] = set()


def test_a_moment_in_which_the_machine_was_busy_moves_nothing() -> None:
    """Of one mean over all repeats, a busy moment was a part: 4 ms became 50 ms in another run of the advisor."""
    (sent,) = (one for one in timeline_of(laconic.strategy("ddp()"), nn.Linear(64, 64), world_size=4, steps=1)[0].in_backward)
    BUSY.clear()
    BUSY.update((1, 2))
    codec = Codec()
    assert sum(codec.work(Disturbed(), sent)) < 0.01
    BUSY.update(range(0, 10_000, 2))
    assert codec.scatter < SCATTERED
    known = Codec()
    known.work(Disturbed(), sent)
    assert known.scatter > SCATTERED, "what stays so is said"


def test_a_large_bucket_is_timed_in_part_and_keeps_its_matrices() -> None:
    rows = LARGEST // 1024
    assert _part([torch.Size([4 * rows, 1024])]) == ((rows, 1024),)
    assert _part([torch.Size([4 * rows, 1024]), torch.Size([]), torch.Size([0]), torch.Size([8])])[1:] == ((), (0,), (1,))


@pytest.mark.parametrize("text", ["int8()", "powersgd(rank=2, warmup=0)"])
def test_a_small_tensor_before_a_large_one_changes_little(text: str) -> None:
    """The first of a bucket is the last parameter: a bias of 3000 before a matrix of 9 million."""
    strategy = laconic.strategy(text)
    model = nn.Linear(3000, 3000, device="meta")
    (step,) = Codec().steps(strategy, timeline_of(strategy, model, world_size=4, steps=1))
    for exchange in step.in_backward:
        assert len(exchange.work) == len(exchange.rounds) + 1
    assert sum(sum(exchange.work) for exchange in step.in_backward) < 2, "300 ms are slow; it was scaled from the bias before"
