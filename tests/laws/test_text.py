"""Every strategy's text reads back as that strategy, or says that it can't."""

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.composition import BUFFERS, MOMENTS, ORDERS
from laconic.recipes import RECIPES
from laconic.routes import AUTO
from laconic.schedules import Until
from laconic.wire import Exchange
from tests.laws.reducers import EVERY

steps = st.integers(0, 50)
shares = st.floats(0.01, 0.99)
every = st.integers(1, 64).flatmap(lambda period: st.builds(laconic.Every, st.just(period), steps, st.integers(0, period)))
schedules = (
    every | st.builds(Until, steps) | st.builds(laconic.QSR, st.integers(1, 64), shares, steps) | st.just(laconic.Never())
)
scopes = st.sampled_from(["world", "node", AUTO, 'a  mesh\'s "dimension"']) | st.integers(1, 8)
legs = st.lists(st.tuples(schedules, scopes), max_size=3)
routes = st.builds(laconic.Route, legs.map(tuple) | legs)
reducers = st.sampled_from(EVERY) | st.builds(laconic.Warmup, steps, st.sampled_from(EVERY), st.sampled_from(EVERY))
outers = (
    st.builds(laconic.Adopt, shares) | st.builds(laconic.Nesterov, shares, shares) | st.builds(laconic.SlowMo, shares, shares)
)
moments = st.sampled_from(MOMENTS) | st.dictionaries(st.text(max_size=5), st.integers(1, 99), max_size=2)
deltas = st.builds(
    laconic.Deltas,
    outers,
    reducers,
    order=st.sampled_from(ORDERS),
    blend=shares,
    carry=st.booleans(),
    offload=st.booleans(),
    outlier=st.none() | st.floats(1, 9) | st.just(float("inf")),
)
averagings = st.builds(laconic.Averaging, routes, st.none() | deltas, st.sampled_from(BUFFERS), moments, atomic=st.booleans())
compositions = st.builds(laconic.Strategy, reducers, routes, st.none() | averagings)


@settings(max_examples=50, deadline=None)
@given(compositions)
def test_a_composition_reads_back(composed: laconic.Strategy) -> None:
    assert laconic.strategy(str(composed)) == composed
    assert str(laconic.strategy(str(composed))) == str(composed)


STREAM = laconic.Averaging(
    laconic.Route(((laconic.Every(16, 3), "world"),)),
    laconic.Deltas(laconic.Nesterov(0.5, 0.5), laconic.Quantized(4), fragments=4, delay=2),
)
ARGUMENTS: dict[str, list[Any]] = {
    "period": [8, laconic.QSR(4, 0.02)],
    "periods": [{2: 2, 4: "world"}],
    "reducer": [laconic.Cast("fp16"), laconic.ErrorFeedback(laconic.TopK(0.25))],
    "moments": ["reset", {"exp_avg": 48, "exp_avg_sq": 96}],
    "subgroup": ["node", "none"],
    "buffers": ["local"],
    "order": ["bytes"],
    "outlier": [4.0],
    "rank": [2],
    "fragments": [2],
    "delay": [1],
}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_reads_back_by_its_text_and_by_its_parts(name: str) -> None:
    build = RECIPES[name]
    for argument in inspect.signature(build).parameters:
        for value in ARGUMENTS.get(argument, []):
            try:
                made = build(**{argument: value})
            except (TypeError, ValueError):
                continue  # this recipe says why not
            assert laconic.strategy(str(made)) == made
            parts = laconic.Strategy(made.reducer, made.route, made.averaging)
            assert str(parts).startswith("Strategy(")
            assert laconic.strategy(str(parts)) == made


def test_a_changed_recipe_does_not_keep_the_recipe_s_text() -> None:
    changed = replace(laconic.bf16(warmup=3), averaging=STREAM)
    assert str(changed) != "bf16(warmup=3)"
    assert laconic.strategy(str(changed)) == changed


def test_a_part_that_has_no_name_is_not_given_one() -> None:
    @dataclass(frozen=True)
    class Hidden(laconic.Reducer):
        bits: int = 8

        def reduce(self, bucket: laconic.Bucket) -> Exchange:
            return laconic.Exact().reduce(bucket)

    text = str(laconic.ddp(reducer=Hidden(4)))
    assert "<" in text
    assert "Hidden(bits=4)>" in text
    with pytest.raises(ValueError, match="has no name by which it could be found again"):
        laconic.strategy(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Strategy(Exact(), 3)", "route must be a Route"),
        ("Strategy(Exact(), Route(((3, 'world'),)))", "legs must be pairs such as (Every(16), 'world'), got (3, 'world')"),
        ("Strategy(Exact(), Route(3))", "legs must be pairs"),
        ("Strategy(Exact(), Route(()), 3)", "averaging must be an Averaging"),
        ("Strategy(Exact(), Route(()), Averaging(Route(()), 3))", "deltas must be a Deltas"),
        ("Strategy(Exact(), Route(()), text='ddp()')", "Strategy has no 'text'"),
    ],
)
def test_compositions_that_make_no_sense(text: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wanted)):
        laconic.strategy(text)
