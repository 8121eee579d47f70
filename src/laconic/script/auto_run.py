"""One model of a script that knows nothing of laconic, a DDP or a sharded one: its run, from the first forward to the end."""

import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.advisor.attach import attach
from laconic.comm.exchange import complete
from laconic.comm.ledger import Ledger
from laconic.forecast import predict
from laconic.gradients.dispatcher import Dispatcher
from laconic.meter import Meter
from laconic.ranks.agreement import gather_texts
from laconic.run.arguments import unwrapped
from laconic.run.ending import warn_if_still_warming_up
from laconic.run.resume import is_of_this_auto, respelt
from laconic.run.run import Run, engine_of
from laconic.run.state import is_for_all, replicated
from laconic.script.islands import Islands
from laconic.script.messages import log
from laconic.strategies.strategy import Strategy


class AutoRun:
    """A DDP, or a sharded module, that the script has built, and the run over it while there is one.

    The run holds the DDP, the module and the optimizers: whether the script still holds them, and when Python collects them
    otherwise, differs between ranks, and ending a run takes all of them.
    """

    def __init__(self, model: nn.Module, islands: Islands | None = None) -> None:
        self.run: Run | None = None
        self._model = weakref.ref(model)
        self._islands = islands
        self._parameters = parameters_of(model)
        self.followed = True  # no optimizer has been built since its last forward
        self._restored: int | None = None  # after how many steps the script has loaded the module's weights
        self.first_step = 0  # of this run: a checkpoint may have been loaded

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """That of its run, if there is one."""
        return None if self.run is None else engine_of(self.run).group.process_group

    def overlaps(self, module: nn.Module) -> bool:
        """Whether it trains some of these parameters."""
        return not self._parameters.isdisjoint(parameters_of(module))

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is over some of the parameters."""
        return not self._parameters.isdisjoint(parameters_of(optimizer))

    def attach(
        self,
        optimizers: Sequence[Optimizer],
        strategy: Strategy,
        scaler: torch.amp.GradScaler | None,
        number: int,
        loaded: dict[str, Any] | None,
    ) -> None:
        """Begin, in a forward of the model, from what was loaded; all ranks together. It is this process's `number`-th run."""
        model, mesh = self._model(), self._islands.mesh if self._islands else None
        assert model is not None, "its forward is running"
        self._parameters = parameters_of(model)
        ddp = model if isinstance(model, DistributedDataParallel) else None
        registered = ddp is None or Dispatcher.knows(ddp)
        replicate = self._islands.replicate if self._islands else "replicate"
        self.run = attach(model, list(optimizers), strategy, scaler=scaler, mesh=mesh, replicate=replicate)
        self.followed, self._restored = True, None
        log(_attached(self.run))
        self._load_agreed(loaded)
        self.first_step = self.run.step
        if "LACONIC_RECORD" in os.environ:
            folder = os.environ["LACONIC_RECORD"]
            folder = folder if number == 1 else os.path.join(folder, f"run-{number}")
            Meter(self.run, folder, tensorboard="LACONIC_TENSORBOARD" in os.environ)
        if ddp is not None and not registered:
            Dispatcher.of(ddp).before_forward(ddp, ())  # its hook came too late for this forward

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """The script may have built another optimizer over the model: its steps count from here on."""
        assert self.run is not None
        self.followed, engine = True, engine_of(self.run)
        for optimizer in optimizers:
            if all(unwrapped(optimizer) is not known for known in engine.optimizers):
                engine.add_optimizer(optimizer)
                log(f"the script has built another optimizer over the model, {type(optimizer).__name__}; its steps count, too")

    def state_for(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """What this optimizer's `state_dict` is to carry: the first one's has it. Nothing is asked of other ranks."""
        assert self.run is not None
        first = parameters_of(engine_of(self.run).optimizers[0])  # one that has replaced the first has it as well
        return None if first.isdisjoint(parameters_of(optimizer)) else self.run.state_dict()

    def is_at(self, state: Mapping[str, Any]) -> bool:
        """Whether this is its state as of now, as far as can be seen."""
        return self.run is not None and (state.get("step"), state.get("strategy")) == (self.run.step, str(self.run.strategy))

    def load(self, state: dict[str, Any]) -> None:
        """The script has loaded this in mid-run: go on from there. An error on all ranks if only some did."""
        assert self.run is not None
        engine_of(self.run).await_loads()
        self._load_agreed(state)

    def _load_agreed(self, state: dict[str, Any] | None) -> None:
        """Use what was loaded: each rank its own, or, where all loaded one rank's, what all ranks have alike."""
        run = self.run
        assert run is not None
        engine = engine_of(run)
        mine = "none" if state is None else str(state.get("rank"))
        rows = complete(gather_texts(mine, engine.device), engine.group, Ledger())
        if set(rows) == {"none"}:
            return
        if state is None or "none" in rows:
            having = [str(rank) for rank, row in enumerate(rows) if row != "none"]
            raise RuntimeError(f"only rank {', '.join(having)} loaded an optimizer with laconic's state; load it on all ranks")
        if respelt(engine, state)["strategy"] != str(run.strategy) and not is_of_this_auto(engine, state):
            log(f"the checkpoint is of {state['strategy']}; going on by {run.strategy}")
        if rows == [str(rank) for rank in range(len(rows))]:
            if state.get("world", len(rows)) != len(rows):
                log(
                    f"the checkpoint is of {state['world']} ranks, here are {len(rows)}: what the others had not sent yet is "
                    "lost; laconic.checkpoint changes the number of ranks without that"
                )
            _load(run, state)
            return
        if len(set(rows)) > 1:
            raise RuntimeError(
                f"ranks loaded the states of ranks {', '.join(rows)}: all must load their own, or all the same one"
            )
        if engine.place.sharding is not None:
            raise RuntimeError(
                f"all ranks loaded the state of rank {rows[0]}, and of a sharded model each rank has that of its own shard: "
                "save optimizer.state_dict() on every rank, each to a file of its own"
            )
        _load(run, replicated(state, engine.group.rank))
        engine.adopt_first()
        if is_for_all(state):
            return
        log(
            f"all ranks loaded the state of rank {rows[0]}: its model is taken for the common one; what the other ranks had "
            "not sent yet (residuals of error feedback, steps since the last sync) is lost. Save optimizer.state_dict() on "
            "every rank, each to a file of its own, to resume exactly"
        )

    def saw_weights(self) -> None:
        """The script has loaded weights into the module."""
        self._restored = None if self.run is None else self.run.step

    def finish(self) -> None:
        """All went well: outstanding exchanges are completed, replicas made equal, everything taken off. All ranks together.

        Where every step was taken together there is nothing to agree on, and nobody is waited for: the first rank may have
        a long evaluation before it.
        """
        run, self.run = self.run, None
        if run is None:
            return
        engine = engine_of(run)
        plain = predict("ddp()", engine.model, world_size=engine.replicas.world).wire_bytes_per_step
        if engine.lockstep:
            warn_if_still_warming_up(engine)
            run.detach()
        else:
            if self._restored == run.step:
                engine.keep_restored()
            run.__exit__(None, None, None)
            if engine.unequal:
                log(
                    "only some ranks loaded weights after the last step: replicas are not made equal, and each rank keeps its "
                    "own; load them on all ranks, or on none"
                )
        log(_sent(run, plain))

    def fail(self, error: BaseException) -> None:
        """The script failed: the other ranks are told, and nobody is waited for."""
        run, self.run = self.run, None
        if run is not None:
            engine_of(run).fail(error)


def parameters_of(thing: nn.Module | Optimizer) -> set[int]:
    """The parameters of a module, or those that an optimizer steps, by id."""
    if isinstance(thing, nn.Module):
        return {id(parameter) for parameter in thing.parameters()}
    return {id(parameter) for group in thing.param_groups for parameter in group["params"]}


def _load(run: Run, state: Mapping[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the state is of")  # one rank has said so, in a line
        run.load_state_dict(state, strict=False)


def _attached(run: Run) -> str:
    engine = engine_of(run)
    world, model, ranks = engine.replicas.world, engine.model, engine.ranks
    people = f"{ranks.islands} islands of {ranks.shards}" if ranks.sharded else "1 rank" if world == 1 else f"{world} ranks"
    count = sum(parameter.numel() for parameter in model.parameters())
    share = _share(run.strategy, model, world)
    optimizers = ", ".join(type(optimizer).__name__ for optimizer in engine.optimizers)
    return (
        f"{run.strategy} is attached to {type(engine.module).__name__} ({count:,} parameters) and {optimizers}"
        f"{' with a GradScaler' if engine.scaler else ''}, {people}{share}"
    )


def _sent(run: Run, plain: float) -> str:
    """What it came to, where ddp() sends so many bytes a step."""
    stats = run.stats()
    text = f"{run.strategy}: {stats.steps:,} steps, this rank sent {stats.wire_bytes:,} bytes"
    whole = stats.counted_steps * plain
    return f"{text}, {stats.wire_bytes / whole:.2g} of what ddp() sends in as many" if whole else text


def _share(strategy: Strategy, model: nn.Module, world: int) -> str:
    """How much it sends, where that is known."""
    if strategy.advised is not None:
        return ": it trains as ddp() until it has chosen"
    if world == 1:
        return ", which is alone: nothing is sent"
    plain = predict("ddp()", model, world_size=world)
    if strategy.cycle is None or not plain.wire_bytes:
        return ""
    ours = predict(strategy, model, world_size=world)
    return f": {ours.wire_bytes_per_step / plain.wire_bytes_per_step:.2g} of ddp()'s bytes once it is warm"
