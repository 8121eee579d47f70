"""Saves in which ranks are not alike: one is slow, one fails, one says something else. Nobody waits for ever."""

import gc
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import laconic
from laconic.checkpoint import loading, manifest, saving
from laconic.checkpoint.packing import keys, pack, skeleton, unpack
from laconic.comm import group as polling
from tests.checkpoint.test_edges import adamw, names, started, train
from tests.live import ranks
from tests.models import build, chain, difference, everything, same_bits, weights


class Unwilling:
    def __reduce__(self) -> Any:
        raise KeyError("not to be pickled")


def one_sided(rank: int, folder: str) -> None:
    """What fails on one rank fails on all."""
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    with pytest.raises((TypeError, ValueError), match="extra/a has a"):
        laconic.checkpoint.save(folder, run=run, extra={"a": Unwilling() if rank == 1 else 1})
    with pytest.raises(ValueError, match="asynchronous"):
        laconic.checkpoint.save(folder, run=run, asynchronous=rank == 0)
    with pytest.raises(ValueError, match="rank 1 has keep 4, rank 0 has keep 3"):
        laconic.checkpoint.save(folder, run=run, keep=3 + rank)
    (Path(folder) / "file").touch()
    going = laconic.checkpoint.save(Path(folder) / "file", run=run, asynchronous=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match="was not written"):
            going.wait()
    with pytest.raises((RuntimeError, ValueError), match="was not written"):  # rank 1 has not heard of it yet
        laconic.checkpoint.save(Path(folder) / "good", run=run)
    laconic.checkpoint.save(Path(folder) / "good", run=run)
    train(model, optimizer, rank, range(1, 2))

    def unreadable(*_: object) -> Any:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(manifest, "describe", unreadable)
        with pytest.raises(RuntimeError, match=r"(?s)was not written.*Input/output error"):
            laconic.checkpoint.save(Path(folder) / "good", run=run)
    assert names(Path(folder) / "good") == ["step-00000001"]
    run.detach()


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    ranks(2, one_sided, str(tmp_path))


def unreadable_by_one(rank: int, folder: str) -> None:
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    laconic.checkpoint.save(folder, run=run)
    before = weights(model)

    def broken(*_: object) -> Any:
        raise dcp.CheckpointException("read", {})  # no Exception, as torch has it

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(loading, "_read", broken)
        with pytest.raises(ValueError, match="can't be read: CheckpointException"):
            laconic.checkpoint.load(folder, run=run)
    assert same_bits(before, weights(model))
    run.detach()


def test_what_one_rank_can_not_read_is_loaded_by_none(tmp_path: Path) -> None:
    ranks(2, unreadable_by_one, str(tmp_path))


def slow_and_apart(rank: int, folder: str) -> None:
    """A checksum takes long on one rank; another one leaves the block later."""
    describe = manifest.describe

    def slow(*arguments: Any) -> Any:
        time.sleep(1.5 * (rank == 0))
        return describe(*arguments)

    model = build(chain)
    optimizer = adamw(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "describe", slow)
        patch.setattr(polling, "POLL_SECONDS", 0.2)
        with laconic.attach(model, optimizer, "ddp()") as run:
            train(model, optimizer, rank, range(2))
            laconic.checkpoint.save(folder, run=run, asynchronous=True)
            time.sleep(2.5 * (rank == 1))
    assert names(folder) == ["step-00000002"]


def test_a_slow_save_and_ranks_that_leave_apart(tmp_path: Path) -> None:
    ranks(2, slow_and_apart, str(tmp_path))


def stopped(rank: int, folder: str) -> None:
    """Out of batches on one rank: that is an ordinary end, and all wait for the checkpoint."""
    write = saving._write

    def slow(*arguments: Any) -> Path:
        time.sleep(1)
        return write(*arguments)

    model = build(chain)
    optimizer = adamw(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "GRACE_SECONDS", 0.1)
        patch.setattr(saving, "_write", slow)
        with laconic.attach(model, optimizer, "ddp()", uneven="stop") as run:
            for step in range(3 if rank == 1 else 6):
                train(model, optimizer, rank, range(step, step + 1))
                if step == 2:
                    laconic.checkpoint.save(folder, run=run, asynchronous=True)
    assert names(folder) == ["step-00000003"]


def test_a_run_that_stops_waits_for_its_checkpoint(tmp_path: Path) -> None:
    ranks(2, stopped, str(tmp_path))


def let_go(rank: int, folder: str) -> None:
    copies: list[weakref.ref[Tensor]] = []
    write = saving._write

    def seen(target: Path, partial: Path, flat: dict[str, Tensor], *rest: Any) -> Path:
        copies.extend(weakref.ref(tensor) for tensor in flat.values())
        return write(target, partial, flat, *rest)

    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_write", seen)
        going = laconic.checkpoint.save(folder, run=run, asynchronous=True)
        going.wait()
    gc.collect()
    assert copies
    assert not [copy for copy in copies if copy() is not None]
    run.detach()


