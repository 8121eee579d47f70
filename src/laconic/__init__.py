"""laconic: PyTorch data-parallel training that communicates less.

Importing this package imports nothing else: each name brings its module when it is first used.
"""

import atexit
import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic import checkpoint as checkpoint
    from laconic import compat as compat
    from laconic import elastic as elastic
    from laconic import integrations as integrations
    from laconic.advisor.attach import attach as attach
    from laconic.comm.bucket import Bucket as Bucket
    from laconic.comm.bucket import Slot as Slot
    from laconic.comm.collectives import AllGather as AllGather
    from laconic.comm.collectives import AllReduce as AllReduce
    from laconic.comm.collectives import AllToAll as AllToAll
    from laconic.comm.collectives import Collective as Collective
    from laconic.comm.collectives import Traffic as Traffic
    from laconic.comm.dryrun import simulate as simulate
    from laconic.comm.exchange import Exchange as Exchange
    from laconic.comm.exchange import Reduced as Reduced
    from laconic.comm.group import CommunicationError as CommunicationError
    from laconic.forecast import Forecast as Forecast
    from laconic.forecast import predict as predict
    from laconic.forecast.reducer_laws import check_reducer as check_reducer
    from laconic.meter import Meter as Meter
    from laconic.probing.probe import probe as probe
    from laconic.ranks.agreement import PeerError as PeerError
    from laconic.ranks.presence import UnevenError as UnevenError
    from laconic.ranks.replicas import ReplicaError as ReplicaError
    from laconic.reducers.alternating_powersgd import AlternatingPowerSGD as AlternatingPowerSGD
    from laconic.reducers.base import Reducer as Reducer
    from laconic.reducers.batched_powersgd import BatchedPowerSGD as BatchedPowerSGD
    from laconic.reducers.cast import Cast as Cast
    from laconic.reducers.error_feedback import ErrorFeedback as ErrorFeedback
    from laconic.reducers.error_feedback import Release as Release
    from laconic.reducers.exact import Exact as Exact
    from laconic.reducers.float8 import Float8 as Float8
    from laconic.reducers.momentum import Momentum as Momentum
    from laconic.reducers.powersgd import PowerSGD as PowerSGD
    from laconic.reducers.quantized import Quantized as Quantized
    from laconic.reducers.randomk import RandomK as RandomK
    from laconic.reducers.sign import Sign as Sign
    from laconic.reducers.ternary import Ternary as Ternary
    from laconic.reducers.topk import TopK as TopK
    from laconic.reducers.warmup import Warmup as Warmup
    from laconic.run.attach import check_replicas as check_replicas
    from laconic.run.run import Run as Run
    from laconic.run.stats import Stats as Stats
    from laconic.strategies.gradient_recipes import bf16 as bf16
    from laconic.strategies.gradient_recipes import ddp as ddp
    from laconic.strategies.gradient_recipes import fp8 as fp8
    from laconic.strategies.gradient_recipes import fp16 as fp16
    from laconic.strategies.gradient_recipes import int4 as int4
    from laconic.strategies.gradient_recipes import int8 as int8
    from laconic.strategies.gradient_recipes import onebit_adam as onebit_adam
    from laconic.strategies.gradient_recipes import powersgd as powersgd
    from laconic.strategies.gradient_recipes import randomk as randomk
    from laconic.strategies.gradient_recipes import sign as sign
    from laconic.strategies.gradient_recipes import silent as silent
    from laconic.strategies.gradient_recipes import topk as topk
    from laconic.strategies.local_recipes import hierarchical_sgd as hierarchical_sgd
    from laconic.strategies.local_recipes import local_adam as local_adam
    from laconic.strategies.local_recipes import local_sgd as local_sgd
    from laconic.strategies.local_recipes import post_local_sgd as post_local_sgd
    from laconic.strategies.naming import register as register
    from laconic.strategies.outer import Adopt as Adopt
    from laconic.strategies.outer import Nesterov as Nesterov
    from laconic.strategies.outer import Outer as Outer
    from laconic.strategies.outer import OuterOptimizer as OuterOptimizer
    from laconic.strategies.outer import SlowMo as SlowMo
    from laconic.strategies.outer_recipes import diloco as diloco
    from laconic.strategies.outer_recipes import slowmo as slowmo
    from laconic.strategies.outer_recipes import sparseloco as sparseloco
    from laconic.strategies.outer_recipes import streaming_diloco as streaming_diloco
    from laconic.strategies.parsing import strategy as strategy
    from laconic.strategies.routes import Route as Route
    from laconic.strategies.schedules import QSR as QSR
    from laconic.strategies.schedules import Every as Every
    from laconic.strategies.schedules import Never as Never
    from laconic.strategies.schedules import Schedule as Schedule
    from laconic.strategies.strategy import Averaging as Averaging
    from laconic.strategies.strategy import Deltas as Deltas
    from laconic.strategies.strategy import Strategy as Strategy

