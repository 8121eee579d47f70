"""Run inside a network namespace of one's own: prints the bytes counted and the bytes on `lo`.

For each reducer whose collectives carry enough that framing doesn't matter.

All ranks communicate through the namespace's loopback and nothing else does, so its counter is the sum of what they sent.
"""

import fcntl
import socket
import struct
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from laconic.comm.exchange import complete
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.strategies.strategy import render
from tests.live import ranks
from tests.reducers.every import EVERY, Memory, bucket

COUNT, EXCHANGES = 1 << 20, 4  # 4 MiB of fp32
LARGE = 128 << 10  # below, headers are more than 5 % of it


def loopback_up() -> None:
    up, get, put = 1, 0x8913, 0x8914
    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, get, request))[1]
        fcntl.ioctl(any_socket, put, struct.pack("16sh14x", b"lo", flags | up))


def bytes_sent() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(rank: int) -> list[tuple[str, int, int]]:
    group = TorchGroup(dist.group.WORLD)  # type: ignore[arg-type]
    rows: list[tuple[str, int, int]] = []
    for reducer in EVERY:
        memory: Memory = [{} for _ in range(group.world)]
        ledger = Ledger()
        dist.barrier()
        before = bytes_sent()
        dist.barrier()
        for step in range(EXCHANGES):
            one = bucket([torch.randn(COUNT)], memory[rank], rank, group.world, step, False)
            complete(reducer.reduce(one), group, ledger)
        dist.barrier()
        if ledger.total.payload_bytes >= LARGE * ledger.total.collectives:
            rows.append((render(reducer), ledger.total.wire_bytes * group.world, bytes_sent() - before))
        dist.barrier()
    return rows


if __name__ == "__main__":
    loopback_up()
    for name, counted, seen in ranks(int(sys.argv[1]), measure)[0]:
        print(name.replace(" ", ""), counted, seen)
