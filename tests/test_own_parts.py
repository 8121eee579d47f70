"""A reducer, a schedule and an outer optimizer in a user's own file work wherever laconic's own do."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.local import fragments
from laconic.local.agenda import Agenda
from laconic.run.run import engine_of
from laconic.strategies.schedules import Until
from tests import own_parts
from tests.live import ranks
from tests.models import chain, everywhere_equal, vectors, weights

PLACE = "tests.own_parts"
TEXTS = {
    "gradients": f"ddp(reducer={PLACE}:Clipped(limit=0.002))",
    "all three": f"diloco({PLACE}:Doubling(first=2), outer={PLACE}:Capped(limit=0.05), reducer={PLACE}:Clipped(limit=0.002))",
    "after a warm-up": f"local_sgd({PLACE}:Doubling(2), warmup=3)",
    "any optimizer": "diloco(4, outer=OuterOptimizer(torch.optim.adam:Adam, {'lr': 0.01}))",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_their_texts_read_back(text: str) -> None:
    strategy = laconic.strategy(text)
    assert laconic.strategy(str(strategy)) == strategy


def test_registered_by_one_line_they_have_their_plain_names() -> None:
    for part in (own_parts.Clipped, own_parts.Doubling, own_parts.Capped):
        laconic.register(part)
    short = laconic.strategy("diloco(Doubling(2), outer=Capped(0.05), reducer=Clipped(0.002))")
    assert short == laconic.strategy(TEXTS["all three"])


def trained(rank: int, text: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    fragments.BUCKET_BYTES = 2000  # many buckets
    model = DistributedDataParallel(chain(4, 8), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncs = []
    with laconic.attach(model, optimizer, text) as run:
        for step in range(steps):
            model(vectors(rank, step, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            syncs.append(run.stats().syncs)
        stats, deltas = run.stats(), engine_of(run).local.deltas
        outer = deltas.anchors._outer if deltas else None
        layout = run.layout() if stats.exchanges else None
    assert everywhere_equal(weights(model))
    fragments.BUCKET_BYTES = 25 << 20
    return {"stats": stats, "syncs": syncs, "outer": getattr(outer, "steps", None), "layout": layout}


def test_at_work() -> None:
    for found in ranks(2, trained, TEXTS["all three"], 9):
        assert found["syncs"] == [0, 1, 1, 2, 2, 2, 2, 3, 3], "after steps 2, 4 and 8"
        assert found["outer"] == 3, "once a sync, whatever the number of buckets"
    for found in ranks(2, trained, TEXTS["after a warm-up"], 9):
        assert found["syncs"] == [0, 0, 0, 0, 1, 1, 2, 2, 2], "after steps 3 + 2 and 3 + 4"
    for found in ranks(2, trained, TEXTS["any optimizer"], 9):
        assert found["syncs"][-1] == 2


@pytest.mark.parametrize("name", ["gradients", "all three"])
def test_predicted_bytes_are_those_that_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "BUCKET_BYTES", 2000)
    found = ranks(2, trained, TEXTS[name], 9)[0]
    buckets = found["layout"] if name == "gradients" else None
    predicted = laconic.predict(TEXTS[name], chain(4, 8), world_size=2, step=0, steps=9, buckets=buckets)
    assert predicted.wire_bytes == found["stats"].wire_bytes
    assert predicted.collectives == found["stats"].collectives


def saved(rank: int, text: str, folder: str) -> dict[str, Any]:
    found = []
    model = DistributedDataParallel(chain(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, text) as run:
        for step in range(5):
            model(vectors(rank, step, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        laconic.checkpoint.save(folder, run=run).wait()
        found.append(run.state_dict())
    return found[0]


def loaded(rank: int, text: str, folder: str) -> dict[str, Any] | str:
    model = DistributedDataParallel(chain(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, text) as run:
        try:
            laconic.checkpoint.load(folder, run=run)
        except ValueError as error:
            return str(error)
        state = run.state_dict()
        for step in range(run.step, run.step + 4):
            model(vectors(rank, step, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert everywhere_equal(weights(model))
    return state


@pytest.mark.parametrize("name", ["gradients", "all three"])
def test_on_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    """What each rank had of its own becomes the mean of all, what they shared stays, whatever its key is called."""
    before = ranks(3, saved, TEXTS[name], str(tmp_path))
    after = ranks(2, loaded, TEXTS[name], str(tmp_path))

    def memory(state: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        found: dict[str, dict[str, torch.Tensor]] = state["memory"] or state["local"]["deltas"]["memory"]
        return found

    slots = [memory(state) for state in before]
    assert any(not torch.equal(slots[0][key]["backlog"], slots[1][key]["backlog"]) for key in slots[0]), (
        "else nothing is tested"
    )
    for state in after:
        assert not isinstance(state, str)
        for key, slot in memory(state).items():
            mean = torch.stack([each[key]["backlog"] for each in slots]).double().mean(0).float()
            assert torch.equal(slot["backlog"], mean)
            assert torch.equal(slot["peak"], slots[0][key]["peak"])


def test_memory_that_nobody_declares_is_an_error_there_and_nothing_is_lost(tmp_path: Path) -> None:
    text = f"ddp(reducer={PLACE}:Forgetful())"
    ranks(2, saved, text, str(tmp_path))
    for problem in ranks(3, loaded, text, str(tmp_path)):
        assert isinstance(problem, str)
        assert "remembers 'seen' and doesn't declare whose that is" in problem
        assert "memory = {'seen': 'own'}" in problem
    for state in ranks(2, loaded, text, str(tmp_path)):
        assert not isinstance(state, str), "on as many ranks each gets its own back"


def test_a_schedule_without_a_start_and_a_warm_up() -> None:
    with pytest.raises(ValueError, match="Until can't begin after a warm-up of 3 steps: it has no field start"):
        laconic.strategy("local_sgd(Until(5), warmup=3)")


def test_a_strategy_has_one_warm_up_wherever_it_is_given() -> None:
    strategy = laconic.diloco(laconic.Every(8, start=100))
    assert strategy.warmup == 100
    assert (strategy.averaging, strategy.route) == (
        laconic.diloco(8, warmup=100).averaging,
        laconic.diloco(8, warmup=100).route,
    )
    assert laconic.local_sgd(laconic.QSR(4, 0.02), warmup=5) == laconic.local_sgd(laconic.QSR(4, 0.02, start=5))
    with pytest.raises(ValueError, match="local_sgd: period starts after 3 steps and warmup is 5: give one of the two"):
        laconic.local_sgd(laconic.Every(8, start=3), warmup=5)


def test_an_outer_optimizer_takes_the_place_of_its_numbers() -> None:
    with pytest.raises(ValueError, match="diloco: outer takes the place of outer_lr and outer_momentum"):
        laconic.diloco(outer=laconic.Adopt(), outer_lr=0.5)
    with pytest.raises(ValueError, match="slowmo: outer takes the place of beta and alpha"):
        laconic.slowmo(outer=laconic.Adopt(), beta=0.2)
    with pytest.raises(ValueError, match="sparseloco: outer takes the place of outer_lr"):
        laconic.sparseloco(outer=laconic.Adopt(), outer_lr=0.2)
    assert laconic.streaming_diloco(outer=laconic.Nesterov(0.7, 0.6)).averaging == laconic.streaming_diloco().averaging
    with pytest.raises(TypeError, match="options don't fit Adam"):
        laconic.OuterOptimizer(torch.optim.Adam, {"momentum": 0.1})
    with pytest.raises(TypeError, match=r"optimizer must be a class of optimizers such as torch\.optim\.Adam, got 'Adam'"):
        laconic.OuterOptimizer("Adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Adam is an optimizer: write OuterOptimizer"):
        laconic.strategy("diloco(outer=torch.optim.adam:Adam())")


@dataclass(frozen=True)
class Wrong(laconic.Reducer):
    """Each of these is a mistake that a user may make."""

    how: str = ""

    def reduce(self, bucket: laconic.Bucket) -> Any:
        match self.how:
            case "no yield":
                return laconic.Reduced(bucket.flat)
            case "no yield, no return":
                return None
            case "yields a tensor":
                return (part for part in [bucket.flat])
        return self._exchange(bucket)

    def _exchange(self, bucket: laconic.Bucket) -> Any:
        mean = yield laconic.AllReduce(bucket.flat)
        match self.how:
            case "no return":
                return None
            case "returns a tensor":
                return mean
            case "another shape":
                return laconic.Reduced(mean[1:])
            case "an error of another shape":
                return laconic.Reduced(mean, mean[1:])
            case "no tensor":
                return laconic.Reduced(0.5)  # type: ignore[arg-type]
        return laconic.Reduced(mean, None, lambda: bucket.slots[0].update(n=3))  # type: ignore[call-overload]


MUST_YIELD = (
    r"Wrong.reduce must yield collectives, as in `mean = yield .*AllReduce\(tensor\)`; it yielded nothing, and returned "
)
MUST_RETURN = r"Wrong.reduce must return laconic.Reduced\(mean, ...\)"
MISTAKES = {
    "no yield": MUST_YIELD + "a Reduced",
    "no yield, no return": MUST_YIELD + "None",
    "yields a tensor": r"Wrong.reduce must yield collectives, such as laconic.AllReduce\(tensor\), and yielded a Tensor",
    "no return": f"{MUST_RETURN}, got None",
    "returns a tensor": f"{MUST_RETURN}, got a Tensor",
    "no tensor": f"{MUST_RETURN} with a tensor as its mean, got a float",
    "another shape": "Wrong.reduce: the mean must have as many numbers as the bucket, 3, got 2",
    "an error of another shape": "Wrong.reduce: the error must have as many numbers as the bucket, 3, got 2",
}
MISTAKE_OF_MEMORY = {"memory that is no tensor": "a reducer's memory must be tensors, and 'n' of '.*' is 3"}


@pytest.mark.parametrize("how", [*MISTAKES, *MISTAKE_OF_MEMORY])
@pytest.mark.parametrize("text", ["ddp(reducer={})", "diloco(1, reducer={})"], ids=["gradients", "deltas"])
def test_a_reducer_that_is_wrong_is_told_what_is_wanted(how: str, text: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = laconic.attach(model, optimizer, text.format(f"tests.test_own_parts:Wrong({how!r})"))
        with pytest.raises((TypeError, ValueError), match={**MISTAKES, **MISTAKE_OF_MEMORY}[how]):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.state_dict()
        engine_of(run).end(failed=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", MISTAKES)
@pytest.mark.parametrize("around", [lambda wrong: wrong, laconic.ErrorFeedback], ids=["alone", "inside"])
def test_it_is_told_the_same_by_predict_and_simulate(how: str, around: Callable[[laconic.Reducer], laconic.Reducer]) -> None:
    reducer, flat = around(Wrong(how)), torch.ones(3)
    with pytest.raises((TypeError, ValueError), match=MISTAKES[how]):
        laconic.predict(laconic.ddp(reducer=reducer), torch.nn.Linear(2, 1, device="meta"), world_size=2)
    with pytest.raises((TypeError, ValueError), match=MISTAKES[how]):
        laconic.simulate([reducer.reduce(laconic.Bucket(flat, [flat], ["w"], [{}], rank=0, world=1))])


@dataclass(frozen=True)
class Reads(laconic.Reducer):
    """Looks at values, which tensors on meta don't have."""

    how: str = "item"

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        match self.how:
            case "item":
                largest = bucket.flat.abs().max().item()
                mean = yield laconic.AllReduce(bucket.flat / largest)
            case "mask":
                mean = yield laconic.AllReduce(bucket.flat[bucket.flat > 0])
            case "shape":
                mean = yield laconic.AllReduce(bucket.flat + bucket.flat.new_zeros(2))
        return laconic.Reduced(mean)


