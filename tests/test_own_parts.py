"""A reducer, a schedule and an outer optimizer in a user's own file work wherever laconic's own do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.local import fragments
from laconic.run.run import engine_of
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
