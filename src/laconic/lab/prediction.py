"""What the cost model says of a run before it is made: how long a step will take, over the link that it has and over others."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import laconic
from laconic.cost import measured
from laconic.cost.codec import Codec
from laconic.cost.link import Link
from laconic.cost.network import Network
from laconic.cost.step_time import Compute, Step, step_time
from laconic.cost.step_timer import SKIPPED, StepTimer
from laconic.forecast.prediction import timeline_of
from laconic.lab.hosts import burst_bytes
from laconic.lab.trainee import Trainee, step

TIMED = 16  # steps without communication


def networks(probe: str, links: Sequence[tuple[int | None, float]], groups: int) -> list[Network]:
    """One for each link, as it is emulated here, between hosts of which `probe` is a file."""
    hosts = measured.read(Path(probe)).network()
    return [
        replace(hosts, link=link, burst_bytes=burst_bytes(link.bits_per_second or 0), groups=groups, per_node=1, both_ways=True)
        for link in (Link(*link) for link in links)
    ]


def compute_of(trainee: Trainee, batches: Iterator[Any]) -> Compute:
    """A step of all workers without communication; the mean over them. Replicas are left as they are then: apart."""
    run = laconic.attach(trainee.model, trainee.optimizer, "silent()", mesh=trainee.mesh)
    timer = StepTimer(trainee.model, [trainee.optimizer])
    dist.barrier()
    for _ in range(SKIPPED + TIMED):
        step(trainee, next(batches))
        timer.tick()
    timer.stop()
    dist.barrier()
    run.detach()
    mine, everyone = timer.compute(), [None] * dist.get_world_size()
    assert mine is not None, "steps were timed"
    dist.all_gather_object(everyone, [mine.forward, mine.backward, mine.optimizer, mine.jitter])
    return Compute(*(statistics.fmean(column) for column in zip(*filter(None, everyone), strict=True)))


def steps_of(strategy: str, trainee: Trainee, first: int, count: int) -> list[Step]:
    """What leaves in each of `count` steps from step `first` on, with the work on it; all workers time theirs together."""
    chosen = laconic.strategy(strategy)
    found = timeline_of(chosen, trainee.bare, world_size=trainee.replicas, step=first, steps=count, sizes={"node": 1})
    dist.barrier()
    return Codec().steps(chosen, found)


def step_ms(job: Mapping[str, Any], trainee: Trainee, compute: Compute, steps: int) -> list[float]:
    """The predicted milliseconds of a timed step, over each of the job's links."""
    first = min(int(job["warmup"]), steps - 1)
    found = steps_of(job["strategy"], trainee, first, steps - first)
    groups = dist.get_world_size() // trainee.replicas
    return [
        step_time(found, compute, network, cycles=1).seconds * 1e3 for network in networks(job["probe"], job["links"], groups)
    ]
