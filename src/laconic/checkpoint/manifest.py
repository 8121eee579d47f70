"""What a checkpoint's directory says about itself, in words a person can read."""

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

FORMAT = 2
FILE = "manifest.json"
PARTIAL = ".partial"
CHECKSUM = "checksum"  # of the rest of the manifest
LOCK = ".writing"  # locked as long as the process that writes is alive
OLD = f".old{PARTIAL}"  # a checkpoint whose step is being saved once more
NAME = re.compile(rf"step-(\d{{8,}})(\.[0-9a-f]{{8}}{re.escape(PARTIAL)}|{re.escape(OLD)})?")


@dataclass(frozen=True)
class Manifest:
    """One checkpoint: who wrote it, what is in it, and what its files must look like."""

    format: int
    laconic: str
    torch: str
    python: str
    written: str
    step: int
    world_size: int
    strategy: str
    files: dict[str, dict[str, Any]]  # name -> bytes, blake2b
    shards: int = 1  # ranks that held one replica together; not written where each held a whole one

    def write(self, folder: Path) -> None:
        facts = {key: value for key, value in asdict(self).items() if key != "shards" or value > 1}
        with (folder / FILE).open("w") as file:
            json.dump({**facts, CHECKSUM: checksum(facts)}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def new(step: int, world_size: int, strategy: str, files: dict[str, dict[str, Any]], shards: int = 1) -> Manifest:
    """A manifest of this moment."""
    from laconic import __version__

    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    versions = FORMAT, __version__, torch.__version__, platform.python_version()
    return Manifest(*versions, now, step, world_size, strategy, files, shards)


def checksum(facts: Mapping[str, Any]) -> str:
    """Of a manifest without its checksum, of any format."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class FormatError(ValueError):
    """A checkpoint of another version of laconic."""


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, or an error that says what the directory is instead."""
    try:
        data = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is no laconic checkpoint: it has no {FILE}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / FILE} is damaged: {error}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise ValueError(f"{folder / FILE} is not a laconic checkpoint's")
    # Before the format: a flipped bit there is damage, not another version. (Format 1 had no checksum; a later one keeps it.)
    written = data.pop(CHECKSUM, None)
    if written is not None and written != checksum(data):
        raise ValueError(f"{folder / FILE} is damaged: its checksum is not the one that was written down")
    if data["format"] != FORMAT:
        raise FormatError(
            f"{folder} has format {data['format']}, and this is laconic for format {FORMAT}; "
            f"it was written by laconic {data.get('laconic', '?')}"
        )
    if written is None:
        raise ValueError(f"{folder / FILE} is damaged: it has no {CHECKSUM}")
    return Manifest(**data)


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Sizes and checksums of files, read back from where they were written."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = {
                "bytes": os.fstat(file.fileno()).st_size,
                "blake2b": hashlib.file_digest(file, "blake2b").hexdigest(),
            }
    return found


def missing(folder: Path, manifest: Manifest) -> str | None:
    """What is missing of a checkpoint, at a glance: files that are not there, or too short. None: nothing."""
    for name, wanted in manifest.files.items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != wanted["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {wanted['bytes']}"
    return None


def damaged(folder: Path, wanted: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Which of these files is not what its checksum is of; None: each is."""
    found = describe(folder, wanted)
    for name, facts in wanted.items():
        if found[name]["blake2b"] != facts["blake2b"]:
            return f"{folder / name} is damaged: its checksum is not the one that was written down"
    return None


def folder_name(step: int) -> str:
    """What a checkpoint of this step is called."""
    return f"step-{step:08d}"


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first, whole or not. What has another kind of name is not ours.

    One that was about to be replaced by another of its step, when the process was killed, counts.
    """
    found = [(int(match[1]), folder) for match, folder in _folders(path) if not match[2]]
    there = {step for step, _ in found}
    found += [(int(match[1]), folder) for match, folder in _folders(path) if match[2] == OLD and int(match[1]) not in there]
    return [folder for _, folder in sorted(found)]


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, at a glance; None: nothing. Another version's is an error."""
    try:
        return missing(folder, read(folder))
    except FormatError:
        raise
    except (ValueError, OSError) as error:
        return str(error)


def lock(folder: Path) -> TextIO:
    """As long as this file is open, and its process alive, `sweep` leaves the folder alone."""
    file = (folder / LOCK).open("w")
    if sys.platform != "win32":
        import fcntl

        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _being_written(folder: Path) -> bool:
    if sys.platform == "win32" or not (folder / LOCK).exists():
        return False
    import fcntl

    with (folder / LOCK).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def sweep(path: Path) -> None:
    """Remove what a save that was killed has left; what it was about to replace is put back."""
    for match, folder in [found for found in _folders(path) if found[0][2]]:
        target = folder.with_name(folder_name(int(match[1])))
        if match[2] == OLD and not target.exists():
            folder.rename(target)
        elif not _being_written(folder):
            shutil.rmtree(folder)


def prune(newest: Path, keep: int) -> None:
    """Remove old checkpoints beside the one just written, so that `keep` whole ones are left."""
    others = [folder for folder in checkpoints(newest.parent) if folder != newest and _usable(folder)]
    for folder in others[: max(0, len(others) - (keep - 1))]:
        # Under a name that `sweep` removes: a kill in the middle leaves no half of a checkpoint that nobody ever removes.
        shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.{0:08x}{PARTIAL}")))


def _usable(folder: Path) -> bool:
    try:
        return problem(folder) is None
    except FormatError:
        return False  # not for this version to judge


def _folders(path: Path) -> Iterator[tuple[re.Match[str], Path]]:
    for folder in path.glob("step-*"):
        match = NAME.fullmatch(folder.name)
        if match and folder.is_dir():
            yield match, folder


def sync_folder(folder: Path) -> None:
    """Make sure that a directory's entries are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