@pytest.mark.parametrize("around", [lambda wrong: wrong, laconic.ErrorFeedback], ids=["alone", "inside"])
def test_a_reducer_that_reads_a_value_is_named_by_predict(around: Callable[[laconic.Reducer], laconic.Reducer]) -> None:
    layer = torch.nn.Linear(2, 1, device="meta")
    for how in ("item", "mask"):
        with pytest.raises(TypeError, match=r"Reads.reduce must not read a value into Python: no .item\(\), no `if tensor`"):
            laconic.predict(laconic.ddp(reducer=around(Reads(how))), layer, world_size=2)
    with pytest.raises(RuntimeError, match="broadcast a dimension"):  # any other error stays as it is
        laconic.predict(laconic.ddp(reducer=around(Reads("shape"))), layer, world_size=2)


@dataclass(frozen=True)
class Builds(laconic.Outer):
    what: str = "nothing"

    def build(self, groups: Any) -> Any:
        if self.what == "nothing":
            return None
        return torch.optim.SGD([*groups, {"params": [torch.zeros(1)]}], lr=0.1)


@dataclass(frozen=True)
class Counts(laconic.Schedule):
    cycle: Any = None

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return step % 4 == 3


def test_what_a_part_declares_is_checked_when_a_strategy_is_made() -> None:
    @dataclass(frozen=True)
    class Mine(own_parts.Clipped):
        memory = {"backlog": "mine"}  # type: ignore[dict-item]  # noqa: RUF012

    @dataclass
    class Soft(laconic.Outer):
        def build(self, groups: Any) -> Any: ...

    class Plain(laconic.Schedule):
        def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
            return True

    mistakes: list[tuple[Callable[[], object], str]] = [
        (
            lambda: laconic.ddp(reducer=Mine()),
            r"Mine.memory\['backlog'\] must be 'own' .* or 'shared', got 'mine'",
        ),
        (lambda: laconic.diloco(outer=Soft()), "Soft must be a frozen dataclass"),
        (lambda: laconic.diloco(Plain()), "Plain must be a frozen dataclass"),
        (lambda: laconic.diloco(Counts(0)), "Counts.cycle must be a whole number of steps, 1 or more, got 0"),
        (lambda: laconic.diloco(outer=0), "outer must be an Outer such as Nesterov.*, got 0"),  # type: ignore[arg-type]
        (lambda: laconic.diloco(outer=torch.optim.Adam), "of an optimizer class make OuterOptimizer"),  # type: ignore[arg-type]
        (lambda: laconic.streaming_diloco(Counts()), "or a schedule with a fixed_period, .* got Counts"),
        (
            lambda: laconic.ErrorFeedback(laconic.ErrorFeedback(laconic.Sign())),
            "keeps 'error' for each parameter, and so does Err",
        ),
        (lambda: laconic.OuterOptimizer(torch.optim.LBFGS), "LBFGS can't step by gradients alone"),
        (lambda: laconic.OuterOptimizer(torch.optim.SGD, {"lr": -1}), "options don't fit SGD: Invalid learning rate: -1"),
    ]
    for make, wanted in mistakes:
        with pytest.raises((TypeError, ValueError), match=wanted):
            make()
    one = laconic.OuterOptimizer(torch.optim.SGD, {"lr": 1, "momentum": 0.5})
    other = laconic.OuterOptimizer(torch.optim.SGD, {"momentum": 0.5, "lr": 1.0})
    assert one == other
    assert hash(one) == hash(other)
    assert laconic.OuterOptimizer(torch.optim.SGD, {"lr": torch.tensor(0.5)}).options == {"lr": 0.5}


