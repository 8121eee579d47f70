"""What is on the disk at every moment of a save: what a kill at that moment would leave."""

import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

import laconic
from laconic.checkpoint import manifest
from tests.checkpoint.test_edges import started, train
from tests.live import ranks

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class Camera:
    """Copies a folder before each file operation in it. What the process has not handed to the kernel yet is not in the copy,
    as it would not be on the disk after a SIGKILL."""

    def __init__(self, folder: Path, album: Path) -> None:
        self.folder, self.album, self.count = folder, album, 0
        self.on = True
        self._lock = threading.Lock()
        sys.addaudithook(self._see)  # can't be taken off again: `on` switches it

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.on or event not in CHANGES or not str(arguments[0]).startswith(str(self.folder)):
            return
        with self._lock:
            self.on = False  # not of its own operations
            try:
                shutil.copytree(self.folder, self.album / f"{self.count:03d}")
                self.count += 1
            finally:
                self.on = True


def filmed(rank: int, folder: Path, album: Path, again: bool) -> None:
    model, optimizer, run = started("ddp()")
    train(model, optimizer, rank, range(1))
    laconic.checkpoint.save(folder, run=run, keep=1)
    if not again:
        train(model, optimizer, rank, range(1))
    camera = Camera(folder, album)
    laconic.checkpoint.save(folder, run=run, keep=1, extra={"again": True})
    camera.on = False


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step once more"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(again: bool, tmp_path: Path) -> None:
    folder, album = tmp_path / "checkpoints", tmp_path / "album"
    ranks(1, filmed, folder, album, again)
    pictures = sorted(album.iterdir())
    assert len(pictures) > 10
    for picture in pictures:
        newest = laconic.checkpoint.latest(picture)
        assert newest is not None, f"{os.listdir(picture)}: everything is lost"
        wanted = manifest.read(newest)
        for each in manifest.checkpoints(picture):  # what goes by a checkpoint's name is whole, to the last bit
            assert manifest.damaged(each, manifest.read(each).files) is None
        manifest.sweep(picture)  # the next save does this
        assert {each.name for each in picture.iterdir()} <= {"step-00000001", "step-00000002"}
        assert manifest.read(picture / manifest.folder_name(wanted.step)) == wanted
