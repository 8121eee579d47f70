"""laconic: PyTorch data-parallel training that talks less.

Importing this package imports nothing else: each name brings its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.agreement import UnevenError as UnevenError
    from laconic.bucket import Bucket as Bucket
    from laconic.bucket import Slot as Slot
    from laconic.dryrun import simulate as simulate
    from laconic.forecast import predict as predict
    from laconic.recipes import Strategy as Strategy
    from laconic.recipes import bf16 as bf16
    from laconic.recipes import ddp as ddp
    from laconic.recipes import fp16 as fp16
    from laconic.recipes import silent as silent
    from laconic.reducers.base import Reducer as Reducer
    from laconic.reducers.cast import Cast as Cast
    from laconic.reducers.exact import Exact as Exact
    from laconic.reducers.warmup import Warmup as Warmup
    from laconic.routes import Route as Route
    from laconic.run import Run as Run
    from laconic.run import Stats as Stats
    from laconic.run import attach as attach
    from laconic.schedules import Every as Every
    from laconic.schedules import Never as Never
    from laconic.spec import strategy as strategy
    from laconic.wire import AllGather as AllGather
    from laconic.wire import AllReduce as AllReduce
    from laconic.wire import AllToAll as AllToAll
    from laconic.wire import Exchange as Exchange
    from laconic.wire import Reduced as Reduced
    from laconic.wire import Traffic as Traffic

__version__ = "0.1.0"

_HOME = {
    "agreement": ["UnevenError"],
    "bucket": ["Bucket", "Slot"],
    "dryrun": ["simulate"],
    "forecast": ["predict"],
    "recipes": ["Strategy", "bf16", "ddp", "fp16", "silent"],
    "reducers.base": ["Reducer"],
    "reducers.cast": ["Cast"],
    "reducers.exact": ["Exact"],
    "reducers.warmup": ["Warmup"],
    "routes": ["Route"],
    "run": ["Run", "Stats", "attach"],
    "schedules": ["Every", "Never"],
    "spec": ["strategy"],
    "wire": ["AllGather", "AllReduce", "AllToAll", "Exchange", "Reduced", "Traffic"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_MODULE, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"laconic.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