@pytest.mark.parametrize(("what", "wanted"), [("nothing", "got None"), ("another group", "of one, it made 2")])
def test_an_outer_that_builds_no_optimizer_is_refused_before_the_warm_up(what: str, wanted: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 1)
        with pytest.raises((TypeError, ValueError), match=f"Builds.build must .*{wanted}"):
            laconic.attach(model, torch.optim.SGD(model.parameters()), laconic.diloco(4, outer=Builds(what)))
    finally:
        dist.destroy_process_group()


def test_what_is_not_known_of_a_schedule_is_not_predicted() -> None:
    layer = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(ValueError, match=r"a schedule that does not say its cycle, .*; give steps="):
        laconic.predict(laconic.diloco(Counts()), layer, world_size=2)
    assert laconic.predict(laconic.diloco(Counts()), layer, world_size=2, step=0, steps=8).collectives == 2
    assert laconic.predict(laconic.diloco(Counts(4)), layer, world_size=2).steps == 4
    assert laconic.predict("diloco(QSR(4, 0.02))", layer, world_size=2).steps == 4


def test_a_schedule_that_forgets_its_start_is_not_due_in_the_warm_up() -> None:
    """For parameters as for deltas."""
    for averaging in (laconic.local_sgd(Eager(), warmup=5).averaging, laconic.diloco(Eager(), warmup=5).averaging):
        assert averaging is not None
        agenda = Agenda(averaging)
        assert [step for step in range(1, 8) if agenda.scope(step) or agenda.departures(step)] == [6, 7]


