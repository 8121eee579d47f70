"""Attach by itself, to a script that knows nothing of laconic but this import.

Import it before the script builds its model, and start the script by plain torchrun with the strategy in the environment:

    LACONIC_STRATEGY="diloco(64)" torchrun --nproc-per-node 4 train.py

Each DistributedDataParallel that the script builds is attached at its first forward with gradients, with all optimizers over
its parameters. The first rank prints a line on stderr that says so. `laconic run --strategy "diloco(64)" ... train.py` does
the same and needs not even the import. `docs/run.md` has the rest.

Not: without the variable, the import does nothing.

Environment:
  `LACONIC_STRATEGY`: the strategy's text; "auto()" lets the advisor choose. Default: nothing is attached.
  `LACONIC_ISLAND_SIZE`: of a script that shards its model by `fully_shard`, the number of ranks of an island, or "node".
    Default: models that are sharded are not attached.

>>> import laconic.auto  # nothing is set here, and nothing happens
"""

import os

from laconic.script.auto import install

if "LACONIC_STRATEGY" in os.environ:
    install(os.environ["LACONIC_STRATEGY"], os.environ.get("LACONIC_ISLAND_SIZE"))
