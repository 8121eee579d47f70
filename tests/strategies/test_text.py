"""Every strategy's text reads back as that strategy, or says that it can't."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.comm.exchange import Exchange
from laconic.comm.scopes import AUTO
from laconic.strategies import naming
from laconic.strategies.parsing import saved
from laconic.strategies.recipe import recipes
from laconic.strategies.schedules import Until
from laconic.strategies.strategy import BUFFERS, MOMENTS, ORDERS
from tests.reducers.every import EVERY

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
    "second_moment": ["shared", "slow"],
    "warmup_reducer": [laconic.Quantized(8)],
    "refresh": [0, 7],
}


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_reads_back_by_its_text_and_by_its_parts(name: str) -> None:
    build = recipes()[name]
    for argument in inspect.signature(build).parameters:
        for value in ARGUMENTS.get(argument, []):
            try:
                made = build(**{argument: value})
            except (TypeError, ValueError):
                continue  # this recipe says why not
            assert laconic.strategy(str(made)) == made
            parts = laconic.Strategy(made.reducer, made.route, made.averaging, made.second_moment)
            assert str(parts).startswith("Strategy(")
            assert laconic.strategy(str(parts)) == made


def test_a_changed_recipe_does_not_keep_the_recipe_s_text() -> None:
    changed = replace(laconic.bf16(warmup=3), averaging=STREAM)
    assert str(changed) != "bf16(warmup=3)"
    assert laconic.strategy(str(changed)) == changed


@pytest.mark.parametrize(
    "text",
    [
        "powersgd(rank=4)",
        "streaming_diloco(period=32, fragments=4, delay=4)",
        "ddp(reducer=ErrorFeedback(inner=PowerSGD(rank=1)))",
        "ddp(reducer=Warmup(start=0, inner=Quantized(bits=8)), warmup=0)",
        "diloco(period=32, outer=None)",
    ],
)
def test_a_text_shows_what_was_given_and_ranks_compare_what_it_is(text: str) -> None:
    made = laconic.strategy(text)
    assert str(made) == repr(made) == text
    assert laconic.strategy(text) == laconic.strategy(str(made))
    assert laconic.strategy(made.compared) == made


def test_two_ways_to_write_the_same_call_compare_as_one() -> None:
    written = [laconic.diloco(), laconic.diloco(32), laconic.strategy("diloco(period=32, outer_lr=0.7)")]
    assert len({str(one) for one in written}) == 3
    assert {one.compared for one in written} == {"diloco()"}


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


MINE = """
from dataclasses import dataclass
import laconic

NUMBER = 3

class Plain: ...

class Everything:
    @dataclass(frozen=True)
    class Inner(laconic.Reducer):
        def reduce(self, bucket):
            return laconic.Exact().reduce(bucket)

@dataclass(frozen=True)
class Mine(laconic.Reducer):
    bits: int = 8
    inner: laconic.Reducer = laconic.Exact()

    def reduce(self, bucket):
        return self.inner.reduce(bucket)

