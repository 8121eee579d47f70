"""`laconic run` for scripts that call `fully_shard`, and the three lines that such a script needs otherwise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laconic.script.launch import launch

SCRIPT = Path(__file__).with_name("fsdp_script.py")
ISLANDS = ("--island-size", "2", "--nproc-per-node=4")


def held(stdout: str) -> dict[int, str]:
    """What each rank holds at the end, by the sum of its shards."""
    return {int(rank): total for rank, total in re.findall(r"rank (\d) holds (\S+)", stdout)}


def run(strategy: str, kind: str, folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "laconic.cli", "run", "-s", strategy, *more, str(SCRIPT), str(folder), kind]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=180)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("strategy", "kind", "said"),
    [
        ("diloco(4)", "none", "fully_shard is given 2 islands of 2 ranks, where the script shards over all 4"),
        ("int8()", "hsdp", "the script's mesh is taken for 2 islands of 2: torch no longer averages gradients between them"),
    ],
)
def test_a_script_as_it_is(strategy: str, kind: str, said: str, tmp_path: Path) -> None:
    done = run(strategy, kind, tmp_path, *ISLANDS)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert re.search(r"is attached to \w*Model .* and AdamW, 2 islands of 2: \S+ of ddp\(\)'s bytes", done.stderr), done.stderr
    totals = held(done.stdout)
    assert totals[0] == totals[2] != totals[1] == totals[3], "islands are equal at the end, and shards are not"
    losses = [float(value) for value in re.findall(r"loss (\S+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert (tmp_path / ".metadata").exists()


@pytest.mark.soak
def test_another_mesh_is_refused(tmp_path: Path) -> None:
    done = run("diloco(4)", "odd", tmp_path, *ISLANDS)
    assert done.returncode == 1
    assert "with a mesh of (2,), and --island-size 2 makes islands of a mesh of all 4 ranks, or of one of (2, 2)" in done.stderr


@pytest.mark.soak
def test_without_islands_a_script_runs_as_it_is(tmp_path: Path) -> None:
    done = run("diloco(4)", "none", tmp_path, "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    assert "its model is sharded, so give --island-size to laconic run" in done.stderr


@pytest.mark.parametrize(
    ("size", "said"), [("3", "must be a multiple of --island-size, got 4 and 3"), ("many", "got 'many'"), ("0", "'0'")]
)
def test_islands_must_fill_the_ranks(size: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        launch("diloco(4)", ["--nproc-per-node", "4", str(SCRIPT)], island_size=size)


@pytest.mark.soak
def test_a_node_is_an_island(tmp_path: Path) -> None:
    done = run("diloco(4)", "world", tmp_path, "--island-size", "node", "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    assert "1 islands of 2" in done.stderr


def changed(script: str) -> str:
    """The script with the three lines of the documentation: the import, the mesh, and attach."""
    lines = [
        ("import torch\n", "import torch\nimport laconic\n"),
        (
            '    if kind == "world":\n',
            '    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))\n'
            '    options["mesh"] = mesh["shard"]\n'
            '    if kind == "world":\n',
        ),
        (
            "    data = torch.Generator()",
            '    run = laconic.attach(model, optimizer, "streaming_diloco(4, fragments=2, delay=1)", mesh=mesh)\n'
            "    data = torch.Generator()",
        ),
        ("    dcp.save(", "    run.sync(), run.detach()\n    dcp.save("),
    ]
    for old, new in lines:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


@pytest.mark.soak
def test_three_lines_in_a_script_of_torchtitans_shape(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(changed(SCRIPT.read_text()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path / "saved"), "three lines"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    totals = held(done.stdout)
    assert totals[0] == totals[2] != totals[1] == totals[3]
    losses = [float(value) for value in re.findall(r"loss (\S+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert (tmp_path / "saved" / ".metadata").exists()
