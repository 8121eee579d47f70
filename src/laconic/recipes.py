"""Strategies by name: a recipe says how, when and with whom in one line."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, ParamSpec

from laconic import routes
from laconic.reducers.base import Reducer, checked, checked_steps
from laconic.reducers.cast import Cast
from laconic.reducers.error_feedback import ErrorFeedback
from laconic.reducers.exact import Exact
from laconic.reducers.float8 import Float8
from laconic.reducers.powersgd import PowerSGD
from laconic.reducers.quantized import Quantized
from laconic.reducers.randomk import RandomK
from laconic.reducers.sign import Sign
from laconic.reducers.topk import TopK
from laconic.reducers.warmup import Warmup
from laconic.routes import Route

Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Strategy:
    """How gradients are averaged, and when and with whom. `str()` gives the text it can be made from again."""

    reducer: Reducer
    route: Route
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        checked(self.reducer, "reducer")

    def __str__(self) -> str:
        return self.text or render_call("Strategy", {"reducer": self.reducer, "route": self.route})


RECIPES: dict[str, Callable[..., Strategy]] = {}


def recipe(build: Callable[Arguments, Strategy]) -> Callable[Arguments, Strategy]:
    """Give a recipe its name in texts, and its strategies the text they came from."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def _named(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Strategy:
        given = signature.bind(*args, **kwargs).arguments
        chosen = {name: value for name, value in given.items() if value != signature.parameters[name].default}
        return replace(build(*args, **kwargs), text=render_call(build.__name__, chosen))

    RECIPES[build.__name__] = _named
    return _named


def render(value: object) -> str:
    """A value as it is written in a strategy's text; what a dataclass has by default is left out."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != _default(f)}
        return render_call(type(value).__name__, shown)
    return repr(value)


def render_call(name: str, arguments: Mapping[str, object]) -> str:
    """A call as it is written in a strategy's text."""
    return f"{name}({', '.join(f'{key}={render(value)}' for key, value in arguments.items())})"


def _default(f: Any) -> object:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _warmed(warmup: int, reducer: Reducer) -> Reducer:
    return Warmup(warmup, reducer) if checked_steps(warmup, "warmup") else reducer


@recipe
def ddp(*, reducer: Reducer = Exact(), warmup: int = 0) -> Strategy:  # noqa: B008  (a frozen value)
    """Average the gradients of every step, by any reducer; `warmup` steps of plain all-reduce first.

    Bytes: the reducer's; as given, 2(N-1)/N * n * itemsize a step, bit for bit DDP without a hook.
    """
    return Strategy(_warmed(warmup, reducer), routes.world())


@recipe
def fp16(*, warmup: int = 0) -> Strategy:
    """Gradients as fp16 on the wire, summed in fp32. Bytes: 2(N-1)/N * 2n a step."""
    return Strategy(_warmed(warmup, Cast("fp16")), routes.world())


@recipe
def bf16(*, warmup: int = 0) -> Strategy:
    """Gradients as bf16 on the wire, summed in fp32. Bytes: 2(N-1)/N * 2n a step."""
    return Strategy(_warmed(warmup, Cast("bf16")), routes.world())


@recipe
def int8(*, warmup: int = 0) -> Strategy:
    """Gradients as 8-bit whole numbers with block scales. Bytes: 2(N-1)/N * 1.008n a step."""
    return Strategy(_warmed(warmup, Quantized(8)), routes.world())


@recipe
def int4(*, warmup: int = 0) -> Strategy:
    """Gradients as 4-bit whole numbers with block scales and error feedback. Bytes: 2(N-1)/N * 0.531n a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(Quantized(4))), routes.world())


@recipe
def fp8(*, warmup: int = 0) -> Strategy:
    """Gradients as 8-bit floats (e4m3) with block scales. Bytes: 2(N-1)/N * 1.008n a step."""
    return Strategy(_warmed(warmup, Float8()), routes.world())


@recipe
def powersgd(*, rank: int = 4, warmup: int = 10) -> Strategy:
    """Matrices by low rank with error feedback. Bytes: 2(N-1)/N * 4(rank * (rows + columns) per matrix + the rest) a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(PowerSGD(rank))), routes.world())


@recipe
def sign(*, warmup: int = 10) -> Strategy:
    """One bit a number with error feedback. Bytes: (N-1) * n/8 a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(Sign())), routes.world())


@recipe
def topk(*, ratio: float = 0.01, warmup: int = 10) -> Strategy:
    """The largest entries with error feedback. Bytes: (N-1) * 8 * ratio * n a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(TopK(ratio))), routes.world())


@recipe
def randomk(*, ratio: float = 0.05, warmup: int = 10) -> Strategy:
    """Entries drawn alike by all ranks, with error feedback. Bytes: 2(N-1)/N * 4 * ratio * n a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(RandomK(ratio))), routes.world())


@recipe
def silent() -> Strategy:
    """Every rank for itself; replicas are averaged once, on leaving. Bytes: none a step. The speed limit of a comparison."""
    return Strategy(Exact(), routes.silent())
