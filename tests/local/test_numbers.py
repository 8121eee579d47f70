"""Local updates on numbers that can be worked out by hand: anchors, rates, buffers, groups, and when rounds leave."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.comm import group as polling
from laconic.comm.collectives import Collective
from laconic.comm.scopes import OUTSTANDING
from laconic.run.run import engine_of
from tests.live import ranks
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights


class Numbers(nn.Module):
    """A weight and a bias, and a buffer."""

    def __init__(self, size: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in range(2))
        self.register_buffer("seen", torch.zeros(1))


def step(model: Any, optimizer: torch.optim.Optimizer, gradient: float | complex | Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) + gradient
    optimizer.step()


def started(text: str, lr: float = 1.0, size: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    model = Numbers(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, laconic.attach(model, optimizer, text, **options)


def cut_short(rank: int) -> None:
    """After a sync that was asked for, deltas are from where it left the replicas."""
    model, optimizer, run = started("diloco(4, outer_lr=0.5, outer_momentum=0.0)")
    for _ in range(2):
        step(model, optimizer, rank + 1)
    run.sync()
    assert model.weight.item() == -3, "the mean of -2 and -4, and no step of the outer optimizer"
    for _ in range(2):
        step(model, optimizer, rank + 1)
    assert model.weight.item() == -3 - 0.5 * 3
    run.detach()


def late_in_a_run(rank: int) -> None:
    """A period that follows the learning rate begins where the strategy does."""
    model, optimizer, run = started("silent()")
    for _ in range(3):
        step(model, optimizer, rank)
    run.swap("local_sgd(QSR(4, 1e-9))")
    equal = []
    for _ in range(9):
        step(model, optimizer, rank)
        equal.append(everywhere_equal([model.weight]))
    assert [place + 1 for place, same in enumerate(equal) if same] == [4, 8]
    run.sync()
    run.detach()


def first_or_mean(rank: int) -> None:
    for buffers, wanted in (("broadcast", 1.0), ("average", 2.0), ("local", 1.0 + 2 * rank)):
        model, optimizer, run = started(f"local_sgd(1, buffers={buffers!r})")
        model.seen.fill_(1 + 2 * rank)
        step(model, optimizer, 1.0)
        assert model.seen.item() == wanted, buffers
        run.detach()


def complex_numbers(rank: int) -> None:
    model = Numbers(dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with laconic.attach(model, optimizer, "local_sgd(1)"):
        step(model, optimizer, 2j * rank + 1)
        assert model.weight.item() == -1 - 1j


def still_apart(rank: int) -> None:
    """What is carried on top of the anchor, or blended with it, is each replica's own: a sync has something to do."""
    for how in ("carry=True, blend=0.0", "blend=0.5"):
        model, optimizer, run = started(f"streaming_diloco(3, fragments=1, delay=1, {how}, reducer=Exact())")
        for _ in range(3):  # the exchange completes in the last step
            step(model, optimizer, rank + 1)
        assert not everywhere_equal([model.weight]), how
        with run.consensus():
            assert everywhere_equal([model.weight]), how
        run.sync()
        assert everywhere_equal([model.weight]), how
        run.detach()


def other_entries(rank: int) -> None:
    """What is drawn differs between exchanges."""
    model, optimizer, run = started("local_sgd(1, reducer=RandomK(0.1))", size=100)
    moved = []
    for _ in range(4):
        before = model.weight.detach().clone()
        step(model, optimizer, 1.0)
        moved.append(tuple((model.weight != before).nonzero().flatten().tolist()))
    assert all(len(entries) == 10 for entries in moved)
    assert len(set(moved)) > 1
    run.detach()


def twice_from_one_state(rank: int) -> None:
    """A loaded state is not written into, and nothing of before is left over."""
    model, optimizer, run = started("diloco(2, outer_momentum=0.5, reducer=ErrorFeedback(TopK(0.1)))", size=20)
    pull = torch.randn(20, generator=torch.Generator().manual_seed(rank))

    def go(steps: int) -> list[Tensor]:
        for _ in range(steps):
            step(model, optimizer, pull + model.weight.detach())
        return weights(model)

    start, fresh = copy.deepcopy((model.state_dict(), run.state_dict()))
    from_start = go(4)
    middle, state = copy.deepcopy((model.state_dict(), run.state_dict()))
    kept = copy.deepcopy(state)
    on = go(4)
    for _ in range(2):
        model.load_state_dict(middle)
        run.load_state_dict(state)
        assert same_bits(go(4), on)
    for name, memory in state["local"]["deltas"]["memory"].items():
        assert same_bits(list(memory.values()), list(kept["local"]["deltas"]["memory"][name].values()))
    model.load_state_dict(start)
    run.load_state_dict(fresh)
    assert same_bits(go(4), from_start), "no residual was there yet"
    run.detach()


def groups_of_its_own(rank: int) -> None:
    """What is outstanding has a process group that nobody else uses, and that goes with the run."""
    _, _, run = started("streaming_diloco(4, fragments=1, delay=2)")
    own = engine_of(run).groups[OUTSTANDING].process_group
    deltas = engine_of(run).local.deltas
    assert deltas is not None
    assert deltas._group.process_group is own
    waiting = engine_of(run).groups[OUTSTANDING]._check_peers
    assert waiting == engine_of(run).group._check_peers != polling._nothing, "waits there look after peers, too"
    assert own in dist.distributed_c10d._world.pg_map
    run.detach()
    assert own not in dist.distributed_c10d._world.pg_map


@pytest.mark.parametrize(
    "what",
    [
        cut_short,
        late_in_a_run,
        first_or_mean,
        complex_numbers,
        still_apart,
        other_entries,
        twice_from_one_state,
        groups_of_its_own,
    ],
)
def test_by_hand(what: Any) -> None:
    ranks(2, what)