@dataclass(frozen=True)
class Eager(laconic.Schedule):
    start: int = 0

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return True


@dataclass(frozen=True)
class Named(laconic.Reducer):
    """Fields by names that laconic's own classes use, too."""

    warmup: int
    cycle: int
    parts: tuple[laconic.Reducer, ...] = ()

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        mean = yield laconic.AllReduce(bucket.flat)
        return laconic.Reduced(mean)


@dataclass(frozen=True)
class Soon(laconic.Schedule):
    start: int
    cycle: int

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return step >= self.start and (step + 1 - self.start) % self.cycle == 0


@dataclass(frozen=True)
class Kin(laconic.ErrorFeedback):
    memory = {"more": "shared"}  # noqa: RUF012


def test_fields_may_have_any_name_and_memory_is_found_wherever_it_is_declared() -> None:
    reducer = Named(3, 0, (laconic.ErrorFeedback(laconic.PowerSGD(1)),))
    assert laconic.ddp(reducer=reducer).warmup == 0
    assert reducer.all_memory() == {"error": "own", "q": "shared"}
    assert Kin(laconic.Exact()).all_memory() == {"error": "own", "more": "shared"}
    layer = torch.nn.Linear(4, 4, device="meta")
    assert laconic.predict(laconic.ddp(reducer=reducer), layer, world_size=2).collectives > 0
    assert laconic.predict(laconic.diloco(Soon(2, 3)), layer, world_size=2).steps == 3
    assert laconic.diloco(Soon(2, 3)).warmup == 2


