"""A Lightning script that goes on from its last checkpoint, and whose second rank kills itself at the steps it is given."""

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.lightning_runs import Module, copied, made, numbers, saver


def fit(rank: int, folder: Path, strategy: str, kills: list[str]) -> str:
    """Two epochs of 14 steps, saved every 4 under one name; the weights, as a word."""

    class Dies(Module):
        def training_step(self, batch: Any, number: int) -> Any:
            self.die(f"{self.global_step}")
            return super().training_step(batch, number)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            self.die(f"save {self.global_step}")

        def die(self, moment: str) -> None:
            done = folder / f"killed at {moment}"
            if rank == 1 and moment in kills and not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    save = saver(folder, filename="same", every_n_train_steps=4, enable_version_counter=False)
    trainer, hook = made(strategy, [save], max_epochs=2)
    module, path = Dies(rank, 0.3), folder / "same.ckpt"
    torch.manual_seed(rank)
    trainer.fit(module, numbers(14), ckpt_path=str(path) if path.exists() else None)
    assert hook.run.stats().steps == 28
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in copied(module.net).values()))
    return digest.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Path(sys.argv[1]).mkdir(exist_ok=True)
    word = fit(dist.get_rank(), Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
    print("weights", word, flush=True)
    dist.destroy_process_group()
