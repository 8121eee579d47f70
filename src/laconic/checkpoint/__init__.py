"""Saving a whole training run and going on with it, on as many ranks or others.

laconic.checkpoint.save("checkpoints", run=run)              # all ranks together, between steps
laconic.checkpoint.load("checkpoints", run=run)              # the newest whole one
"""

from laconic.checkpoint.loading import Loaded, latest, load
from laconic.checkpoint.saving import Saving, save
from laconic.checkpoint.stateful import RankState, island_key

__all__ = ["Loaded", "RankState", "Saving", "island_key", "latest", "load", "save"]
