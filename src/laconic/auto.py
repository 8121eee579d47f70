"""Attach by itself, to a script that knows nothing of laconic.

`laconic run --strategy "diloco(64)" ... script.py` has this on before the script starts. With plain torchrun, set
LACONIC_STRATEGY and let the script `import laconic.auto` before it builds its model; without the variable that import does
nothing.

The first DistributedDataParallel that is built, and all optimizers over its parameters, are attached at its first forward with
gradients. Each optimizer's `state_dict()` carries the communication state along, and `load_state_dict()` brings it back. When
the process group is destroyed, or the script ends, replicas are made equal.
"""

import atexit
import functools
import multiprocessing
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.agreement import gather_texts
from laconic.dispatch import Dispatcher
from laconic.forecast import predict
from laconic.meter import Meter
from laconic.run import Run, attach
from laconic.spec import strategy as read
from laconic.state import replicated
from laconic.wire import Ledger, land

KEY = "laconic"  # of the entry in an optimizer's state_dict


class Auto:
    """What has been built in this process, and the run, once there is one."""

    def __init__(self, strategy: str) -> None:
        self.strategy = read(strategy)
        self.run: Run | None = None
        self.status: Any = None  # that the script asked for by sys.exit
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._built, self._attached_once = 0, False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._new_optimizers = False  # since the last forward
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._loaded: dict[str, Any] | None = None  # from a checkpoint, until the next forward
        self._bare = False  # an optimizer's state without ours was loaded since

    # What is built

    def saw_ddp(self, ddp: DistributedDataParallel) -> None:
        self._built += 1
        if self._ddp is not None and self._ddp() is not None:
            say("the script builds a second DistributedDataParallel; the first one is attached, this one stays plain")
            return
        self._ddp = weakref.ref(ddp)
        ddp.register_forward_pre_hook(_before_forward)

    def saw_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))
        self._new_optimizers = True
        optimizer.register_state_dict_post_hook(_with_state)
        optimizer.register_load_state_dict_pre_hook(_take_state)

    def saw_scaler(self, scaler: torch.amp.GradScaler) -> None:
        self._scalers.append(weakref.ref(scaler))

    # What is done

    def before_forward(self, ddp: DistributedDataParallel, inputs: object) -> None:
        """Attach, at the first forward that a backward may follow; load, where a checkpoint was loaded since the last one."""
        if self._ddp is None or self._ddp() is not ddp or not torch.is_grad_enabled() or not dist.is_initialized():
            return
        if self.run is not None:
            if self._new_optimizers:
                self._follow(self.run, ddp)
            if self._loaded is not None:
                self._load(self.run)
            self._explain_loss()
            return
        optimizers = self._over(ddp)
        if not optimizers:
            return  # they may be built yet
        self.run = attach(ddp, optimizers, self.strategy, scaler=self._scaler())
        self._attached_once, self._new_optimizers = True, False
        say(_attached(self.run))
        self._load(self.run)
        self._explain_loss()
        if "LACONIC_RECORD" in os.environ:
            Meter(self.run, os.environ["LACONIC_RECORD"], tensorboard="LACONIC_TENSORBOARD" in os.environ)
        Dispatcher.of(ddp).before_forward(ddp, inputs)  # registered too late for this forward

    def _follow(self, run: Run, ddp: DistributedDataParallel) -> None:
        """The script has built another optimizer over the model: its steps count from here on."""
        self._new_optimizers = False
        for optimizer in self._over(ddp):
            if all(optimizer is not known for known in run.optimizers):
                run.add_optimizer(optimizer)
                say(f"the script has built another optimizer over the model, {type(optimizer).__name__}; its steps count, too")

    def _over(self, ddp: DistributedDataParallel) -> list[Optimizer]:
        """The optimizers over its parameters, but for those that are parts of another one."""
        ours = {id(parameter) for parameter in ddp.parameters()}
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        found = [one for one in alive if any(id(p) in ours for group in one.param_groups for p in group["params"])]
        inner = {id(value) for one in found for value in vars(one).values() if isinstance(value, Optimizer)}
        return [one for one in found if id(one) not in inner]

    def _scaler(self) -> torch.amp.GradScaler | None:
        alive = [scaler for ref in self._scalers if (scaler := ref()) is not None and scaler.is_enabled()]
        if len(alive) > 1:
            raise RuntimeError(
                f"the script builds {len(alive)} GradScalers, and which one is meant is not clear; attach by hand"
            )
        return alive[0] if alive else None

    # Checkpoints

    def state_for(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """What this optimizer's `state_dict` is to carry: the first one's has it. Nothing is asked of other ranks."""
        if self.run is None or self._loaded is not None:
            return self._loaded
        first = {id(parameter) for group in self.run.optimizers[0].param_groups for parameter in group["params"]}
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return self.run.state_dict() if first & mine else None  # one that has replaced the first has it as well

    def take(self, state: dict[str, Any] | None) -> None:
        """An optimizer has loaded a state dict with this in it."""
        self._loaded = self._loaded if state is None else state
        self._bare = self._loaded is None  # of several optimizers, one has it

    def _load(self, run: Run) -> None:
        """Use what was loaded: each rank its own, or, where all loaded one rank's, what all ranks have alike."""
        state, self._loaded = self._loaded, None
        mine = "none" if state is None else str(state.get("rank"))
        rows = land(gather_texts(mine, run.device), run.group, Ledger())
        if set(rows) == {"none"}:
            return
        if state is None or "none" in rows:
            having = [str(rank) for rank, row in enumerate(rows) if row != "none"]
            raise RuntimeError(f"only rank {', '.join(having)} loaded an optimizer with laconic's state; load it on all ranks")
        if state["strategy"] != str(run.strategy):
            say(f"the checkpoint is of {state['strategy']}; going on by {run.strategy}")
        if rows == [str(rank) for rank in range(len(rows))]:
            if state.get("world", len(rows)) != len(rows):
                say(
                    f"the checkpoint is of {state['world']} ranks, here are {len(rows)}: what the others had not sent yet is "
                    "lost; laconic.checkpoint changes the number of ranks without that"
                )
            _load(run, state)
            return
        if len(set(rows)) > 1:
            raise RuntimeError(
                f"ranks loaded the states of ranks {', '.join(rows)}: all must load their own, or all the same one"
            )
        _load(run, replicated(state, run.group.rank))
        run.adopt_first()
        if run.group.rank == 0:
            warnings.warn(
                f"laconic: all ranks loaded the state of rank {rows[0]}: its model is taken for the common one; what the other "
                "ranks had not sent yet (residuals of error feedback, steps since the last sync) is lost. Save "
                "optimizer.state_dict() on every rank, each to a file of its own, to resume exactly",
                stacklevel=2,
            )

    def _explain_loss(self) -> None:
        if self._bare:
            say(
                f"the optimizer's state that was loaded has nothing of {self.strategy} (saved without laconic, or through "
                "torch.distributed.checkpoint's helpers, which drop it: with these, call laconic.attach in the script and save "
                "laconic.checkpoint.RankState(run) as well); residuals, anchors and the step count go on as they are"
            )
        self._bare = False

    # The end

    def finish(self) -> None:
        """All went well: replicas are made equal, and everything is taken off again. All ranks together.

        Where every step was taken together there is nothing to agree on, and nobody is waited for: the first rank may have
        a long evaluation before it.
        """
        run = self._take_off()
        if run is not None and run.lockstep:
            run.warn_if_still_warming_up()
            run.detach()
        elif run is not None:
            run.__exit__(None, None, None)

    def fail(self, error: BaseException) -> None:
        """The script failed: the other ranks are told, and nobody is waited for."""
        run = self._take_off()
        if run is not None:
            run.fail(error)

    def end(self, error: BaseException | None) -> None:
        """One or the other."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
        else:
            self.fail(error)

    def _take_off(self) -> Run | None:
        run, self.run = self.run, None
        if run is not None:
            self._ddp = None  # the next one that is built is the first one again
        return run

    def explain_idleness(self) -> None:
        """Why nothing was attached, if nothing was."""
        if self._built == 0:
            say(f"the script never built a DistributedDataParallel, so {self.strategy} was not attached to anything")
        elif self.run is None and not self._attached_once:
            say(
                "no optimizer over the DistributedDataParallel's parameters was there when it ran, "
                f"so {self.strategy} was not attached"
            )


_auto: Auto | None = None


def install(strategy: str) -> Auto:
    """Watch from now on what this process builds."""
    global _auto
    if _auto is not None:
        return _auto
    _auto = auto = Auto(strategy)
    _afterwards(DistributedDataParallel, auto.saw_ddp)
    _afterwards(Optimizer, auto.saw_optimizer)
    _afterwards(torch.amp.GradScaler, auto.saw_scaler)
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_after_all(group: dist.ProcessGroup | None = None) -> None:
        if group in (None, dist.group.WORLD) or (auto.run is not None and group is auto.run.group.process_group):
            auto.end(sys.exc_info()[1])  # in a `finally`, it is the error that brought the script here
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


def _afterwards(kind: type, saw: Callable[[Any], None]) -> None:
    """Have `saw` called with each instance, once it is built."""
    build: Any = vars(kind)["__init__"]

    @functools.wraps(build)
    def build_and_tell(self: object, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        saw(self)

    kind.__init__ = build_and_tell  # type: ignore[misc]  # torch has no hook for this


# Functions, so that a copied or pickled DDP or optimizer doesn't take the watcher along.


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(ddp: DistributedDataParallel, inputs: object) -> None:
    if _auto is not None:
        _auto.before_forward(ddp, inputs)


def _load(run: Run, state: Mapping[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the state is of")  # one rank has said so, in a line
        run.load_state_dict(state, strict=False)


def _with_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = _auto.state_for(optimizer) if _auto is not None else None
    return state_dict if state is None else {**state_dict, KEY: state}


def _take_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    if _auto is not None:
        _auto.take(state_dict.get(KEY))


def _at_exit() -> None:
    assert _auto is not None
    if dist.is_initialized():
        # A handler of the script's own may have kept an error from ours.
        _auto.end(getattr(sys, "last_value", None) or SystemExit(_auto.status))
    if multiprocessing.parent_process() is None:  # a DataLoader's process has read the script again, and trains nothing
        _auto.explain_idleness()


def _attached(run: Run) -> str:
    world = run.group.world
    count = sum(parameter.numel() for parameter in run.model.parameters())
    ours, plain = (predict(text, run.model, world_size=world) for text in (run.strategy, "ddp()"))
    share = ours.wire_bytes / run.strategy.cycle / plain.wire_bytes if plain.wire_bytes else 1.0
    optimizers = ", ".join(type(optimizer).__name__ for optimizer in run.optimizers)
    return (
        f"{run.strategy} is attached to {type(run.model.module).__name__} ({count:,} parameters) and {optimizers}"
        f"{' with a GradScaler' if run.scaler else ''}, {world} ranks: {share:.2g} of ddp()'s bytes once it is warm"
    )


def say(sentence: str) -> None:
    """One line, from one rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"laconic: {sentence}", file=sys.stderr, flush=True)  # noqa: T201


if "LACONIC_STRATEGY" in os.environ:
    install(os.environ["LACONIC_STRATEGY"])
