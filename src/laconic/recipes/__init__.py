"""Strategies by name: a recipe says how, when and with whom in one line."""

from laconic.recipes.gradients import bf16, ddp, fp8, fp16, int4, int8, powersgd, randomk, sign, silent, topk
from laconic.recipes.local import diloco, hierarchical_sgd, local_sgd, post_local_sgd, slowmo, sparseloco, streaming_diloco
from laconic.recipes.registry import RECIPES, recipe

__all__ = [
    "RECIPES",
    "bf16",
    "ddp",
    "diloco",
    "fp8",
    "fp16",
    "hierarchical_sgd",
    "int4",
    "int8",
    "local_sgd",
    "post_local_sgd",
    "powersgd",
    "randomk",
    "recipe",
    "sign",
    "silent",
    "slowmo",
    "sparseloco",
    "streaming_diloco",
    "topk",
]
