"""What a strategy is made of: how, when, with whom, what, and then what."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from laconic.reducers.base import Reducer, checked, checked_frozen
from laconic.strategies.naming import name_of
from laconic.strategies.outer import Outer
from laconic.strategies.routes import Route
from laconic.strategies.schedules import Schedule

BUFFERS = ("average", "local", "broadcast")
MOMENTS = ("keep", "average", "reset", "auto")
ORDERS = ("strided", "contiguous", "bytes")
SECOND_MOMENTS = ("local", "slow", "shared")
RISKS = ("same", "rounding", "delay", "local")
PROBE_SECONDS = (0.1, 60.0)  # the shortest and the longest
ALWAYS_SHOWN = ("bits", "rank", "ratio")  # of a part in a text: what decides its bytes


@dataclass(frozen=True)
class Deltas:
    """Send how far each replica has come from a common anchor, instead of where it is.

    Maths: delta = anchor - parameter, averaged by `reducer`; `outer` steps the anchor by the mean; then the parameter becomes
    blend * parameter + (1 - blend) * anchor.

    Bytes: the reducer's, once a period.

    Memory: the anchor, what the outer optimizer and the reducer keep, and twice what is outstanding.

    Arguments:
      `outer`: builds the optimizer over the anchor, such as Nesterov(0.7, 0.9).
      `reducer`: how deltas are averaged.
      `fragments`: into how many parts parameters are cut, which take turns within the period. Default 1.
      `order`: how: by layer, "strided" or "contiguous", or in runs of equal "bytes". Default "strided".
      `delay`: steps that an exchange stays outstanding while training goes on. Default 0.
      `blend`: the weight of the local parameters when it is complete, from 0 to 1. Default 0.0.
      `carry`: put the steps that were made in the meantime on top of the anchor. Default False.
      `offload`: keep the anchor and the outer optimizer's memory on the CPU. Default False.
      `outlier`: skip a sync whose deltas' norm is more than so many standard deviations above that of the syncs before, once
        there have been eight; None: skip none. Default None.

    >>> import laconic
    >>> laconic.diloco(64).averaging.deltas == laconic.Deltas(
    ...     laconic.Nesterov(0.7, 0.6), laconic.Exact()
    ... )
    True
    """

    outer: Outer
    reducer: Reducer
    fragments: int = 1
    order: str = "strided"  # by layer, "strided" or "contiguous"; or in runs of equal "bytes"
    delay: int = 0
    blend: float = 0.0
    carry: bool = False
    offload: bool = False
    outlier: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.outer, Outer):
            hint = "; of an optimizer class make OuterOptimizer(torch.optim.Adam, {'lr': 0.1})" if callable(self.outer) else ""
            raise TypeError(f"outer must be an Outer such as Nesterov(0.7, 0.9), got {self.outer!r}{hint}")
        checked_frozen(self.outer)
        checked(self.reducer, "reducer")
        for name in ("fragments", "delay"):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        if self.fragments < 1:
            raise ValueError(f"fragments must be at least 1, got {self.fragments}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.delay < 0:
            raise ValueError(f"delay must be 0 or more steps, got {self.delay}")
        if self.outlier is not None and type(self.outlier) not in (int, float):
            raise TypeError(f"outlier must be a number of standard deviations, or None to skip no sync, got {self.outlier!r}")
        if self.outlier is not None and not self.outlier > 0:
            raise ValueError(f"outlier must be above 0 standard deviations, or None to skip no sync, got {self.outlier!r}")
        if type(self.blend) not in (int, float) or not 0 <= self.blend <= 1:
            raise ValueError(f"blend must be from 0 (adopt global parameters) to 1 (keep local ones), got {self.blend!r}")
        if not isinstance(self.carry, bool):
            raise TypeError(f"carry must be True or False, got {self.carry!r}")


@dataclass(frozen=True)
class Averaging:
    """What is averaged between steps, beyond gradients: parameters, or deltas from an anchor.

    Bytes: of parameters, 2(N-1)/N * n * itemsize an averaging (N ranks, n numbers); of deltas, their reducer's.

    Memory: with `atomic`, a copy of the model during an averaging of parameters; of deltas, theirs.

    Arguments:
      `route`: when, and with whom.
      `deltas`: what is sent instead of parameters; None: parameters themselves. Default None.
      `buffers`: "average" (of counters, the largest), "local" (left alone), or "broadcast" (the first rank's).
        Default "average".
      `moments`: the optimizer's memory at an averaging: "keep", "average", "reset", "auto" (SGD's momentum is reset, all else
        kept), or each key's period in steps, such as {"exp_avg": 48}. Default "keep".
      `atomic`: no parameter is written before all have arrived, as is always so of deltas. Default True.

    >>> import laconic
    >>> averaging = laconic.Averaging(laconic.Route(((laconic.Every(16), "world"),)))
    >>> averaging == laconic.local_sgd(16).averaging
    True
    """

    route: Route
    deltas: Deltas | None = None
    buffers: str = "average"
    moments: str | tuple[tuple[str, int], ...] | Mapping[str, int] = "keep"  # a mapping is kept as its items
    atomic: bool = True

    def __post_init__(self) -> None:
        _checked_route(self.route)
        if self.deltas is not None and not isinstance(self.deltas, Deltas):
            raise TypeError(f"deltas must be a Deltas(outer=..., reducer=...), or None for parameters, got {self.deltas!r}")
        if isinstance(self.moments, Mapping):
            object.__setattr__(self, "moments", tuple(sorted(self.moments.items())))
        if not isinstance(self.atomic, bool):
            raise TypeError(f"atomic must be True or False, got {self.atomic!r}")
        if not isinstance(self.moments, str | tuple):
            raise TypeError(f"moments must be a word or a mapping of periods by name, got {self.moments!r}")
        if self.buffers not in BUFFERS:
            raise ValueError(f"buffers must be one of {', '.join(BUFFERS)}, got {self.buffers!r}")
        if isinstance(self.moments, str) and self.moments not in MOMENTS:
            raise ValueError(
                f"moments must be one of {', '.join(MOMENTS)}, or periods by name, {{'exp_avg': 48}}, got {self.moments!r}"
            )
        if self.deltas is None or (self.deltas.fragments == 1 and self.deltas.delay == 0):
            return
        fixed, fragments, delay = self.fixed, self.deltas.fragments, self.deltas.delay
        if fixed is None or fixed.fixed_period is None:
            raise ValueError("fragments and delay need a fixed period, not one that follows the learning rate")
        if not fixed.due((fixed.start or 0) + fixed.fixed_period - 1):
            raise ValueError(f"fragments and delay need a sync at the end of each period, and {render(fixed)} has none there")
        if fragments > fixed.fixed_period:
            raise ValueError(f"fragments must be at most the period, one a step; got {fragments} in {fixed.fixed_period} steps")
        if delay >= fixed.fixed_period:
            raise ValueError(
                f"delay must be below the period: an exchange is complete before its fragment leaves again; "
                f"got {delay} of {fixed.fixed_period} steps"
            )

    @property
    def start(self) -> int:
        """Steps before the first local one."""
        starts = [schedule.start for schedule in self.route.schedules if schedule.start is not None]
        return min(starts, default=0)

    @property
    def fixed(self) -> Schedule | None:
        """The schedule of a route that has only one, if its period is always as long."""
        schedules = self.route.schedules
        return schedules[0] if len(schedules) == 1 and schedules[0].fixed_period else None


@dataclass(frozen=True)
class Advised:
    """The user leaves the choice to the advisor; until it has chosen, the run goes by the rest of the strategy.

    The advisor chooses the mildest strategy that reaches `share` of the rate without communication, and none above `risk`. It
    times `steps` steps, and probes the ranks' own network for `seconds`; with `link`, it goes by that link's rate instead.

    >>> from laconic import strategy
    >>> strategy("auto(risk='rounding')").advised
    Advised(risk='rounding', share=0.95, link=None, steps=10, seconds=5.0)
    """

    risk: str = "delay"
    share: float = 0.95
    link: str | None = None  # such as "1gbit:20ms"
    steps: int = 10
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.risk not in RISKS:
            raise ValueError(f"risk must be one of {', '.join(RISKS)}, from mild to strong, got {self.risk!r}")
        if type(self.share) not in (int, float) or not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, such as 0.95, got {self.share!r}")
        if self.link is not None and not isinstance(self.link, str):
            raise TypeError(f"link must be a text such as '1gbit', or None to probe, got {self.link!r}")
        if type(self.steps) is not int:
            raise TypeError(f"steps must be a whole number, got {self.steps!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        shortest, longest = PROBE_SECONDS
        if type(self.seconds) not in (int, float) or not shortest <= self.seconds <= longest:
            raise ValueError(f"seconds must be from {shortest:g} to {longest:g}, got {self.seconds!r}")


@dataclass(frozen=True, repr=False)
class Strategy:
    """How gradients are averaged, when and with whom, and what is averaged between steps.

    Recipes such as `laconic.int8()` make one; `laconic.strategy` reads one from a text. `str()` gives the text it can be made
    from again. A part that no text can name, such as an instance of a class inside a function, stands in angle brackets there,
    and `laconic.strategy` refuses the text.

    Maths: an Adam step is not linear in the gradient: a replica that divides by the noise of its own few samples, or by that of
    a coarse code, takes other steps than all together would. That is what `second_moment` is for.

    Arguments:
      `reducer`: how gradients are averaged.
      `route`: in which steps, and with whom.
      `averaging`: what is averaged between steps; None: nothing. Default None.
      `second_moment`: how Adam's moves when the warm-up is over. "local": each replica's follows its own gradients, as without
        laconic. "slow": its beta2 is 0.9999 at least. "shared": it is slow in local steps, and follows the gradients that all
        ranks average. Default "local".
      `advised`: what the advisor may choose instead, as `auto()` says it; None: this is the strategy. Default None.

    >>> import laconic
    >>> every_step = laconic.Route(((laconic.Every(1), "world"),))
    >>> laconic.Strategy(laconic.Cast("bf16"), every_step) == laconic.bf16()
    True
    """

    reducer: Reducer
    route: Route
    averaging: Averaging | None = None
    second_moment: str = "local"
    advised: Advised | None = None  # until an advisor has chosen another strategy; None: this is the one
    # Of a recipe's call: as it was written, and without what is as by default, so that two calls of the same have the same.
    # Not arguments, so that `dataclasses.replace` doesn't keep the text of what it changed.
    text: str = field(default="", compare=False, init=False)
    key: str = field(default="", compare=False, init=False)

    def __post_init__(self) -> None:
        checked(self.reducer, "reducer")
        _checked_route(self.route)
        if self.averaging is not None and not isinstance(self.averaging, Averaging):
            raise TypeError(f"averaging must be an Averaging(route=...), or None for gradients alone, got {self.averaging!r}")
        if self.second_moment not in SECOND_MOMENTS:
            raise ValueError(f"second_moment must be one of {', '.join(SECOND_MOMENTS)}, got {self.second_moment!r}")
        if self.advised is not None and not isinstance(self.advised, Advised):
            raise TypeError(f"advised must be an Advised(), or None, got {self.advised!r}")

    @property
    def cycle(self) -> int | None:
        """Steps after which it does the same again, once it is warm; the base of a period that follows the learning rate.

        Moments with periods of their own are no part of it. None: a schedule of the user's own doesn't say it.
        """
        schedules = [*self.route.schedules, *(self.averaging.route.schedules if self.averaging else ())]
        cycles = [schedule.cycle or schedule.fixed_period for schedule in schedules]
        return None if None in cycles else math.lcm(*(cycle for cycle in cycles if cycle is not None))

    @property
    def warmup(self) -> int:
        """Steps before the strategy does what it is for."""
        return max(self.reducer.warmup_steps, self.averaging.start if self.averaging else 0)

    def __str__(self) -> str:
        return self.text or render(self)

    def __repr__(self) -> str:
        return str(self)

    @property
    def compared(self) -> str:
        """The text that ranks compare: of a recipe's call, without arguments that are as by default."""
        return self.key or str(self)


