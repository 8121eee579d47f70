"""Scopes: names for sets of ranks."""

from typing import TypeAlias

Scope: TypeAlias = str | int
"""Which ranks: "world", all that hold this model, or the same shard of it; "node", those of them on this host; a number, blocks
of so many neighbouring ones; any other name, a dimension of the DeviceMesh that `attach` was given."""

AUTO = "node, if there are several"
"""The ranks on this host; nobody, where all ranks are on one."""

OUTSTANDING = "all, outstanding"
"""All replicas, for exchanges that stay outstanding for some steps: on a group that nobody else uses."""

HEARTBEATS = "all, outstanding, with their islands"
"""All ranks of all islands, for the heartbeats of such exchanges: on a group that nobody else uses."""

BACKGROUND = "all, in the background"
"""All ranks, for what has no part in training, such as writing checkpoints: on a gloo group that nobody else uses."""
