"""Limited links: real namespaces, real sockets, and nothing left over."""

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from laconic.cost.link import FASTEST_EMULATED, SLOWEST, Link, parse
from laconic.lab.link import refusal, start

LIMITED = Link(20_000_000)
missing = refusal(LIMITED)
needs_link = pytest.mark.skipif(missing is not None, reason=str(missing))


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("none", Link()),
        ("10mbit", Link(10_000_000)),
        ("1gbit", Link(1_000_000_000)),
        ("1.5mbit", Link(1_500_000)),
        ("100mbit:20ms", Link(100_000_000, 0.02)),
    ],
)
def test_a_link_as_text(text: str, link: Link) -> None:
    assert parse(text) == link
    assert parse(str(link)) == link


@pytest.mark.parametrize("text", ["100", "fast", "0mbit", "100mbits", "-5mbit", "100mbit:20", ""])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a link is a rate with its unit.*got " + repr(text)):
        parse(text)


@pytest.mark.parametrize("text", ["0.5kbit", "0.0001kbit", "99999gbit", "11tbit", "10mbit:20000ms"])
def test_what_no_link_has_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"a rate from 10kbit to 10tbit, and a delay of up to 10000ms; got {text!r}"):
        parse(text)


def test_what_the_kernel_has_no_room_for_can_be_advised_on_but_not_emulated() -> None:
    fast = parse("34.5gbit")
    assert str(fast) == "34500mbit"
    assert refusal(fast) == "the fastest link that can be emulated has 34gbit, and 34500mbit is asked for"


@needs_link
def test_the_slowest_and_the_fastest_can_be_had() -> None:
    assert [refusal(Link(bits)) for bits in (SLOWEST, FASTEST_EMULATED)] == [None, None]


def test_a_delay_is_had_or_refused_in_one_line() -> None:
    answer = refusal(parse("100mbit:20ms"))
    assert answer is None or (answer.count("\n") == 0 and "can't be had here" in answer)


def run(code: str, hosts: int, link: Link, per_host: int = 1) -> tuple[str, int]:
    process = start([sys.executable, "-c", code], hosts, link, os.environ, per_host=per_host)
    output, _ = process.communicate(timeout=60)
    return output, process.returncode


SEND = """
import os, socket, time
rank = int(os.environ["RANK"])
if rank == 0:
    server = socket.create_server((os.environ["MASTER_ADDR"], 5000)); peer, _ = server.accept(); got = 0
    while data := peer.recv(1 << 16): got += len(data)
    print("got", got, flush=True)
else:
    for _ in range(200):
        try: peer = socket.create_connection((os.environ["MASTER_ADDR"], 5000)); break
        except OSError: time.sleep(0.05)
    start = time.perf_counter(); peer.sendall(bytes(4_000_000)); peer.shutdown(socket.SHUT_WR); peer.recv(1)
    print("seconds", time.perf_counter() - start, flush=True)
    from laconic.lab.link import sent_bytes
    print("kernel", sent_bytes(), flush=True)
"""


@needs_link
def test_a_limit_is_a_limit_and_the_kernel_counts() -> None:
    output, code = run(SEND, 2, LIMITED)
    assert code == 0, output
    words = dict(line.split() for line in output.splitlines())
    assert words["got"] == "4000000"
    # 4 MB at 20 Mbit/s are 1.6 s, less a burst of 64 KB at each end; a busy machine is slower, never faster.
    assert float(words["seconds"]) > 1.2
    assert 4_000_000 < int(words["kernel"]) < 4_400_000


SHARED = """
import os, socket, time
from threading import Thread
rank, size, now = int(os.environ["RANK"]), 1_000_000, time.monotonic  # one clock for all processes of a machine
def receive(peer, left):
    while left: left -= len(peer.recv(min(left, 1 << 16)))
def all_at_once(task, *more):
    threads = [Thread(target=task, args=[peer, *more]) for peer in peers]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
if rank == 0:
    server = socket.create_server((os.environ["MASTER_ADDR"], 5000))
    peers = [server.accept()[0] for _ in range(2)]
    start = now(); all_at_once(socket.socket.sendall, b"go"); all_at_once(receive, size); down = now()
    all_at_once(socket.socket.sendall, bytes(size)); all_at_once(receive, 2)
    print(down - start, now() - down, flush=True)
else:
    for _ in range(200):
        try: peer = socket.create_connection((os.environ["MASTER_ADDR"], 5000)); break
        except OSError: time.sleep(0.05)
    receive(peer, 2); peer.sendall(bytes(size)); receive(peer, size); peer.sendall(b"ok")
"""


