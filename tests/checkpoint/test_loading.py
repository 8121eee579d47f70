"""Checkpoints that are damaged, foreign, of another world or another strategy; and saving that fails or takes its time."""

import copy
import json
import resource
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.checkpoint import manifest
from tests.live import last_ranks, ranks
from tests.models import build, chain, difference, everywhere_equal, same_bits, vectors, weights

STRATEGY = "ddp(reducer=ErrorFeedback(PowerSGD(1)))"


def started(text: str, **options: Any) -> tuple[Any, Any, Any]:
    model = build(chain, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, laconic.attach(model, optimizer, text)


def train(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        model(vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def written(rank: int, folder: str, text: str = STRATEGY, steps: int = 4, keep: int = 2) -> None:
    model, optimizer, run = started(text)
    for step in range(steps):
        train(model, optimizer, rank, range(step, step + 1))
        laconic.checkpoint.save(folder, run=run, keep=keep)
    run.sync()
    run.detach()


# Damage


def refused(rank: int, folder: str, text: str, pattern: str) -> None:
    model, _, run = started(text)
    before = weights(model)
    with pytest.raises(ValueError, match=pattern):
        laconic.checkpoint.load(folder, run=run)
    assert same_bits(before, weights(model)), "nothing is loaded by half"
    assert run.step == 0
    run.detach()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def remove(file: Path) -> None:
    file.unlink()


def test_damage_is_told_and_the_one_before_is_there(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path / "good"))
    assert [folder.name for folder in sorted((tmp_path / "good").iterdir())] == ["step-00000003", "step-00000004"], "keep=2"
    for number, (name, damage, torn, pattern) in enumerate(
        [  # which file, what becomes of it, whether a glance shows it, what is said
            (
                "__0_0.distcp",
                flip,
                False,
                "__0_0.distcp is damaged: its checksum .*move the folder away, and load goes on from step-00000003",
            ),  # rank 1 verifies it
            (".metadata", flip, False, ".metadata is damaged: its checksum"),
            ("__0_0.distcp", cut, True, "__0_0.distcp has [0-9]+ bytes instead of"),
            ("__1_0.distcp", remove, True, "__1_0.distcp is missing"),
            ("manifest.json", cut, True, "manifest.json is damaged"),
            ("manifest.json", remove, True, "no laconic checkpoint: it has no manifest.json|has no checkpoint"),
        ]
    ):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", path)
        newest = path / "step-00000004"
        damage(newest / name)
        ranks(2, refused, str(newest), STRATEGY, pattern)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = laconic.checkpoint.latest(path)
        assert found is not None
        assert found.name == ("step-00000003" if torn else "step-00000004"), "a torn one is passed over"
        assert ["step-00000004 is not whole (" in str(warning.message) for warning in told] == [True] * torn
        if torn:
            ranks(2, loaded_at, str(path), STRATEGY, 3)


def loaded_at(rank: int, folder: str, text: str, step: int) -> None:
    _, _, run = started(text)
    assert laconic.checkpoint.load(folder, run=run).step == step
    assert run.step == step
    run.detach()


def test_foreign_and_newer_checkpoints_are_refused(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path), steps=1)
    (folder,) = tmp_path.iterdir()
    ranks(2, refused, str(folder), "bf16()", r"the checkpoint is of ddp\(.*attached is bf16\(\).*strict=False")
    facts = {**json.loads((folder / "manifest.json").read_text()), "format": 99, "laconic": "9.0"}
    del facts["checksum"]
    newer = {**facts, "checksum": manifest.checksum(facts)}  # else it would be a damaged one
    (folder / "manifest.json").write_text(json.dumps(newer))
    ranks(2, refused, str(folder), STRATEGY, "has format 99.*written by laconic 9.0")
    (folder / "manifest.json").write_text(json.dumps({"name": "something else"}))
    ranks(2, refused, str(folder), STRATEGY, "is not a laconic checkpoint's")
    empty = tmp_path / "empty"
    empty.mkdir()
    ranks(2, refused, str(empty), STRATEGY, "has no checkpoint; laconic.checkpoint.save writes")
    assert laconic.checkpoint.latest(empty) is None
    assert laconic.checkpoint.latest(tmp_path / "nowhere") is None


def another_model(rank: int, folder: str) -> None:
    model = build(lambda: nn.Sequential(chain(), nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = laconic.attach(model, optimizer, STRATEGY)
    with pytest.raises(ValueError, match=r"is in the model alone; is it another model's\?"):
        laconic.checkpoint.load(folder, run=run)
    run.detach()
    model = build(lambda: chain(12, 15))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = laconic.attach(model, optimizer, STRATEGY)
    with pytest.raises(ValueError, match=r"has the shape \(16, 16\) in the checkpoint, \(15, 15\) here"):
        laconic.checkpoint.load(folder, run=run)
    misfits(folder)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    with pytest.raises(ValueError, match="not the optimizers that the run is attached to"):
        laconic.checkpoint.load(folder, run=run, optimizer=other)
    with pytest.raises(ValueError, match="not the model that the run is attached to"):
        laconic.checkpoint.save(folder, run=run, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="keep must be at least 1"):
        laconic.checkpoint.save(folder, run=run, keep=0)
    run.detach()


def misfits(folder: str) -> None:
    """A layer less, other optimizers over the same model, a scaler that there was not."""
    for make, groups, scaler, said in (
        (lambda: nn.Sequential(*list(chain().children())[:-1]), None, None, "'24.weight' is in the checkpoint alone"),
        (chain, [(0, 20), (20, 26)], None, "has 1 optimizers, the run 2"),
        (chain, [(0, 25)], None, r"has groups of \[26\] parameters, this one of \[25\]"),
        (chain, None, torch.amp.GradScaler("cpu"), "the checkpoint has no GradScaler, and the run the reverse"),
    ):
        model = build(make)
        parameters = list(model.parameters())
        parts = [parameters[first:last] for first, last in groups] if groups else [parameters]
        if groups and groups[-1][-1] < len(parameters):
            parameters[-1].requires_grad_(False)
        run = laconic.attach(model, [torch.optim.AdamW(part, lr=0.01) for part in parts], STRATEGY, scaler=scaler)
        with pytest.raises(ValueError, match=said):
            laconic.checkpoint.load(folder, run=run)
        run.detach()


def test_another_model_is_refused(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path), steps=1)
    ranks(2, another_model, str(tmp_path))


# Saving that fails


def full_disk(rank: int, folder: str) -> None:
    """On rank 1 no file may grow beyond some kilobytes: the system refuses the write as it does on a full disk."""
    model, optimizer, run = started(STRATEGY)
    train(model, optimizer, rank, range(2))
    laconic.checkpoint.save(folder, run=run)
    train(model, optimizer, rank, range(2, 3))
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        with pytest.raises(
            RuntimeError, match=r"(?s)step-00000003 was not written; those before are untouched: .*File too large"
        ):
            laconic.checkpoint.save(folder, run=run)
    finally:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    assert [entry.name for entry in Path(folder).iterdir()] == ["step-00000002"], "nothing is left over"
    train(model, optimizer, rank, range(3, 4))
    laconic.checkpoint.save(folder, run=run)  # and when there is room again, it goes on
    run.detach()


def test_a_full_disk(tmp_path: Path) -> None:
    last_ranks(2, full_disk, str(tmp_path))
    ranks(2, loaded_at, str(tmp_path), STRATEGY, 4)


def no_such_place(rank: int, folder: str) -> None:
    _, _, run = started(STRATEGY)
    with pytest.raises(RuntimeError, match=r"(?s)was not written.*FileExistsError"):
        laconic.checkpoint.save(folder, run=run)
    run.detach()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks(2, no_such_place, str(tmp_path / "file"))


# Saving that takes its time


def meanwhile(rank: int, folder: str) -> None:
    """What is saved is what was there at the call, although training goes on; and saves wait for each other."""
    model, optimizer, run = started("streaming_diloco(4, fragments=2, delay=2)")
    states = {}
    for step in range(9):
        train(model, optimizer, rank, range(step, step + 1))
        if step in (4, 7):
            states[step + 1] = copy.deepcopy((weights(model), run.state_dict()))
            saving = laconic.checkpoint.save(folder, run=run, asynchronous=True)
    assert saving.wait().name == "step-00000008"
    assert saving.done
    run.sync()
    run.detach()
    for step, (kept, state) in states.items():
        model, optimizer, run = started("streaming_diloco(4, fragments=2, delay=2)")
        laconic.checkpoint.load(Path(folder) / f"step-{step:08d}", run=run)
        assert same_bits(weights(model), kept)
        unlike = difference(run.state_dict(), state)
        assert unlike is None, unlike
        run.sync()
        run.detach()


def test_asynchronous_saving(tmp_path: Path) -> None:
    ranks(2, meanwhile, str(tmp_path))


def last_one(rank: int, folder: str) -> None:
    model = build(chain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with laconic.attach(model, optimizer, "bf16()") as run:
        train(model, optimizer, rank, range(2))
        laconic.checkpoint.save(folder, run=run, asynchronous=True)
    assert (Path(folder) / "step-00000002").exists(), "leaving the block waits for it"


def test_leaving_waits_for_the_last_checkpoint(tmp_path: Path) -> None:
    ranks(2, last_one, str(tmp_path))


def swept(rank: int, folder: str) -> None:
    mine, others = ["step-00000001.0123abcd.partial"], ["download.partial", "step-00000000-notes", "step-1", "step-final"]
    if rank == 0:
        for name in [*mine, *others]:
            (Path(folder) / name).mkdir()
    dist.barrier()
    written(rank, folder, steps=1, keep=1)
    assert sorted(entry.name for entry in Path(folder).iterdir()) == sorted(["step-00000001", *others])


def test_what_a_killed_save_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    ranks(2, swept, str(tmp_path))


def test_a_checkpoint_that_was_about_to_be_replaced_is_put_back(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path), steps=1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.old.partial")
    ranks(2, loaded_at, str(tmp_path), STRATEGY, 1)


# Another world


def residuals(run: Any) -> dict[str, Tensor]:
    state = run.state_dict()
    memory = state["memory"] if state["local"]["deltas"] is None else state["local"]["deltas"]["memory"]
    return {name: slot["error"].double() for name, slot in memory.items() if "error" in slot}


def outstanding(run: Any) -> dict[str, Tensor]:
    exchanges = (run.state_dict()["local"]["deltas"] or {"outstanding": []})["outstanding"]
    return {f"outstanding {name}": delta.double() for one in exchanges for name, delta in one["deltas"].items()}


def mean_owed(run: Any) -> dict[str, Tensor]:
    """The means of what the model would still have received: residuals, and deltas outstanding."""
    found = {**residuals(run), **outstanding(run)}
    for tensor in found.values():
        dist.all_reduce(tensor)
    return {name: tensor / dist.get_world_size() for name, tensor in found.items()}


def stage(rank: int, folder: str, text: str, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Load if there is something, train on, save: what is owed after loading and before saving, and the losses.

    A convex problem; each rank sees a part of it of its own, and losses are those of the whole.
    """
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = laconic.attach(model, optimizer, text)
    first: dict[str, Tensor] = {}
    if laconic.checkpoint.latest(folder):
        laconic.checkpoint.load(folder, run=run)
        first = mean_owed(run)
    target = torch.randn(16, 16, generator=torch.Generator().manual_seed(7))
    x = torch.randn(60, 16, generator=torch.Generator().manual_seed(8))
    mine = x[rank :: dist.get_world_size()]
    losses = []
    for _ in range(steps):
        with run.consensus(), torch.no_grad():
            losses.append((model.module(x) - x @ target).square().mean().item())
        (model(mine) - mine @ target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    last = mean_owed(run)
    assert not everywhere_equal(list(residuals(run).values())), "each rank has left out something else"
    assert bool(outstanding(run)) == ("delay" in text)
    laconic.checkpoint.save(folder, run=run)
    run.sync()
    assert everywhere_equal([p.detach() for p in model.parameters()])
    run.detach()
    return first, last, losses


@pytest.mark.parametrize(
    "text",
    [
        STRATEGY,
        "ddp(reducer=ErrorFeedback(TopK(0.05)))",
        "diloco(6, reducer=ErrorFeedback(Quantized(4)))",
        "sparseloco(6)",
        "streaming_diloco(6, fragments=2, delay=4, reducer=ErrorFeedback(Quantized(4)))",  # something is always outstanding
    ],
)
def test_from_four_ranks_to_two_to_three(text: str, tmp_path: Path) -> None:
    _, before, losses = ranks(4, stage, str(tmp_path), text, 21)[0]
    assert before, "there is something to keep"
    for world in (2, 3):
        after, last, more = ranks(world, stage, str(tmp_path), text, 9)[0]
        assert after.keys() == before.keys()
        for name, kept in before.items():
            scale = float(kept.abs().max()) + 1e-12
            assert float((after[name] - kept).abs().max()) <= 1e-6 * scale, name
        assert more[0] < 1.1 * losses[-1], "the loss doesn't jump"
        assert more[-1] < losses[-1], "and training goes on"
        before, losses = last, more


def apart(rank: int, folder: str, text: str, world: int) -> None:
    """Replicas that have drifted become their mean."""
    model, optimizer, run = started(text)
    if world == 4:
        train(model, optimizer, rank, range(6))
        mine = [p.detach().clone() for p in model.parameters()]
        for parameter in mine:
            dist.all_reduce(parameter)
        if rank == 0:
            torch.save([parameter / 4 for parameter in mine], Path(folder) / "mean.pt")
        laconic.checkpoint.save(Path(folder) / "ck", run=run, extra={"rank": rank})
        run.sync()
    else:
        loaded = laconic.checkpoint.load(Path(folder) / "ck", run=run)
        assert loaded.extra == {"rank": rank}
        wanted = torch.load(Path(folder) / "mean.pt")
        assert all(torch.allclose(p, w, atol=1e-6) for p, w in zip(model.parameters(), wanted, strict=True))
        assert everywhere_equal([p.detach() for p in model.parameters()])
        train(model, optimizer, rank, range(6, 10))
        run.sync()
    run.detach()


@pytest.mark.parametrize("text", ["local_sgd(4)", "diloco(4)"])
def test_drifted_replicas_become_their_mean(text: str, tmp_path: Path) -> None:
    ranks(4, apart, str(tmp_path), text, 4)
    ranks(2, apart, str(tmp_path), text, 2)


# Another strategy, other buckets


def swapped(rank: int, folder: str) -> None:
    model, optimizer, run = started("int8()", bucket_cap_mb=25)
    with pytest.warns(UserWarning, match="goes on by int8"):
        laconic.checkpoint.load(folder, run=run, strict=False)
    assert run.step == 4
    assert str(run.strategy) == "int8()"
    held = sum(float(error.abs().sum()) for error in residuals(run).values())
    assert held > 0, "what PowerSGD left out is still there,"
    train(model, optimizer, rank, range(4, 5))
    assert sum(float(error.abs().sum()) for error in residuals(run).values()) == 0, "and went into the next exchange"
    assert everywhere_equal(weights(model))
    run.detach()


def test_another_strategy_when_told_so(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path))
    ranks(2, swapped, str(tmp_path))


def other_buckets(rank: int, folder: str, text: str) -> list[Tensor]:
    model, optimizer, run = started(text, bucket_cap_mb=25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        laconic.checkpoint.load(folder, run=run)
    train(model, optimizer, rank, range(4, 8))
    assert everywhere_equal(weights(model))
    run.detach()
    return weights(model)


def straight(rank: int, text: str) -> list[Tensor]:
    model, optimizer, run = started(text)
    train(model, optimizer, rank, range(8))
    run.detach()
    return weights(model)


def test_other_buckets_move_rounding_only(tmp_path: Path) -> None:
    ranks(2, written, str(tmp_path))
    found, wanted = ranks(2, other_buckets, str(tmp_path), STRATEGY)[0], ranks(2, straight, STRATEGY)[0]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
