"""What each recipe is made of: as it comes, and with every argument given."""

import pytest

import laconic
from laconic.comm.scopes import AUTO
from laconic.reducers.base import Reducer
from laconic.strategies.recipe import recipes
from laconic.strategies.routes import Route
from laconic.strategies.schedules import QSR, Every, Never, Schedule, Until
from laconic.strategies.strategy import Advised

EXACT = laconic.Exact()
FED = laconic.ErrorFeedback


def gradients(reducer: Reducer) -> laconic.Strategy:
    return laconic.Strategy(reducer, Route(((Every(1, 0, 0), "world"),)))


def warm(reducer: Reducer, steps: int = 10) -> laconic.Strategy:
    return gradients(laconic.Warmup(steps, reducer, EXACT))


def local(
    schedule: Schedule,
    outer: laconic.Outer | None = None,
    reducer: Reducer = EXACT,
    moments: str = "keep",
    fragments: int = 1,
    delay: int = 0,
    blend: float = 0.0,
) -> laconic.Strategy:
    deltas = laconic.Deltas(outer, reducer, fragments, "strided", delay, blend, False, False, None) if outer else None
    averaging = laconic.Averaging(Route(((schedule, "world"),)), deltas, "average", moments, True)
    return laconic.Strategy(EXACT, Route(((Never(), "world"),)), averaging)


AS_IT_COMES = {
    "auto": laconic.Strategy(EXACT, Route(((Every(1, 0, 0), "world"),)), advised=Advised("delay", 0.95, None, 10, 5.0)),
    "ddp": gradients(EXACT),
    "fp16": gradients(laconic.Cast("fp16")),
    "bf16": gradients(laconic.Cast("bf16")),
    "int8": gradients(laconic.Quantized(8)),
    "int4": gradients(FED(laconic.Quantized(4))),
    "fp8": gradients(laconic.Float8()),
    "powersgd": warm(FED(laconic.PowerSGD(4))),
    "sign": warm(FED(laconic.Sign())),
    "topk": warm(FED(laconic.TopK(0.01))),
    "randomk": warm(FED(laconic.RandomK(0.05))),
    "onebit_adam": laconic.Strategy(
        laconic.Warmup(100, laconic.Momentum(FED(laconic.Sign(256)), 0.9), laconic.Quantized(8)),
        Route(((Every(1), "world"),)),
        second_moment="slow",
    ),
    "silent": laconic.Strategy(EXACT, Route(((Never(), "world"),))),
    "local_adam": laconic.Strategy(
        laconic.Warmup(100, laconic.Release(laconic.Quantized(4)), FED(laconic.Quantized(4))),
        Route(((Until(100), "world"), (Every(64, 100, 1), "world"))),
        laconic.Averaging(Route(((Every(4, 100), "world"),)), laconic.Deltas(laconic.Adopt(1.0), FED(laconic.Ternary()))),
        "shared",
    ),
    "local_sgd": local(Every(16, 0)),
    "post_local_sgd": laconic.Strategy(
        EXACT, Route(((Until(100), "world"), (Every(1, 100), AUTO))), laconic.Averaging(Route(((Every(16, 100), "world"),)))
    ),
    "hierarchical_sgd": laconic.Strategy(
        EXACT, Route(((Never(), "world"),)), laconic.Averaging(Route(((Every(16), "world"), (Every(4), "node"))))
    ),
    "slowmo": local(Every(12, 0), laconic.SlowMo(0.5, 1.0), moments="auto"),
    "diloco": local(Every(32, 0), laconic.Nesterov(0.7, 0.6)),
    "streaming_diloco": local(Every(32, 0), laconic.Nesterov(0.7, 0.6), laconic.Quantized(8), "keep", 4, 4, 0.5),
    "sparseloco": local(Every(30, 0), laconic.Adopt(1.0), FED(laconic.TopK(1 / 64, values="2bit"), 0.95)),
}


def test_every_recipe_as_it_comes() -> None:
    assert {name: build() for name, build in recipes().items()} == AS_IT_COMES
    assert laconic.Nesterov() == laconic.Nesterov(0.7, 0.9), "the paper's"


LOCAL = "warmup=2, reducer=Sign(), buffers='local', offload=True, outlier=5.0"
BEGUN = Route(((Until(2), "world"),))


def lossy(outer: laconic.Outer, reducer: Reducer = laconic.Sign(), moments: str = "reset") -> laconic.Strategy:  # noqa: B008
    deltas = laconic.Deltas(outer, reducer, offload=True, outlier=5.0)
    return laconic.Strategy(EXACT, BEGUN, laconic.Averaging(Route(((Every(7, 2), "world"),)), deltas, "local", moments))