@needs_link
def test_what_one_host_gets_from_several_and_sends_to_several_shares_its_cable() -> None:
    output, code = run(SHARED, 3, LIMITED)
    assert code == 0, output
    # Twice 1 MB by the first host's cable are 0.8 s, less the bursts; if only the others' cables were limited, 0.4 s.
    down, up = map(float, output.split())
    assert down > 0.65
    assert up > 0.65


@needs_link
def test_hosts_see_their_own_cable_alone() -> None:
    seen = "[line.split(':')[0].strip() for line in open('/proc/self/net/dev')][2:]"
    output, _ = run(f"import sys; seen = {seen}; sys.stdout.write(str(seen) + '\\n')", 2, LIMITED)
    assert output == "['lo', 'eth0']\n" * 2
    before = Path("/proc/net/dev").read_text().count(":")
    run("pass", 2, LIMITED)
    assert Path("/proc/net/dev").read_text().count(":") == before, "the machine's network is as it was"


@needs_link
def test_two_at_the_same_time_do_not_collide() -> None:
    processes = [start([sys.executable, "-c", SEND], 2, LIMITED, os.environ) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output


def test_without_a_limit_they_are_plain_processes() -> None:
    text = "{MASTER_ADDR} {WORLD_SIZE} {RANK} {GROUP_RANK} {LOCAL_RANK} {LOCAL_WORLD_SIZE} {OMP_NUM_THREADS}\n"
    # Both write to one pipe. One write is one line; `print` may write its newline apart, behind another's line.
    output, code = run("import os, sys; sys.stdout.write(TEXT.format(**os.environ))".replace("TEXT", repr(text)), 2, Link())
    assert (sorted(output.splitlines()), code) == (["127.0.0.1 2 0 0 0 1 1", "127.0.0.1 2 1 1 0 1 1"], 0)


@pytest.mark.parametrize("per_host", [1, 3])
@pytest.mark.parametrize("link", [Link(), pytest.param(LIMITED, marks=needs_link)], ids=str)
def test_one_that_fails_ends_the_others(link: Link, per_host: int) -> None:
    start_ = time.monotonic()
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(50)"
    _, status = run(code, 3 // per_host, link, per_host)
    assert status == 7
    assert time.monotonic() - start_ < 30


@pytest.mark.soak
@pytest.mark.parametrize(("link", "per_host"), [(Link(), 1), pytest.param(LIMITED, 2, marks=needs_link)], ids=str)
def test_one_that_is_killed_is_named_though_others_fail_first(link: Link, per_host: int) -> None:
    code = (
        "import os, sys, time; rank = os.environ['RANK']; rank == '1' and os.kill(os.getpid(), 9); time.sleep(0.3); sys.exit(5)"
    )
    output, status = run(code, 2, link, per_host)
    assert status in (5, 128 + 9), "whichever was seen first"
    assert "worker 1 was killed by SIGKILL\n" in output


NUMBERS = """
import os, sys
text = "{RANK} {GROUP_RANK} {LOCAL_RANK} {LOCAL_WORLD_SIZE} {WORLD_SIZE} ".format(**os.environ)
sys.stdout.write(text + os.readlink("/proc/self/ns/net") + chr(10))
"""


@pytest.mark.soak
@pytest.mark.parametrize("link", [Link(), pytest.param(LIMITED, marks=needs_link)], ids=str)
def test_workers_of_one_host_share_its_network(link: Link) -> None:
    output, code = run(NUMBERS, 2, link, per_host=3)
    assert code == 0, output
    *numbers, where = zip(*(line.split() for line in sorted(output.splitlines())), strict=True)
    assert ["".join(column) for column in numbers] == ["012345", "000111", "012012", "333333", "666666"]
    own = str(Path("/proc/self/ns/net").readlink())
    assert len(set(where[:3])) == len(set(where[3:])) == 1
    assert set(where) == {own} if link == Link() else len({*where, own}) == 3


INSIDE = """
import sys, torch, torch.distributed as dist
from laconic.lab.link import sent_bytes
dist.init_process_group("gloo")
rank, cable = dist.get_rank(), [sent_bytes()]
for ranks in ([0, 1], [0, 2]):
    group = dist.new_group(ranks)
    dist.barrier()
    if rank in ranks:
        dist.all_reduce(torch.ones(250_000), group=group)
    cable.append(sent_bytes())
    dist.barrier()
if rank == 0:
    sys.stdout.write(f"cable {cable[1] - cable[0]} {cable[2] - cable[1]}\\n")
"""


@pytest.mark.soak
@needs_link
def test_what_workers_of_one_host_send_each_other_is_not_on_its_cable() -> None:
    output, code = run(INSIDE, 2, LIMITED, per_host=2)
    assert code == 0, output
    (words,) = (line.split() for line in output.splitlines() if line.startswith("cable"))
    within, across = map(int, words[1:])
    assert within < 50_000, "of one megabyte"
    assert 500_000 < across < 1_200_000, "the link carries it, in as many rounds as gloo likes"


@pytest.mark.soak
@needs_link
def test_a_host_goes_with_its_last_worker_and_not_with_its_first() -> None:
    code = (
        "import os, sys, time\nfrom laconic.lab.link import sent_bytes\n"
        "os.environ['LOCAL_RANK'] == '0' and sys.exit()\ntime.sleep(0.5)\n"
        "sys.stdout.write(f'{sent_bytes() is not None}\\n')"
    )
    assert run(code, 2, LIMITED, per_host=2) == ("True\n" * 2, 0)


def with_mark(mark: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in file.read_bytes():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("link", "per_host"), [(Link(), 1), *(pytest.param(LIMITED, count, marks=needs_link) for count in (1, 2))], ids=str
)
def test_nothing_outlives_a_parent_that_is_killed(link: Link, per_host: int) -> None:
    mark = f"mark{os.getpid()}{link.bits_per_second or 0}_{per_host}"
    code = (
        "import os, sys, time\nfrom laconic.cost.link import Link\nfrom laconic.lab.link import start\n"
        f"process = start([sys.executable, '-c', 'import time; {mark} = 1; time.sleep(100)'], {2 // per_host}, "
        f"Link({link.bits_per_second}), os.environ, per_host={per_host})\nprint('up', flush=True)\ntime.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 40
        # The parent itself, the switch, and two workers; as an ordinary user and as root alike.
        while len(with_mark(mark)) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(with_mark(mark)) >= 4
    finally:
        parent.kill()
        parent.communicate()
    while with_mark(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert with_mark(mark) == []


AS_SOMEBODY = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]  # without any capability, as any user has it
LOCKED_DOWN = [
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"',
    "sh",
]
namespaces = subprocess.run([*AS_SOMEBODY, "true"], capture_output=True, text=True) if sys.platform == "linux" else None
needs_user_namespaces = pytest.mark.skipif(
    namespaces is None or namespaces.returncode != 0, reason="unprivileged user namespaces are not allowed here"
)


@needs_user_namespaces
def test_an_ordinary_user_has_links_too() -> None:
    code = (
        "import os, sys\nfrom laconic.cost.link import Link\nfrom laconic.lab.link import refusal, start\n"
        "print(os.geteuid(), refusal(Link(20_000_000)))\n"
        f"process = start([sys.executable, '-c', {SEND!r}], 2, Link(20_000_000), os.environ)\n"
        "print(process.communicate()[0], process.returncode)\n"
        f"process = start([sys.executable, '-c', {NUMBERS!r}], 1, Link(20_000_000), os.environ, per_host=2)\n"
        "print(len(process.communicate()[0].splitlines()), process.returncode)"
    )
    done = subprocess.run([*AS_SOMEBODY, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = done.stdout.split()
    assert lines[:2] == ["1000", "None"], done.stdout + done.stderr
    words = dict(zip(lines[2::2], lines[3::2], strict=False))
    assert words["got"] == "4000000"
    assert float(words["seconds"]) > 1.2
    assert lines[-3:] == ["0", "2", "0"], "and islands"


@needs_user_namespaces
def test_where_namespaces_are_switched_off_that_is_said() -> None:
    code = "from laconic.cost.link import Link\nfrom laconic.lab.link import refusal\nprint(refusal(Link(20_000_000)))"
    done = subprocess.run([*LOCKED_DOWN, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "can't be had here" in done.stdout, done.stdout + done.stderr
    assert "max_net_namespaces" in done.stdout
    assert done.stdout.count("\n") == 1


def test_orders_of_any_length_reach_every_host() -> None:
    code = "import os, sys; sys.stdout.write(f'{len(os.pread(0, os.fstat(0).st_size, 0))}\\n')"
    with TemporaryFile() as file:
        file.write(bytes(300_000))  # an environment, or an argument, has 131,072 bytes at most
        file.flush()
        process = start([sys.executable, "-c", code], 2, Link(), os.environ, file)
    assert process.communicate(timeout=60)[0] == "300000\n" * 2
