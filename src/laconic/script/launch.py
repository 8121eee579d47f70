"""`laconic run`: torchrun with a strategy, for a script that stays as it is."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from laconic.cost.link import parse
from laconic.script.exit_codes import LOST_A_PEER
from laconic.strategies.auto_recipe import auto
from laconic.strategies.parsing import strategy as read
from laconic.strategies.strategy import Advised

Rehearsal = Callable[[list[str], int, Mapping[str, str]], int]
"""Runs a command in so many processes with this environment, and returns an exit code: instead of torchrun."""


def measure(arguments: Sequence[str], file: Path) -> int:
    """Start a script in one process, time some steps of it, and have `file` written; the script's exit code.

    `arguments` are the script, or `-m` and a module, and what it is given. The file is JSON, version 1: `compute` has the
    seconds of forward, backward and optimizer, `parameters` a shape for each name, `dtype` is that of most of them, and
    `optimizer` is "adam" or "sgd". It is missing where the script made no step that could be timed.
    """
    parsed = options(["--standalone", "--nproc-per-node=1", *arguments])
    _check_script(parsed)
    os.environ["LACONIC_ADVISE"] = str(file.resolve())
    os.environ.pop("LACONIC_STRATEGY", None)  # nothing is attached
    script = ["-m", parsed.training_script] if parsed.module else [parsed.training_script]
    command = [*script, *parsed.training_script_args]
    parsed.module, parsed.training_script, parsed.training_script_args = True, "laconic.script", command
    return _torchrun(parsed)


def options(arguments: Sequence[str]) -> Any:
    """As torchrun reads them. What it refuses is an error in a line, without a list of all its options."""
    return _parser().parse_args(list(arguments))


def _parser() -> Any:
    """torchrun's, which says what is wrong by a ValueError."""
    from torch.distributed.run import get_args_parser

    def refuse(message: str) -> NoReturn:
        if "training_script" in message:
            raise ValueError("which script? laconic run -s STRATEGY [torchrun options] script.py [its arguments]")
        raise ValueError(f"torchrun refuses its options: {message}")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser


def takes_value(word: str, following: Sequence[str]) -> bool | None:
    """Whether torchrun takes the word that follows one of its options as its value; None: it has no such option.

    >>> takes_value("--nproc-per-node", ["2"]), takes_value("--nproc-per-node=2", ["a.py"]), takes_value("--strateg", ["x"])
    (True, False, None)
    """
    value = next((one for one in following if not one.startswith("-")), "1")
    parsed, unknown = _parser().parse_known_args([word, value, "script of nobody"])
    return None if unknown else bool(parsed.training_script == "script of nobody")


def option_names() -> list[str]:
    """Of torchrun's options, the long names with hyphens."""
    return sorted(set(re.findall(r"--[a-z]+(?:-[a-z]+)*\b(?!_)", _parser().format_help())))


def check_script(arguments: Sequence[str]) -> None:
    """Refuse a script that isn't there."""
    _check_script(options(arguments))


def _check_script(parsed: Any) -> None:
    if parsed.no_python:
        raise ValueError("laconic run starts Python scripts; --no-python is for other programs")
    if not parsed.module and not Path(parsed.training_script).is_file():
        raise ValueError(f"there is no script {parsed.training_script}")


def _text(strategy: str, risk: str | None) -> str:
    """The strategy as the processes read it, with the risk that the command line allows the advisor."""
    chosen = read(strategy)
    if chosen.advised is not None and chosen.advised.link is not None:
        parse(chosen.advised.link)  # says what is wrong with it
    if risk is None:
        return str(chosen)
    if chosen.advised is None:
        raise ValueError(f"--risk is what auto() may choose, and the strategy is {chosen}; leave it out, or use -s auto")
    if chosen.advised.risk != Advised().risk:
        raise ValueError(f"--risk {risk} and {chosen} both give a risk; give one of them")
    return auto(**{**asdict(chosen.advised), "risk": risk}).compared


