"""Workers killed at random moments, under torchrun with restarts: the run ends with the weights of an undisturbed one."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# torch 2.13's agent keeps one store for all restarts, where gloo finds the addresses of the dead: it must have one for each.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
STRATEGIES = [
    "diloco(8, reducer=Quantized(8))",
    "streaming_diloco(8, fragments=2, delay=3)",
    "powersgd(rank=2, warmup=10)",
    "local_sgd(6)",
]


def command(world: int, folder: Path, strategy: str, steps: int, *more: str) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "--max-restarts=30"]
    script = [str(ROOT / "examples/resume.py"), str(folder), "--strategy", strategy, "--steps", str(steps), *more]
    return [*launch, "--monitor-interval=0.1", *script]


def weights(output: str) -> str:
    """What the run ended with; twice, where torch's gloo threads aborted a process at its very end (see tests/test_docs.py),
    and torchrun started all of them again."""
    found = set(re.findall(r"weights (\w+)", output))
    assert len(found) == 1, output
    return str(found.pop())


def workers(parent: int) -> list[int]:
    """The processes that torchrun has started and that run the script."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, line = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if int(stat.rsplit(")", 1)[1].split()[1]) == parent and b"resume.py" in line:
            found.append(int(folder.name))
    return found


def disturbed(world: int, folder: Path, strategy: str, steps: int, kills: int, seed: int, *more: str) -> str:
    """Kill a worker so many times: in turn some random moments after a checkpoint has appeared, and in the middle of a save."""
    chance = random.Random(seed)
    launch = command(world, folder, strategy, steps, *more)
    process = subprocess.Popen(launch, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed = 0
    try:
        for number in range(kills):
            known, deadline = set(_saved(folder)), time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                if number % 2 and list(folder.glob("*.partial")):
                    break
                if number % 2 == 0 and set(_saved(folder)) - known:
                    time.sleep(chance.uniform(0, 0.3))
                    break
                time.sleep(0.001)
            for worker in chance.sample(alive := workers(process.pid), min(1, len(alive))):
                os.kill(worker, signal.SIGKILL)
                killed += 1
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert killed == kills, "it was over before"
    return output


def _saved(folder: Path) -> list[Path]:
    return [entry for entry in folder.glob("step-*") if entry.suffix != ".partial"]


def check(world: int, tmp_path: Path, strategy: str, kills: int, seed: int, *more: str) -> None:
    steps = 120
    launch = command(world, tmp_path / "calm", strategy, steps, *more)
    calm = subprocess.run(launch, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    output = disturbed(world, tmp_path / "disturbed", strategy, steps, kills, seed, *more)
    assert weights(output) == weights(calm.stdout)
    left = sorted(entry.name for entry in (tmp_path / "disturbed").iterdir())
    assert left == sorted(entry.name for entry in (tmp_path / "calm").iterdir()), "no temporary ones, and the last one is there"
    assert not [line for line in _processes() if str(tmp_path) in line], "no process is left"


def _processes() -> list[str]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return lines


def test_a_kill(tmp_path: Path) -> None:
    check(2, tmp_path, STRATEGIES[0], 1, 1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", [(), ("--asynchronous",)], ids=["", "asynchronous"])
def test_many_kills(strategy: str, how: tuple[str, ...], tmp_path: Path) -> None:
    check(4, tmp_path, strategy, 3, 7, *how, "--every", "3")
