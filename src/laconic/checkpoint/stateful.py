"""A run's communication state inside a `torch.distributed.checkpoint` of the user's own."""

import io
from typing import Any

import torch

from laconic.run.run import Run, engine_of


def island_key(run: Run) -> str:
    """Under what to save model and optimizer in a `torch.distributed.checkpoint` of the user's own; for sharded models.

    DCP takes what islands save under one name for the same, and keeps the first one's. So where islands may differ, each has a
    name of its own:

        state = {island_key(run): {"model": model_state, "optimizer": optimizer_state}, "laconic": RankState(run)}
    """
    engine = engine_of(run)
    return "islands" if engine.lockstep else f"island{engine.ranks.island}"


class RankState:
    """`dcp.save({"model": ..., "laconic": RankState(run)})`, and the same with `dcp.load`, on as many ranks.

    DCP gives every rank the same value for a key, and loads only what the state has places for before. So this rank's state
    is one entry, under its own name. For another number of ranks use `laconic.checkpoint.load`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._key = f"rank{engine_of(run).group.rank}/state"

    def state_dict(self) -> dict[str, Any]:
        data = io.BytesIO()
        torch.save(self._run.state_dict(), data)
        return {self._key: data.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        data = state_dict[self._key]
        self._run.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
