"""`laconic run`: torchrun with a strategy, for a script that stays as it is."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from laconic.agreement import LOST_A_PEER
from laconic.lab.link import Link, refusal, start
from laconic.spec import strategy as read


def launch(
    strategy: str, arguments: Sequence[str], link: Link, record: Path | None = None, *, tensorboard: bool = False
) -> int:
    """Start a script by torchrun's own launcher; returns the exit code of the first process that failed, or 0."""
    from torch.distributed.run import parse_args

    parsed = parse_args(list(arguments))  # type: ignore[no-untyped-call]
    with _path_of(None if parsed.module else parsed.training_script):
        text = str(read(strategy))
    if parsed.no_python:
        raise ValueError("laconic run starts Python scripts; --no-python is for other programs")
    script = ["-m", parsed.training_script] if parsed.module else [parsed.training_script]
    if not parsed.module and not Path(parsed.training_script).is_file():
        raise ValueError(f"there is no script {parsed.training_script}")
    environment = {"LACONIC_STRATEGY": text}
    if record is not None:
        environment["LACONIC_RECORD"] = str(record.resolve())
    if tensorboard:
        if record is None:
            raise ValueError("--tensorboard writes into the folder that --record names; give one")
        if find_spec("tensorboard") is None:
            raise ValueError("--tensorboard needs TensorBoard: pip install tensorboard")
        environment["LACONIC_TENSORBOARD"] = "1"
    command = [*script, *parsed.training_script_args]
    if link.bits_per_second is not None:
        if not str(parsed.nproc_per_node).isdigit():
            raise ValueError(f"with --link, give --nproc-per-node as a number of processes, got {parsed.nproc_per_node!r}")
        return _rehearse(command, int(parsed.nproc_per_node), link, environment)
    os.environ.update(environment)
    parsed.module, parsed.training_script, parsed.training_script_args = True, "laconic.script", command
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


def _rehearse(command: Sequence[str], hosts: int, link: Link, environment: dict[str, str]) -> int:
    """Each process on a host of its own behind a limited link, on this machine."""
    problem = refusal(link)
    if problem is not None:
        raise ValueError(problem)
    process = start([sys.executable, "-m", "laconic.script", *command], hosts, link, {**os.environ, **environment})
    assert process.stdout is not None
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
        code = process.wait()
        return 1 if code == LOST_A_PEER else code
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