def render(value: object) -> str:
    """A value as it is written in a strategy's text; what a dataclass has by default is left out, but for `ALWAYS_SHOWN`.

    >>> from laconic import Every, Quantized
    >>> render(Every(4)), render({4: ("node", 2.5)}), render(Quantized(8))
    ('Every(period=4)', "{4: ('node', 2.5)}", 'Quantized(bits=8)')
    """
    match value:
        case bool() | None:
            return repr(value)
        case int():
            return repr(int(value))
        case str():
            return repr(str(value))
        case float():
            return repr(float(value)).replace("inf", "1e999")  # which is how Python reads infinity
        case tuple():
            return f"({', '.join(map(render, value))}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(map(render, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{render(key)}: {render(part)}' for key, part in value.items())}}}"
    if isinstance(value, type) and (place := name_of(value)):
        return place
    if is_dataclass(value) and not isinstance(value, type):
        shown = {f.name: getattr(value, f.name) for f in fields(value) if f.init and _is_shown(f, getattr(value, f.name))}
        name = type(value).__name__ if type(value) in COMPOSITES else name_of(type(value))
        return render_call(name, shown) if name else f"<{render_call(type(value).__qualname__, shown)}>"
    return f"<{value!r}>"


def render_call(name: str, arguments: Mapping[str, object]) -> str:
    """A call as it is written in a strategy's text."""
    return f"{name}({', '.join(f'{key}={render(value)}' for key, value in arguments.items())})"


def _is_shown(f: Any, value: object) -> bool:
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    return f.name in ALWAYS_SHOWN or bool(value != default)


def _checked_route(route: object) -> None:
    if not isinstance(route, Route):
        raise TypeError(f"route must be a Route of (schedule, scope) pairs, got {route!r}")


COMPOSITES = (Strategy, Averaging, Deltas, Route, Advised)
"""What is put together of reducers, schedules and outer optimizers."""
