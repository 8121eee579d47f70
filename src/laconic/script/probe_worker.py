"""One rank of `laconic probe`: what torchrun starts. Rank 0 prints the table, and writes probe.json and probe.html."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from laconic._torch.process_groups import default_group, training_device
from laconic.comm.group import CommunicationError, TorchGroup, is_lost
from laconic.probing.probe import measure, promise
from laconic.ranks.agreement import PeerError, agree
from laconic.report import probe_page, probe_table
from laconic.report.comparison_records import write_whole
from laconic.report.probe_progress import Progress
from laconic.script.exit_codes import LOST_A_PEER

TIMEOUT = timedelta(seconds=120)  # of a rank that stands still: no collective of a probe is planned to take so long


def main(out: Path, seconds: float) -> int:
    """The exit code."""
    try:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(timeout=TIMEOUT)
        _probe(out, seconds)
        dist.barrier()  # rank 0 has the store: it leaves when all are done
        return 0
    except KeyboardInterrupt:
        return 130
    except (CommunicationError, PeerError) as error:
        _say(f"the probe ended early: {error}")
        return LOST_A_PEER
    except (ValueError, OSError) as error:
        if dist.is_initialized() and dist.get_rank():
            return LOST_A_PEER  # rank 0 says it
        _say(str(error))
        return 1
    except RuntimeError as error:
        if not is_lost(error):
            raise
        _say(f"the ranks did not come together: {error}")
        return LOST_A_PEER


def _probe(out: Path, seconds: float) -> None:
    group = TorchGroup(default_group())
    device, first = training_device(group.process_group), group.rank == 0
    problem: Exception | None = None
    try:
        if first:
            _check_room(out)
        nodes = max(1, group.world // int(os.environ.get("LOCAL_WORLD_SIZE", group.world)))
        most = promise(group.world, nodes, seconds)
    except (ValueError, OSError) as error:
        problem = error
    agree([], problem, group, device)
    if not first:
        measure(group, device, seconds=seconds)
        return
    screen = probe_table.console()
    probe_table.say(screen, probe_table.promised(group.world, most.seconds, most.wire_bytes))
    with Progress() as progress:
        found = measure(group, device, seconds=seconds, progress=progress)
    record = found.as_dict()
    probe_table.show(record, screen)
    page = out.with_suffix(".html")
    write_whole(out, found.text())
    write_whole(page, probe_page.page(record))
    probe_table.say(screen, f"written: {out}, and charts for a browser: {page}")


def _check_room(out: Path) -> None:
    """Whether files can be written there at all: to be known before the work, not after it."""
    if out.is_dir() or out.suffix == ".html":
        raise ValueError(f"--out must be a file such as probe.json, got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}; make it first, or give another --out")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"nothing can be written to {out.parent}; give another --out")


def _say(text: str) -> None:
    """One of the first two ranks is there to say it; more would say the same."""
    if int(os.environ.get("RANK", "0")) < 2:
        sys.stderr.write(f"laconic probe: {text}\n")


def _leave(code: int) -> NoReturn:
    """Without the interpreter's end, in which torch's gloo threads may abort the process, and the exit code with it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(Path(sys.argv[1]), float(sys.argv[2])))