def test_schedules_within_a_strategy() -> None:
    route = laconic.Route(((Until(2), "world"), (laconic.Every(4, start=3), "world")))
    assert laconic.Averaging(route).start == 3, "one without a start of its own says nothing of it"
    with pytest.raises(ValueError, match=r"local_sgd: period is never due, got Never.*use silent"):
        laconic.local_sgd(laconic.Never())
    with pytest.raises(ValueError, match=r"need a sync at the end of each period, and Every.period=16, phase=3. has none"):
        laconic.streaming_diloco(laconic.Every(16, phase=3))
    averaging = laconic.diloco(laconic.Every(8, phase=3)).averaging
    assert averaging is not None
    assert [step for step in range(20) if Agenda(averaging).departures(step)] == [3, 11, 19]


@dataclass(frozen=True)
class Growing(laconic.Outer):
    """Goes further with each sync, by a count that its optimizer keeps for the whole group."""

    def build(self, groups: Any) -> torch.optim.Optimizer:
        return GrowingSGD(list(groups), {"count": 0})


class GrowingSGD(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * 0.1 * group["count"])


def counted(rank: int, middle: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = chain(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for steps in (range(middle), range(middle, 8)):
        with laconic.attach(model, optimizer, laconic.diloco(2, outer=Growing())) as run:
            if state is not None:
                run.load_state_dict(state)
            for step in steps:
                model(vectors(rank, step, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = run.state_dict()
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            engine_of(run).end(failed=True)  # as it is
    return kept


def test_what_an_outer_optimizer_counts_for_a_group_is_resumed() -> None:
    for straight, resumed in zip(ranks(2, counted, 0), ranks(2, counted, 4), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))
