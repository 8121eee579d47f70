"""Checkpoints in unusual hands: odd data, odd directories, runs that change or fail on the way."""

import copy
import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import laconic
from laconic.checkpoint import manifest
from tests.live import ranks
from tests.models import build, chain, difference, everything, everywhere_equal, vectors

Made = Callable[[nn.Module], Any]


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def started(text: str, make: Callable[[], nn.Module] = chain, optimizer: Made = adamw) -> tuple[Any, Any, Any]:
    model = build(make)
    made = optimizer(model)
    return model, made, laconic.attach(model, made, text)


def train(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        model(vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def names(folder: str | Path) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


# What is saved


def numpy_data(rank: int, folder: str) -> None:
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    optimizer.param_groups[0]["lr"] = np.cos(1.0)
    generator: Any = np.random.RandomState(3).get_state()
    table = np.arange(6, dtype=np.int16).reshape(2, 3)
    extra: dict[Any, Any] = {
        "generator": generator,
        "table": table,
        "loss": np.float32(0.5),
        "a": {"b": torch.ones(1)},
        "a/b": torch.zeros(1),
    }
    laconic.checkpoint.save(folder, run=run, extra=extra)
    optimizer.param_groups[0]["lr"] = 7.0
    found: dict[Any, Any] = laconic.checkpoint.load(folder, run=run).extra
    assert optimizer.param_groups[0]["lr"] == np.cos(1.0)
    assert type(optimizer.param_groups[0]["lr"]) is float
    np.random.RandomState().set_state(found["generator"])
    assert (found["generator"][1] == generator[1]).all()
    assert found["table"].dtype == np.int16
    assert (found["table"] == table).all()
    assert (found["loss"], found["a"]["b"], found["a/b"]) == (0.5, 1, 0)
    run.detach()


def test_what_numpy_made_comes_back(tmp_path: Path) -> None:
    ranks(2, numpy_data, str(tmp_path))


def unreadable(rank: int, folder: str) -> None:
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    said = r"(?s)plain data.*extra/places/1 has a pathlib.\w+, \w+\('here'\)"
    with pytest.raises((TypeError, ValueError), match=said):
        laconic.checkpoint.save(folder, run=run, extra={"places": ["x", Path("here") if rank == 1 else "here"]})
    assert names(folder) == []
    for wrong in ({"keep": "3"}, {"keep": 2.5}, {"extra": [1, 2]}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be a"):
            laconic.checkpoint.save(folder, run=run, **wrong)
    with pytest.raises(TypeError, match=r"run must be what .* returned, got DistributedDataParallel"):
        laconic.checkpoint.save(folder, run=model)
    run.detach()
    for call in (laconic.checkpoint.save, laconic.checkpoint.load):
        with pytest.raises(RuntimeError, match="needs a run that is attached"):
            call(folder, run=run)


def test_what_could_not_be_read_back_is_refused_by_all_ranks(tmp_path: Path) -> None:
    ranks(2, unreadable, str(tmp_path))


def borrowed(rank: int, folder: str) -> None:
    model, optimizer, run = started("diloco(4)")
    train(model, optimizer, rank, range(2))
    with run.consensus(), pytest.raises(RuntimeError, match="inside consensus"):
        laconic.checkpoint.save(folder, run=run)
    run.sync()
    run.detach()


def test_a_mean_on_loan_is_not_saved(tmp_path: Path) -> None:
    ranks(2, borrowed, str(tmp_path))


class Own(nn.Module):
    """Has what each rank may have for itself: a buffer, and a parameter that DDP is told to leave alone."""

    def __init__(self, ignored: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        if ignored:
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["body.2.weight"])  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def of_its_own(rank: int, folder: str) -> None:
    """The strategy's text, and whether DDP ignores a parameter; what a rank has for itself comes back to that rank."""
    every_second = "Strategy(Exact(), Route(((Every(2), 'world'),)))"  # steps between are taken apart
    for place, (text, ignored) in enumerate((("ddp()", False), ("ddp()", True), (every_second, False))):
        found = []
        for load in (False, True):
            torch.manual_seed(0)
            random.seed(rank)
            model = nn.parallel.DistributedDataParallel(Own(ignored), forward_sync_buffers=False)
            optimizer = adamw(model)
            run = laconic.attach(model, optimizer, text)
            if load:
                laconic.checkpoint.load(Path(folder) / str(place), run=run)
            else:
                train(model, optimizer, rank, range(3))
                random.gauss(0, 1)  # Python keeps the second of a pair for the next call
                laconic.checkpoint.save(Path(folder) / str(place), run=run)
            found.append({**everything(model, [optimizer], run), "random": [random.getstate(), torch.get_rng_state()]})
            run.detach()
        assert everywhere_equal([model.module.body[2].weight]) == (text == "ddp()" and not ignored)
        unlike = difference(found[1], found[0], text)
        assert unlike is None, unlike


def test_what_a_rank_has_for_itself_comes_back_to_it(tmp_path: Path) -> None:
    ranks(2, of_its_own, str(tmp_path))


# Where it is saved


def rolled_back(rank: int, folder: str) -> None:
    """Training goes on from an older checkpoint; the newest is torn."""
    model, optimizer, run = started("ddp()")
    for step in range(4):
        train(model, optimizer, rank, range(step, step + 1))
        laconic.checkpoint.save(folder, run=run, keep=None)
    dist.barrier()
    if rank == 0:
        (Path(folder) / "step-00000004" / ".metadata").unlink()
    dist.barrier()
    laconic.checkpoint.load(Path(folder) / "step-00000001", run=run)
    train(model, optimizer, rank, range(1, 2))
    assert laconic.checkpoint.save(folder, run=run, keep=2).wait().exists()
    assert names(folder) == ["step-00000002", "step-00000003", "step-00000004"], "the new one, a whole one, and what is torn"
    run.detach()


def test_what_was_just_written_is_never_removed(tmp_path: Path) -> None:
    ranks(2, rolled_back, str(tmp_path))


def test_the_newest_is_the_one_of_most_steps(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        (tmp_path / manifest.folder_name(step)).mkdir()
    assert [folder.name for folder in manifest.checkpoints(tmp_path)] == ["step-99999999", "step-100000000"]


def beside(rank: int, folder: str) -> None:
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    laconic.checkpoint.save(folder, run=run)
    laconic.checkpoint.load(folder, run=run)
    run.detach()


def test_a_save_of_somebody_else_goes_on(tmp_path: Path) -> None:
    (tmp_path / "movie.partial").write_text("a file")
    alive, dead = tmp_path / "step-00000009.0123abcd.partial", tmp_path / "step-00000008.0123abcd.partial"
    for folder in (alive, dead):
        folder.mkdir()
    manifest.lock(dead).close()
    with manifest.lock(alive):
        ranks(2, beside, str(tmp_path))
        assert names(tmp_path) == ["movie.partial", "step-00000001", alive.name]
    ranks(2, beside, str(tmp_path))
    assert names(tmp_path) == ["movie.partial", "step-00000001"]


def each_its_own(rank: int, folder: str) -> None:
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    mine = Path(folder) / str(rank)
    with pytest.raises(RuntimeError, match=r"(?s)was not written.*__1_0.distcp is missing.*one directory that all can see"):
        laconic.checkpoint.save(mine, run=run)
    assert names(mine) == []
    run.detach()


def test_ranks_that_see_different_directories(tmp_path: Path) -> None:
    ranks(2, each_its_own, str(tmp_path))


def written(rank: int, folder: str, text: str, steps: int, make: Callable[[], nn.Module], optimizer: Made) -> None:
    model, made, run = started(text, make, optimizer)
    train(model, made, rank, range(steps))
    laconic.checkpoint.save(folder, run=run)
    run.sync()
    run.detach()


def test_killed_while_the_only_checkpoint_is_replaced(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path), "ddp()", 1, chain, adamw)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.old.partial")
    assert laconic.checkpoint.latest(tmp_path) == tmp_path / "step-00000001.old.partial"


def test_a_manifest_that_was_changed_is_damaged(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path), "ddp()", 1, chain, adamw)
    file = tmp_path / "step-00000001" / "manifest.json"
    good = file.read_text()
    for change in [
        ('"format": 2', '"format": 3'),
        ('"format": 2', '"format": 0'),
        ('"world_size": 2', '"world_size": 3'),
        ('"step": 1', '"step": 3'),
        ('"bytes"', '"bytez"'),
    ]:
        assert change[0] in good
        file.write_text(good.replace(*change))
        with pytest.raises(ValueError, match=r"has no whole checkpoint: .*manifest\.json is damaged: its checksum"):
            laconic.checkpoint.latest(tmp_path)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged: its checksum"):
            manifest.read(file.parent)
    file.write_text(json.dumps(json.loads(good)))  # other blanks, the same words
    assert laconic.checkpoint.latest(tmp_path) == file.parent
    file.write_text(json.dumps({key: value for key, value in json.loads(good).items() if key != "checksum"}))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: it has no checksum"):
        manifest.read(file.parent)
    file.write_text(good)
    with (file.parent / ".metadata").open("ab") as longer:
        longer.write(b"x")
    with pytest.raises(ValueError, match=r"has no whole checkpoint: .*\.metadata has"):
        laconic.checkpoint.latest(tmp_path)  # a file that is too long is not the one that was written
    old = {**json.loads(good), "format": 1}
    del old["checksum"]  # which format 1 did not have
    file.write_text(json.dumps(old))
    with pytest.raises(ValueError, match="has format 1, and this is laconic for format 2"):
        laconic.checkpoint.latest(tmp_path)


# What doesn't fit


def partly_frozen() -> nn.Module:
    model = chain()
    next(model.parameters()).requires_grad_(False)
    return model


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def refused(rank: int, folder: str, text: str, make: Callable[[], nn.Module], optimizer: Made, said: str) -> None:
    model, made, run = started(text, make, optimizer)
    train(model, made, rank, range(1))
    before = everything(model, [made], run)
    with pytest.raises(ValueError, match=said):
        laconic.checkpoint.load(folder, run=run)
    assert difference(everything(model, [made], run), before) is None
    run.sync()
    run.detach()


@pytest.mark.parametrize(
    ("text", "then", "now", "said"),
    [
        ("diloco(4)", (partly_frozen, adamw), (chain, adamw), "'0.weight' needs an anchor of shape.*none; was it frozen then"),
        ("ddp()", (chain, sgd), (chain, adamw), "has dampening, momentum, nesterov and no .*another kind than AdamW"),
        ("ddp()", (chain, adamw), (chain, sgd), "has .*betas.* and no dampening, momentum, nesterov"),
    ],
)
def test_what_does_not_fit_changes_nothing(text: str, then: Any, now: Any, said: str, tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path), text, 3, *then)
    ranks(2, refused, str(tmp_path), text, now[0], now[1], said)


def scaler_switched_on(rank: int, folder: str) -> None:
    for enabled in (False, True):
        model = build(chain)
        optimizer = adamw(model)
        run = laconic.attach(model, optimizer, "ddp()", scaler=torch.amp.GradScaler("cpu", enabled=enabled))
        train(model, optimizer, rank, range(1 + enabled))
        if not enabled:
            laconic.checkpoint.save(folder, run=run)
        else:
            before = everything(model, [optimizer], run)
            with pytest.raises(ValueError, match="GradScaler was disabled and has no scale to go on with"):
                laconic.checkpoint.load(folder, run=run)
            assert difference(before, everything(model, [optimizer], run)) is None, "nothing is changed"
        run.detach()


def test_a_scaler_that_was_disabled_then_and_is_enabled_now(tmp_path: Path) -> None:
    ranks(2, scaler_switched_on, str(tmp_path))


def in_other_words(rank: int, folder: str) -> None:
    _, _, run = started("ddp(reducer=Quantized(8))")
    assert laconic.checkpoint.load(folder, run=run).step == 2
    run.detach()


def test_the_same_strategy_in_other_words_is_the_same(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path), "int8()", 2, chain, adamw)
    ranks(2, in_other_words, str(tmp_path))


