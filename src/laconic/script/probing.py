"""`laconic probe`: the probe under torchrun, or in a rehearsal."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laconic.script.exit_codes import LOST_A_PEER
from laconic.script.launch import Rehearsal, options, torchrun

WORKER = "laconic.script.probe_worker"


def launch(arguments: Sequence[str], out: Path, seconds: float, rehearsal: Rehearsal | None = None) -> int:
    """Start the probe with torchrun's own options; the exit code of the first process that failed, or 0."""
    given = [str(out.resolve()), repr(seconds)]
    parsed = options([*arguments, "-m", WORKER, *given])
    if parsed.training_script != WORKER or parsed.training_script_args != given:
        raise ValueError(f"laconic probe takes torchrun's options and no script, got {parsed.training_script!r}")
    nodes, processes = _counts(parsed)
    if (nodes, processes) == ("1", "1"):
        raise ValueError("a probe needs two processes at least: give --nproc-per-node 2, or --nnodes 2 on each of two nodes")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, which says so in four lines
    if rehearsal is None:
        return torchrun(parsed, arguments)
    if not (nodes.isdigit() and processes.isdigit()):
        raise ValueError(f"with --link, give --nnodes and --nproc-per-node as numbers, got {nodes!r} and {processes!r}")
    # Emulated hosts have no names, which c10d would warn of.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    code = rehearsal([sys.executable, "-m", WORKER, *given], int(nodes) * int(processes), environment)
    return 1 if code == LOST_A_PEER else code


def per_host(arguments: Sequence[str]) -> int:
    """Of a rehearsal: with several nodes, those of a node share a link; else each process has its own."""
    parsed = options([*arguments, "-m", WORKER])
    nodes, processes = _counts(parsed)
    return int(processes) if nodes != "1" and processes.isdigit() else 1


def _counts(parsed: Any) -> tuple[str, str]:
    """Nodes, and processes on each, as texts: torchrun knows ranges and words, too."""
    nodes = str(parsed.nnodes)
    return "1" if nodes == "1:1" else nodes, str(parsed.nproc_per_node)
