"""The choice, by its rule: from candidates that are made up."""

import dataclasses
from collections.abc import Sequence

import pytest

from laconic.advisor.advice import Advice, Candidate, Limits, advise
from laconic.advisor.risk import Risk
from laconic.cost.around import Flow
from laconic.cost.link import Link
from laconic.cost.network import Network, Speed
from laconic.cost.step_time import Compute, Exchange, Step

COMPUTE = Compute(0.0, 1.0)
FREE = {kind: {2: Speed(0.0, 0.0)} for kind in ("AllReduce", "AllGather", "AllToAll")}
PLAIN = dict.fromkeys(FREE, 1.0)
SLOW = Network(Link(8_000_000), FREE, framing=PLAIN)  # a megabyte a second, and nothing else


def sends(name: str, risk: Risk, seconds: float, memory: float = 0.0) -> Candidate:
    """One that waits for so many seconds after each step on the slow network."""
    sent = Exchange([Flow("AllReduce", seconds * 1e6, 2)], [0.0, 0.0], 100)
    return Candidate(name, risk, [Step(after=[sent])], memory, f"the loss of {name}")


def chosen(families: Sequence[Sequence[Candidate]], share: float = 0.9, risk: Risk = Risk.LOCAL) -> Advice:
    return advise(families, COMPUTE, SLOW, share=share, risk=risk)


DDP, INT8 = sends("ddp()", Risk.SAME, 1.0), sends("int8()", Risk.ROUNDING, 0.25)
INT4 = sends("int4()", Risk.DELAY, 0.1)
LOCAL = [sends(f"local({period})", Risk.LOCAL, 1 / period) for period in (4, 8, 16, 32)]
FAMILIES = [[DDP], [INT8], [INT4], LOCAL]


def test_the_mildest_class_that_reaches_the_share_wins() -> None:
    assert [chosen(FAMILIES, share).choice.strategy for share in (0.5, 0.8, 0.9, 0.95)] == [
        "ddp()",
        "int8()",
        "int4()",
        "local(32)",
    ]


def test_a_family_has_the_mildest_parameters_that_reach_it_else_the_mildest_near_its_fastest() -> None:
    rows = {share: chosen(FAMILIES, share).rows[-1] for share in (0.7, 0.85, 0.99)}
    assert {share: row.strategy for share, row in rows.items()} == {0.7: "local(4)", 0.85: "local(8)", 0.99: "local(16)"}
    assert rows[0.7].share == pytest.approx(0.8)
    slower = [sends("rank(8)", Risk.DELAY, 0.2), sends("rank(4)", Risk.DELAY, 0.9)]
    assert chosen([slower], 0.99).choice.strategy == "rank(8)", "the strongest need not be the fastest"


def test_what_is_hardly_faster_is_not_worth_a_stronger_strategy() -> None:
    hardly, more = sends("bf16()", Risk.ROUNDING, 0.96), sends("bf16()", Risk.ROUNDING, 0.9)
    advice = chosen([[DDP], [hardly]], 0.9)
    assert advice.choice.strategy == "ddp()"
    assert "ddp() is the mildest within 3% of the fastest, with 50 %" in advice.reason
    assert chosen([[DDP], [more]], 0.9).choice.strategy == "bf16()"


def test_a_stronger_class_earns_its_place_against_those_that_leave_the_loss_alone() -> None:
    """92 % of the rate against 95 % and more: not worth another training; 80 % against 90 % is, and so is what is delayed."""
    nearly, far = sends("int8()", Risk.ROUNDING, 0.08), sends("int8()", Risk.ROUNDING, 0.25)
    late = sends("powersgd()", Risk.DELAY, 0.08)
    advice = chosen([[DDP], [nearly], LOCAL], 0.95)
    assert advice.choice.strategy == "int8()"
    assert advice.reason == (
        "int8() reaches 92 % of the rate without communication. local(32) would reach 96 %: for 5% or less of the rate, "
        "nothing that does more to the training is taken."
    )
    assert chosen([[DDP], [far], LOCAL], 0.95).choice.strategy == "local(32)"
    assert chosen([[DDP], [late], LOCAL], 0.95).choice.strategy == "local(32)"


def test_in_a_class_the_first_of_the_list_wins_and_not_the_fastest() -> None:
    late = sends("later()", Risk.ROUNDING, 0.0)
    assert chosen([[DDP], [INT8], [late]], 0.8).choice.strategy == "int8()"
    assert chosen([[DDP], [late], [INT8]], 0.8).choice.strategy == "later()"


