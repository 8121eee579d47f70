"""Scopes: names for sets of ranks."""

from typing import TypeAlias

Scope: TypeAlias = str | int
"""Which ranks: "world", all that train this model together; "node", those of them on this host; a number, blocks of so many
neighbouring ranks; any other name, a dimension of the DeviceMesh that `attach` was given."""

AUTO = "node, if there are several"
"""The ranks on this host; nobody, where all ranks are on one."""

OUTSTANDING = "all, outstanding"
"""All ranks, for exchanges that stay outstanding for some steps: on a group that nobody else uses."""

BACKGROUND = "all, in the background"
"""All ranks, for what has no part in training, such as writing checkpoints: on a gloo group that nobody else uses."""
