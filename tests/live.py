"""`ranks(n, fn)`: run a function on n live gloo ranks.

Importing torch takes seconds, so it is imported once, by a server that forks a rank wherever one is needed; and the ranks live
on and are sent one function after another. Each call gets a process group of its own. A call that fails or takes too long ends
the whole pool.
"""

import atexit
import gc
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

Extra = ParamSpec("Extra")
Result = TypeVar("Result")

# What ranks need and what takes long. All of it can be forked: none starts a thread when it is imported.
PRELOADED = [
    "torch", "torch.distributed.checkpoint", "torch._dynamo", "pytest", "hypothesis", "laconic.run", "pytorch_lightning",
    "transformers.trainer",
]  # fmt: skip
GROUP_TIMEOUT = timedelta(seconds=90)
POLL_SECONDS = 1.0  # of the ranks here: tests of peers that are gone wait for it


# Before a process group is destroyed. A rank sets it that has used a hook of torch's which launches collectives from callbacks:
# where the last callback is the last to hold the group, gloo's thread joins itself, and the process dies.
settle_seconds = 0.0


def _serve(pipe: Connection) -> None:
    global settle_seconds
    import torch
    import torch.distributed as dist

    from laconic.comm import group as polling

    gc.freeze()  # what was imported is never garbage, and some frameworks collect often
    torch.set_num_threads(1)
    polling.POLL_SECONDS = POLL_SECONDS
    while True:
        try:
            rank, world, store, fn, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
            dist.barrier()  # one that had nothing to say was seen to close its sockets while a peer was still connecting
            torch.manual_seed(rank)
            settle_seconds = 0.0
            answer = (True, fn(rank, *args, **kwargs))
            time.sleep(settle_seconds)
            dist.destroy_process_group()
        except BaseException:
            answer = (False, f"rank {rank} of {world}:\n{traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(answer))


class _Pool:
    def __init__(self) -> None:
        self.members: list[tuple[Any, Connection]] = []

    def grow(self, size: int) -> None:
        # One thread a process, and in the threads that torch starts for callbacks too, where set_num_threads doesn't reach.
        os.environ["OMP_NUM_THREADS"] = "1"
        if not all(process.is_alive() for process, _ in self.members):  # after its last answer: torch's threads may do that
            self.end()
        while len(self.members) < size:
            self.members.append(_start())

    def end(self) -> None:
        for process, pipe in self.members:
            pipe.close()
            process.kill()
            process.join()
        self.members = []


_context = mp.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def _start() -> tuple[Any, Connection]:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


_pool = _Pool()
atexit.register(_pool.end)


def ranks(world: int, fn: Callable[Concatenate[int, Extra], Result], *args: Extra.args, **kwargs: Extra.kwargs) -> list[Result]:
    """Call `fn(rank, ...)` on `world` ranks, with gloo as the default process group; the results, by rank."""
    return ranks_within(120, world, fn, *args, **kwargs)


def last_ranks(
    world: int, fn: Callable[Concatenate[int, Extra], Result], *args: Extra.args, **kwargs: Extra.kwargs
) -> list[Result]:
    """As `ranks`, for what leaves collectives hanging: nobody uses these processes again."""
    try:
        return ranks_within(120, world, fn, *args, **kwargs)
    finally:
        _pool.end()


def ranks_within(
    seconds: float, world: int, fn: Callable[Concatenate[int, Extra], Result], *args: Extra.args, **kwargs: Extra.kwargs
) -> list[Result]:
    """As `ranks`, with another limit of time."""
    _pool.grow(world)
    pipes = [pipe for _, pipe in _pool.members[:world]]
    with tempfile.TemporaryDirectory() as folder:
        for rank, pipe in enumerate(pipes):
            pipe.send_bytes(pickle.dumps((rank, world, str(Path(folder, "store")), fn, args, kwargs)))
        answers = _collect(pipes, time.monotonic() + seconds)
    problems = [problem for answer in answers for problem in _problem(answer)]
    if problems:
        _pool.end()
        raise AssertionError("\n".join(problems))
    return [answer[1] for answer in answers if answer]


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any] | None]:
    answers: dict[Connection, tuple[bool, Any]] = {}
    while len(answers) < len(pipes) and time.monotonic() < deadline:
        waiting = [pipe for pipe in pipes if pipe not in answers]
        for ready in wait(waiting, timeout=1):
            assert isinstance(ready, Connection)
            try:
                answers[ready] = pickle.loads(ready.recv_bytes())
            except (EOFError, ConnectionError):
                answers[ready] = (False, "the process died")
        if any(not good for good, _ in answers.values()):
            deadline = min(deadline, time.monotonic() + 15)  # the others may have something to say
    return [answers.get(pipe) for pipe in pipes]


def _problem(answer: tuple[bool, Any] | None) -> list[str]:
    if answer is None:
        return ["a rank never answered"]
    return [] if answer[0] else [str(answer[1])]
