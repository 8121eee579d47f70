"""Run a script as Python would, attached: what `laconic run` starts on every rank."""

import atexit
import contextlib
import gc
import io
import os
import runpy
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from laconic.comm.group import CommunicationError
from laconic.gradients.dispatcher import in_buffers
from laconic.gradients.sharded import in_island
from laconic.ranks.agreement import PeerError
from laconic.ranks.presence import UnevenError
from laconic.script.exit_codes import LOST_A_PEER

if TYPE_CHECKING:
    from laconic.script.auto import Auto
    from laconic.script.elastic_auto import ElasticAuto
    from laconic.script.measuring import Measuring

MEASURED = "LACONIC_ADVISE"  # names the file for what is timed


def main(arguments: list[str]) -> None:
    """Run a script, or `-m module`, as Python would, attached; its exit code and its traceback are its own."""
    if not arguments or not {"LACONIC_STRATEGY", MEASURED} & os.environ.keys():
        sys.exit(
            "python -m laconic.script runs a script by the strategy that LACONIC_STRATEGY names, for launchers other than "
            'laconic\'s: LACONIC_STRATEGY="int8()" accelerate launch -m laconic.script train.py; without one, use laconic run'
        )
    as_module = arguments[:1] == ["-m"]
    target, rest = (arguments[1], arguments[2:]) if as_module else (arguments[0], arguments[1:])
    sys.argv = [target, *rest]
    if not as_module:
        sys.path[0] = str(Path(target).resolve().parent)
    auto = _installed()
    code = 0
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(target).absolute()), run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)  # noqa: T201  # as Python does
        if code:
            auto.fail(stop)
    except BaseException as error:
        error.__traceback__ = _from_script(error.__traceback__)
        auto.fail(error)  # the script may have a hook of its own there
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else LOST_A_PEER if _lost_a_peer(error) else 1
    auto.status = code
    _leave(code)


def _installed() -> "Auto | ElasticAuto | Measuring":
    """What watches the script: it attaches a strategy, or times some steps."""
    if MEASURED in os.environ:
        from laconic.script.measuring import Measuring

        return Measuring(Path(os.environ[MEASURED]))
    if "LACONIC_ELASTIC" in os.environ:
        from laconic.script import elastic_auto

        return elastic_auto.install(os.environ["LACONIC_STRATEGY"])
    from laconic.script.auto import install  # not before: the strategy may name a class in a module beside the script

    return install(os.environ["LACONIC_STRATEGY"], os.environ.get("LACONIC_ISLAND_SIZE"))


def _lost_a_peer(error: BaseException | None) -> bool:
    """Whether it failed only because another rank did."""
    while error is not None:
        if isinstance(error, CommunicationError | PeerError | UnevenError) or in_buffers(error) or in_island(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _leave(code: int) -> NoReturn:
    """End as Python does, but for the last of it: torch's gloo threads, when they outlive a DDP that globals or cycles keep,
    abort the process there (3 of 60 short runs of plain DDP on a busy machine, torch 2.13), and the exit code with it."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    _close_files()
    os._exit(code)


def _close_files() -> None:
    """What the interpreter's end does for files that are still open: text, then what compresses, then what lies below."""
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), io.IOBase)]
    plain = (io.BufferedWriter, io.BufferedReader, io.BufferedRandom, io.BufferedRWPair, io.RawIOBase)
    order = sorted(files, key=lambda file: 0 if isinstance(file, io.TextIOBase) else 2 if isinstance(file, plain) else 1)
    for file in order:
        with contextlib.suppress(OSError, ValueError):  # closed or detached, or its disk or peer is gone: as at any end
            file.flush()
            if not isinstance(file, plain) and file not in (sys.stdout, sys.stderr):
                file.close()


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback that begins in the script, as if Python had started it."""
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
