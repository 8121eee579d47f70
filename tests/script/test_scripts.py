"""Scripts that know nothing of laconic, under `laconic run`."""

import gzip
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
import torch
from torch import Tensor

from laconic.cli import app
from tests.lab.test_link import needs_link

SCRIPTS = Path(__file__).with_name("scripts")
NAMES = ["plain", "accumulate", "amp", "onecycle", "checkpoint_each", "checkpoint_first"]
STRATEGIES = [
    "ddp()", "powersgd(rank=2, warmup=2)", "int8()", "post_local_sgd(warmup=4, period=4)", "diloco(6)",
    "streaming_diloco(6, fragments=2, delay=2)",
]  # fmt: skip
PAIRS = [(name, strategy) for name in NAMES for strategy in STRATEGIES]
# With the tests below, each script and each strategy once; the rest is in the soak.
CHOSEN = {(NAMES[place], STRATEGIES[place]) for place in (1,)}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(command: list[str], timeout: float = 150) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Launch(Protocol):
    def __call__(self, strategy: str, script: Path, *arguments: str, options: tuple[str, ...] = ()) -> Done: ...


@pytest.fixture
def launch(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """`laconic run` from this process, which has torch already: the launcher's start is half of such a test's time."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}

    def launched(strategy: str, script: Path, *arguments: str, options: tuple[str, ...] = ()) -> Done:
        before = dict(os.environ)
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            app(laconic_run(strategy, script, *arguments, options=options)[3:])
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        out, err = capfd.readouterr()
        return Done(int(end.value.code or 0), out, err)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield launched
    for number, handler in handlers.items():
        signal.signal(number, handler)


def laconic_run(
    strategy: str, script: Path, *arguments: str, options: tuple[str, ...] = (), torchrun: tuple[str, ...] = ()
) -> list[str]:
    command = [sys.executable, "-m", "laconic.cli", "run", "-s", strategy, *options, "--nproc-per-node=2", *torchrun]
    return [*command, str(script), *arguments]


def torchrun(script: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *arguments]


def final(folder: Path) -> list[dict[str, Tensor]]:
    return [torch.load(folder / f"final-{rank}.pt") for rank in range(2)]


def parameters_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if "running" not in name)


@pytest.mark.parametrize(
    ("name", "strategy"), [pytest.param(*pair, marks=[] if pair in CHOSEN else pytest.mark.soak) for pair in PAIRS]
)
def test_a_script_runs_and_its_replicas_end_equal(name: str, strategy: str, tmp_path: Path, launch: Launch) -> None:
    done = launch(strategy, SCRIPTS / f"{name}.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^laconic: .* is attached to ", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert ("with a GradScaler" in done.stderr) == (name == "amp")
    first, second = final(tmp_path)
    assert parameters_equal(first, second)
    assert all(value.isfinite().all() for value in first.values())


@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.soak) for name in NAMES[1:])])
def test_under_ddp_nothing_changes_by_a_bit(name: str, tmp_path: Path, launch: Launch) -> None:
    for folder in ("with", "without"):
        (tmp_path / folder).mkdir()
    with_, without = tmp_path / "with", tmp_path / "without"
    assert launch("ddp()", SCRIPTS / f"{name}.py", str(with_)).returncode == 0
    for _ in range(4):  # torch's gloo threads may abort a process without laconic at its very end
        done = run(torchrun(SCRIPTS / f"{name}.py", str(without)))
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    for one, other in zip(final(with_), final(without), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy",
    ["streaming_diloco(6, fragments=2, delay=2)", *(pytest.param(text, marks=pytest.mark.soak) for text in STRATEGIES[:-1])],
)
def test_a_script_that_saves_on_every_rank_resumes_to_the_bit(strategy: str, tmp_path: Path, launch: Launch) -> None:
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
    script, whole, broken = SCRIPTS / "checkpoint_each.py", tmp_path / "whole", tmp_path / "broken"
    assert launch(strategy, script, str(whole)).returncode == 0
    assert launch(strategy, script, str(broken), "--die-at=13").returncode == 9, "the script's own exit code"
    done = launch(strategy, script, str(broken))
    assert done.returncode == 0, done.stderr
    assert "laconic: all ranks loaded" not in done.stderr
    for one, other in zip(final(whole), final(broken), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["diloco(6)", *STRATEGIES[1:]])
def test_a_script_that_saves_on_the_first_rank_resumes_with_a_warning(strategy: str, tmp_path: Path, launch: Launch) -> None:
    script = SCRIPTS / "checkpoint_first.py"
    assert launch(strategy, script, str(tmp_path), "--die-at=13").returncode == 9
    done = launch(strategy, script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("laconic: all ranks loaded the state of rank 0") == 1
    assert parameters_equal(*final(tmp_path))


def written(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_a_crash_is_the_scripts_own(tmp_path: Path, launch: Launch) -> None:
    script = written(
        tmp_path, "import sys\n\ndef deep():\n    raise KeyError('gone')\n\nif __name__ == '__main__':\n    deep()\n"
    )
    done = launch("int8()", script)
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'gone'") >= 1
    trace = done.stderr[done.stderr.index("Traceback") :]
    assert "runpy" not in trace
    assert "auto.py" not in trace
    assert f'File "{script}", line 7, in <module>' in trace


@pytest.mark.soak
def test_a_crash_on_one_rank_in_training_ends_the_others_and_names_it(tmp_path: Path, launch: Launch) -> None:
    text = (
        (SCRIPTS / "plain.py")
        .read_text()
        .replace(
            "            optimizer.step()\n",
            "            optimizer.step()\n            rank == 1 and epoch == 1 and sys.exit(7)\n",
        )
    )
    start = time.monotonic()
    done = launch("diloco(6)", written(tmp_path, text), str(tmp_path))
    assert done.returncode == 7
    assert time.monotonic() - start < 100


FINALLY = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 3 and dist.get_rank() == 1:
            sys.exit(7)
        dist.all_reduce(torch.ones(1))  # the script's own: nobody looks after rank 0 in there
finally:
    dist.destroy_process_group()
"""


@pytest.mark.soak
def test_an_error_in_a_script_that_cleans_up_is_not_taken_for_the_end(tmp_path: Path, launch: Launch) -> None:
    began = time.monotonic()
    assert launch("diloco(2)", written(tmp_path, FINALLY)).returncode == 7
    assert time.monotonic() - began < 60


BESIDE = """
from dataclasses import dataclass
import laconic

@dataclass(frozen=True)
class Plain(laconic.Reducer):
    def reduce(self, bucket):
        mean = yield laconic.AllReduce(bucket.flat)
        return laconic.Reduced(mean)
"""
ONE_STEP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def test_a_reducer_in_a_module_beside_the_script(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    path = list(sys.path)
    done = launch("ddp(reducer=beside:Plain())", written(tmp_path, ONE_STEP))
    sys.modules.pop("beside")
    assert done.returncode == 0, done.stderr
    assert "laconic: ddp(reducer=beside:Plain()) is attached to Linear" in done.stderr
    assert sys.path == path


STAGES = """
import gzip, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
log, packed = open("log.txt", "w"), gzip.open("log.gz", "wt")
taken_apart = open("other.txt", "w")
below = taken_apart.detach()
def note(text):
    log.write(text), packed.write(text)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
first = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step == 4:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
import laconic.auto
stats = laconic.script.auto._auto.run.stats()
note(f"{stats.steps} {stats.syncs} {'laconic' in optimizer.state_dict()} {os.path.isabs(__file__)}")
dist.destroy_process_group()
model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.soak
def test_a_script_that_goes_on_with_another_optimizer_and_leaves_files_open(tmp_path: Path) -> None:
    written(tmp_path, STAGES)
    environment = {**ENVIRONMENT, "LACONIC_STRATEGY": "local_sgd(2)"}
    command = [sys.executable, "-m", "laconic.script", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("another optimizer over the model, Adam") == 1
    assert (tmp_path / "log.txt").read_text() == "8 4 True True"
    assert gzip.decompress((tmp_path / "log.gz").read_bytes()) == b"8 4 True True"


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    text = (SCRIPTS / "plain.py").read_text().replace("range(3)", "range(100000)")
    command = laconic_run("int8()", written(tmp_path, text), str(tmp_path))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # an epoch is over
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_script_without_a_ddp_gets_a_sentence(tmp_path: Path) -> None:
    left_open = "import gzip; log, packed = open('log.txt', 'w'), gzip.open('log.gz', 'wt'); log.write('a'), packed.write('b')"
    script = written(tmp_path, f"{left_open}\nprint('done')")
    environment = {**ENVIRONMENT, "LACONIC_STRATEGY": "int8()"}
    command = [sys.executable, "-m", "laconic.script", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert (tmp_path / "log.txt").read_text() == "a"
    assert gzip.decompress((tmp_path / "log.gz").read_bytes()) == b"b"
    assert done.stderr.count("never built a DistributedDataParallel") == 1


TWO = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
one, two = (DistributedDataParallel(torch.nn.Linear(2, 2)) for _ in range(2))
optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
two(one(torch.ones(1, 2))).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


SEVERAL = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
early = torch.optim.SGD(inner[0].parameters(), lr=0.1)
model = DistributedDataParallel(inner)
late = torch.optim.AdamW(inner[1].parameters(), lr=0.1)
other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(late, 1)
model.eval()
with torch.no_grad():
    model(torch.ones(1, 2))
print("nothing yet", flush=True)
model.train()
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    early.step(), late.step(), schedule.step()
import laconic.auto
print(laconic.script.auto._auto.run.stats().steps, "laconic" in early.state_dict(), "laconic" in late.state_dict())
for whole in (True, False):
    for optimizer in (early, late):
        optimizer.load_state_dict({k: v for k, v in optimizer.state_dict().items() if whole or k != "laconic"})
    model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_optimizers_built_before_and_after_are_attached_at_the_first_training_forward(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "LACONIC_STRATEGY": "diloco(2)"}
    command = [sys.executable, "-m", "laconic.script", str(written(tmp_path, SEVERAL))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "(12 parameters) and SGD, AdamW, 1 ranks" in done.stderr
    assert done.stdout == "nothing yet\n3 True False\n"
    assert done.stderr.count("the optimizer's state that was loaded has nothing of diloco(period=2)") == 1


@pytest.mark.soak
def test_torchruns_restarts_resume_to_the_bit(tmp_path: Path, launch: Launch) -> None:
    """It breaks down once, is started again by torchrun, and goes on from its own checkpoint."""
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
    text = (SCRIPTS / "checkpoint_each.py").read_text()
    text = text.replace("    if step == options.die_at:\n", "    if step == options.die_at and first == 0:\n")
    script, strategy = written(tmp_path, text), "streaming_diloco(6, fragments=2, delay=2)"
    assert launch(strategy, script, str(tmp_path / "whole")).returncode == 0
    done = run(laconic_run(strategy, script, str(tmp_path / "broken"), "--die-at=13", torchrun=("--max-restarts=2",)), 300)
    assert done.returncode == 0, done.stderr
    for one, other in zip(final(tmp_path / "whole"), final(tmp_path / "broken"), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@needs_link
@pytest.mark.soak
def test_a_rehearsal_of_a_slow_link(tmp_path: Path, launch: Launch) -> None:
    done = launch("int8()", SCRIPTS / "plain.py", str(tmp_path), options=("--link", "50mbit"))
    assert done.returncode == 0, done.stdout
    assert parameters_equal(*final(tmp_path))
    crash = written(tmp_path, "import os\nos.environ['RANK'] == '1' and 1 / 0\n")
    done = launch("int8()", crash, options=("--link", "50mbit"))
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout


@pytest.mark.soak
def test_of_two_ddps_with_one_optimizer_the_first_is_attached(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "LACONIC_STRATEGY": "int8()"}
    command = [sys.executable, "-m", "laconic.script", str(written(tmp_path, TWO))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("int8() is not attached to this Linear: its SGD is attached to another run already") == 1
    assert done.stderr.count("int8() is attached to") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-s", "int7()", "plain.py"], "int8"),
        (["-s", "int8()", "nowhere.py"], "there is no script nowhere.py"),
        (["-s", "int8()"], "which script?"),
        (["-s", "int8()", "--link", "5", "plain.py"], "a rate with its unit"),
        (["-s", "int8()", "--link", "5mbit", "--nproc-per-node=auto", __file__], "as a number of processes, got 'auto'"),
    ],
)
def test_bad_arguments(arguments: list[str], sentence: str) -> None:
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, ["run", *arguments])
    assert done.exit_code != 0
    assert sentence in " ".join(done.output.split())


@pytest.mark.soak
def test_plain_torchrun_with_one_import(tmp_path: Path) -> None:
    text = (SCRIPTS / "plain.py").read_text().replace("import torch\n", "import torch\n\nimport laconic.auto\n", 1)
    script = written(tmp_path, text)
    environment = {**ENVIRONMENT, "LACONIC_STRATEGY": "diloco(6)"}
    done = subprocess.run(torchrun(script, str(tmp_path)), capture_output=True, text=True, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "laconic: diloco(period=6) is attached to Sequential" in done.stderr
    assert parameters_equal(*final(tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("inside", [True, False], ids=["the module", "the DDP"])
def test_a_script_that_compiles(inside: bool, tmp_path: Path, launch: Launch) -> None:
    """The backend is one that needs no C++ compiler; buckets of DDP and graphs of dynamo are cut alike with all of them."""
    text = (SCRIPTS / "plain.py").read_text()
    if inside:
        text = text.replace("model = DDP(nn.Sequential(", "model = DDP(torch.compile(backend='aot_eager', model=nn.Sequential(")
        text = text.replace("nn.Linear(64, 5)))", "nn.Linear(64, 5))))")
    else:
        text = text.replace("    optimizer =", "    model = torch.compile(model, backend='aot_eager')\n    optimizer =")
    finals = []
    for name, script in (("compiled", text), ("eager", (SCRIPTS / "plain.py").read_text())):
        (tmp_path / name).mkdir()
        done = launch("diloco(6)", written(tmp_path / name, script), str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert "is attached to" in done.stderr
        assert parameters_equal(*final(tmp_path / name))
        finals.append(final(tmp_path / name)[0])
    compiled, eager = finals
    for key, value in eager.items():
        found = compiled.get(key, compiled.get(f"_orig_mod.{key}"))
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)
