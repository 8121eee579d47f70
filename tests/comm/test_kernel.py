"""Counted bytes against what the kernel saw on a network interface that nothing else uses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kernel_bytes.py")
PRIVATE = ["unshare", "--user", "--map-root-user", "--net"]


def namespaces_allowed() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*PRIVATE, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not namespaces_allowed(), reason="a private network namespace is missing: unshare --user --net is refused")
@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3])
def test_counted_bytes_are_on_the_cable(world: int) -> None:
    done = subprocess.run([*PRIVATE, sys.executable, str(SCRIPT), str(world)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) >= 4
    for name, counted, seen in rows:
        assert 1 <= int(seen) / int(counted) <= 1.05, f"{name}: counted {counted}, the kernel saw {seen}"
