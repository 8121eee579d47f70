"""A user's script that uses every public name of `laconic.integrations` and `laconic.elastic`.

It is never run: see `face.py`.
"""

from typing import Any, assert_type

import torch
from accelerate import Accelerator
from pytorch_lightning import Trainer
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, Seq2SeqTrainer, TrainingArguments

import laconic
from laconic import elastic
from laconic.integrations import accelerate, lightning
from laconic.integrations.accelerate import LocalSGD
from laconic.integrations.lightning import LaconicCallback
from laconic.integrations.transformers import LaconicMixin, LaconicTrainer


def in_lightning() -> None:
    callback = LaconicCallback("diloco(16, warmup=100)", consensus="anchor", check_every=10)
    Trainer(callbacks=[callback])
    if callback.run is not None:
        print(callback.run.stats().wire_bytes)


def in_fabric(fabric: Any, model: Any, optimizer: Any) -> int:
    with lightning.attach(fabric, model, optimizer, "diloco(32)", consensus="mean") as run:
        run.sync()
    return run.stats().wire_bytes


def in_accelerate(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> int:
    with accelerate.attach(accelerator, model, optimizer, laconic.int8(), consensus="local") as run, run.consensus():
        print(run.layout(), laconic.integrations.accelerate.LocalSGD)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True, strategy="diloco(8)") as local_sgd:
        local_sgd.step()
    return local_sgd.run.step + local_sgd.num_steps


def in_transformers(model: PreTrainedModel, args: TrainingArguments) -> None:
    trainer = LaconicTrainer(strategy="int8()", consensus="mean", model=model, args=args)
    trainer.train()
    print(trainer.laconic_run)


class Seq2Seq(LaconicMixin, Seq2SeqTrainer):
    """Another Trainer under a strategy."""


def among_workers_that_come_and_go(model: nn.Module, optimizer: Optimizer) -> elastic.ElasticStats:
    with elastic.lighthouse(min_replicas=2) as address:
        place = elastic.Membership(lighthouse=address, name="first", timeout_seconds=10.0)
        try:
            run = elastic.attach(model, [optimizer], "diloco(64)", place, weights="equal", late="drop", min_replicas=2)
        except elastic.MembershipError as error:
            raise SystemExit(str(error)) from error
        assert_type(run, elastic.ElasticRun)
        with run:
            laconic.Meter(run, "runs/elastic")
            while run.step < 100:
                torch.autograd.backward(model(torch.ones(4)).sum())
                optimizer.step()
            with run.consensus():
                print(run.version, run.strategy)
            run.leave()
            run.detach()
    return run.stats() if run.version else laconic.elastic.ElasticStats(**vars(run.stats()))


def counts(stats: elastic.ElasticStats) -> float:
    who: tuple[str, ...] = stats.workers
    weights: dict[str, float] = stats.weights
    print(who, weights, stats.syncs, stats.dropped, stats.healed, stats.joined, stats.lost, stats.left, stats.quorum_seconds)
    return stats.lost_residual_norm + stats.wire_bytes
