"""Run the README's first block as it stands there, on every rank that torchrun starts, with the laconic that is installed.

torchrun --standalone --nproc-per-node 2 .ci/three_lines.py
"""

import importlib.util
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

README = Path(__file__).parents[1] / "README.md"


def main() -> None:
    """One rank."""
    import laconic

    assert callable(laconic.attach)
    home = Path(laconic.__file__).resolve()
    assert home.is_relative_to(Path(sys.prefix).resolve()), f"laconic is {home}, and not the one that is installed here"
    extras = [name for name in ("typer", "rich", "numpy", "plotly", "torchft", "accelerate") if importlib.util.find_spec(name)]
    assert not extras, f"this is to show that torch alone is enough, and here are {extras}"
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    found = re.search(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    names = {
        "DistributedDataParallel": DistributedDataParallel,
        "torch": torch,
        "model": torch.nn.Linear(64, 32),
        "loader": torch.randn(20, 16, 64),
        "loss": lambda model, batch: model(batch).square().mean(),
    }
    exec("\n".join(line[1:] for line in found[1].splitlines()), names)
    model, stats, world = names["model"], names["run"].stats(), dist.get_world_size()
    assert same_bits(model), "replicas differ"
    expected = 20 * laconic.predict("bf16()", model, world_size=world).wire_bytes
    assert (stats.steps, stats.wire_bytes) == (20, expected), f"{stats}; expected {expected} bytes on the cable"
    dist.destroy_process_group()


def same_bits(model: torch.nn.Module) -> bool:
    """Whether this rank's parameters are those of all ranks."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return all(torch.equal(mine, one) for one in everybody)


if __name__ == "__main__":
    main()
