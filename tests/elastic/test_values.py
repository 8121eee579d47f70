"""What numbers come of a sync: models of a few numbers under a constant gradient, so that each value is known beforehand."""

import contextlib
import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic import elastic
from laconic.comm.bucket import RESIDUAL
from laconic.comm.group import CommunicationError
from laconic.elastic.membership import MembershipError
from tests.live import ranks

DILOCO = "diloco(4, outer_lr=1.0, outer_momentum=0.0)"


class Numbers(nn.Module):
    """Some parameters of one number each."""

    def __init__(self, count: int = 1, size: int = 1) -> None:
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(count)])


class Worker:
    """One rank's part: every step adds `slope` to all numbers."""

    def __init__(self, rank: int, lighthouse: str, strategy: str, net: nn.Module | None = None, **options: Any) -> None:
        self.net = net or Numbers()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.place = elastic.Membership(lighthouse=lighthouse, name=f"w{rank}", timeout_seconds=10, quorum_seconds=30)
        self.run = elastic.attach(self.net, self.optimizer, strategy, self.place, start_with=dist.get_world_size(), **options)
        dist.barrier()

    def steps(self, count: int, slope: "float | Tensor" = 1.0) -> None:
        for _ in range(count):
            for parameter in self.net.parameters():
                parameter.grad = -slope * torch.ones_like(parameter)
            self.optimizer.step()

    @property
    def value(self) -> float:
        return float(next(self.net.parameters()).view(-1)[0])

    def end(self) -> None:
        dist.barrier()
        self.run.detach()


def losing_its_last_message(worker: Worker, call: int) -> None:
    """The n-th time that all have said that all has arrived, this worker doesn't hear it."""
    syncs: Any = worker.run._syncs
    act, calls = syncs._everywhere, [0]

    def deaf() -> None:
        act()
        calls[0] += 1
        if calls[0] == call:
            raise CommunicationError("the last message was lost")

    syncs._everywhere = deaf


def of(count: int, fn: Callable[..., Any], *args: Any, deadline_seconds: float = 5.0) -> list[Any]:
    with elastic.lighthouse(deadline_seconds=deadline_seconds, heartbeat_seconds=2) as address:
        return ranks(count, fn, address, *args)


def uneven(rank: int, lighthouse: str, strategy: str, late: str) -> tuple[float, dict[str, float], int]:
    """Worker 1 makes three steps, misses a sync of the two others, and comes to their second one after a step more."""
    worker = Worker(rank, lighthouse, strategy, late=late)
    if rank == 1:
        worker.steps(3)
        dist.barrier()
        worker.steps(1)
    else:
        worker.steps(4)
        dist.barrier()
        time.sleep(0.5)  # worker 1 asks first: the lighthouse doesn't wait for it where all of the last quorum are there
        worker.steps(4)
    found = worker.value, dict(worker.run.stats().weights), worker.run.stats().lost
    worker.end()
    return found


ALL, WITHOUT = {"w0": 1.0, "w1": 1.0, "w2": 1.0}, {"w0": 1.5, "w1": 0.0, "w2": 1.5}


@pytest.mark.parametrize(
    ("strategy", "late", "weights"),
    [
        (DILOCO, "drop", WITHOUT),
        pytest.param(DILOCO, "carry", ALL, marks=pytest.mark.soak),
        pytest.param("local_sgd(4)", "carry", WITHOUT, marks=pytest.mark.soak),  # there is no delta to carry
    ],
)
def test_a_worker_that_missed_a_sync_counts_by_what_it_still_brings(
    strategy: str, late: str, weights: dict[str, float]
) -> None:
    """After the 4 steps of the first sync, 4 of each that brings any."""
    for found, counted, _ in of(3, uneven, strategy, late, deadline_seconds=4.0):
        assert found == pytest.approx(8.0)
        assert counted == pytest.approx(weights)


def doubtful(rank: int, lighthouse: str) -> list[tuple[int, float, dict[str, float]]]:
    worker = Worker(rank, lighthouse, DILOCO)
    if rank == 1:
        losing_its_last_message(worker, 1)
    found = []
    for _ in range(3):
        worker.steps(4)
        found.append((worker.run.version, worker.value, dict(worker.run.stats().weights)))
    worker.end()
    return found


def test_steps_that_others_have_committed_count_once() -> None:
    """Worker 1 doesn't hear that the first sync was made: neither value nor weights have its steps twice."""
    first, second = of(2, doubtful)
    assert [value for _, value, _ in first] == [4.0, 8.0, 12.0]
    assert [value for _, value, _ in second] == [4.0, 8.0, 12.0]
    for _, _, weights in [*first[1:], *second[1:]]:
        assert weights == pytest.approx({"w0": 1.0, "w1": 1.0})