def test_the_copy_of_an_asynchronous_save_goes_when_it_is_written(tmp_path: Path) -> None:
    ranks(2, let_go, str(tmp_path))


def cluttered(rank: int, folder: str) -> None:
    """What is old can't be removed: the new one counts."""
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))

    def busy(*_: object) -> None:
        raise OSError(39, "Directory not empty")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(manifest, "prune", busy)
        laconic.checkpoint.save(folder, run=run)
    assert [str(one.message) for one in told if "is written, but" in str(one.message)] or rank == 1
    assert laconic.checkpoint.latest(folder) is not None
    run.detach()


def test_what_can_not_be_removed_is_no_reason_to_stop(tmp_path: Path) -> None:
    ranks(2, cluttered, str(tmp_path))


def as_if_swapped(rank: int, folder: str, then: str, now: str, load: bool) -> dict[str, Any]:
    if load:
        model, optimizer, run = started(now)
        with pytest.warns(UserWarning, match="goes on by"):
            laconic.checkpoint.load(folder, run=run, strict=False)
    else:
        model, optimizer, run = started(then)
        train(model, optimizer, rank, range(5))
        laconic.checkpoint.save(folder, run=run)
        run.swap(now)
    train(model, optimizer, rank, range(5, 8))
    found = everything(model, [optimizer], run)
    run.sync()
    run.detach()
    return found


@pytest.mark.parametrize(
    ("then", "now"), [("diloco(4, warmup=2)", "diloco(8)"), ("int8()", "ddp(reducer=ErrorFeedback(PowerSGD(1)))")]
)
def test_a_checkpoint_of_another_strategy_is_as_good_as_a_swap(then: str, now: str, tmp_path: Path) -> None:
    wanted, found = (ranks(2, as_if_swapped, str(tmp_path), then, now, load) for load in (False, True))
    unlike = difference(found, wanted, "rank")
    assert unlike is None, unlike


def test_another_version_is_an_error_and_no_reason_to_begin_anew(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"format": 1, "laconic": "0.0"}')
    with pytest.raises(ValueError, match=r"has format 1, .*written by laconic 0\.0"):
        laconic.checkpoint.latest(tmp_path)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    with pytest.raises(ValueError, match=r"has no whole checkpoint: .*step-00000001 is not whole .* move them away"):
        laconic.checkpoint.latest(tmp_path)  # None would begin anew, and replace it


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(2, dtype=[("a", "f4")]),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        lambda: np.datetime64("2026-01-01", "ns"),
        lambda: {"laconic tensor": 1},
    ],
    ids=["structured", "masked", "moment", "key"],
)
def test_what_would_come_back_as_something_else_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="extra/x"):
        pack({"extra": {"x": make()}}, lambda path, _: "/".join(path))


def test_what_is_packed_comes_back_as_it_was() -> None:
    arrays = {
        "none": np.empty((0, 3), dtype=np.int64),
        "scalar": np.array(2.5),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "every second": np.arange(9, dtype=np.uint16)[::2],
        "texts": np.array(["a", "\u00e9\u00e9"]),
        "days": np.array(["2026-01-01"], dtype="M8[D]"),
        "truths": np.array([True, False]),
    }
    plain: dict[Any, Any] = {
        1: (2, [3.5, None, (True,)]),
        "size": torch.Size([2, 3]),
        "dtype": torch.float16,
        "number": np.int32(7),
        "truth": np.bool_(True),
        "bytes": b"\0\xff",
        "z": 1 + 2j,
    }
    tensors = {"a": {"b": torch.ones(2).t(), "empty": torch.empty(0)}, "a/b": torch.arange(6).view(2, 3).t()}
    packed, rest = pack({"arrays": arrays, "plain": plain, "tensors": [tensors]}, lambda path, _: "/".join(path))
    found = unpack(skeleton(rest), packed)
    assert sorted(keys(skeleton(rest))) == sorted(packed), "nothing is read that was not asked for, nor the reverse"
    for name, array in arrays.items():
        back = found["arrays"][name]
        assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
        assert back.flags.writeable
    assert found["plain"] == {**plain, "number": 7, "truth": True}
    assert [type(found["plain"][key]) for key in ("number", "truth", "size")] == [int, bool, torch.Size]
    unlike = difference(found["tensors"], [tensors])
    assert unlike is None, unlike


def scaled(rank: int, folder: str) -> None:
    for scale in (8.0, 2.0):
        model = build(chain)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=scale)
        with laconic.attach(model, optimizer, "ddp()", scaler=scaler) as run:
            if scale == 8:
                laconic.checkpoint.save(folder, run=run)
            else:
                laconic.checkpoint.load(folder, run=run)
        assert scaler.get_scale() == 8


def test_the_loss_scale_comes_back(tmp_path: Path) -> None:
    ranks(1, scaled, str(tmp_path))
