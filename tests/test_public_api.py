"""No public name, signature or default changes unseen."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import public_api
from tests.public_api import BREAKS, NAMES, ROOT, SOURCES, accept, broken_since, compare, newest_tag


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A clone without tags, whose names are accepted."""
    shutil.copytree(ROOT / SOURCES, tmp_path / SOURCES, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / NAMES).parent.mkdir(parents=True)
    (tmp_path / BREAKS).touch()
    git(tmp_path, "init", "--quiet")
    accept(tmp_path)
    return tmp_path


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "a change")


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new))


def test_a_changed_signature_a_default_and_a_name_are_seen(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(copy) == []
    replace(
        copy / SOURCES / "strategies/gradient_recipes.py", "def powersgd(*, rank: int = 4,", "def powersgd(*, rank: int = 8,"
    )
    replace(copy / SOURCES / "run/run.py", "def swap(self,", "def swop(self,")
    replace(copy / SOURCES / "__init__.py", '    "topk",\n]\n', "]\n")
    changed = compare(copy)
    assert "+laconic.powersgd: (*, rank: int = 8, warmup: int = 10) -> Strategy" in changed
    assert {line[1:].partition(":")[0] for line in changed if line[0] in "+-"} >= {"laconic.Run.swop", "laconic.Run.swap"}
    assert any(line.startswith("-laconic.topk:") for line in changed)
    assert "no tag" in capsys.readouterr().out
    accept(copy)
    assert compare(copy) == []


@pytest.mark.soak
def test_what_breaks_code_for_the_release_before_is_seen_until_it_is_accepted(copy: Path) -> None:
    commit(copy)
    git(copy, "tag", "v0.9.0")
    commit(copy)
    git(copy, "tag", "v0.10.0")
    assert newest_tag(copy) == "v0.9.0", "the tag of this commit is that of this very release"
    commit(copy)
    assert newest_tag(copy) == "v0.10.0"
    replace(copy / SOURCES / "checkpoint/saving.py", "    keep: int | None = 3,", "    kept: int | None = 3,")
    replace(copy / SOURCES / "comm/pipeline.py", "class Pipeline", "class Pipes")
    line = "laconic.checkpoint.saving.save: Parameter was removed (keep)"
    assert broken_since("v0.10.0", copy) == [line], "and what is not public may change"
    assert f"breaks code written for v0.10.0: {line}" in compare(copy)
    accept(copy)
    assert compare(copy) == []
    assert (copy / BREAKS).read_text() == f"{line}\n"


@pytest.mark.soak
def test_without_git_the_accepted_names_are_all_there_is(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(copy / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(copy.parent))
    assert newest_tag(copy) is None
    assert compare(copy) == []


@pytest.mark.soak
def test_the_command_says_what_to_do(copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(public_api, "ROOT", copy)
    assert public_api.main([]) == 0
    replace(copy / SOURCES / "strategies/gradient_recipes.py", "def silent()", "def silent(steps: int)")
    assert public_api.main([]) == 1
    assert "make api" in capsys.readouterr().out
    assert public_api.main(["--accept"]) == 0
    assert public_api.main([]) == 0
