"""What the documents show can be run, and does what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import laconic
from laconic.comm.bucket import Bucket

ROOT = Path(__file__).parents[1]
# `torchrun`, `python` and `laconic` are those of the environment in which the tests run.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": PATH}


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def scripts(page: str) -> list[str]:
    """The Python blocks of a page that are whole scripts."""
    return [block for block in blocks(page) if "init_process_group" in block]


def finished(command: list[str], folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT, timeout=180)


def test_the_script_in_docs_attach(tmp_path: Path) -> None:
    (script,) = scripts("docs/attach.md")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "train.py")]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    assert "Stats(steps=20, exchanges=20" in done.stdout
    assert "['module" not in done.stdout, "names are the module's own"


@pytest.mark.soak
def test_the_script_in_docs_start_prints_what_the_page_shows(tmp_path: Path) -> None:
    (script,) = scripts("docs/start.md")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "train.py")]
    counts, page = {}, (ROOT / "docs/start.md").read_text()
    for strategy in ("int8()", "ddp()", "diloco(16)"):
        done = finished([*command, strategy])
        assert done.returncode == 0, done.stderr
        assert f"{strategy}: held-out loss 0.00" in done.stdout
        counts[strategy] = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)\b(?!\.)", done.stdout)}
        assert f"| {round(counts[strategy]['wire_bytes'] / 200):,} |" in page
    shown = re.findall(r"(\w+)=(\d+)\b(?!\.)", page.partition("\nStats(")[2].partition("```")[0])
    assert {name: int(count) for name, count in shown} == counts["int8()"]
    assert counts["diloco(16)"]["syncs"] == 12


@pytest.mark.soak
def test_the_loop_with_epochs_in_docs_checkpoint_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """It dies in the midst of an epoch, right after it has saved, and is started again."""
    (script,) = [one for one in scripts("docs/checkpoint.md") if "DistributedSampler" in one]
    saving = "                    laconic.checkpoint.save(folder, run=run, extra=place_now)\n"
    assert saving in script
    dying = script.replace(saving, f"{saving}                    if run.step == 20: __import__('os')._exit(9)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ends = []
    for name, texts in (("whole", [script]), ("broken", [dying, script])):
        for text in texts:
            (tmp_path / "train.py").write_text(text)
            done = finished([*command, str(tmp_path / "train.py"), str(tmp_path / name)])
        assert done.returncode == 0, done.stderr
        assert ("goes on after step 20" in done.stdout) == (name == "broken")
        ends.append(sorted(re.findall(r"rank \d ends at \S+", done.stdout)))
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]


@pytest.mark.soak
def test_the_script_in_docs_sharded(tmp_path: Path) -> None:
    (script,) = scripts("docs/sharded.md")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(tmp_path / "train.py")]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    whole = 4 * (64 * 64 + 64)  # numbers; 2 islands of 2, every 8 steps
    assert f"2 {whole * 4 / 2 / 8}" in done.stdout


@pytest.mark.soak
def test_the_script_in_docs_torch(tmp_path: Path) -> None:
    (script,) = scripts("docs/torch.md")
    (tmp_path / "resume.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "resume.py")]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    assert "steps: 40 numbers sent, times fewer: 13.0" in done.stdout


@pytest.mark.parametrize(("page", "name"), [("docs/extending.md", "Half"), ("CONTRIBUTING.md", "Halve")])
def test_the_reducers_that_are_shown_can_be_used_as_they_stand(
    page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [block for block in blocks(page) if "class" in block and ">>>" not in block]
    (tmp_path / f"shown_{name}.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    text = f"ddp(reducer=shown_{name}:{name}())"
    assert str(laconic.strategy(text)) == text
    flats = [torch.arange(6.0) + rank for rank in range(2)]
    given = [Bucket(flat, [flat], ["w"], [{}], rank, 2) for rank, flat in enumerate(flats)]
    one, two = laconic.simulate([laconic.strategy(text).reducer.reduce(bucket) for bucket in given])
    assert torch.equal(one.mean[::2], torch.tensor([0.5, 2.5, 4.5]))
    assert torch.equal(one.mean, two.mean) == (name == "Half"), "CONTRIBUTING says of its own that ranks don't agree"
    half = laconic.predict(text, torch.nn.Linear(10, 10, bias=False, device="meta"), world_size=2)
    assert half.wire_bytes == 200


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "examples/README.md", *[str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")]],
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("http") or (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "examples/README.md", *[str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")]],
)
def test_lines_can_be_read_without_scrolling(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > 160 and not line.startswith("|")]
    assert not long, f"{page} has lines of more than 160 characters: {long}"
