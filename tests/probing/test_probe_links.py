"""The probe behind emulated links, and the command: what it finds, how it ends, and what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laconic.cost.link import Link, parse
from laconic.cost.measured import Probe, read
from laconic.lab.link import refusal, start
from laconic.script.probing import launch, per_host

missing = refusal(Link(100_000_000))
needs_link = pytest.mark.skipif(missing is not None, reason=str(missing))
DELAYED = "100mbit:20ms"
no_delay = refusal(parse(DELAYED)) if missing is None else missing
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

# One rank of a probe; where SLOW is its rank, what leaves its host is limited to a tenth before.
WORKER = """
import os, sys
from pathlib import Path
if os.environ["RANK"] == os.environ.get("SLOW"):
    from pyroute2 import IPRoute
    with IPRoute() as netlink:
        index = netlink.link_lookup(ifname="eth0")[0]
        netlink.tc("change", "tbf", index, 0x10000, rate="10mbit", burst=65536, latency="200ms")
from laconic.script.probe_worker import _leave, main
_leave(main(Path(sys.argv[1]), float(sys.argv[2])))
"""


def probed(out: Path, link: str, processes: int, seconds: float, *, per_host: int = 1, slow: int | None = None) -> Probe:
    """Through the lab's hosts, as `laconic probe --link` does."""
    environment = {**ENVIRONMENT, **({"SLOW": str(slow)} if slow is not None else {})}
    command = [sys.executable, "-c", WORKER, str(out), str(seconds)]
    process = start(command, processes // per_host, parse(link), environment, per_host=per_host)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"written: {out}" in output
    return read(out)


@pytest.mark.soak
@needs_link
def test_a_probe_behind_a_link_is_written_and_claims_no_other_link(tmp_path: Path) -> None:
    """Tests run beside it, and on a busy machine no link is claimed. The soak has the machine to itself, and finds each."""
    found = probed(tmp_path / "probe.json", "100mbit", 2, 4.0)
    assert found.link_note
    assert (found.per_node, found.delay_seconds) == (1, 0.0)
    assert (tmp_path / "probe.html").read_text().startswith("<!doctype html>")
    assert sorted(os.listdir(tmp_path)) == ["probe.html", "probe.json"]
    if found.bits_per_second is not None:
        assert found.network().link.bits_per_second == pytest.approx(100e6, rel=0.1)


@pytest.mark.soak
@pytest.mark.alone
@needs_link
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("link", ["10mbit", "100mbit", "1gbit"])
def test_links_are_found_within_a_tenth(link: str, processes: int, tmp_path: Path) -> None:
    found = probed(tmp_path / "probe.json", link, processes, 15.0)
    assert found.bits_per_second == pytest.approx(parse(link).bits_per_second, rel=0.1), found.link_note
    assert found.slow == []
    assert found.seconds <= 15.0


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("processes", [2, 4])
def test_without_a_limit_no_link_is_claimed(processes: int, tmp_path: Path) -> None:
    found = probed(tmp_path / "probe.json", "none", processes, 15.0)
    assert found.bits_per_second is None
    assert "all ranks are on one host" in found.link_note


@pytest.mark.soak
@pytest.mark.alone
@needs_link
def test_hosts_that_are_slower_than_their_links_claim_none(tmp_path: Path) -> None:
    found = probed(tmp_path / "probe.json", "30gbit", 2, 10.0)
    assert found.bits_per_second is None, found.link_note


@pytest.mark.soak
@pytest.mark.alone
@needs_link
def test_ranks_of_a_node_share_its_link_and_have_a_group_of_their_own(tmp_path: Path) -> None:
    found = probed(tmp_path / "probe.json", "100mbit", 4, 15.0, per_host=2)
    assert found.bits_per_second == pytest.approx(100e6, rel=0.1), found.link_note
    assert found.per_node == 2
    assert {fit.ranks for fit in found.fits} == {2, 4}
    network = found.network(world=4)
    across, within = (network.host_seconds("AllReduce", 1 << 20, ranks) for ranks in (4, 2))
    assert within < across / 3


@pytest.mark.soak
@needs_link
def test_a_rank_that_is_slower_than_the_others_is_named(tmp_path: Path) -> None:
    found = probed(tmp_path / "probe.json", "100mbit", 3, 10.0, slow=2)
    assert {text.split(" (")[0] for text in found.slow} == {"rank 2"}, found.slow
    assert found.workers[2].sends_bits_per_second == pytest.approx(10e6, rel=0.15)
    assert found.bits_per_second in (None, pytest.approx(10e6, rel=0.1)), "all wait for the slowest, or nothing is claimed"


@pytest.mark.soak
@pytest.mark.skipif(no_delay is not None, reason=str(no_delay))
def test_a_delay_is_found_within_a_fifth(tmp_path: Path) -> None:
    found = probed(tmp_path / "probe.json", DELAYED, 2, 15.0)
    assert found.delay_seconds == pytest.approx(0.02, rel=0.2)
    assert found.bits_per_second == pytest.approx(100e6, rel=0.1), found.link_note


def begun(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "laconic.cli", "probe", "--seconds", "20", "--out", "probe.json", *options]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def workers_of(folder: Path) -> list[int]:
    """Ranks that probe for that folder, by their process ids, in the order in which they were started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"laconic.script.probe_worker" in words and str(folder / "probe.json").encode() in words and b"worker" not in words:
            found.append(int(file.parent.name))
    return sorted(found)


def until_probing(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("probing "):
            time.sleep(2)
            return
    raise AssertionError("it ended before it began")


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], pytest.param(["--link", "100mbit"], marks=needs_link)], ids=["plain", "link"])
@pytest.mark.parametrize("end", ["a rank is killed", "Ctrl-C"])
def test_an_early_end_is_said_and_leaves_nothing(end: str, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text("the one before")
    process = begun(tmp_path, "--nproc-per-node", "2", *options)
    try:
        until_probing(process)
        if end == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(workers_of(tmp_path)[-1], signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    # Of a rehearsal the code is that of the rank whose end was seen first: the killed one, or one that lost it.
    assert process.returncode in ([130] if end == "Ctrl-C" else [1, 137] if options else [137]), output
    assert "nothing was written" in output
    assert end == "Ctrl-C" or "ended early" in output or "was killed by SIGKILL" in output, output
    assert (tmp_path / "probe.json").read_text() == "the one before"
    assert os.listdir(tmp_path) == ["probe.json"]
    deadline = time.monotonic() + 10
    while workers_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of(tmp_path) == []


@pytest.mark.soak
def test_the_command_writes_a_probe_that_can_be_read(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "laconic.cli", "probe", "--nproc-per-node", "2", "--seconds", "3", "--out", "two.json"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "probing 2 ranks: 3 s at most" in done.stdout
    assert "probing: 100%" in done.stderr
    assert read(tmp_path / "two.json").world == json.loads((tmp_path / "two.json").read_text())["world"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a probe needs two processes at least"),
        (["--nproc-per-node", "1"], "a probe needs two processes at least"),
        (["train.py"], "takes torchrun's options and no script, got 'train.py'"),
        (["--nproc-per-node", "2", "train.py"], "takes torchrun's options and no script, got 'train.py'"),
        (["-m", "train"], "takes torchrun's options and no script, got 'train'"),
    ],
)
def test_what_the_command_can_not_start_is_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        launch(arguments, tmp_path / "probe.json", 3.0)
    assert not list(tmp_path.iterdir())


def test_processes_of_several_nodes_share_a_link_in_a_rehearsal(tmp_path: Path) -> None:
    started: list[tuple[list[str], int]] = []

    def rehearsal(command: list[str], processes: int, environment: object) -> int:
        started.append((command, processes))
        return 0

    assert launch(["--nnodes", "2", "--nproc-per-node", "4"], tmp_path / "p.json", 3.0, rehearsal) == 0
    ((command, processes),) = started
    assert command[-2:] == [str(tmp_path / "p.json"), "3.0"]
    assert processes == 8
    assert per_host(["--nnodes", "2", "--nproc-per-node", "4"]) == 4
    assert per_host(["--nproc-per-node", "4"]) == per_host(["--nnodes", "1:1", "--nproc-per-node", "4"]) == 1
    with pytest.raises(ValueError, match="with --link, give --nnodes and --nproc-per-node as numbers, got '1' and 'gpu'"):
        launch(["--nproc-per-node", "gpu"], tmp_path / "p.json", 3.0, rehearsal)
