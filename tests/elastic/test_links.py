"""Workers whose links are cut for longer than anybody waits, and restored: real sockets, in network namespaces."""

import subprocess
import sys
from pathlib import Path

import pytest

from laconic.lab.link import _apart
from tests.lab.test_link import needs_link


@needs_link
@pytest.mark.soak
@pytest.mark.parametrize("noticed", ["noticed", "unnoticed"])
@pytest.mark.parametrize("names", ["c", "bc"])
def test_a_worker_whose_link_was_cut_comes_back(names: str, noticed: str, tmp_path: Path) -> None:
    """The others go on without it; with the link, it takes part again, and all have the same bits after every sync."""
    switch = [*_apart(), sys.executable, "-m", "tests.elastic.linked", str(tmp_path), names, noticed]
    done = subprocess.run(switch, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
