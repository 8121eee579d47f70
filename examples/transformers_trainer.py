"""Transformers under a strategy: `LaconicTrainer` in the place of `Trainer`. Adapters of a frozen GPT-2, so little travels.

    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py checkpoints
    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py checkpoints --resume checkpoint-33

About 12 seconds each on 2 cores. Look at the bytes beside those of ddp(), and at the held-out loss, which is the same for both
commands, digit for digit. The model has random weights, so that nothing is downloaded; they are frozen. What is trained, and
sent, are low-rank adapters beside its attention, written here in ten lines; PEFT's do the same.
"""

import argparse

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import laconic
from laconic.integrations.transformers import LaconicTrainer


class Adapter(nn.Module):
    """What was there, and a low-rank matrix beside it."""

    def __init__(self, inner, rank=4):
        super().__init__()
        rows, columns = inner.weight.shape  # of a Conv1D: inputs, outputs
        self.inner, self.down, self.up = inner, nn.Linear(rows, rank, bias=False), nn.Linear(rank, columns, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def adapted_model():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn, block.mlp.c_fc = Adapter(block.attn.c_attn), Adapter(block.mlp.c_fc)
    return model


def rows(count, seed):
    """Sequences that count up by a step of their own."""
    draw = torch.Generator().manual_seed(seed)
    first, step = torch.randint(64, (count, 1), generator=draw), torch.randint(1, 4, (count, 1), generator=draw)
    return [{"input_ids": row, "labels": row} for row in (first + step * torch.arange(32)) % 64]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", help="for checkpoints")
    options.add_argument("--strategy", default="diloco(8, warmup=10)", help="any strategy")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--resume", help="from this checkpoint in the folder")
    given = options.parse_args()

    arguments = TrainingArguments(
        given.folder,
        max_steps=given.steps,
        per_device_train_batch_size=8,
        learning_rate=2e-2,
        logging_steps=10,
        save_steps=given.steps // 2 + 3,
        eval_strategy="steps",
        eval_steps=20,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        report_to="none",
    )
    trainer = LaconicTrainer(
        strategy=given.strategy,  # the one new argument
        model=adapted_model(),
        args=arguments,
        train_dataset=rows(2048, 1),
        eval_dataset=rows(128, 2),
    )
    trainer.train(resume_from_checkpoint=f"{given.folder}/{given.resume}" if given.resume else None)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        stats = trainer.laconic_run.stats()
        plain = laconic.predict("ddp()", trainer.model, world_size=arguments.world_size, steps=stats.steps).wire_bytes
        print(f"{given.strategy}: {stats.steps} steps, {stats.wire_bytes:,} bytes; ddp() sends {plain:,}", flush=True)
        print(f"held-out loss {loss:.6f}", flush=True)
    del trainer  # it holds the process group; without it, gloo's threads end before Python does
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
