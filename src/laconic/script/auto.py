"""Attach by itself, to a script that knows nothing of laconic: `install` watches what the process builds.

Each DistributedDataParallel that is built, and all optimizers over its parameters, are attached at its first forward with
gradients; so is each model that `fully_shard` has sharded, where the launcher was told the size of islands. A new one over the
same parameters ends the run before it. Each optimizer's `state_dict()` carries the communication state of its own run along,
and `load_state_dict()` brings it back. When the process group is destroyed, or the script ends, replicas are made equal.
"""

import atexit
import functools
import gc
import multiprocessing
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic._torch.fsdp import is_dtensor
from laconic.run.arguments import attached
from laconic.run.run import Run, engine_of
from laconic.script.auto_run import AutoRun, parameters_of
from laconic.script.islands import Islands, around_fully_shard
from laconic.script.messages import log, remember_rank
from laconic.strategies.parsing import strategy as read

KEY = "laconic"  # of the entry in an optimizer's state_dict


class Auto:
    """What has been built in this process, and the runs over it."""

    def __init__(self, strategy: str, islands: Islands | None = None) -> None:
        self.strategy = read(strategy)
        self.islands = islands
        self.status: Any = None  # that the script asked for by sys.exit
        self._models: weakref.WeakKeyDictionary[nn.Module, AutoRun] = weakref.WeakKeyDictionary()
        self._live: list[AutoRun] = []  # attached, in the order in which they were: the same on all ranks
        self._built, self._attached = 0, 0  # models, runs, so far
        self._plain: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # it was said why
        self._sharded = False  # an optimizer steps shards
        self._ran = False  # a model, when there was no optimizer over it
        self._explained = False  # it was said why some model is not attached
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._used: weakref.WeakSet[object] = weakref.WeakSet()  # optimizers and scalers of runs that are over
        self._loaded: weakref.WeakKeyDictionary[Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()  # until a forward
        self._bare: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # a state without ours was loaded since

    @property
    def runs(self) -> list[Run]:
        """Those that are attached now, in the order in which they were."""
        return [one.run for one in self._live if one.run is not None]

    @property
    def run(self) -> Run | None:
        """The one that was attached last."""
        return next(reversed(self.runs), None)

    # What is built

    def before_ddp(self, module: nn.Module) -> None:
        """A DDP is about to be built over this module, on all ranks: its constructor sends the first rank's parameters."""
        for one in [one for one in self._live if one.overlaps(module)]:
            self._finish(one)

    def saw_ddp(self, ddp: DistributedDataParallel) -> None:
        self._built += 1
        remember_rank()
        self._models[ddp] = AutoRun(ddp)
        ddp.register_forward_pre_hook(_before_forward)

    def saw_sharded(self, module: nn.Module) -> None:
        """`fully_shard` has sharded it. Its own hook gathers parameters, and this one comes before."""
        self._built += 1
        remember_rank()
        self._models[module] = AutoRun(module, self.islands)
        module.register_forward_pre_hook(_before_forward, prepend=True)

    def saw_weights(self, module: nn.Module) -> None:
        for one in self._live:
            if one.overlaps(module):
                one.saw_weights()

    def saw_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))
        self._sharded |= any(is_dtensor(one) for group in optimizer.param_groups for one in group["params"])
        for one in self._live:
            one.followed = False
        optimizer.register_state_dict_post_hook(_with_state)
        optimizer.register_load_state_dict_pre_hook(_take_state)

    def saw_scaler(self, scaler: torch.amp.GradScaler) -> None:
        self._scalers.append(weakref.ref(scaler))

    # What is done

    def before_forward(self, model: nn.Module) -> None:
        """Attach, at the first forward that a backward may follow; load, where a checkpoint was loaded since the last one."""
        one = self._models.get(model)
        if one is None or not torch.is_grad_enabled() or not dist.is_initialized() or self._inside(model):
            return
        if one.run is None:
            self._attach(one, model)
            return
        if not one.followed:
            one.follow(self._over(model))
        state = self._take_loaded(one)
        if state is not None:
            one.load(state)

    def _inside(self, model: nn.Module) -> bool:
        """Whether it is sharded as a part of a larger model, which is attached as a whole."""
        if isinstance(model, DistributedDataParallel):
            return False
        return any(model is part for other in list(self._models) if other is not model for part in other.modules())

    def _attach(self, one: AutoRun, model: nn.Module) -> None:
        for other in [other for other in self._live if other.overlaps(model)]:
            if other.run is not None and other.run.step == other.first_step:
                raise RuntimeError(
                    "two DistributedDataParallels over the same parameters ran forward, and no optimizer made a step between "
                    f"them: {self.strategy} can be attached to one of them only; call laconic.attach in the script"
                )
            self._finish(other)
        if self._used:
            gc.collect()  # else it is chance, and differs between ranks, which of the former optimizers are still there
        optimizers = self._over(model)
        if not optimizers:
            self._ran = True
            return  # they may be built yet
        taken = [type(optimizer).__name__ for optimizer in optimizers if optimizer in attached]
        if taken:
            if model not in self._plain:
                module = model.module if isinstance(model, DistributedDataParallel) else model
                log(
                    f"{self.strategy} is not attached to this {type(module).__name__}: its {taken[0]} is attached to "
                    "another run already, that of another DistributedDataParallel or one of the script's own"
                )
            self._plain.add(model)
            self._explained = True
            return
        self._attached += 1
        self._live.append(one)
        one.attach(optimizers, self.strategy, self._scaler(), self._attached, self._take_loaded(one))

    def _over(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers over its parameters, but for parts of another one, and those of an earlier run that others replace."""
        ours = parameters_of(model)
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        found = [one for one in alive if parameters_of(one) & ours]
        inner = {id(value) for one in found for value in vars(one).values() if isinstance(value, Optimizer)}
        found = [one for one in found if id(one) not in inner]
        new = {parameter for one in found if one not in self._used for parameter in parameters_of(one)}
        left = {id(parameter) for parameter in model.parameters() if parameter.requires_grad} - new
        return [one for one in found if one not in self._used or parameters_of(one) & left]

    def _scaler(self) -> torch.amp.GradScaler | None:
        alive = [scaler for ref in self._scalers if (scaler := ref()) is not None and scaler.is_enabled()]
        alive = [scaler for scaler in alive if scaler not in self._used] or alive
        busy = {id(engine_of(run).scaler) for run in self.runs}  # one may serve several runs, but a new one is for the new run
        alive = [scaler for scaler in alive if id(scaler) not in busy] or alive
        if len(alive) > 1:
            raise RuntimeError(
                f"the script builds {len(alive)} GradScalers, and which one is meant is not clear; attach by hand"
            )
        return alive[0] if alive else None

    # Checkpoints

    def entry_for(self, optimizer: Optimizer) -> dict[str, Any]:
        """What this optimizer's `state_dict` is to carry of its run. Nothing is asked of other ranks."""
        if optimizer in self._loaded:
            return {KEY: self._loaded[optimizer]}
        states = [state for one in self._live if (state := one.state_for(optimizer)) is not None]
        if states:
            return {KEY: states[0]}
        # None: nothing is trained yet, or a new run is to come. A wrapper that loads this again, as Accelerate's does, has
        # lost nothing. Once the process group is gone, it is the end of a training whose state was not saved in time.
        over = optimizer in self._used and not dist.is_initialized()
        return {} if over or any(one.steps(optimizer) for one in self._live) else {KEY: None}

    def take(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """An optimizer is loading this."""
        trained = any(one.steps(optimizer) for one in self._live)
        if state_dict.get(KEY) is not None:
            self._loaded[optimizer] = state_dict[KEY]
        elif trained or KEY not in state_dict:
            self._bare.add(optimizer)

    def _take_loaded(self, one: AutoRun) -> dict[str, Any] | None:
        """What the optimizers over its parameters have loaded since, and a line where there is nothing of ours in it."""
        states = [self._loaded.pop(optimizer) for optimizer in list(self._loaded) if one.steps(optimizer)]
        bare = [optimizer for optimizer in self._bare if one.steps(optimizer)]
        self._bare.difference_update(bare)
        if bare and not states:  # of several optimizers, one has it
            log(
                f"the optimizer's state that was loaded has nothing of {self.strategy} (saved without laconic, or through "
                "torch.distributed.checkpoint's helpers, which drop it: with these, call laconic.attach in the script and save "
                "laconic.checkpoint.RankState(run) as well); residuals, anchors and the step count go on as they are"
            )
        return states[-1] if states else None

    # The end

    def finish(self, group: dist.ProcessGroup | None = None) -> None:
        """All went well: runs (of this group) complete what is outstanding and make replicas equal. All ranks together."""
        leaving = [one for one in self._live if group is None or one.process_group in (None, group)]
        try:
            for one in leaving:
                self._finish(one)
        except BaseException as error:
            self.fail(error)
            raise

    def _finish(self, one: AutoRun) -> None:
        self._take_off(one)
        # A wrapper's reload, or momentum for the next fit's optimizer: what it holds of this run is completed here instead.
        for optimizer in [optimizer for optimizer, state in self._loaded.items() if one.is_at(state)]:
            if one.steps(optimizer):
                del self._loaded[optimizer]
        one.finish()

    def fail(self, error: BaseException) -> None:
        """The script failed: the other ranks are told, and nobody is waited for."""
        for one in list(self._live):
            self._take_off(one)
            one.fail(error)

    def end(self, error: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
        """One or the other."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish(group)
        else:
            self.fail(error)

    def _take_off(self, one: AutoRun) -> None:
        self._live.remove(one)
        if one.run is not None:
            engine = engine_of(one.run)
            self._used.update(engine.optimizers)
            if engine.scaler is not None:
                self._used.add(engine.scaler)

    def explain_idleness(self) -> None:
        """Why nothing was attached, if nothing was."""
        if self._built == 0:
            hint = ": its model is sharded, so give --island-size to laconic run, and replicas are islands of so many ranks"
            log(
                f"this process never built a DistributedDataParallel, so {self.strategy} was not attached to anything in it"
                f"{hint if self._sharded else ''}"
            )
        elif self._attached == 0 and self._ran and not self._explained:
            log(
                "no optimizer over the DistributedDataParallel's parameters was there when it ran, "
                f"so {self.strategy} was not attached"
            )


_auto: Auto | None = None


def install(strategy: str, island_size: str | None = None) -> Auto:
    """Watch from now on what this process builds; where islands have a size, what `fully_shard` shards as well."""
    global _auto
    if _auto is not None:
        return _auto
    islands = None if island_size is None else Islands(island_size)
    _auto = auto = Auto(strategy, islands)
    if islands is not None:
        around_fully_shard(islands, auto.saw_sharded)
    around_building(DistributedDataParallel, auto.saw_ddp, auto.before_ddp)
    around_building(Optimizer, auto.saw_optimizer)
    around_building(torch.amp.GradScaler, auto.saw_scaler)
    load = nn.Module.load_state_dict

    @functools.wraps(load)
    def load_and_tell(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        auto.saw_weights(self)
        return result

    nn.Module.load_state_dict = load_and_tell  # type: ignore[method-assign]  # a hook would be pickled with the module
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_after_all(group: dist.ProcessGroup | None = None) -> None:
        everything = group in (None, dist.group.WORLD)
        if everything or any(group is engine_of(run).group.process_group for run in auto.runs):
            auto.end(sys.exc_info()[1], None if everything else group)  # in a `finally`, it is what brought the script here
        destroy(group)

    dist.destroy_process_group = destroy_after_all
    dist.distributed_c10d.destroy_process_group = destroy_after_all
    atexit.register(_at_exit)
    hook = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        auto.fail(error)
        hook(kind, error, trace)

    sys.excepthook = failed
    leave = sys.exit

    @functools.wraps(leave)
    def leave_and_remember(status: Any = None, /) -> NoReturn:
        auto.status = status
        leave(status)

    sys.exit = leave_and_remember
    return auto


def around_building(kind: type, saw: Callable[[Any], None], before: Callable[[Any], None] | None = None) -> None:
    """Have `saw` called with each instance once it is built, and `before` with its first argument, `module`, before that."""
    build: Any = vars(kind)["__init__"]

    @functools.wraps(build)
    def build_and_tell(self: object, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs.get("module")
        if before is not None and isinstance(module, nn.Module):
            before(module)
        build(self, *args, **kwargs)
        saw(self)

    kind.__init__ = build_and_tell  # type: ignore[misc]  # torch has no hook for this


# Functions, so that a copied or pickled DDP or optimizer doesn't take the watcher along.


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(model: nn.Module, inputs: object) -> None:
    if _auto is not None:
        _auto.before_forward(model)


def _with_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return state_dict if _auto is None else {**state_dict, **_auto.entry_for(optimizer)}


def _take_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    if _auto is not None:
        _auto.take(optimizer, state_dict)


def _at_exit() -> None:
    assert _auto is not None
    if dist.is_initialized():
        # A handler of the script's own may have kept an error from ours.
        _auto.end(getattr(sys, "last_value", None) or SystemExit(_auto.status))
    if multiprocessing.parent_process() is None:  # a DataLoader's process has read the script again, and trains nothing
        _auto.explain_idleness()
