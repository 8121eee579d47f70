"""What becomes of several ranks' state in a world of another size."""

from typing import Any

import torch

from laconic.checkpoint.redeal import merge


def tree(rank: int) -> dict[str, Any]:
    error = {"error": torch.tensor([3.0, 6.0])} if rank == 1 else {}  # the others have left nothing out
    return {
        "model": {"w": torch.tensor([1.0, 5.0]) * rank, "same": torch.tensor([0.1]), "count": torch.tensor(7 - rank)},
        "optimizers": [{"state": {0: {"step": torch.tensor(4.0 + rank), "exp_avg": torch.tensor([1.0j]) * rank}}}],
        "scaler": None,
        "run": {
            "rank": rank,
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