WITH_ARGUMENTS = {
    "ddp(reducer=Sign(), warmup=3)": warm(laconic.Sign(), 3),
    "fp16(warmup=3)": warm(laconic.Cast("fp16"), 3),
    "int8(warmup=3)": warm(laconic.Quantized(8), 3),
    "int4(warmup=3)": warm(FED(laconic.Quantized(4)), 3),
    "fp8(warmup=3)": warm(laconic.Float8(), 3),
    "powersgd(rank=2, warmup=3)": warm(FED(laconic.PowerSGD(2)), 3),
    "sign(warmup=0)": gradients(FED(laconic.Sign())),
    "topk(ratio=0.5, warmup=0)": gradients(FED(laconic.TopK(0.5))),
    "randomk(ratio=0.5, warmup=3)": warm(FED(laconic.RandomK(0.5)), 3),
    "local_sgd(4, warmup=2, reducer=Sign(), buffers='local', moments={'b': 3, 'a': 2}, atomic=False)": laconic.Strategy(
        EXACT,
        BEGUN,
        laconic.Averaging(
            Route(((Every(4, 2), "world"),)),
            laconic.Deltas(laconic.Adopt(1.0), laconic.Sign()),
            "local",
            (("a", 2), ("b", 3)),
            atomic=False,
        ),
    ),
    "post_local_sgd(5, 6, subgroup='none', buffers='broadcast', moments='reset', atomic=False)": laconic.Strategy(
        EXACT,
        Route(((Until(5), "world"),)),
        laconic.Averaging(Route(((Every(6, 5), "world"),)), None, "broadcast", "reset", atomic=False),
    ),
    "post_local_sgd(0, QSR(4, 0.5), subgroup='rack', reducer=Sign())": laconic.Strategy(
        EXACT,
        Route(((Every(1, 0), "rack"),)),
        laconic.Averaging(Route(((QSR(4, 0.5, 0), "world"),)), laconic.Deltas(laconic.Adopt(1.0), laconic.Sign())),
    ),
    "hierarchical_sgd({8: 4, 2: 2}, warmup=2, buffers='local', moments='reset', atomic=False)": laconic.Strategy(
        EXACT, BEGUN, laconic.Averaging(Route(((Every(8, 2), 4), (Every(2, 2), 2))), None, "local", "reset", atomic=False)
    ),
    "ddp(reducer=Sign(), warmup=3, warmup_reducer=Quantized(8), second_moment='shared')": laconic.Strategy(
        laconic.Warmup(3, laconic.Sign(), laconic.Quantized(8)), Route(((Every(1), "world"),)), second_moment="shared"
    ),
    "onebit_adam(warmup=0, reducer=Ternary(), beta=0.5)": laconic.Strategy(
        laconic.Momentum(laconic.Ternary(), 0.5), Route(((Every(1), "world"),)), second_moment="slow"
    ),
    "local_adam(6, warmup=2, refresh=0, second_moment='local', warmup_reducer=Sign(), delay=2, moments='average')": (
        laconic.Strategy(
            laconic.Sign(),
            BEGUN,
            laconic.Averaging(
                Route(((Every(6, 2), "world"),)),
                laconic.Deltas(laconic.Adopt(1.0), FED(laconic.Ternary()), delay=2, carry=True),
                moments="average",
            ),
        )
    ),
    "post_local_sgd(3, 4, subgroup='node', warmup_reducer=Sign(), second_moment='slow')": laconic.Strategy(
        laconic.Warmup(3, EXACT, laconic.Sign()),
        Route(((Until(3), "world"), (Every(1, 3), "node"))),
        laconic.Averaging(Route(((Every(4, 3), "world"),))),
        "slow",
    ),
    f"slowmo(7, beta=0.25, alpha=0.75, moments='reset', {LOCAL})": lossy(laconic.SlowMo(0.25, 0.75)),
    f"diloco(7, outer_lr=0.25, outer_momentum=0.75, moments='reset', {LOCAL})": lossy(laconic.Nesterov(0.25, 0.75)),
    f"diloco(7, outer_lr=0.25, outer_momentum=0.0, moments='keep', {LOCAL})": lossy(laconic.Adopt(0.25), moments="keep"),
    f"streaming_diloco(20, fragments=5, delay=3, blend=0.25, carry=True, order='bytes', outer_lr=0.5, {LOCAL})": (
        laconic.Strategy(
            EXACT,
            BEGUN,
            laconic.Averaging(
                Route(((Every(20, 2), "world"),)),
                laconic.Deltas(laconic.Nesterov(0.5, 0.6), laconic.Sign(), 5, "bytes", 3, 0.25, True, True, 5.0),
                "local",
            ),
        )
    ),
    f"sparseloco(7, ratio=0.25, decay=0.5, outer_lr=0.75, moments='reset', {LOCAL.replace('reducer=Sign(), ', '')})": lossy(
        laconic.Adopt(0.75), FED(laconic.TopK(0.25, values="2bit"), 0.5)
    ),
}


@pytest.mark.parametrize("text", WITH_ARGUMENTS)
def test_every_argument_reaches_its_part(text: str) -> None:
    assert laconic.strategy(text) == WITH_ARGUMENTS[text]


@pytest.mark.parametrize(
    ("text", "cycle", "warmup"),
    [
        ("ddp()", 1, 0),
        ("int8(warmup=5)", 1, 5),
        ("diloco(6, warmup=4, reducer=Warmup(9, Sign()))", 6, 4),
        ("hierarchical_sgd({4: 2, 6: 'world'}, warmup=3)", 12, 3),
        ("local_adam(6, warmup=5, refresh=10)", 30, 5),  # gradients and deltas together
        ("local_adam(6, warmup=0, refresh=0)", 6, 0),
        ("slowmo(QSR(5, 0.1, 7))", 5, 7),  # a recipe's period begins where its own warm-up ends
        ("slowmo(QSR(5, 0.1), warmup=7)", 5, 7),
        ("Strategy(Warmup(3, Sign()), Route(((Every(1), 'world'),)), Averaging(Route(((Every(8, 6), 'world'),))))", 8, 6),
        ("Strategy(Warmup(9, Sign()), Route(((Every(1), 'world'),)), Averaging(Route(((Every(8, 6), 'world'),))))", 8, 9),
        ("Strategy(Sign(), Route(()), Averaging(Route(((Every(8, 6), 'world'), (Every(2, 4), 2)))))", 8, 4),
    ],
)
def test_how_long_a_strategy_warms_up_and_when_it_repeats(text: str, cycle: int, warmup: int) -> None:
    made = laconic.strategy(text)
    assert (made.cycle, made.warmup) == (cycle, warmup)