def elsewhere(rank: int, folder: str, text: str, said: str) -> None:
    model, optimizer, run = started(text)
    with pytest.warns(UserWarning, match=said):
        laconic.checkpoint.load(folder, run=run, strict=False)
    assert run.step == 5
    assert str(run.strategy) == text
    train(model, optimizer, rank, range(5, 6))
    laconic.check_replicas(run)
    run.sync()
    run.detach()


@pytest.mark.parametrize(
    ("then", "worlds", "said"),
    [  # three ranks have no blocks of two
        ("hierarchical_sgd({2: 2, 4: 'world'})", (4, 3), re.escape("goes on by ddp(): clock and residuals are taken over")),
        ("diloco(4, reducer=ErrorFeedback(PowerSGD(1)))", (2, 2), "not used: the anchors, the outer .*'q' of its compressor"),
        ("powersgd(rank=1, warmup=0)", (2, 2), "not used: 'q' of its compressor"),
    ],
)
def test_another_strategy_says_what_it_does_not_use(then: str, worlds: tuple[int, int], said: str, tmp_path: Path) -> None:
    ranks(worlds[0], written, str(tmp_path), then, 5, chain, adamw)
    ranks(worlds[1], elsewhere, str(tmp_path), "ddp()", said)


class Wide(nn.Module):
    """Of double precision, with a buffer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = chain(2).double()
        self.register_buffer("phase", torch.tensor([1j / 3, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.chain(x.double())
        return out


def wide(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer, run = started("ddp()", Wide)
    if laconic.checkpoint.latest(folder):
        laconic.checkpoint.load(folder, run=run)
    else:
        train(model, optimizer, rank, range(3))
        laconic.checkpoint.save(folder, run=run)
    found = everything(model, [optimizer], run)
    run.detach()
    return found


def test_another_world_takes_what_all_had_alike_as_it_is(tmp_path: Path) -> None:
    before, after = ranks(3, wide, str(tmp_path)), ranks(2, wide, str(tmp_path))
    for rank, found in enumerate(after):
        found["run"].update(world=3)
        assert difference(found, before[rank]) is None


# Runs that change on the way


class Turning(nn.Module):
    """Its first backward makes gradients ready in another order than those after."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(*[nn.Linear(16, 16, bias=place % 2 == 0) for place in range(6)])
        self.b = nn.Sequential(nn.Linear(16, 23), nn.Linear(23, 23), nn.Linear(23, 16))
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(self.b(x).tanh()) if self.turned else self.b(self.a(x).tanh())
        return out


