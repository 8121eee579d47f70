"""The probe: how long collectives take on a process group, what the link between its hosts is, and who is slow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import laconic
from laconic._torch.process_groups import backend_name, default_group, is_outside, named_group, training_device
from laconic.comm.group import TorchGroup
from laconic.cost.found_link import delay_of, link_of, most_on_a_node, slow_ranks
from laconic.cost.measured import LeftOut, Probe, Sample, Worker, fitted
from laconic.probing import collectives, paths, rounds, slow_down
from laconic.probing.collectives import SIZES, SIZES_IN_FLIGHT
from laconic.probing.paths import Path
from laconic.probing.session import Session
from laconic.ranks.agreement import agree

IN_FLIGHT = 4
SECONDS, SHORTEST, LONGEST = 30.0, 0.1, 60.0
# When each part ends, as a share of the time; one that is done earlier leaves more to the next. The last part is kept, for a
# machine that is busy with other things.
ALONE, PATHS, WITHIN, TOGETHER, SLOW_DOWN, ROUNDS = 0.4, 0.5, 0.6, 0.68, 0.78, 0.88
SHORT, SHORTER = 8.0, 3.0  # seconds: in less than that, several at once are left out; and small rounds between computations
SLOW_DOWN_SIZES = SIZES[:-1]


@dataclass(frozen=True)
class Promise:
    """What a probe takes at most."""

    seconds: float
    wire_bytes: int  # that each rank sends


def probe(
    group: dist.ProcessGroup | None = None, *, seconds: float = SECONDS, progress: Callable[[float], None] | None = None
) -> Probe:
    """Measure the network of a process group: how long collectives take, what the link between hosts is, and who is slow.

    All of the group's ranks call it together, and all get the same answer. Nothing else may communicate or train meanwhile.
    `laconic probe` is the command, `docs/probe.md` says what is measured and how.

    Maths: for each kind of collective, time = alpha + beta * bytes, the line of least |log(fitted / measured)|.

    Bytes: as many as pass in the time: all-reduces, all-gathers and all-to-alls of 1 KB to 64 MB, and transfers between pairs
    of hosts. `laconic probe` prints before it begins how many a rank sends at most; `wire_bytes` of the answer is what it sent.

    Memory: messages of up to 64 MB; in a probe of 8 seconds or more, four at once.

    Not: it can't tell a link where all ranks are on one host, or where processors are the limit. It has not run on a GPU.

    Arguments:
      `group`: the process group. Default None: all ranks.
      `seconds`: how long it may take, from 0.1 to 60; in less than 8, several collectives at once are left out. Default 30.
      `progress`: called with the share of the time that has passed, from 0 to 1. Default None.

    It raises a ValueError for a group of one rank, for seconds that can't be, on a rank outside of the group, and where ranks
    were given different things; a RuntimeError without a process group; and a CommunicationError where a rank is lost.

    >>> import laconic
    >>> found = laconic.probe(seconds=10)  # on two ranks  # doctest: +SKIP
    >>> found.bits_per_second, found.link_note  # doctest: +SKIP
    (None, "all ranks are on one host: no link was measured, only this machine's own speed")
    """
    if not dist.is_initialized():
        raise RuntimeError("laconic.probe measures a process group: call torch.distributed.init_process_group first")
    process_group = default_group() if group is None else group
    if is_outside(process_group):
        raise ValueError("this rank is not in the group that laconic.probe was given; call it on the group's ranks alone")
    return measure(TorchGroup(process_group), training_device(process_group), seconds=seconds, progress=progress)


def measure(
    group: TorchGroup, device: torch.device, *, seconds: float = SECONDS, progress: Callable[[float], None] | None = None
) -> Probe:
    """The same, of a group and a device that are known."""
    check(group.world, seconds)
    identity = agree([f"seconds {seconds:g}", f"device {device.type}"], None, group, device)
    session = Session(group, device, seconds, progress)
    samples, left_out, found = _measured(session, identity)
    downs = slow_down.slow_downs(session, samples, SLOW_DOWN_SIZES, SLOW_DOWN * session.seconds)
    small = rounds.round_seconds(session, ROUNDS * session.seconds) if seconds >= SHORTER else {}
    sent = max(row[0] for row in session.meet(session.sent_bytes))
    session.finish()
    workers = [
        Worker(rank, place.host, node, _bits(path.sends), _bits(path.receives), path.spread, path.round_trip)
        for rank, (place, node, path) in enumerate(zip(session.places, session.nodes, found, strict=True))
    ]
    slow = slow_ranks(workers)
    rate, note = link_of(samples, workers, max(path.busy for path in found) if device.type == "cpu" else 0.0)
    return Probe(
        world=group.world,
        per_node=most_on_a_node(workers),
        device=device.type,
        backend=backend_name(group.process_group, device),
        seconds=session.now,
        asked_seconds=seconds,
        wire_bytes=int(sent),
        workers=workers,
        samples=samples,
        left_out=left_out,
        fits=fitted(samples),
        bits_per_second=rate,
        delay_seconds=delay_of(workers),
        link_note=note,
        slow=slow,
        slow_down=sum(downs.values()) / len(downs) if downs else 0.0,
        slow_downs=downs,
        round_seconds=small,
        versions={"laconic": laconic.__version__, "torch": torch.__version__},
    )


def check(world: int, seconds: float) -> None:
    """Refuse what can't be measured."""
    if world < 2:
        raise ValueError(
            "a probe needs two ranks at least, got one: there is nobody to communicate with; give --nproc-per-node 2"
        )
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):  # type: ignore[redundant-expr]  # it may be anything
        raise TypeError(f"seconds must be a number, got {seconds!r}")
    if not SHORTEST <= seconds <= LONGEST:
        raise ValueError(f"a probe takes from {SHORTEST:g} to {LONGEST:g} seconds, got {seconds:g}")


