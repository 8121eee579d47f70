"""What becomes of several ranks' state in a world of another size."""

import copy
from typing import Any

import pytest
import torch

from laconic.checkpoint.redeal import merge
from laconic.run.state import VERSION, checked, kept_of, replicated
from laconic.run.stats import Counts
from tests.models import difference


def tree(rank: int) -> dict[str, Any]:
    error = {"error": torch.tensor([3.0, 6.0])} if rank == 1 else {}  # the others have left nothing out
    return {
        "model": {"w": torch.tensor([1.0, 5.0]) * rank, "same": torch.tensor([0.1]), "count": torch.tensor(7 - rank)},
        "optimizers": [{"state": {0: {"step": torch.tensor(4.0 + rank), "exp_avg": torch.tensor([1.0j]) * rank}}}],
        "scaler": None,
        "run": {
            "rank": rank,
            "strategy": "powersgd()",
            "whose": {},
            "memory": {"w": {"q": torch.tensor([float(rank)]), **error}},
            "local": {"deltas": None, "drifted": True},
            "kept": [],
        },
        "extra": {"rank": rank},
        "random": None,
    }


def test_means_of_numbers_the_largest_of_counts_and_residuals_that_conserve() -> None:
    merged = merge([tree(rank) for rank in range(3)])
    assert merged["model"]["w"].tolist() == [1, 5]
    assert torch.equal(merged["model"]["same"], torch.tensor([0.1]))
    assert int(merged["model"]["count"]) == 7
    state = merged["optimizers"][0]["state"][0]
    assert float(state["step"]) == 6
    assert state["exp_avg"].tolist() == [1.0j]
    memory = merged["run"]["memory"]["w"]
    assert memory["error"].tolist() == [1, 2], "every new rank's, so that their mean is what the mean was"
    assert memory["q"].tolist() == [0]
    assert sorted(merged["run"]["kept"]) == ["w: error", "w: q"]
    assert merged["run"]["local"]["drifted"] is False
    assert "extra" not in merged


def test_residuals_that_the_first_rank_knows_nothing_of() -> None:
    """Left by a strategy before, on some ranks alone; a former state says of each rank what that rank had."""
    trees = [tree(rank) for rank in range(3)]
    for rank, each in enumerate(trees):
        each["run"] |= {"strategy": "ddp()", "whose": {"mine": "own"} if rank == 2 else {}}
        each["run"]["memory"]["w"].pop("q")
    trees[2]["run"]["memory"]["w"]["mine"] = torch.tensor([3.0])
    memory = merge(trees)["run"]["memory"]["w"]
    assert memory["error"].tolist() == [1, 2]
    assert memory["mine"].tolist() == [1]


def test_residuals_in_a_former_state_are_each_rank_s_own() -> None:
    """Of version 4, after a swap: neither the state nor its strategy says whose they are."""
    trees = [tree(rank) for rank in range(3)]
    for each in trees:
        del each["run"]["whose"]
        each["run"] |= {"version": 4, "strategy": "ddp()", "rounds": 2}
    memory = merge(trees)["run"]["memory"]["w"]
    assert memory["error"].tolist() == [1, 2]
    assert memory["q"].tolist() == [0], "the first rank's, as it always was"


def test_of_optimizer_state_the_mean_is_over_the_ranks_that_had_it() -> None:
    """A parameter that had no gradient on rank 0 has no state there; that is no state of zeros."""
    trees = [tree(rank) for rank in range(3)]
    for rank in (1, 2):
        late = {"step": torch.tensor(float(rank)), "exp_avg": torch.tensor([2.0, 4.0]) * rank}
        trees[rank]["optimizers"][0]["state"][1] = late
    state = merge(trees)["optimizers"][0]["state"][1]
    assert state["exp_avg"].tolist() == [3, 6]
    assert float(state["step"]) == 2


def test_means_of_16_bit_residuals_do_not_overflow_on_the_way() -> None:
    trees = [tree(rank) for rank in range(3)]
    for each in trees:
        each["run"]["memory"]["w"]["error"] = torch.tensor([40_000.0], dtype=torch.float16)  # two of them are infinite
    error = merge(trees)["run"]["memory"]["w"]["error"]
    assert error.tolist() == [40_000]
    assert error.dtype is torch.float16


def saved() -> dict[str, Any]:
    """What rank 0 may have saved in mid-period, with a delta outstanding."""
    slot = {"error": torch.ones(2), "q": torch.ones(1)}
    deltas = {
        "anchors": {"w": torch.ones(2)},
        "outer": {},
        "outer_groups": [],
        "memory": {"w": slot},
        "exchanges": 1,
        "norms": [],
        "skipped": 0,
    }
    deltas |= {"clean": True, "outstanding": [{"deltas": {"w": torch.ones(2)}}]}
    local = {"syncs": 1, "skipped": 0, "last": 2, "rate": None, "drifted": True, "deltas": deltas}
    state = {"version": VERSION, "rank": 0, "strategy": "diloco()", "step": 3, "ahead": [0], "exchanges": 3, "order": ["w"]}
    state |= {"memory": {"w": dict(slot)}, "local": local, "counts": Counts().state(), "whose": {"error": "own", "q": "shared"}}
    return {**state, "kept": kept_of(state["memory"], deltas)}  # type: ignore[arg-type]


def read(state: dict[str, Any], rank: int = 0) -> Any:
    return checked(state, "diloco()", rank, {"w": torch.zeros(2)}, {"w"})


def without(path: list[Any]) -> dict[str, Any]:
    """The state, but for what is at this place."""
    state = saved()
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return state


def test_a_state_that_has_lost_something_is_refused() -> None:
    whole = saved()
    assert read(whole).step == 3
    needed = [[key] for key in whole if key != "counts"]  # states of before had none
    needed += [["local", key] for key in whole["local"]] + [["local", "deltas", key] for key in whole["local"]["deltas"]]
    for path in needed:
        with pytest.raises(ValueError, match=r"the state is damaged|version|rank None"):
            read(without(path))
    own: list[list[Any]] = [["memory", "w", "error"], ["local", "deltas", "memory", "w", "q"]]
    for path in [*own, ["local", "deltas", "outstanding", 0, "deltas", "w"]]:
        with pytest.raises(ValueError, match="of 5 tensors that this rank kept, 4 are here"):
            read(without(path))
    wide = saved()
    wide["local"]["deltas"]["anchors"]["w"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"'w' needs an anchor of shape \(2,\), and the state has one of shape \(3,\)"):
        read(wide)


def test_of_another_rank_s_state_residuals_are_left_out() -> None:
    first = saved()
    kept = copy.deepcopy(first)
    state = read(replicated(first, 1), rank=1)
    assert state.memory["w"].keys() == state.local["deltas"]["memory"]["w"].keys() == {"q"}
    assert state.local["drifted"] is False
    assert (state.step, state.exchanges, state.local["syncs"], state.order) == (3, 3, 1, ["w"])
    unlike = difference(first, kept)
    assert unlike is None, unlike