def one(model: nn.Module) -> list[Any]:
    return [adamw(model)]


def two(model: nn.Module) -> list[Any]:
    parameters = list(model.parameters())
    return [torch.optim.AdamW(parameters[::2], lr=0.01), torch.optim.SGD(parameters[1::2], lr=0.05, momentum=0.9)]


def changing(rank: int, make: Any, optimizer: Any, texts: list[str], folder: str, saves: list[int], at: int) -> dict[str, Any]:
    """Ten iterations; after four, the other strategy; with two optimizers they take turns. From `at` on, if it is not 0."""
    model = build(make)
    made = optimizer(model)
    run = laconic.attach(model, made, texts[at >= 4])
    if at:
        laconic.checkpoint.load(Path(folder) / str(at), run=run)
    for number in range(at, 10):
        if number in saves:
            laconic.checkpoint.save(Path(folder) / str(number), run=run)
        model.module.turned = number >= 1
        model(vectors(rank, number)).square().mean().backward()
        made[number % len(made)].step()
        model.zero_grad()
        if number == 3 and len(texts) == 2:
            run.swap(texts[1])
    found = everything(model, made, run)
    run.sync()
    run.detach()
    return found


@pytest.mark.parametrize(
    ("world", "make", "optimizer", "texts", "saves"),
    [
        (2, chain, one, ["ddp(reducer=ErrorFeedback(PowerSGD(1)))", "int8()"], [4, 6]),  # residuals still to be sent
        (3, chain, one, ["diloco(3)", "ddp()"], [5, 6]),  # the first backward that communicates comes after the swap
        (3, Turning, one, ["ddp()", "ddp()"], [2, 5]),
        (2, chain, two, ["local_sgd(2)", "local_sgd(2)"], [3, 6]),  # one optimizer is ahead of the other
    ],
)
def test_resumed_twice(world: int, make: Any, optimizer: Any, texts: list[str], saves: list[int], tmp_path: Path) -> None:
    wanted = ranks(world, changing, make, optimizer, texts, str(tmp_path), saves, 0)
    for at, again in ((saves[0], saves[1:]), (saves[1], [])):
        found = ranks(world, changing, make, optimizer, texts, str(tmp_path), again, at)
        unlike = difference(found, wanted, f"resumed at {at}, rank")
        assert unlike is None, unlike


