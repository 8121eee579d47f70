"""A link's text."""

import pytest

from laconic.cost.link import Link, parse


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("10gbit", "10gbit"),
        ("10gbps", "10gbit"),
        ("10Gbps", "10gbit"),
        ("10Gbit/s", "10gbit"),
        ("10 Gb/s", "10gbit"),
        ("100Mbit", "100mbit"),
        ("2.5gbit:20ms", "2500mbit:20ms"),
        ("100Mbps:0.5ms", "100mbit:0.5ms"),
        ("none", "none"),
    ],
)
def test_a_link_is_read_as_people_write_it(text: str, wanted: str) -> None:
    assert str(parse(text)) == wanted
    assert parse(wanted) == parse(text)


def test_bits_a_second() -> None:
    assert parse("10gbps:20ms") == Link(10 * 10**9, 0.02)


@pytest.mark.parametrize("text", ["10GB/s", "10GBps", "10MB", "10GBPS"])
def test_bytes_are_not_taken_for_bits(text: str) -> None:
    with pytest.raises(ValueError, match="a link is a rate with its unit"):
        parse(text)


@pytest.mark.parametrize("text", ["", "10", "fast", "0gbit", "10gbit:20", "10gbitps/s", "-1gbit"])
def test_anything_else_is_refused_with_what_came(text: str) -> None:
    with pytest.raises(ValueError, match="a link is a rate with its unit") as caught:
        parse(text)
    assert "bytes" not in str(caught.value)
    assert repr(text) in str(caught.value)
