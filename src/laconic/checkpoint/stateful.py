"""A run's communication state inside a `torch.distributed.checkpoint` of the user's own."""

import io
from typing import Any

import torch

from laconic.run.run import Run, engine_of


def island_key(run: Run) -> str:
    """The name under which to save a sharded model and its optimizer in a `torch.distributed.checkpoint` of your own.

    DCP takes what islands save under one name for the same thing, and keeps the first one's. So where islands may differ, each
    has a name of its own: "island0", "island1", ... Where all have the same after every step, it is "islands".

    Not: for another number of islands use `laconic.checkpoint.load`.

    Arguments:
      `run`: what `laconic.attach` returned.

    >>> import tempfile, torch, laconic, torch.distributed.checkpoint as dcp
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "diloco(2)") as run:
    ...     key = laconic.checkpoint.island_key(run)
    ...     state = {
    ...         key: {"model": model.state_dict()},
    ...         "laconic": laconic.checkpoint.RankState(run),
    ...     }
    ...     saved = dcp.save(state, checkpoint_id=tempfile.mkdtemp())
    >>> key
    'island0'
    >>> torch.distributed.destroy_process_group()
    """
    engine = engine_of(run)
    return "islands" if engine.lockstep else f"island{engine.ranks.island}"


class RankState:
    """A run's communication state inside a `torch.distributed.checkpoint` of your own.

    DCP gives every rank the same value for a key, and loads only what the state has places for before. So this rank's state
    is one entry, under its own name. Load model and optimizer before, or in the same `dcp.load`: DCP loads tensors in place,
    and calls `load_state_dict` after it.

    Memory: a copy of the communication state on the CPU, as it is written.

    Not: for another number of ranks use `laconic.checkpoint.load`.

    Arguments:
      `run`: what `laconic.attach` returned.

    >>> import tempfile, torch, laconic, torch.distributed.checkpoint as dcp
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model, folder = torch.nn.Linear(4, 2), tempfile.mkdtemp()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "diloco(2)") as run:
    ...     state = {
    ...         "model": model.state_dict(),
    ...         "laconic": laconic.checkpoint.RankState(run),
    ...     }
    ...     saved = dcp.save(state, checkpoint_id=folder)
    ...     dcp.load(state, checkpoint_id=folder)
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._key = f"rank{engine_of(run).group.rank}/state"

    def state_dict(self) -> dict[str, Any]:
        """This rank's `run.state_dict()` as bytes, under this rank's name; DCP calls it."""
        data = io.BytesIO()
        torch.save(self._run.state_dict(), data)
        return {self._key: data.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; DCP calls it, on all ranks.

        Arguments:
          `state_dict`: this rank's entry. It raises what `run.load_state_dict` raises.
        """
        data = state_dict[self._key]
        self._run.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