def states(rank: int, lighthouse: str, strategy: str, call: int) -> dict[tuple[int, int], tuple[str, tuple[int, ...]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    worker = Worker(rank, lighthouse, strategy, net)
    if rank == 1:
        losing_its_last_message(worker, call)
    generator, found = torch.Generator().manual_seed(rank), {}
    deltas: Any = worker.run._parts.deltas
    for _ in range(40):
        torch.autograd.backward(net(torch.randn(8, 32, generator=generator)).square().mean())
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        anchors = b"".join(anchor.numpy().tobytes() for anchor in deltas.anchors.by_name.values())
        syncs: Any = worker.run._syncs
        found[syncs.version, syncs._lineage] = hashlib.sha256(anchors).hexdigest()[:8], tuple(deltas.mark().exchanges)
    worker.end()
    return found


@pytest.mark.parametrize("call", [2, *[pytest.param(call, marks=pytest.mark.soak) for call in (1, 3, 4, 5)]])
def test_who_hears_the_last_message_and_who_does_not_have_the_same_state(call: int) -> None:
    """With reducers that draw by the number of the exchange, another count would be another choice of numbers."""
    first, second = of(2, states, "streaming_diloco(8, fragments=2, delay=2, reducer=RandomK(0.1))", call)
    both = set(first) & set(second)
    assert len(both) > 5
    assert {state: first[state] for state in both} == {state: second[state] for state in both}


def fragments(rank: int, lighthouse: str) -> list[list[float]]:
    strategy = "streaming_diloco(8, fragments=2, delay=1, blend=0.0, reducer=Exact(), outer_lr=1.0, outer_momentum=0.0)"
    worker = Worker(rank, lighthouse, strategy, Numbers(2))
    if rank == 1:
        losing_its_last_message(worker, 1)
    found = []
    for _ in range(10):
        worker.steps(1)
        found.append([float(parameter) for parameter in worker.net.parameters()])
    worker.end()
    return found


def test_a_sync_in_doubt_takes_nothing_from_other_fragments() -> None:
    first, second = of(2, fragments)
    for numbers in second:
        assert max(numbers) >= max(first[0]), "it went back"
    assert second[-1] == pytest.approx(first[-1], abs=2.0)


def leaving(rank: int, lighthouse: str) -> tuple[float, int, float]:
    strategy = "streaming_diloco(8, fragments=2, delay=3, reducer=ErrorFeedback(Quantized(4)))"
    worker = Worker(rank, lighthouse, strategy, Numbers(2, 8))
    worker.steps(5, torch.linspace(0.1, 1.0, 8))  # the first fragment left after step 4 or so
    began = time.monotonic()
    try:
        if rank == 1:
            worker.run.leave()
        worker.steps(16, torch.linspace(0.1, 1.0, 8))
    except SystemExit:
        pass
    took = time.monotonic() - began
    found = took, worker.run.stats().version, worker.run.stats().lost_residual_norm
    worker.end()
    return found


@pytest.mark.soak
def test_a_worker_leaves_while_an_exchange_is_outstanding() -> None:
    """Nobody waits for it, nor it for others, until its patience is over (30 s)."""
    for took, _, lost in of(3, leaving):
        assert took < 15
        assert lost == 0


def handing_over(rank: int, lighthouse: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers and residual before worker 2 leaves, and two syncs of zeros later, in which residuals alone are sent."""
    strategy = "diloco(4, reducer=ErrorFeedback(Quantized(4)), outer_lr=1.0, outer_momentum=0.0)"
    worker = Worker(rank, lighthouse, strategy, Numbers(1, 64))
    worker.steps(4, torch.linspace(-1, 1, 64) ** 3 * (rank + 1))
    deltas: Any = worker.run._parts.deltas
    before = worker.net.get_parameter("p.0").detach().clone(), deltas.memory["p.0"][RESIDUAL].clone()
    if rank == 2:
        worker.run.leave()
    dist.barrier()
    with contextlib.suppress(SystemExit):
        worker.steps(8, 0.0)
    after = worker.net.get_parameter("p.0").detach().clone(), deltas.memory["p.0"][RESIDUAL].clone()
    worker.end()
    return (*before, *after)


def test_what_a_worker_that_leaves_still_held_reaches_the_model() -> None:
    """Residuals are of the mean: numbers less the sum of residuals over the workers stay what they were."""
    rows = of(3, handing_over, deadline_seconds=30)
    numbers, kept = rows[0][0], sum(row[1] for row in rows) / 3
    then, left = rows[0][2], sum(row[3] for row in rows[:2]) / 2
    assert float(kept.abs().max()) > 0.01
    torch.testing.assert_close(then - left, numbers - kept, atol=1e-5, rtol=0)


def planned(rank: int, lighthouse: str | None, strategy: str) -> list[int]:
    """After which steps replicas are equal, under a learning rate that falls."""
    net = Numbers(1, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run: Any
    if lighthouse is None:
        run = laconic.attach(net, optimizer, strategy)
    else:
        place = elastic.Membership(lighthouse=lighthouse, name=f"w{rank}", timeout_seconds=10, quorum_seconds=30)
        run = elastic.attach(net, optimizer, strategy, place, start_with=2)
    found = []
    for step in range(1, 41):
        net.p[0].grad = torch.ones(4) if rank == 0 else -torch.ones(4)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1 if step < 8 else 0.01
        if bool((net.p[0].abs() < 1e-6).all()):
            found.append(step)
    run.detach()
    return found


def both_ways(rank: int, lighthouse: str, strategy: str) -> tuple[list[int], list[int]]:
    return planned(rank, lighthouse, strategy), planned(rank, None, strategy)


def test_a_schedule_that_follows_the_learning_rate_does_so_here_too() -> None:
    for elastically, plainly in of(2, both_ways, "local_sgd(QSR(2, alpha=0.03))"):
        assert elastically == plainly
        assert elastically[1] - elastically[0] < elastically[-1] - elastically[-2]


def refused(rank: int, lighthouse: str, what: str) -> str:
    """Worker 1 differs in something, and comes when worker 0 trains."""
    torch.manual_seed(0)
    net: nn.Module = nn.Conv2d(3, 2, 2)
    options: dict[str, Any] = {}
    groups: Any = net.parameters()
    if rank == 1 and what == "strides":
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        groups = net.parameters()
    if rank == 1 and what == "group":
        groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    if rank == 1 and what in ("weights", "min_replicas"):
        options = {"weights": "equal"} if what == "weights" else {"min_replicas": 2}
    optimizer = torch.optim.SGD(groups, lr=0.1)
    place = elastic.Membership(lighthouse=lighthouse, name=f"w{rank}", timeout_seconds=5, quorum_seconds=20)
    if rank == 1:
        dist.barrier()
        try:
            elastic.attach(net, optimizer, DILOCO, place, **options)
        except MembershipError as error:
            return str(error)
        return "it was let in"
    run = elastic.attach(net, optimizer, DILOCO, place)
    dist.barrier()
    until = time.monotonic() + 4
    while time.monotonic() < until:
        torch.autograd.backward(net(torch.ones(1, 3, 4, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    run.detach()
    return ""


SOAK = [pytest.param(what, marks=pytest.mark.soak) for what in ("group", "weights", "min_replicas")]


@pytest.mark.parametrize("what", ["strides", *SOAK])
def test_what_would_mix_numbers_up_is_refused(what: str) -> None:
    _, answer = of(2, refused, what)
    assert "trains something else" in answer
    assert what in answer


def arguments(rank: int, lighthouse: str) -> list[str]:
    net = Numbers()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    place = elastic.Membership(lighthouse=lighthouse, name="one", timeout_seconds=5, quorum_seconds=10)
    found = []

    def attempt(*args: Any, **kwargs: Any) -> None:
        try:
            elastic.attach(*args, **kwargs)
        except (TypeError, ValueError) as error:
            found.append(str(error))

    attempt(net, [optimizer, optimizer], DILOCO, place)
    attempt(net, torch.optim.SGD(Numbers().parameters(), lr=1.0), DILOCO, place)
    attempt(net, optimizer, DILOCO, place, leave_seconds=float("inf"))
    attempt(net, optimizer, DILOCO, place, start_with=0)
    odd = Numbers()
    odd.register_buffer("short", torch.zeros(2, dtype=torch.uint16))
    attempt(odd, torch.optim.SGD(odd.parameters(), lr=1.0), DILOCO, place)
    run = elastic.attach(net, optimizer, DILOCO, place)
    other = Numbers()
    attempt(other, torch.optim.SGD(other.parameters(), lr=1.0), DILOCO, place)
    with run.consensus():
        net.p[0].grad = torch.ones(1)
        try:
            optimizer.step()
        except RuntimeError as error:
            found.append(str(error))
    run.detach()
    return found


def test_what_can_not_work_is_refused_with_a_reason() -> None:
    (found,) = of(1, arguments)
    reasons = [
        "given twice", "no parameter of the model", "leave_seconds must be", "start_with must be", "short is of torch.uint16",
        "has been used by a run already", "inside consensus",
    ]  # fmt: skip
    assert len(found) == len(reasons), found
    assert all(reason in error for reason, error in zip(reasons, found, strict=True)), found
    for changed, words in (({"min_replicas": 0}, "min_replicas must be"), ({"bind": "127.0.0.1"}, "an address and a port")):
        with pytest.raises(ValueError, match=words), elastic.lighthouse(**changed):
            pass
