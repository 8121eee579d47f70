"""Text to strategy and back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.strategies.recipe import recipes


def test_text_and_call_are_the_same_strategy() -> None:
    made = laconic.ddp(reducer=laconic.Warmup(3, laconic.Cast("fp16", accumulate="wire")), warmup=5)
    read = laconic.strategy("ddp(reducer=Warmup(3, Cast('fp16', accumulate='wire')), warmup=5)")
    assert read == made
    assert laconic.strategy(str(made)) == made
    assert laconic.strategy(made) is made


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_works_without_arguments_and_gives_its_text_back(name: str) -> None:
    assert str(laconic.strategy(name)) == str(laconic.strategy(f" {name}() ")) == f"{name}()"


@given(st.integers(0, 10**6))
def test_arguments_come_back(warmup: int) -> None:
    text = str(laconic.bf16(warmup=warmup))
    assert laconic.strategy(text) == laconic.bf16(warmup=warmup)
    assert text == f"bf16(warmup={warmup})", "as it was given, also where it is the default"
    assert laconic.bf16(warmup=warmup).compared == (text if warmup else "bf16()")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("bf61()", "did you mean 'bf16'?\n  bf61()\n  ^^^^"),
        ("frobnicate", "unknown name 'frobnicate'; known are "),
        ("bf16(warmpu=3)", "bf16 has no 'warmpu'; did you mean 'warmup'?\n  bf16(warmpu=3)\n       ^^^^^^^^"),
        ("bf16(warmup=-3)", "warmup must be 0 or more steps, got -3\n  bf16(warmup=-3)\n  ^^^^"),
        (
            "ddp(reducer=Cats())",
            "did you mean 'Cast'? For a class of your own write module:Cats()\n  ddp(reducer=Cats())\n              ^^^^",
        ),
        ("ddp(reducer=Cast('int3'))", "one of fp16, bf16, got 'int3'"),
        ("ddp(reducer=Warmup(-1, Exact()))", "start must be 0 or more steps, got -1"),
        ("ddp(reducer=3)", "reducer must be a Reducer such as Cast('bf16'), got 3"),
        ("bf16(3)", "positional argument"),
        ("bf16(", "'(' was never closed; write a strategy as name(key=value, ...)\n  bf16(\n      ^"),
        ("bf16(warmup=1+1)", "only names, calls and literals can stand here\n  bf16(warmup=1+1)\n              ^^^"),
        ("__import__('os').getcwd()", "only names, calls and literals"),
        ("(lambda: 0)()", "only names, calls and literals"),
        ("bf16(**{'warmup': 1})", "bf16 has no"),
        ("Cast('bf16')", "is no strategy; to average gradients by a reducer write ddp(reducer=Cast('bf16'))"),
        ("", "write a strategy as name(key=value, ...)"),
        ("3", "'3' is no strategy; write one such as bf16()"),
        (
            "Nesterov()",
            "'Nesterov()' is no strategy: an outer optimizer steps by averaged deltas; write diloco(outer=Nesterov())",
        ),
        ("QSR(4, 0.02)", "is no strategy: a schedule says when replicas are averaged; write local_sgd(QSR(4, 0.02))"),
        ("Route(())", "is no strategy: Route is a part of one"),
        ("INT8()", "unknown name 'INT8'; did you mean 'int8'?"),
        ("PowerSgd(rank=2)", "did you mean 'powersgd'?"),
        ("ddp(reducer=powersg())", "did you mean 'PowerSGD'?"),
        (
            "ddp(reducer=int8())",
            "reducer can't be a strategy, and int8() is one; use reducer=Quantized(bits=8), or int8() by itself",
        ),
        ("diloco(int8())", "diloco: period can't be a strategy, and int8() is one; use int8() by itself"),
        ("ddp(reducer=ErrorFeedback(int8()))", "inner must be a Reducer such as Cast('bf16'), got int8(), which is a strategy"),
        ("hierarchical_sgd({[4]: 'node'})", "the keys of a mapping must be numbers, texts or the like"),
        ("-" * 5000 + "1", "the text is too deeply nested to be a strategy: ---"),
        ("hierarchical_sgd({4: 'é'}, warmpu=2)", f"\n  {' ' * 27}{'^' * 8}"),  # below the word, not as many bytes to the right
        ("bf16(\n  warmup=-1)", "  bf16( warmup=-1)\n  ^^^^"),
        ("bf16(warmup=2.5)", "warmup must be a whole number of steps, got 2.5"),
        ("ddp(reducer=Warmup(2, 3))", "inner must be a Reducer such as Cast('bf16'), got 3"),
    ],
)
def test_errors_say_what_came_and_point_at_it(text: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wanted)):
        laconic.strategy(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("powersgd(rank=0)", "powersgd: rank must be a whole number, at least 1, got 0"),
        ("topk(ratio=2)", "topk: ratio must be above 0"),
        ("bf16(warmup=-1)", "bf16: warmup must be 0 or more steps, got -1"),
        ("ddp(reducer=3)", "ddp: reducer must be a Reducer"),
        ("diloco(outer_lr=0)", "diloco: outer_lr must be above 0, got 0"),
        ("diloco(outer_lr='x')", "diloco: outer_lr must be a number, got 'x'"),
        ("diloco(outer_momentum=2)", "diloco: outer_momentum must be above 0 and below 1, got 2"),
        ("diloco(0)", "diloco: period must be at least 1, got 0"),
        ("sparseloco(outer_lr=-1)", "sparseloco: outer_lr must be above 0, got -1"),
        ("streaming_diloco(4, delay=9)", "streaming_diloco: delay must be below the period"),
        ("streaming_diloco(blend='x')", "streaming_diloco: blend must be from 0"),
        ("slowmo(beta=2)", "slowmo: beta must be at least 0 and below 1, got 2"),
        ("local_sgd(moments={'exp_avg': 0})", "local_sgd: moments['exp_avg']: period must be at least 1, got 0"),
        ("local_sgd(moments=3)", "local_sgd: moments must be one of"),
        ("hierarchical_sgd(reducer=Cast())", "hierarchical_sgd averages parameters exactly"),
        ("silent(3)", "silent: too many positional arguments"),
    ],
)
def test_an_error_of_a_recipe_s_part_names_the_recipe_and_its_argument(text: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}"):
        laconic.strategy(text)
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(wanted)}"):
        eval(f"laconic.{text.replace('Cast', 'laconic.Cast')}")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("diloco(reducer=PowerSGD(rank=0))", "diloco: reducer: PowerSGD: rank must be a whole number, at least 1, got 0"),
        ("diloco(8, reducer=ErrorFeedback(TopK(2)))", "diloco: reducer: ErrorFeedback: inner: TopK: ratio must be"),
        ("local_sgd(QSR(0, 0.1))", "local_sgd: period: QSR: base must be at least 1 step, got 0"),
        ("local_sgd(period=QSR(4, 'x'))", "local_sgd: period: QSR: alpha must be above 0"),
        ("ddp(reducer=Cats())", "ddp: reducer: unknown name 'Cats'; did you mean 'Cast'?"),
    ],
)
def test_an_error_inside_a_text_says_where_it_is(text: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}"):
        laconic.strategy(text)


def test_only_texts_and_strategies() -> None:
    for thing, wanted in (
        (3, "a Strategy or a text such as 'bf16()', got int"),
        (laconic.QSR(4, 0.02), "got QSR: a schedule says when replicas are averaged; write local_sgd(QSR(base=4, alpha=0.02))"),
        (laconic.Cast("fp16"), "got Cast; to average gradients by a reducer write ddp(reducer=Cast(dtype='fp16'))"),
        (laconic.Cast, "got Cast; call it: Cast()"),
        (laconic.int8, "got int8; call it: int8()"),
    ):
        with pytest.raises(TypeError, match=re.escape(wanted)):
            laconic.strategy(thing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("got <class 'laconic.reducers.cast.Cast'>; give an instance, Cast()")):
        laconic.ddp(reducer=laconic.Cast)  # type: ignore[arg-type]


def test_schedules_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="period must be at least 1, got 0"):
        laconic.Every(0)
    with pytest.raises(ValueError, match="start must be 0 or more steps, got -2"):
        laconic.Every(1, start=-2)


@pytest.mark.parametrize(
    ("text", "wanted", "elsewhere"),
    [
        ("ddp(reducer=BlockMax())", ["known are AlternatingPowerSGD, ", "Warmup; for"], ["Adopt", "Every", "Route", "Advised"]),
        ("ddp(reducer=ErrorFeedback(BlockMax()))", ["known are AlternatingPowerSGD, "], ["Adopt", "Every", "Deltas"]),
        ("diloco(outer=BlockMax())", ["known are Adopt, Nesterov, OuterOptimizer, SlowMo; for"], []),
        ("local_sgd(BlockMax())", ["known are Every, Never, QSR, Until; for"], []),
        ("Strategy(Exact(), BlockMax())", ["known are Route; for"], []),
        ("Strategy(Exact(), Route(((BlockMax(), 'world'),)))", ["known are Every, Never, QSR, Until; for"], []),
    ],
)
def test_an_unknown_name_is_told_what_fits_there(text: str, wanted: list[str], elsewhere: list[str]) -> None:
    with pytest.raises(ValueError, match="unknown name 'BlockMax'") as caught:
        laconic.strategy(text)
    said = str(caught.value)
    assert all(part in said for part in [*wanted, "for a class of your own write module:BlockMax()"])
    assert not any(re.search(rf"\b{name}\b", said.split("\n")[0].partition("known are")[2]) for name in elsewhere)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ddp(reducer=ErrorFeedback())", "ddp: reducer: ErrorFeedback needs inner, such as ErrorFeedback(TopK())\n"),
        ("ddp(reducer=ErrorFeedback)", "ddp: reducer: ErrorFeedback needs inner, such as ErrorFeedback(TopK())\n"),
        ("ddp(reducer=Warmup(start=3))", "ddp: reducer: Warmup needs inner, such as Warmup(100, TopK())\n"),
        ("local_sgd(QSR())", "local_sgd: period: QSR needs base and alpha, such as QSR(4, 0.02)\n"),
        ("diloco(outer=OuterOptimizer())", "OuterOptimizer needs optimizer, such as OuterOptimizer(torch.optim.adam:Adam)\n"),
        ("Strategy(Exact(), Route())", "Route needs legs, such as Route(((Every(16), 'world'),))\n"),
        ("Strategy()", "Strategy needs reducer and route, such as Strategy(TopK(), Route(((Every(16), 'world'),)))\n"),
        ("ddp(reducer=ErrorFeedback(iner=TopK()))", "ErrorFeedback has no 'iner'; did you mean 'inner'?\n"),
        ("ddp(reducer=Exact(1, 2))", "Exact: too many positional arguments, 2\n"),
        (
            "ddp(reducer=Sign(256, 2, 3, 4, 5))",
            "Sign: too many positional arguments, 5; write the arguments with their names, which are block, ",
        ),
        ("ddp(reducer=Cast('bf16', dtype='fp16'))", "'dtype' is given twice\n"),
        ("ddp(reducer=tests.test_own_parts:Named(parts=()))", "Named needs warmup and cycle, such as Named(100, 100)\n"),
    ],
)
def test_missing_and_unknown_arguments_are_named(text: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wanted)) as caught:
        laconic.strategy(text)
    assert "__init__" not in str(caught.value)


@pytest.mark.parametrize("name", ["Warmup", "ErrorFeedback", "QSR", "Until", "OuterOptimizer", "Route"])
def test_the_example_that_is_shown_can_be_read(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} needs ") as caught:
        laconic.strategy(f"{name}()")
    example = str(caught.value).split("such as ")[1].split("\n")[0]
    with pytest.raises(ValueError, match="is no strategy"):  # it could be made, and is a part of one
        laconic.strategy(example)


def test_the_example_of_a_strategy_is_one() -> None:
    with pytest.raises(ValueError, match="Strategy needs ") as caught:
        laconic.strategy("Strategy()")
    assert laconic.strategy(str(caught.value).split("such as ")[1].split("\n")[0]).reducer == laconic.TopK()