def within_blocks(rank: int) -> None:
    """Buffers and the optimizer's memory are averaged with those whose parameters are."""
    model = Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with laconic.attach(model, optimizer, "hierarchical_sgd({1: 2, 2: 4}, moments='average')"):
        for wanted in (rank // 2 * 2 + 0.5, None):
            model.seen.fill_(rank)  # type: ignore[operator]
            step(model, optimizer, float(rank))
            memory = optimizer.state[model.weight]["momentum_buffer"]
            if wanted is None:
                assert (model.seen.item(), memory.item()) == (1.5, 2.25)  # type: ignore[operator]
            else:
                assert (model.seen.item(), memory.item(), model.weight.item()) == (wanted, wanted, -wanted)  # type: ignore[operator]


def test_blocks_average_among_themselves() -> None:
    ranks(4, within_blocks)


def one_process() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


AFTER_WARMUP = "Averaging(Route(((Every(2), 'world'),)), Deltas(SlowMo(0.5, 0.5), Exact(), delay=1))"


@pytest.mark.parametrize(
    ("text", "period"),
    [("slowmo(1, beta=0.5, alpha=0.5)", 1), (f"Strategy(Exact(), Route(((Never(), 'world'),)), {AFTER_WARMUP})", 2)],
    ids=["at once", "outstanding for a step"],
)
def test_each_group_of_parameters_has_its_own_slow_rate(text: str, period: int) -> None:
    """With deltas of one step, u <- beta u + gradient and x <- x - alpha * rate * u; a parameter that nobody steps stays."""
    one_process()
    try:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(4)])
        rates = [0.5, 2.0, 0.25]
        groups = [{"params": [model[place]], "lr": rate} for place, rate in enumerate(rates)]
        optimizers = [torch.optim.SGD(groups[:2]), torch.optim.SGD(groups[2:])]
        wanted, u = [0.0] * 4, 0.0
        with laconic.attach(model, optimizers, text):
            for factor in (1.0, 0.5, 0.25):
                for group, rate in zip([g for o in optimizers for g in o.param_groups], rates, strict=True):
                    group["lr"] = rate * factor
                for parameter in model:
                    parameter.grad = torch.ones(1)
                for optimizer in optimizers * period:  # a second step is lost, as the delta had left before it
                    optimizer.step()
                u = 0.5 * u + 1
                wanted = [x - 0.5 * rate * factor * u for x, rate in zip(wanted, [*rates, 0.0], strict=True)]
                assert [parameter.item() for parameter in model] == pytest.approx(wanted)
    finally:
        dist.destroy_process_group()


def test_rounds_of_an_outstanding_exchange_leave_at_fixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The i-th of R leaves i * delay / R steps after the first. How many there are is known from the exchange before."""
    left: list[tuple[int, str]] = []
    launch = polling.TorchGroup.launch

    def noted(group: polling.TorchGroup, collective: Collective) -> Any:
        if collective.tensor.is_floating_point() and group is engine_of(run).groups[OUTSTANDING]:
            left.append((run.step, type(collective).__name__))
        return launch(group, collective)

    one_process()
    try:
        model = build(lambda: chain(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = laconic.attach(model, optimizer, "streaming_diloco(8, fragments=1, delay=6, reducer=ErrorFeedback(PowerSGD(1)))")
        monkeypatch.setattr(polling.TorchGroup, "launch", noted)
        for now in range(24):
            model(vectors(0, now)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.detach()
    finally:
        dist.destroy_process_group()
    first, *later = [[(now - start, kind) for now, kind in left if start <= now <= start + 6] for start in (2, 10, 18)]
    assert first == [(0, "AllGather"), (0, "AllReduce"), (6, "AllReduce")], (
        "not known yet: when the exchange has to be complete"
    )
    assert later == [[(0, "AllGather"), (0, "AllReduce"), (3, "AllReduce")]] * 2


def test_what_has_arrived_is_applied_before_anything_else_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of another fragment that can't leave takes nothing of it back."""
    launch, broken = polling.TorchGroup.launch, False

    def refuse(group: polling.TorchGroup, collective: Collective) -> Any:
        if broken and group is engine_of(run).groups[OUTSTANDING]:
            raise RuntimeError("the cable is cut")
        return launch(group, collective)

    one_process()
    try:
        model = build(lambda: chain(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        reducer = "ErrorFeedback(PowerSGD(1, min_compression_rate=0.5))"
        run = laconic.attach(model, optimizer, f"streaming_diloco(8, fragments=4, delay=4, reducer={reducer})")
        deltas = engine_of(run).local.deltas
        assert deltas is not None
        monkeypatch.setattr(polling.TorchGroup, "launch", refuse)
        for now in range(60):
            due = [one for one in deltas._outstanding if now + 1 >= one.launched + 4]
            broken = now > 30 and bool(due) and len(deltas._outstanding) > 1
            before = {name: anchor.clone() for name, anchor in deltas.anchors.by_name.items()}
            model(vectors(0, now)).square().sum().backward()
            if not broken:
                optimizer.step()
                optimizer.zero_grad()
                continue
            with pytest.raises(laconic.CommunicationError, match="the cable is cut"):
                optimizer.step()
            break
        else:
            pytest.fail("no step had one fragment to complete and another to send on")
        moved = {name for name, anchor in deltas.anchors.by_name.items() if not torch.equal(anchor, before[name])}
        assert moved == set(deltas.fragments[due[0].fragment])
        assert due[0] not in deltas._outstanding
        engine_of(run).end(failed=True)
    finally:
        dist.destroy_process_group()
