"""What the lab predicts before a run, and the probe of this machine that it rests on."""

import os
import shutil
import time
from pathlib import Path

import pytest

from laconic.cost.link import Link
from laconic.cost.measured import read
from laconic.lab import host_speeds
from laconic.lab.hosts import burst_bytes
from laconic.lab.prediction import networks


@pytest.mark.soak
def test_a_probe_is_kept_for_a_day_and_speaks_for_any_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, again = host_speeds.ensure(2, 1, cables=False, say=print), list[str]()
    assert host_speeds.ensure(2, 1, cables=False, say=again.append) == path
    assert not again, "nothing is probed twice"
    probe = read(path)
    assert probe.world == 2
    free, limited = networks(str(path), [(None, 0.0), (100_000_000, 0.02)], 3)
    assert (free.link, free.burst_bytes) == (Link(), burst_bytes(0)), "no link has no burst that matters"
    assert (limited.link, limited.burst_bytes) == (Link(100_000_000, 0.02), 256 * 1024)
    assert limited.groups == 3
    assert limited.hosts == free.hosts == probe.network().hosts
    for kind, seconds in probe.round_seconds.items():
        assert free.host_speed(kind, 2).alpha_seconds >= seconds
    shutil.copytree(host_speeds.folder(), tmp_path / "laconic" / "hosts")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(host_speeds, "SECONDS", 0.5)
    copied = host_speeds.folder() / path.name
    old = time.time() - host_speeds.KEPT_SECONDS - 1
    os.utime(copied, (old, old))
    assert host_speeds.ensure(2, 1, cables=False, say=again.append) == copied
    said = "collectives among 2 workers that are plain processes, without links: 0.5 s; kept for a day in "
    assert said in again[0], "one of yesterday is made anew"
    assert read(copied).asked_seconds == 0.5
    copied.write_text("{}")
    assert read(host_speeds.ensure(2, 1, cables=False, say=again.append)).world == 2, "and so is one that is damaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert host_speeds.folder().name.startswith("laconic-hosts-"), "a cache that can't be had stops nobody"
