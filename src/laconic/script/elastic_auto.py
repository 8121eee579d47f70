"""Attach by itself among workers that come and go, to a script that knows nothing of laconic: `laconic run --elastic`.

The script builds a DistributedDataParallel over one process, its own. At the first forward with gradients, the module inside of
it and all optimizers over its parameters are attached; each worker is one such process.
"""

import atexit
import os
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.elastic import ElasticRun, Membership, attach
from laconic.elastic.membership import LOOPBACK
from laconic.script.auto import around_building
from laconic.script.messages import log
from laconic.strategies.parsing import strategy as read

WORKER, MIN_REPLICAS, BIND = "LACONIC_WORKER", "LACONIC_MIN_REPLICAS", "LACONIC_BIND"
START_WITH = "LACONIC_START_WITH"


class ElasticAuto:
    """What has been built in this process, and the run over the first model of it."""

    def __init__(self, strategy: str) -> None:
        self.status: object = None
        self.strategy = read(strategy)
        self.run: ElasticRun | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._finished = False

    def saw_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def saw_ddp(self, ddp: DistributedDataParallel) -> None:
        ddp.register_forward_pre_hook(lambda model, _: self._before_forward(model))

    def _before_forward(self, ddp: nn.Module) -> None:
        if self.run is not None or not torch.is_grad_enabled():
            return
        mine = {id(parameter) for parameter in ddp.parameters()}
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        over = [one for one in alive if any(id(p) in mine for group in one.param_groups for p in group["params"])]
        if not over:
            return  # they may be built yet
        inner = {id(value) for one in over for value in vars(one).values() if isinstance(value, Optimizer)}
        assert isinstance(ddp, DistributedDataParallel)
        membership = Membership(name=os.environ.get(WORKER), bind=os.environ.get(BIND, LOOPBACK))
        optimizers = [one for one in over if id(one) not in inner]
        run = attach(ddp.module, optimizers, self.strategy, membership, min_replicas=int(os.environ.get(MIN_REPLICAS, "1")),
                     start_with=int(os.environ.get(START_WITH, "1")))  # fmt: skip
        self.run = run.__enter__()  # SIGTERM: it leaves after the step
        log(
            f"worker {membership.name} trains by {self.strategy} from step {run.step} on, with {', '.join(run.stats().workers)}"
        )

    def fail(self, error: BaseException) -> None:
        """The script failed: the others go on."""
        self.finish()

    def finish(self) -> None:
        """It is over: once, however it ended."""
        if self._finished:
            return
        self._finished = True
        if self.run is None:
            log(f"this process never trained a DistributedDataParallel, so {self.strategy} was not attached to anything in it")
            return
        stats = self.run.stats()
        self.run.detach()
        log(f"worker {os.environ.get(WORKER, '')} ends after step {stats.steps}: {stats.syncs} syncs, {stats.dropped} dropped")


def install(strategy: str) -> ElasticAuto:
    """Watch from now on what this process builds."""
    auto = ElasticAuto(strategy)
    atexit.register(auto.finish)
    around_building(DistributedDataParallel, auto.saw_ddp)
    around_building(Optimizer, auto.saw_optimizer)
    return auto
