"""A reducer of your own: written, checked without a network by `check_reducer`, then used in training.

    torchrun --standalone --nproc-per-node 2 examples/custom_reducer.py

About 7 seconds on 2 cores. Look at what the check says, then at predicted and counted bytes, which are equal. A script that
knows nothing of it takes it by its place, in a module beside the script:

    laconic run -s "ddp(reducer=ErrorFeedback(custom_reducer:Stripes()))" --nproc-per-node 2 examples/gpt.py --steps 40
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic

PARTS, STEPS = 4, 200


@laconic.register  # so that a strategy's text may say Stripes()
@dataclass(frozen=True)
class Stripes(laconic.Reducer):
    """Every fourth number; the next exchange sends the ones beside them.  Bytes: 2(N-1)/N * 4(n / 4 + 1)."""

    exchange_cycle = PARTS  # exchanges after which it sends the same numbers again

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        stripe = slice(bucket.exchanges % PARTS, None, PARTS)
        alarm = 0 * bucket.flat.sum().view(1)  # not a number if any number of the bucket isn't finite: all ranks must see that
        mean = yield laconic.AllReduce(torch.cat([bucket.flat[stripe], alarm]))
        whole = torch.zeros_like(bucket.flat) + mean[-1]
        whole[stripe] = mean[:-1]
        bucket.flat[stripe] = 0  # what is left was not sent: error feedback adds it to the next message
        return laconic.Reduced(whole, error=bucket.flat)


def train(strategy: str, text: Tensor) -> None:
    torch.manual_seed(1337)
    draw = torch.Generator().manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256))
    predicted = laconic.predict(strategy, net, world_size=dist.get_world_size(), step=0, steps=STEPS)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    with laconic.attach(model, optimizer, strategy) as run:
        for _ in range(STEPS):  # eight bytes of Python's standard library, and the one that follows
            windows = text[torch.randint(len(text) - 9, (32, 1), generator=draw) + torch.arange(9)].long()
            loss = nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if dist.get_rank() == 0:
        counted, last = run.stats().wire_bytes, sum(losses[-50:]) / 50
        print(f"{strategy}: {predicted.wire_bytes:,} bytes predicted, {counted:,} counted, loss {last:.3f}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        laconic.check_reducer(Stripes(), world=3)  # all ranks in this process; raises an error that says which law it breaks
        print("3 simulated ranks agree on the mean, and mean + error is what they had")
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    for strategy in ["ddp()", "ddp(reducer=ErrorFeedback(Stripes()))"]:
        train(strategy, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
