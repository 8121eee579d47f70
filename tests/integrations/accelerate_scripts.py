"""What users of Accelerate write, as functions of what the tests vary."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integrations.frameworks import BATCH, WIDTH, Net, as_torchrun_starts, batch, optimizer_of, sample

OUTSTANDING = "streaming_diloco(8, fragments=2, delay=3)"


@contextmanager
def started(rank: int, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """An Accelerator in the process group that a rank has, and what laconic warns of."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with as_torchrun_starts(rank, dist.get_world_size()) as said:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        yield Accelerator(cpu=True, **options), said


def attach(*args: Any, **options: Any) -> Any:
    from laconic.integrations.accelerate import attach

    return attach(*args, **options)


def prepared(accelerator: Any, net: nn.Module, optimizer: Callable[[nn.Module], Any] = optimizer_of) -> tuple[Any, Any]:
    model, optimizer = accelerator.prepare(net, optimizer(net))
    return model, optimizer


def step(accelerator: Any, model: Any, optimizer: Any, rank: int, number: int, scale: float = 1.0) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(scale * model(**batch(rank, number))["loss"])
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: Any) -> dict[str, Tensor]:
    state = getattr(model, "module", model).state_dict()
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def mean(of: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in of]).mean(0) for name in of[0]}


def sgd(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1)


# A whole script


@dataclass(frozen=True)
class Script:
    """A training with all that `prepare` takes; which may be saved, killed and resumed."""

    strategy: str | None
    epochs: int = 3
    accumulate: int = 2
    save_at: tuple[int, ...] = ()  # steps
    stop_at: int | None = None
    kill: bool = False  # by the operating system
    automatic: bool = False  # Accelerate names the checkpoints
    safe: bool = True
    resume: bool = False

    @property
    def samples(self) -> int:
        return 2 * BATCH * 20  # an epoch of 20 batches a rank of two, or ten steps


@dataclass
class Result:
    weights: dict[str, Tensor]
    moments: Tensor
    rates: list[float]
    saved: dict[int, dict[str, Tensor]]  # this rank's own weights when it saved
    stats: Any
    said: list[str]


class Progress:
    """What a user registers for checkpointing."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def run_script(rank: int, folder: Path, script: Script) -> Result:
    from accelerate import skip_first_batches
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    options = {
        "project_config": ProjectConfiguration(str(folder), automatic_checkpoint_naming=script.automatic, total_limit=2),
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
    }
    with started(rank, gradient_accumulation_steps=script.accumulate, **options) as (accelerator, said):
        net, progress = Net(dropout=0.0), Progress()
        halves = [[*net.body[0].parameters()], [p for layer in list(net.body)[1:] for p in layer.parameters()]]
        data: Any = [sample(number) for number in range(script.samples)]
        loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
        first, second = torch.optim.AdamW(halves[0], lr=3e-3), torch.optim.SGD(halves[1], lr=0.05, momentum=0.9)
        decay = torch.optim.lr_scheduler.LambdaLR(first, lambda n: 0.99**n)
        model, first, second, loader, decay = accelerator.prepare(net, first, second, loader, decay)
        accelerator.register_for_checkpointing(progress)
        run: Any = attach(accelerator, model, [first, second], script.strategy) if script.strategy else nullcontext()
        rates: list[float] = []
        saved: dict[int, dict[str, Tensor]] = {}
        steps = 0
        with run:
            if script.resume:
                accelerator.load_state(None if script.automatic else str(folder / "saved"))
            for epoch in range(progress.batches // len(loader), script.epochs):
                loader.set_epoch(epoch)
                begun = progress.batches - epoch * len(loader)
                for inputs in skip_first_batches(loader, begun) if begun else loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(**inputs)["loss"])
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        for optimizer in (first, second):
                            optimizer.step()
                            optimizer.zero_grad()
                        decay.step()
                    progress.batches += 1
                    rates.append(first.param_groups[0]["lr"])
                    if progress.batches % script.accumulate:
                        continue
                    steps = progress.batches // script.accumulate
                    if steps in script.save_at and not script.resume:
                        saved[steps] = weights_of(model)
                        where = None if script.automatic else str(folder / "saved")
                        accelerator.save_state(where, safe_serialization=script.safe)
                    if steps == script.stop_at:
                        if script.kill:
                            os.kill(os.getpid(), signal.SIGKILL)
                        run.detach()
                        break
                if steps == script.stop_at:
                    break
        memory = [value.flatten() for one in (first, second) for state in one.state.values() for value in state.values()]
        stats = run.stats() if script.strategy else None
    return Result(weights_of(model), torch.cat([value.float() for value in memory]), rates, saved, stats, said)


class Plain(nn.Module):
    """Without buffers, as Accelerate's LocalSGD knows none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.body(x).squeeze(-1) - labels).square().mean()}