@dataclass(frozen=True)
class Damped(laconic.Outer):
    lr: float = 0.5

    def build(self, groups):
        return laconic.Adopt(self.lr).build(groups)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that nobody has imported yet."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MINE)
    (tmp_path / "lacking.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_text_names_a_class_by_its_place(mine: str) -> None:
    text = f"diloco(period=8, reducer={mine}:Mine(bits=4, inner=Cast(dtype='fp16')))"
    made = laconic.strategy(text)
    assert str(made) == text
    assert laconic.strategy(text) == made
    kind = sys.modules[mine].Mine
    assert made == laconic.diloco(8, reducer=kind(4, laconic.Cast("fp16")))
    wrapped = laconic.ddp(reducer=laconic.ErrorFeedback(kind()), warmup=3)
    assert laconic.strategy(str(wrapped)) == wrapped
    inner = laconic.ddp(reducer=sys.modules[mine].Everything.Inner())
    assert laconic.strategy(str(inner)) == inner
    deltas = laconic.Deltas(sys.modules[mine].Damped(0.25), kind())
    composed = laconic.Strategy(laconic.Exact(), laconic.Route(()), laconic.Averaging(laconic.Route(()), deltas))
    assert laconic.strategy(str(composed)) == composed
    assert laconic.strategy(f"ddp(reducer={mine}:Mine)") == laconic.ddp(reducer=kind())
    assert laconic.predict(text, torch.nn.Linear(8, 8, device="meta"), world_size=2).wire_bytes > 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("nowhere:Mine()", "there is no module 'nowhere' in this Python's path: No module named 'nowhere'"),
        ("{mine}.deeper:Mine()", "there is no module '{mine}.deeper'"),
        ("{mine}:Yours()", "module {mine} has no 'Yours'; its reducers are: Mine, Damped"),
        (
            "{mine}:Plain()",
            "{mine}:Plain must be a class derived from laconic.Reducer (or Outer, Schedule), got the class Plain",
        ),
        ("{mine}:NUMBER", "got int 3"),
        ("{mine}:Mine(bit=4)", "Mine has no 'bit'; did you mean 'bits'?"),
        ("{mine}.Mine()", "a class of your own is module:Name(...)"),
    ],
)
def test_a_place_that_has_no_such_class(text: str, wanted: str, mine: str) -> None:
    whole = f"ddp(reducer={text.replace('{mine}', mine)})"
    with pytest.raises(ValueError, match=re.escape(wanted.replace("{mine}", mine))) as caught:
        laconic.strategy(whole)
    message, line, mark = str(caught.value).split("\n")
    assert message.startswith("ddp: reducer: ")
    assert line == f"  {whole}"
    assert mark.index("^") == 2 + len("ddp(reducer=") + (len(f"{mine}:Mine(") if "bit=" in text else 0)


def test_what_a_users_module_lacks_is_its_own_error(mine: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        laconic.strategy("ddp(reducer=lacking:Mine())")


def test_a_text_from_a_file_imports_nothing(mine: str) -> None:
    text = f"ddp(reducer={mine}:Mine())"
    with pytest.raises(ValueError, match=f"{mine} is not imported yet"):
        saved(text)
    assert mine not in sys.modules
    assert saved(str(laconic.strategy(text))) == laconic.strategy(text)


def test_a_text_from_a_file_runs_no_code_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("lazy_module")  # as torch: a submodule is imported when it is asked for
    asked: list[str] = []
    module.__dict__["__getattr__"] = asked.append
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    with pytest.raises(ValueError, match=r"module lazy_module has no 'submodule\.Mine'"):
        saved("ddp(reducer=lazy_module:submodule.Mine())")
    assert asked == []


def test_a_registered_class_has_its_plain_name(mine: str) -> None:
    laconic.strategy(f"ddp(reducer={mine}:Mine())")
    kind = sys.modules[mine].Mine
    with pytest.raises(ValueError, match="unknown name 'Mine'"):
        laconic.strategy("ddp(reducer=Mine())")
    try:
        assert laconic.register(kind) is laconic.register(kind) is kind
        made = laconic.strategy("ddp(reducer=Mine(bits=2))")
        assert made == laconic.ddp(reducer=kind(2))
        assert str(made) == f"ddp(reducer={mine}:Mine(bits=2))", "which other processes can read as well"
        with pytest.raises(ValueError, match="the name Mine is taken by mine_"):
            laconic.register(type("Mine", (laconic.Exact,), {}))
    finally:
        naming._registered.pop("Mine")
    with pytest.raises(ValueError, match="the name Cast is taken by laconic"):
        laconic.register(type("Cast", (laconic.Exact,), {}))
    for what in (laconic.Reducer, 3, laconic.Exact()):
        with pytest.raises(TypeError, match="register takes a class derived from Reducer, Outer or Schedule, got"):
            laconic.register(what)  # type: ignore[type-var]
