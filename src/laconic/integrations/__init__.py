"""Frameworks that own the training loop: each module maps one framework's hook points to `laconic.attach`.

Each needs its framework, in laconic's folder: `pip install '.[lightning]'`, `'.[accelerate]'`, `'.[transformers]'`.

>>> from laconic.integrations.lightning import LaconicCallback  # doctest: +SKIP
>>> trainer = Trainer(strategy="ddp", callbacks=[LaconicCallback("int8()")])  # doctest: +SKIP
>>> from laconic.integrations.accelerate import attach  # doctest: +SKIP
>>> with attach(accelerator, model, optimizer, "int8()") as run:  # doctest: +SKIP
...     train(model, optimizer)
>>> from laconic.integrations.transformers import LaconicTrainer  # doctest: +SKIP
>>> trainer = LaconicTrainer(  # doctest: +SKIP
...     strategy="int8()", model=model, args=args, train_dataset=data
... )
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.integrations import accelerate as accelerate
    from laconic.integrations import fabric as fabric
    from laconic.integrations import lightning as lightning
    from laconic.integrations import transformers as transformers

_MODULES = ("accelerate", "fabric", "lightning", "transformers")


if not TYPE_CHECKING:  # type checkers would take any name for one that is there

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")  # which needs its framework
