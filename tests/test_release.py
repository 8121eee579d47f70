"""What is released says the same everywhere: the version, the extras, and how to install it."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import laconic

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FRAMEWORKS = {"lab", "lightning", "accelerate", "transformers", "elastic"}
PINS = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().split())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_version_is_said_once_and_repeated_as_it_is() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert importlib.metadata.version("laconic") == laconic.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {laconic.__version__}\n" in citation
    newest = re.search(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == laconic.__version__
    assert newest[2] == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2])


def test_all_is_all_extras_of_a_user() -> None:
    (everything,) = EXTRAS["all"]
    assert set(re.findall(r"\w+", everything)) == {"laconic", *FRAMEWORKS}
    readme = (ROOT / "README.md").read_text()
    for extra in FRAMEWORKS | {"all"}:
        assert f"[{extra}]" in readme, "README says what each extra is for"


@pytest.mark.parametrize("extra", sorted(FRAMEWORKS))
def test_what_an_extra_asks_for_is_what_is_pinned_here_or_older(extra: str) -> None:
    for need in EXTRAS[extra]:
        name, least = re.split(">=", need.partition(";")[0].strip())
        assert numbers(least) <= numbers(PINS[name]), f"{need}, and {PINS[name]} is what was run"


def test_nobody_is_sent_to_the_other_laconic_of_pypi() -> None:
    places = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "examples").glob("*.py"),
    ]
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?laconic\b|['\"`]laconic\[\w")
    found = {str(place.relative_to(ROOT)): wrong.findall(place.read_text()) for place in places}
    assert not {place for place, texts in found.items() if texts}, "pip install '.[extra]' in the clone is what works"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_uses_major_versions(workflow: Path) -> None:
    text = workflow.read_text()
    assert re.search(r"^permissions: \{ contents: read \}$", text, re.MULTILINE), "what is not needed is not allowed"
    for action in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"[\w/-]+@(v\d+|release/v\d+)|\./\.github/workflows/\w+\.yml", action), action


def test_publishing_alone_may_sign_and_compares_the_tag() -> None:
    signing = [path.stem for path in WORKFLOWS if "id-token: write" in path.read_text()]
    assert signing == ["publish"]
    text = (ROOT / ".github/workflows/publish.yml").read_text()
    assert text.count("permissions: {") == 2
    assert text.count("id-token: write") == 1
    assert '"v$version"' in text
