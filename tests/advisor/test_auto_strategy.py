"""`auto()` as a strategy: its text, its arguments, what it sends."""

from dataclasses import replace

import pytest
from torch import nn

import laconic
from laconic.strategies.strategy import Advised


def test_it_is_ddp_that_says_who_chooses() -> None:
    made = laconic.strategy("auto")
    assert made == laconic.strategy("auto()") == replace(laconic.ddp(), advised=Advised())
    assert made != laconic.ddp()
    assert str(made) == "auto()"
    assert (made.cycle, made.warmup) == (1, 0)


@pytest.mark.parametrize(
    "text", ["auto(risk='local')", "auto(share=0.5, link='1gbit:20ms', steps=3)", "auto(risk='same', seconds=0.5)"]
)
def test_its_text_comes_back(text: str) -> None:
    made = laconic.strategy(text)
    assert str(made) == text
    assert laconic.strategy(str(made)) == made
    changed = replace(made, second_moment="slow")  # no recipe's any more
    assert str(changed).startswith("Strategy(")
    assert laconic.strategy(str(changed)) == changed


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto(risk='all')", "risk must be one of same, rounding, delay, local, from mild to strong, got 'all'"),
        ("auto(share=0)", "share must be above 0 and at most 1, such as 0.95, got 0"),
        ("auto(share=True)", "share must be above 0 and at most 1"),
        ("auto(share=95)", "share must be above 0 and at most 1"),
        ("auto(link=100)", "link must be a text such as '1gbit', or None to probe, got 100"),
        ("auto(steps=0)", "steps must be at least 1, got 0"),
        ("auto(steps=1.5)", "steps must be a whole number, got 1.5"),
        ("auto(seconds=0)", "seconds must be from 0.1 to 60, got 0"),
        ("auto(seconds=-1)", "seconds must be from 0.1 to 60, got -1"),
        ("auto(seconds=600)", "seconds must be from 0.1 to 60, got 600"),
        ("auto('local')", "positional argument"),
        ("Strategy(Exact(), Route(((Every(), 'world'),)), advised=3)", "advised must be an Advised(), or None, got 3"),
    ],
)
def test_what_is_wrong_with_an_argument(text: str, wanted: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is checked below, whole lines of it
        laconic.strategy(text)
    assert wanted in str(caught.value)


def test_its_forecast_is_that_of_ddp() -> None:
    model = nn.Linear(30, 20)
    assert laconic.predict("auto()", model, world_size=4) == laconic.predict("ddp()", model, world_size=4)