def promise(world: int, nodes: int, seconds: float) -> Promise:
    """What a probe of so many ranks on so many hosts takes at most."""
    check(world, seconds)
    within = world // nodes
    sent = collectives.most_bytes(world, SIZES, 1) + collectives.most_bytes(world, SIZES_IN_FLIGHT, IN_FLIGHT)
    if 1 < within < world:
        sent += collectives.most_bytes(within, SIZES, 1)
    sent += paths.most_bytes(range(nodes)) + slow_down.most_bytes(world, SLOW_DOWN_SIZES)
    sent += rounds.most_bytes(world)
    return Promise(seconds, sent)


def _measured(session: Session, identity: str) -> tuple[list[Sample], list[LeftOut], list[Path]]:
    """Collectives of all ranks and transfers of pairs; then, where they are, those of each node, and several at once."""
    group = session.group
    session.meet()
    samples, left_out = collectives.times(session, group, SIZES, 1, ALONE * session.seconds)
    # The link is what most is asked of a probe, so it has its share, also where collectives took longer than theirs.
    found = paths.paths(session, max(PATHS * session.seconds, session.now + (PATHS - ALONE) * session.seconds))
    with _node_group(session, identity) as node:
        parts = [(node, SIZES, 1, WITHIN)] if node is not None else []
        parts += [(group, SIZES_IN_FLIGHT, IN_FLIGHT, TOGETHER)] if session.seconds >= SHORT else []
        for members, sizes, in_flight, share in parts:
            more = collectives.times(session, members, sizes, in_flight, share * session.seconds, samples)
            samples += more[0]
            left_out += more[1]
    return samples, left_out, found


@contextmanager
def _node_group(session: Session, identity: str) -> Iterator[TorchGroup | None]:
    """The ranks of this rank's host, where all hosts have as many, more than one, and there are several hosts."""
    group, nodes = session.group, session.nodes
    sizes = {nodes.count(node) for node in nodes}
    if len(set(nodes)) == 1 or len(sizes) > 1 or sizes == {1}:
        yield None
        return
    mine = [member for member, node in zip(group.members, nodes, strict=True) if node == nodes[group.rank]]
    name = f"laconic/{identity}/probe/{'_'.join(map(str, mine))}"
    built = named_group(name, mine, group.process_group, session.device)
    try:
        yield TorchGroup(built, group.check_peers, group.places)
    finally:
        dist.destroy_process_group(built)


def _bits(rate: float | None) -> float | None:
    return None if rate is None else 8 * rate
