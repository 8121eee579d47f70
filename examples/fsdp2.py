"""A small transformer, sharded by FSDP2 on two islands of two ranks, and averaged between the islands.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --strategy "int8()"
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --save checkpoints      # and again: it goes on

About 12 seconds each on 2 cores. Look at the loss of the islands' mean, and at the last line: each rank sends its own shards
alone, and few of those.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic


class Transformer(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(64, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of guessing each next byte."""
        x, mask = self.tokens(batch[:, :-1]) + self.positions.weight, nn.Transformer.generate_square_subsequent_mask(64)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="streaming_diloco(16, fragments=2, delay=2)")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--save", help="a folder: checkpoints go there, and the newest is gone on with")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    rank, world = dist.get_rank(), dist.get_world_size()
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    data, draw = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(rank)

    def batch() -> Tensor:
        starts = torch.randint(len(data) - 65, (8,), generator=draw).tolist()
        return torch.stack([data[start : start + 65] for start in starts]).long()

    # Inside an island the model is sharded over a fast network, by torch. Between islands, over a slow one, laconic averages.
    mesh = init_device_mesh("cpu", (options.islands, world // options.islands), mesh_dim_names=("replicate", "shard"))
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    with laconic.attach(model, optimizer, options.strategy, mesh=mesh) as run:
        if options.save and laconic.checkpoint.latest(options.save):
            laconic.checkpoint.load(options.save, run=run)
        for _ in range(options.steps):
            loss = model(batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step % 16 == 0:
                with run.consensus(), torch.no_grad():  # the mean of the islands
                    value = model(batch())
                if rank == 0:
                    print(f"step {run.step}: loss {value.item():.3f}", flush=True)
        if options.save:
            laconic.checkpoint.save(options.save, run=run)
    if rank == 0:
        plain = laconic.predict("ddp()", model, world_size=options.islands).wire_bytes_per_step
        sent = run.stats().wire_bytes_per_step
        print(f"{sent / 1e3:.1f} kB a step and rank between islands; ddp() would send {plain / 1e3:.1f} kB")
    del run, model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
