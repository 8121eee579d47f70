"""What users of Transformers' Trainer write, as one function of what the tests vary."""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from tests.integrations.frameworks import Samples, as_torchrun_starts

OUTSTANDING = "streaming_diloco(8, fragments=2, delay=3)"
WORDS, LENGTH = 24, 10


@dataclass(frozen=True)
class Job:
    """What is trained, and what is watched."""

    strategy: str | None = "diloco(8)"
    kind: str = "laconic"  # "plain": the Trainer itself
    consensus: Any = "mean"
    steps: int = 12
    dropout: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)  # TrainingArguments
    resume: Any = None
    watch: tuple[int, ...] = ()  # steps after which this rank's own weights are kept
    frozen: bool = False  # all but the last block
    act: Callable[[Any, int], Any] | None = None  # on the trainer, after each step
    callbacks: Callable[[], list[Any]] | None = None


@dataclass
class Result:
    begun: dict[str, Tensor]  # before the first step
    weights: dict[str, Tensor]
    history: list[dict[str, Any]]
    watched: dict[int, dict[str, Tensor]]
    stats: Any  # after the last step, before the end
    predicted: Any  # for this model and its buckets
    state: Any  # the Trainer's
    said: list[str]
    acted: dict[int, Any]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.history if name in row]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def mean(of: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in of]).mean(0) for name in of[0]}


def weights_of(model: Any) -> dict[str, Tensor]:
    """Without the second name of the embeddings, which a file doesn't have either."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}


def tokens(count: int, seed: int) -> Samples:
    """Sentences that count by threes."""
    starts = torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed))
    rows = [(start + 3 * torch.arange(LENGTH)) % WORDS for start in starts]
    return Samples([{"input_ids": row, "labels": row.clone()} for row in rows])


def tiny(dropout: float = 0.1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
    model.loss_type = "ForCausalLM"  # GPT-2 leaves it open, and the Trainer counts the first token of a row, too, then
    return model


@functools.cache
def imported() -> None:
    """Import what all need. The Trainer collects garbage in each training: it is spared what was just imported."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import laconic.integrations.transformers  # noqa: F401

    gc.collect()
    gc.freeze()


@contextmanager
def started(rank: int) -> Iterator[list[str]]:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    imported()
    with as_torchrun_starts(rank, dist.get_world_size()) as said:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        yield said


def arguments(folder: Path, kind: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        "output_dir": str(folder), "max_steps": 12, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "no",
        "logging_steps": 3, "learning_rate": 1e-2, "dataloader_pin_memory": False,
    }  # fmt: skip
    return (kind or TrainingArguments)(**{**given, **options})


def trainer_of(folder: Path, job: Job, callbacks: list[Any]) -> Any:
    from transformers import Trainer

    from laconic.integrations.transformers import LaconicTrainer

    model = tiny(job.dropout)
    if job.frozen:
        model.requires_grad_(False)
        model.transformer.h[-1].requires_grad_(True)
    given = {
        "model": model, "args": arguments(folder, max_steps=job.steps, **job.options), "callbacks": callbacks,
        "train_dataset": tokens(40, 0), "eval_dataset": tokens(16, 5),
    }  # fmt: skip
    if job.kind == "plain":
        return Trainer(**given)
    return LaconicTrainer(strategy=job.strategy, consensus=job.consensus, **given)


def train(rank: int, folder: Path, job: Job) -> Result:
    from transformers import TrainerCallback

    watched: dict[int, dict[str, Tensor]] = {}
    acted: dict[int, Any] = {}
    stats = predicted = None

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if -1 not in watched:
                watched[-1] = weights_of(trainer.model)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal stats, predicted
            step, run = state.global_step, getattr(trainer, "laconic_run", None)
            if step in job.watch:
                watched[step] = weights_of(trainer.model)
            if job.act is not None:
                acted[step] = job.act(trainer, step)
            if step == job.steps and run is not None and job.strategy is not None:  # before the end makes replicas equal
                stats = run.stats()
                buckets = run.layout() if stats.exchanges else None
                predicted = laconic.predict(job.strategy, trainer.model, world_size=2, buckets=buckets, step=0, steps=step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if job.act is interrupt:
                trainer.save_model(str(folder / "inside"))

    with started(rank) as said:
        trainer = trainer_of(folder, job, [Watch(), *(job.callbacks() if job.callbacks else [])])
        trainer.train(resume_from_checkpoint=job.resume)
        state = trainer.state
    return Result(watched.pop(-1), weights_of(trainer.model), state.log_history, watched, stats, predicted, state, said, acted)


def refused(rank: int, folder: Path, job: Job, change: str = "") -> str:
    with started(rank), pytest.raises(Exception) as found:  # noqa: PT011  # the tests look at what it says
        trainer = trainer_of(folder, job, [])
        if change:
            setattr(trainer, change, True)
        trainer.train(resume_from_checkpoint=job.resume)
    dist.barrier()  # nobody is left behind in a collective
    return "\n".join([str(found.value), *getattr(found.value, "__notes__", [])])


def interrupt(trainer: Any, step: int) -> Any:
    """What a user does after step 11: saves, evaluates and predicts. Then what they should have got."""
    from transformers import GPT2LMHeadModel

    if step != 11:
        return None
    trainer.save_model(f"{trainer.args.output_dir}/mine")
    evaluated = trainer.evaluate()["eval_loss"]
    nested = trainer.evaluate({"one": trainer.eval_dataset})["eval_one_loss"]
    predicted = trainer.predict(trainer.eval_dataset)
    dist.barrier()
    loaded = GPT2LMHeadModel.from_pretrained(f"{trainer.args.output_dir}/mine").eval()
    rows = torch.stack([one["input_ids"] for one in trainer.eval_dataset])
    with torch.no_grad():
        found = loaded(rows, labels=rows)
    logits = torch.from_numpy(predicted.predictions)
    return weights_of(loaded), evaluated, nested, float(found.loss), (logits - found.logits).abs().max().item()