def counted(rank: int) -> None:
    model, optimizer, run = started("diloco(2)")
    train(model, optimizer, rank, range(1))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.warns(UserWarning, match="is skipped"):
        train(model, optimizer, rank, range(1, 2))
    run.swap("diloco(3)")
    state = run.state_dict()
    assert run.stats().skipped == 1
    run.load_state_dict(state)
    assert run.stats().skipped == 1
    run.sync()
    run.detach()


def test_skipped_rounds_are_counted_through_a_change_of_strategy() -> None:
    ranks(2, counted)


# Runs that fail on the way


def failing_later(rank: int, folder: str) -> None:
    """An asynchronous save that fails is told once, and stands in nobody's way."""
    blocked = Path(folder) / "file"
    blocked.touch()
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    saving = laconic.checkpoint.save(blocked, run=run, asynchronous=True)
    with pytest.raises(RuntimeError, match="was not written"):
        saving.wait()
    laconic.checkpoint.save(Path(folder) / "good", run=run)
    laconic.checkpoint.save(blocked, run=run, asynchronous=True)
    with pytest.raises(RuntimeError, match="was not written"):
        laconic.checkpoint.save(Path(folder) / "good", run=run)
    laconic.checkpoint.save(blocked, run=run, asynchronous=True)
    with pytest.raises(RuntimeError, match="was not written"):
        run.detach()
    laconic.attach(model, optimizer, "ddp()").detach()  # it is off


