"""A Transformers script: a small GPT-2 from a config, by the Trainer."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main(out: str) -> None:
    arguments = TrainingArguments(
        output_dir=os.path.join(out, "checkpoints"), max_steps=16, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=4,
        dataloader_pin_memory=False,
    )  # fmt: skip
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    rows = (torch.arange(128)[:, None] + torch.arange(16)) % 32
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    del trainer  # it holds the process group
    torch.distributed.destroy_process_group()
    torch.save(model.state_dict(), os.path.join(out, f"final-{arguments.process_index}.pt"))


if __name__ == "__main__":
    main(sys.argv[1])
