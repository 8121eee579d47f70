"""Frameworks that own the training loop: each module maps one framework's hook points to `laconic.attach`.

from laconic.integrations.lightning import LaconicCallback     # Trainer(strategy="ddp", callbacks=[LaconicCallback("int8()")])
from laconic.integrations.accelerate import attach             # with attach(accelerator, model, optimizer, "int8()") as run:
from laconic.integrations.transformers import LaconicTrainer   # LaconicTrainer(strategy="int8()", model=..., args=...)

Each needs its framework: `pip install 'laconic[lightning]'`, `'laconic[accelerate]'`, `'laconic[transformers]'`.
"""