def test_families_may_come_in_any_order_of_risk() -> None:
    advice = chosen([LOCAL, [INT8], [DDP]], 0.8)
    assert [row.risk for row in advice.rows] == [Risk.SAME, Risk.ROUNDING, Risk.LOCAL]
    assert advice.choice.strategy == "int8()"


def test_the_reason_names_the_next_milder_one_and_what_it_reaches() -> None:
    assert chosen(FAMILIES, 0.8).reason == (
        "int8() reaches 80 % of the rate without communication, and is the first of the list, from mild to strong, that "
        "reaches 80 %. The next milder one, ddp(), reaches 50 %."
    )
    assert "The next milder one, local(16), reaches 94 %." in chosen(FAMILIES, 0.95).reason, "of the same recipe"
    assert chosen(FAMILIES, 0.5).reason.endswith("the network is not the problem.")


def test_where_none_reaches_it_the_fastest_that_is_allowed_is_taken_and_it_says_so() -> None:
    advice = chosen(FAMILIES, 0.95, Risk.DELAY)
    assert (advice.choice.strategy, advice.reached) == ("int4()", False)
    assert "No strategy that is allowed reaches 95 %" in advice.reason
    assert "local(32) would reach 96 %: see --risk local" in advice.reason
    assert advice.rows[-1].refused == "beyond --risk delay"


def test_what_does_not_fit_is_not_chosen_and_says_why() -> None:
    big = sends("int4()", Risk.DELAY, 0.1, memory=100.0)
    advice = advise([[DDP], [INT8], [big], LOCAL], COMPUTE, SLOW, share=0.9, limits=Limits(extra_memory_bytes=50))
    assert advice.choice.strategy == "local(16)"
    assert [row.refused for row in advice.rows] == ["", "", "its extra memory does not fit", ""]


def test_a_milder_one_that_is_refused_is_named_with_its_reason() -> None:
    big = sends("int4()", Risk.DELAY, 0.1, memory=100.0)
    local = [sends("local(16)", Risk.LOCAL, 1 / 16)]
    advice = advise([[DDP], [big], local], COMPUTE, SLOW, share=0.9, limits=Limits(extra_memory_bytes=50))
    assert advice.reason.endswith("The next milder one, int4(), is not allowed: its extra memory does not fit.")


def test_a_budget_is_of_bytes_a_day_at_the_rate_that_the_strategy_has() -> None:
    (row,) = chosen([[INT4]]).rows
    assert row.bytes_per_day == pytest.approx(1e5 * 86_400 / 1.1)
    just, less = (Limits(bytes_per_day=row.bytes_per_day * factor) for factor in (1.001, 0.999))
    assert advise(FAMILIES, COMPUTE, SLOW, share=0.9, limits=just).choice.strategy == "int4()"
    assert advise(FAMILIES, COMPUTE, SLOW, share=0.9, limits=less).choice.strategy == "local(16)"


def test_of_a_family_whose_strongest_is_refused_the_strongest_that_is_not() -> None:
    heavy = [*LOCAL[:2], dataclasses.replace(LOCAL[2], extra_memory_bytes=100.0)]
    advice = advise([[DDP], heavy], COMPUTE, SLOW, share=0.99, limits=Limits(extra_memory_bytes=50))
    assert [row.strategy for row in advice.rows] == ["ddp()", "local(8)"]


def test_where_nothing_is_allowed_it_says_what_would_be() -> None:
    with pytest.raises(ValueError, match=r"no strategy may be chosen \(2 of 2: over the budget\).*those of int4\(\).*GB a day"):
        advise([[DDP], [INT4]], COMPUTE, SLOW, limits=Limits(bytes_per_day=1))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        chosen(FAMILIES, share)


def test_bytes_within_a_node_are_not_on_its_cable() -> None:
    inside, outside = (Exchange([Flow("AllReduce", 1e6, world)], [0.0, 0.0], 100) for world in (4, 16))
    one = Candidate("any()", Risk.LOCAL, [Step([inside]), Step([inside], [outside])])
    assert one.wire_bytes_per_step() == 1.5e6
    assert one.wire_bytes_per_step(Network(per_node=4)) == 0.5e6


def test_plain_data_has_all_of_a_row() -> None:
    advice = chosen(FAMILIES, 0.8)
    data = advice.as_dict()
    assert (data["choice"], data["reached"], data["risk"]) == ("int8()", True, "local")
    (row,) = [row for row in data["rows"] if row["strategy"] == "int8()"]
    assert row["step_seconds"] == pytest.approx(1.25)
    assert row["waiting_seconds"] == pytest.approx(0.25)
    assert (row["risk"], row["risk_words"], row["loss"]) == ("rounding", "rounding only", "the loss of int8()")
