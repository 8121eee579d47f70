"""A worker that may be killed: a byte-level transformer, trained by laconic.elastic or by torchft's DiLoCo.

It is a process of its own from its start to its end. What it did it writes down step by step, for it can't say so in the end.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.elastic_hosts import Plan, lighthouse, wait_for
from laconic.lab.hosts import NETWORK
from laconic.lab.tasks import BytesGPT

# Those of torchft's own train_diloco.py, for both; a quorum is waited for longer than any run.
COLLECTIVE, TIMEOUT, QUORUM = timedelta(seconds=10), timedelta(seconds=30), timedelta(seconds=300)
LIVES = 100  # a restarted worker's batches are other ones


@dataclass(frozen=True)
class State:
    """What a worker had after a sync."""

    version: int
    time: float  # since the start of the run
    parameters: Tensor


class Training:
    """A model on its way, and how far it is: `version` of the state, `committed` steps, `dropped` syncs."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.task = BytesGPT(plan.size)
        torch.manual_seed(plan.seed)  # the same weights everywhere
        self.model: nn.Module = self.task.model()
        self.optimizer = self.task.optimizer(self.model)
        self.address = f"{NETWORK}.{rank + 1}" if os.environ.get("LACONIC_CABLE") else "127.0.0.1"
        self.steps = self.version = self.committed = self.dropped = 0
        self.stack = ExitStack()

    def attach(self) -> None:
        """Have a state to start from."""
        raise NotImplementedError

    def count(self) -> None:
        """After a step: what has come of it."""
        raise NotImplementedError

    def step(self, batch: Tensor) -> None:
        """One step of training, in which a sync may be due."""
        time.sleep(self.plan.sleep_seconds)
        self.model(batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.count()


class Ours(Training):
    """`laconic.elastic.attach`."""

    def attach(self) -> None:
        from laconic import elastic

        manager = elastic.Membership(
            lighthouse=f"http://{lighthouse()}",
            name=f"worker{self.rank}",
            bind=self.address,
            timeout_seconds=COLLECTIVE.total_seconds(),
            quorum_seconds=QUORUM.total_seconds(),
        )
        self._run = elastic.attach(self.model, self.optimizer, self.plan.method, manager)
        self.stack.enter_context(self._run)
        self.version = self._run.version

    def count(self) -> None:
        if self._run.version != self.version:
            self.version, self.committed = self._run.version, self.steps
        self.dropped = self._run.stats().dropped


class Torchft(Training):
    """torchft's DiLoCo, as its own train_diloco.py uses it, with fragments or without."""

    def attach(self) -> None:
        from torchft.local_sgd import DiLoCo

        from benchmarks.torchft_peer import pieces

        self._manager, self._store = self._connect()
        fragments, delay = map(int, self.plan.method.split()[1:])
        parts = [self.model] if fragments == 1 else pieces(self.model, fragments)
        rate, momentum = self.plan.outer
        outer = [torch.optim.SGD(part.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0) for part in parts]
        self._apart, self._period = self.plan.period // fragments, self.plan.period
        self._uncommitted = [0] * fragments  # steps of each fragment that are in no sync yet
        self._parts_committed = 0
        made = DiLoCo(
            self._manager, parts, self.optimizer, outer, self._period, use_bucketization=True, fragment_sync_delay=delay
        )
        self.stack.enter_context(made)

    def _connect(self) -> tuple[Any, Any]:
        from benchmarks.torchft_peer import make_manager

        def load(state: Any) -> None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["inner_optim"])

        return make_manager(
            self.address,
            f"http://{lighthouse()}",
            f"replica_{self.rank}",
            load,
            lambda: {"model": self.model.state_dict(), "inner_optim": self.optimizer.state_dict()},
            min_replicas=1,
            collective=COLLECTIVE,
            timeout=TIMEOUT,
            quorum=QUORUM,
        )

    def count(self) -> None:
        """A fragment whose sync failed starts from its anchor again; a worker that takes a peer's state has lost its own."""
        self._uncommitted = [steps + 1 for steps in self._uncommitted]
        if self.steps % self._apart:
            return
        before, self.version = self.version, self._manager.current_step()
        fragments = len(self._uncommitted)
        if self.version == before + 1:
            self._parts_committed += self._uncommitted[before % fragments]
            self.committed = self._parts_committed // fragments
        elif self.version == before:
            self.dropped += 1
        else:
            self._uncommitted = [0] * fragments
        self._uncommitted[before % fragments] = 0


def save(training: Training, passed: float, path: Path) -> None:
    """The state as it is after a sync, all at once."""
    part = path.with_suffix(".part")
    vector = parameters_to_vector(training.model.parameters()).detach()
    torch.save({"version": training.version, "time": passed, "parameters": vector}, part)
    part.rename(path)


def saved_states(folder: Path) -> list[State]:
    """What workers saved of it, the oldest version first."""
    found = [State(**torch.load(path)) for path in folder.glob("state-*.pt")]
    return sorted(found, key=lambda state: state.version)


def held_out(size: str, parameters: Tensor) -> float:
    """The loss on what nobody trains on."""
    task = BytesGPT(size)
    model = task.model()
    vector_to_parameters(parameters, model.parameters())
    return task.evaluate(model)


def train(training: Training, life: int, started: Callable[[], float]) -> None:
    """Until somebody kills this process; a worker that joins later is ready, and waits."""
    plan, rank, folder = training.plan, training.rank, Path(training.plan.folder)
    first = rank in plan.first and life == 0
    if first:
        training.attach()
        (folder / f"attached-{rank}").touch()
    start = started()
    if not first:
        time.sleep(max(0.0, start + plan.joins.get(rank, 0.0) - time.monotonic()))
        training.attach()
    else:
        time.sleep(max(0.0, start - time.monotonic()))
    batches = training.task.batches(rank + LIVES * life, plan.hosts, plan.seed)
    saved, saved_at = training.version, -plan.period
    with (folder / f"moments-{rank}-{life}").open("w", buffering=1) as out:
        while True:
            training.step(next(batches))
            passed = time.monotonic() - start
            out.write(f"{passed:.4f} {training.steps} {training.version} {training.committed} {training.dropped}\n")
            if training.version != saved and (training.steps - saved_at >= plan.period or plan.keep):
                saved, saved_at = training.version, training.steps
                name = f"state-{rank}-{saved:06d}.pt" if plan.keep else f"state-{rank}.pt"
                if rank == 0 or not plan.keep:
                    save(training, passed, folder / name)


def main(plan: Plan, life: int) -> None:
    """One life of one worker."""
    faulthandler.register(signal.SIGUSR1)  # says where all threads are
    torch.set_num_threads(1)
    began = Path(plan.folder, "began")

    def started() -> float:
        wait_for(began.exists, "the start of the run")
        return float(began.read_text())

    kind = Torchft if plan.method.startswith("torchft") else Ours
    train(kind(plan, int(os.environ["RANK"])), life, started)


if __name__ == "__main__":
    main(Plan.read(sys.argv[1]), int(sys.argv[2]))