def test_an_asynchronous_save_that_fails(tmp_path: Path) -> None:
    ranks(2, failing_later, str(tmp_path))


def ended_by_an_error(rank: int, folder: str) -> None:
    model = build(chain)
    optimizer = adamw(model)
    with pytest.raises(KeyError), laconic.attach(model, optimizer, "ddp()") as run:
        train(model, optimizer, rank, range(2))
        laconic.checkpoint.save(folder, run=run, asynchronous=True)
        raise KeyError("the user's own")
    assert names(folder) == ["step-00000002"]


def test_a_checkpoint_on_its_way_survives_an_error(tmp_path: Path) -> None:
    ranks(2, ended_by_an_error, str(tmp_path))


# A torch.distributed.checkpoint of one's own

LOSSY = "diloco(2, reducer=ErrorFeedback(Quantized(4)))"


def own_checkpoint(rank: int, folder: str) -> None:
    model, optimizer, run = started(LOSSY)
    train(model, optimizer, rank, range(3))
    dcp.save({"laconic": laconic.checkpoint.RankState(run)}, checkpoint_id=f"{folder}/ranked")
    dcp.save({"laconic": run}, checkpoint_id=f"{folder}/bare")
    wanted = copy.deepcopy(run.state_dict())
    run.sync()
    run.detach()
    _, _, run = started(LOSSY)
    with pytest.raises(ValueError, match=r"save laconic.checkpoint.RankState\(run\)"):
        dcp.load({"laconic": run}, checkpoint_id=f"{folder}/bare")
    dcp.load({"laconic": laconic.checkpoint.RankState(run)}, checkpoint_id=f"{folder}/ranked")
    assert difference(run.state_dict(), wanted) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replicas differ
        run.detach()


def test_a_bare_state_in_dcp_is_found_out(tmp_path: Path) -> None:
    ranks(2, own_checkpoint, str(tmp_path))