def launch(
    strategy: str,
    arguments: Sequence[str],
    record: Path | None = None,
    *,
    tensorboard: bool = False,
    rehearsal: Rehearsal | None = None,
    island_size: str | None = None,
    risk: str | None = None,
) -> int:
    """Start a script by torchrun's own launcher, or in a rehearsal; the exit code of the first process that failed, or 0.

    `risk` is that of `auto()`, for other strategies None.
    `island_size` is how many of its processes hold one model together, sharded, or "node"; None: the script knows.
    """
    parsed = options(arguments)
    with _path_of(None if parsed.module else parsed.training_script):
        text = _text(strategy, risk)
    _check_script(parsed)
    script = ["-m", parsed.training_script] if parsed.module else [parsed.training_script]
    environment = {"LACONIC_STRATEGY": text}
    if record is not None:
        try:
            record.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--record {record} can't be made: {error.strerror}; give a folder that you can write to"
            ) from error
        environment["LACONIC_RECORD"] = str(record.resolve())
    if tensorboard:
        if record is None:
            raise ValueError("--tensorboard writes into the folder that --record names; give one")
        if find_spec("tensorboard") is None:
            raise ValueError("--tensorboard needs TensorBoard: pip install tensorboard")
        environment["LACONIC_TENSORBOARD"] = "1"
    if island_size is not None:
        if island_size != "node" and not (island_size.isdecimal() and int(island_size) > 0):
            raise ValueError(f"--island-size is a number of ranks, or 'node', got {island_size!r}")
        processes = str(parsed.nproc_per_node)
        if (
            island_size != "node"
            and parsed.nnodes in ("1", "1:1")
            and processes.isdecimal()
            and int(processes) % int(island_size)
        ):
            raise ValueError(f"--nproc-per-node must be a multiple of --island-size, got {processes} and {island_size}")
        environment["LACONIC_ISLAND_SIZE"] = island_size
    command = [*script, *parsed.training_script_args]
    if rehearsal is not None:
        if not str(parsed.nproc_per_node).isdigit():
            raise ValueError(f"with --link, give --nproc-per-node as a number of processes, got {parsed.nproc_per_node!r}")
        started = [sys.executable, "-m", "laconic.script", *command]
        code = rehearsal(started, int(parsed.nproc_per_node), {**os.environ, **environment})
        return 1 if code == LOST_A_PEER else code
    os.environ.update(environment)
    parsed.module, parsed.training_script, parsed.training_script_args = True, "laconic.script", command
    return torchrun(parsed, arguments)


def launch_elastic(
    strategy: str,
    arguments: Sequence[str],
    *,
    min_replicas: int,
    deadline_seconds: float,
    lighthouse: str | None = None,
    bind: str | None = None,
) -> int:
    """Start a script as workers that may come and go, `--nproc-per-node` of them on this machine; the exit code."""
    from laconic.elastic.membership import LOOPBACK
    from laconic.script.elastic_launch import Plan, run_workers

    parsed = options(arguments)
    with _path_of(None if parsed.module else parsed.training_script):
        text = _text(strategy, None)
    _check_script(parsed)
    if parsed.nnodes not in ("1", "1:1") or parsed.rdzv_endpoint:
        raise ValueError(
            "with --elastic, start laconic run on each machine, with the address of one lighthouse; not by --nnodes"
        )
    if not str(parsed.nproc_per_node).isdecimal():
        raise ValueError(f"with --elastic, --nproc-per-node is the number of workers here, got {parsed.nproc_per_node!r}")
    restarts = parsed.max_restarts if any(one.startswith(("--max-restarts", "--max_restarts")) for one in arguments) else 3
    command = [*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args]
    workers = int(parsed.nproc_per_node)
    return run_workers(Plan(text, command, workers, min_replicas, restarts, deadline_seconds, lighthouse, bind or LOOPBACK))


def torchrun(parsed: Any, arguments: Sequence[str]) -> int:
    """Start by torchrun's own launcher what was parsed from `arguments`, and perhaps replaced; the exit code, as above."""
    alone = parsed.nnodes in ("1", "1:1") and not parsed.rdzv_endpoint
    if alone and parsed.master_port is None and "--master-addr" not in " ".join(arguments).replace("_", "-"):
        parsed.standalone = True  # a free port: two runs on one machine don't meet
    if parsed.max_restarts:
        # With gloo, torchrun's restarts fail for ever otherwise: its store keeps the addresses of the dead (torch 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return _torchrun(parsed)


@contextmanager
def _path_of(script: str | None) -> Iterator[None]:
    """Modules beside the script can be named in its strategy, as the script can import them; with -m, those of this folder."""
    sys.path.insert(0, str(Path(script).resolve().parent) if script else str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop(0)  # the launcher imports its own modules


def _torchrun(parsed: object) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    try:
        run(parsed)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        codes = [failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode for failure in failures]
        return next((code for code in codes if code != LOST_A_PEER), 1)
    except SignalException as signal:
        return 128 + signal.sigval
    return 0