__version__ = "0.1.0"
"""The version that is installed, such as "0.1.0"."""

_HOME = {
    "advisor.attach": ["attach"],
    "probing.probe": ["probe"],
    "comm.bucket": ["Bucket", "Slot"],
    "comm.collectives": ["AllGather", "AllReduce", "AllToAll", "Collective", "Traffic"],
    "comm.dryrun": ["simulate"],
    "comm.exchange": ["Exchange", "Reduced"],
    "comm.group": ["CommunicationError"],
    "forecast": ["Forecast", "predict"],
    "forecast.reducer_laws": ["check_reducer"],
    "meter": ["Meter"],
    "ranks.agreement": ["PeerError"],
    "ranks.presence": ["UnevenError"],
    "ranks.replicas": ["ReplicaError"],
    "reducers.alternating_powersgd": ["AlternatingPowerSGD"],
    "reducers.base": ["Reducer"],
    "reducers.batched_powersgd": ["BatchedPowerSGD"],
    "reducers.cast": ["Cast"],
    "reducers.error_feedback": ["ErrorFeedback", "Release"],
    "reducers.exact": ["Exact"],
    "reducers.float8": ["Float8"],
    "reducers.momentum": ["Momentum"],
    "reducers.powersgd": ["PowerSGD"],
    "reducers.quantized": ["Quantized"],
    "reducers.randomk": ["RandomK"],
    "reducers.sign": ["Sign"],
    "reducers.ternary": ["Ternary"],
    "reducers.topk": ["TopK"],
    "reducers.warmup": ["Warmup"],
    "run.attach": ["check_replicas"],
    "run.run": ["Run"],
    "run.stats": ["Stats"],
    "strategies.gradient_recipes": [
        "bf16",
        "ddp",
        "fp16",
        "fp8",
        "int4",
        "int8",
        "onebit_adam",
        "powersgd",
        "randomk",
        "sign",
        "silent",
        "topk",
    ],
    "strategies.local_recipes": ["hierarchical_sgd", "local_adam", "local_sgd", "post_local_sgd"],
    "strategies.naming": ["register"],
    "strategies.outer": ["Adopt", "Nesterov", "Outer", "OuterOptimizer", "SlowMo"],
    "strategies.outer_recipes": ["diloco", "slowmo", "sparseloco", "streaming_diloco"],
    "strategies.parsing": ["strategy"],
    "strategies.routes": ["Route"],
    "strategies.schedules": ["Every", "Never", "QSR", "Schedule"],
    "strategies.strategy": ["Averaging", "Deltas", "Strategy"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

_PACKAGES = ["checkpoint", "compat", "elastic", "integrations"]

# In full, and in order: type checkers and documentation tools read it without running it.
__all__ = [
    "QSR",
    "Adopt",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AlternatingPowerSGD",
    "Averaging",
    "BatchedPowerSGD",
    "Bucket",
    "Cast",
    "Collective",
    "CommunicationError",
    "Deltas",
    "ErrorFeedback",
    "Every",
    "Exact",
    "Exchange",
    "Float8",
    "Forecast",
    "Meter",
    "Momentum",
    "Nesterov",
    "Never",
    "Outer",
    "OuterOptimizer",
    "PeerError",
    "PowerSGD",
    "Quantized",
    "RandomK",
    "Reduced",
    "Reducer",
    "Release",
    "ReplicaError",
    "Route",
    "Run",
    "Schedule",
    "Sign",
    "Slot",
    "SlowMo",
    "Stats",
    "Strategy",
    "Ternary",
    "TopK",
    "Traffic",
    "UnevenError",
    "Warmup",
    "__version__",
    "attach",
    "bf16",
    "check_reducer",
    "check_replicas",
    "checkpoint",
    "compat",
    "ddp",
    "diloco",
    "elastic",
    "fp8",
    "fp16",
    "hierarchical_sgd",
    "int4",
    "int8",
    "integrations",
    "local_adam",
    "local_sgd",
    "onebit_adam",
    "post_local_sgd",
    "powersgd",
    "predict",
    "probe",
    "randomk",
    "register",
    "sign",
    "silent",
    "simulate",
    "slowmo",
    "sparseloco",
    "strategy",
    "streaming_diloco",
    "topk",
]


if not TYPE_CHECKING:  # type checkers would take any name for one that is there

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return importlib.import_module(f"laconic.{name}")
        if name not in _MODULE:
            raise AttributeError(f"module 'laconic' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"laconic.{_MODULE[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


if "LACONIC_STRATEGY" in os.environ:
    from laconic.run.environment import explain_unread as _explain_unread

    atexit.register(_explain_unread)  # whether `import laconic.auto` follows is not known before
