"""laconic: PyTorch data-parallel training that talks less.

Importing this package imports nothing else: each name brings its module when it is first used.
"""

import atexit
import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic import checkpoint as checkpoint
    from laconic import compat as compat
    from laconic.agreement import PeerError as PeerError
    from laconic.agreement import UnevenError as UnevenError
    from laconic.bucket import Bucket as Bucket
    from laconic.bucket import Slot as Slot
    from laconic.composition import Averaging as Averaging
    from laconic.composition import Deltas as Deltas
    from laconic.composition import Strategy as Strategy
    from laconic.dryrun import simulate as simulate
    from laconic.forecast import Forecast as Forecast
    from laconic.forecast import predict as predict
    from laconic.meter import Meter as Meter
    from laconic.naming import register as register
    from laconic.outer import Adopt as Adopt
    from laconic.outer import Nesterov as Nesterov
    from laconic.outer import Outer as Outer
    from laconic.outer import SlowMo as SlowMo
    from laconic.recipes import bf16 as bf16
    from laconic.recipes import ddp as ddp
    from laconic.recipes import diloco as diloco
    from laconic.recipes import fp8 as fp8
    from laconic.recipes import fp16 as fp16
    from laconic.recipes import hierarchical_sgd as hierarchical_sgd
    from laconic.recipes import int4 as int4
    from laconic.recipes import int8 as int8
    from laconic.recipes import local_sgd as local_sgd
    from laconic.recipes import post_local_sgd as post_local_sgd
    from laconic.recipes import powersgd as powersgd
    from laconic.recipes import randomk as randomk
    from laconic.recipes import sign as sign
    from laconic.recipes import silent as silent
    from laconic.recipes import slowmo as slowmo
    from laconic.recipes import sparseloco as sparseloco
    from laconic.recipes import streaming_diloco as streaming_diloco
    from laconic.recipes import topk as topk
    from laconic.reducers.alternating import AlternatingPowerSGD as AlternatingPowerSGD
    from laconic.reducers.base import Reducer as Reducer
    from laconic.reducers.batched_powersgd import BatchedPowerSGD as BatchedPowerSGD
    from laconic.reducers.cast import Cast as Cast
    from laconic.reducers.error_feedback import ErrorFeedback as ErrorFeedback
    from laconic.reducers.error_feedback import Release as Release
    from laconic.reducers.exact import Exact as Exact
    from laconic.reducers.float8 import Float8 as Float8
    from laconic.reducers.powersgd import PowerSGD as PowerSGD
    from laconic.reducers.quantized import Quantized as Quantized
    from laconic.reducers.randomk import RandomK as RandomK
    from laconic.reducers.sign import Sign as Sign
    from laconic.reducers.topk import TopK as TopK
    from laconic.reducers.warmup import Warmup as Warmup
    from laconic.replicas import ReplicaError as ReplicaError
    from laconic.routes import Route as Route
    from laconic.run import Run as Run
    from laconic.run import attach as attach
    from laconic.run import check_replicas as check_replicas
    from laconic.schedules import QSR as QSR
    from laconic.schedules import Every as Every
    from laconic.schedules import Never as Never
    from laconic.spec import strategy as strategy
    from laconic.stats import Stats as Stats
    from laconic.wire import AllGather as AllGather
    from laconic.wire import AllReduce as AllReduce
    from laconic.wire import AllToAll as AllToAll
    from laconic.wire import CommunicationError as CommunicationError
    from laconic.wire import Exchange as Exchange
    from laconic.wire import Reduced as Reduced
    from laconic.wire import Traffic as Traffic

__version__ = "0.1.0"

_HOME = {
    "agreement": ["PeerError", "UnevenError"],
    "bucket": ["Bucket", "Slot"],
    "dryrun": ["simulate"],
    "forecast": ["Forecast", "predict"],
    "composition": ["Averaging", "Deltas", "Strategy"],
    "meter": ["Meter"],
    "naming": ["register"],
    "outer": ["Adopt", "Nesterov", "Outer", "SlowMo"],
    "recipes": [
        "bf16",
        "ddp",
        "diloco",
        "fp16",
        "fp8",
        "hierarchical_sgd",
        "int4",
        "int8",
        "local_sgd",
        "post_local_sgd",
        "powersgd",
        "randomk",
        "sign",
        "silent",
        "slowmo",
        "sparseloco",
        "streaming_diloco",
        "topk",
    ],
    "reducers.alternating": ["AlternatingPowerSGD"],
    "reducers.base": ["Reducer"],
    "reducers.batched_powersgd": ["BatchedPowerSGD"],
    "reducers.cast": ["Cast"],
    "reducers.error_feedback": ["ErrorFeedback", "Release"],
    "reducers.exact": ["Exact"],
    "reducers.float8": ["Float8"],
    "reducers.powersgd": ["PowerSGD"],
    "reducers.quantized": ["Quantized"],
    "reducers.randomk": ["RandomK"],
    "reducers.sign": ["Sign"],
    "reducers.topk": ["TopK"],
    "reducers.warmup": ["Warmup"],
    "replicas": ["ReplicaError"],
    "routes": ["Route"],
    "run": ["Run", "attach", "check_replicas"],
    "schedules": ["Every", "Never", "QSR"],
    "spec": ["strategy"],
    "stats": ["Stats"],
    "wire": ["AllGather", "AllReduce", "AllToAll", "CommunicationError", "Exchange", "Reduced", "Traffic"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

_PACKAGES = ["checkpoint", "compat"]

__all__ = [*_MODULE, "__version__", *_PACKAGES]


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
    from laconic.variable import explain_unread as _explain_unread

    atexit.register(_explain_unread)  # whether `import laconic.auto` follows is not known before
