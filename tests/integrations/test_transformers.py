"""Transformers: what the Trainer's users do, and what they do wrong."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.integrations.frameworks import Samples, as_torchrun_starts
from tests.integrations.transformers_jobs import (
    LENGTH,
    OUTSTANDING,
    WORDS,
    Job,
    arguments,
    interrupt,
    mean,
    refused,
    same,
    started,
    tiny,
    tokens,
    train,
    trainer_of,
    weights_of,
)
from tests.live import last_ranks, ranks


def test_ddp_is_the_trainers_own_to_the_bit(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "warmup_steps": 3}
    plain = ranks(2, train, tmp_path, Job(None, "plain", options=options))
    for strategy in ("ddp()", None):
        ours = ranks(2, train, tmp_path, Job(strategy, options=options))
        for mine, theirs in zip(ours, plain, strict=True):
            assert same(mine.weights, theirs.weights)
            for name in ("loss", "grad_norm", "learning_rate"):
                assert mine.column(name) == theirs.column(name) != []
            assert min(mine.column("grad_norm")) > 0.3  # each step was clipped
            assert not mine.said
        assert (ours[0].stats and ours[0].stats.steps) == (12 if strategy else None)


def finds_unused(trainer: Any, step: int) -> Any:
    return trainer.model_wrapped.find_unused_parameters, trainer.accelerator.scaler


@pytest.mark.parametrize(("strategy", "frozen"), [("int8()", False), ("diloco(4)", True)])
def test_a_strategy_trains_a_transformer(strategy: str, frozen: bool, tmp_path: Path) -> None:
    first, second = ranks(2, train, tmp_path, Job(strategy, steps=16, frozen=frozen, act=finds_unused))
    assert first.acted[1] == (True, None)  # the Trainer's default for a model without checkpointed activations
    assert same(first.weights, second.weights)
    assert first.column("loss")[-1] < 0.98 * first.column("loss")[0]
    assert first.stats.wire_bytes == first.predicted.wire_bytes
    assert first.stats.collectives == first.predicted.collectives
    assert first.stats.wire_bytes < (4 * 4 * 3300 if frozen else 16 * 0.3 * 4 * 7168)  # of 7168 parameters


@pytest.mark.parametrize("strategy", ["int8()", pytest.param("diloco(4)", marks=pytest.mark.soak)])
def test_activation_checkpointing_changes_no_bit(strategy: str, tmp_path: Path) -> None:
    without = ranks(2, train, tmp_path, Job(strategy, options={"ddp_find_unused_parameters": False}))  # as it is there
    checkpointed = ranks(2, train, tmp_path, Job(strategy, options={"gradient_checkpointing": True}, act=finds_unused))
    assert checkpointed[0].acted[1][0] is False
    assert all(same(mine.weights, other.weights) for mine, other in zip(checkpointed, without, strict=True))


def test_mixed_precision_on_a_cpu(tmp_path: Path) -> None:
    plain, ours = (
        ranks(2, train, tmp_path, Job("ddp()", kind, steps=4, options={"bf16": True})) for kind in ("plain", "laconic")
    )
    assert all(same(mine.weights, other.weights) for mine, other in zip(ours, plain, strict=True))
    # Accelerate leaves fp16 out on a CPU, without a word: it is a training in fp32, without a GradScaler.
    fp32, fp16 = (
        ranks(2, train, tmp_path, Job("ddp()", steps=4, options={"fp16": on}, act=finds_unused)) for on in (False, True)
    )
    assert fp16[0].acted[1][1] is None
    assert same(fp16[0].weights, fp32[0].weights)
    assert not same(ours[0].weights, fp32[0].weights)


def test_rows_of_the_log_and_reporters_have_bytes_waits_and_drift(tmp_path: Path) -> None:
    options = {"report_to": "tensorboard", "logging_steps": 4}
    first, second = ranks(2, train, tmp_path, Job("diloco(4)", options=options))
    assert first.column("laconic/total_wire_bytes")[-1] == first.stats.wire_bytes
    assert [round(4 * one) for one in first.column("laconic/wire_bytes")] == [first.stats.wire_bytes // 3] * 3
    assert all(one >= 0 for one in first.column("laconic/wait_seconds"))
    assert all(one > 0 for one in first.column("laconic/drift"))
    assert len(first.column("laconic/drift")) == len(first.column("loss")) == 3
    assert "laconic/wire_bytes" not in first.history[-1]  # the summary of the training
    events = b"".join(file.read_bytes() for file in tmp_path.glob("**/events.out.tfevents.*"))
    for name in ("wire_bytes", "wait_seconds", "drift"):
        assert b"train/laconic/" + name.encode() in events
    assert second.column("loss") == first.column("loss")


# In mid-period


@pytest.mark.parametrize("consensus", ["mean", "anchor", pytest.param("local", marks=pytest.mark.soak)])
def test_what_is_saved_evaluated_and_predicted_in_mid_period(consensus: str, tmp_path: Path) -> None:
    job = Job(consensus=consensus, dropout=0.0, steps=14, watch=(8, 11))
    results = ranks(2, train, tmp_path, replace(job, act=interrupt))
    for one in results:
        loaded, evaluated, nested, loss, distance = one.acted[11]
        own = [each.watched[11] for each in results]
        assert not same(*own)
        assert same(loaded, {"mean": mean(own), "anchor": one.watched[8], "local": own[0]}[consensus])
        assert same(loaded, load_file(tmp_path / "inside/model.safetensors"))
        if consensus != "local":  # where each rank evaluates its own on its share
            assert evaluated == nested
            assert evaluated == pytest.approx(loss, rel=1e-5)
            assert distance < 1e-5
    without = ranks(2, train, tmp_path, job)
    assert all(same(mine.weights, other.weights) for mine, other in zip(results, without, strict=True))


def keep_at_the_end() -> list[Any]:
    from transformers import TrainerCallback

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            state.kept = weights_of(model)

    return [Keep()]


def test_callbacks_find_equal_replicas_at_the_end(tmp_path: Path) -> None:
    first, second = ranks(2, train, tmp_path, Job(watch=(12,), callbacks=keep_at_the_end))
    assert same(first.state.kept, second.state.kept)
    assert same(first.state.kept, first.weights)
    assert not same(first.watched[12], second.watched[12])


def early_stopping() -> list[Any]:
    from transformers import EarlyStoppingCallback

    return [EarlyStoppingCallback(early_stopping_patience=2)]


def test_the_best_model_is_loaded_at_the_end_and_old_checkpoints_go(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 7, "save_strategy": "steps", "save_steps": 7, "save_total_limit": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so the first is the best, and it is stopped after two more
    }  # fmt: skip
    job = Job(OUTSTANDING, steps=30, options=options, watch=(7,), callbacks=early_stopping)
    results = ranks(2, train, tmp_path, job)
    assert sorted(one.name for one in tmp_path.glob("checkpoint-*")) == ["checkpoint-21", "checkpoint-7"]
    for number in (7, 21):  # each with its ranks' own parts, and nothing of others
        assert len(list((tmp_path / f"checkpoint-{number}/laconic").glob("*/rank-*.pt"))) == 2
    best = load_file(tmp_path / "checkpoint-7/model.safetensors")
    assert same(best, mean([one.watched[7] for one in results]))
    for one in results:
        assert one.state.global_step == 21
        assert one.state.best_global_step == 7
        assert same(one.weights, best)  # though an exchange was outstanding
        assert len(one.column("eval_loss")) == 3


# What is refused


REFUSED = {
    "typo": (Job("dilocco(8)"), "", "dilocco"),
    "no strategy": (Job(3), "", "strategy"),  # type: ignore[arg-type]
    "no anchor": (
        Job("int8()", consensus="anchor"),
        "",
        "consensus='anchor' is the outer optimizer's model, and int8() has none",
    ),
    "consensus": (Job(consensus="median"), "", "consensus must be 'mean', 'anchor' or 'local', got 'median'"),
    "FSDP": (Job(), "is_fsdp_enabled", "under the Trainer with FSDP"),  # none of them runs on a CPU: only the flag says so
    "DeepSpeed": (Job(), "is_deepspeed_enabled", "under the Trainer with DeepSpeed"),
    "subgroups": (Job("post_local_sgd(warmup=4, period=4)"), "", "TrainingArguments(ddp_find_unused_parameters=False)"),
    "static graph": (Job(options={"ddp_static_graph": True}), "", "static_graph=True learns the graph in a first step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_on_all_ranks(case: str, tmp_path: Path) -> None:
    job, change, wanted = REFUSED[case]
    for sentence in ranks(2, refused, tmp_path, job, change):
        assert wanted in sentence


def differing(rank: int, folder: Path) -> str:
    return refused(rank, folder, Job(f"diloco({8 + rank})"))


def test_ranks_with_different_strategies_say_so(tmp_path: Path) -> None:
    for sentence in ranks(2, differing, tmp_path):
        assert "rank 1 has strategy diloco(period=9), rank 0 has strategy diloco(period=8)" in sentence


def test_subgroups_without_unused_parameters(tmp_path: Path) -> None:
    job = Job("post_local_sgd(warmup=4, period=4)", options={"ddp_find_unused_parameters": False})
    first, second = ranks(2, train, tmp_path, job)
    assert same(first.weights, second.weights)
    assert (first.stats.exchanges, first.stats.syncs) == (4, 2)


# What else users do


def twice(rank: int, folder: Path) -> tuple[list[int], list[bool], list[str]]:
    steps, equal = [], []
    with started(rank) as said:
        trainer = trainer_of(folder, Job("diloco(4)", steps=6), [])
        for _ in range(2):
            trainer.train()
            steps.append(trainer.laconic_run.stats().steps)
            trainer.evaluate()
            trainer.save_model(str(folder / "after"))
            rows: list[Any] = [None, None]
            dist.all_gather_object(rows, weights_of(trainer.model))
            equal.append(same(*rows))
    return steps, equal, said


def test_training_twice_is_two_runs(tmp_path: Path) -> None:
    for steps, equal, said in ranks(2, twice, tmp_path):
        assert steps == [6, 6]
        assert equal == [True, True]
        assert not said


def out_of_memory(rank: int, folder: Path) -> tuple[int, int, list[str], dict[str, Tensor]]:
    from laconic.integrations.transformers import LaconicTrainer

    class Greedy(LaconicTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if len(inputs["input_ids"]) > 2 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    with started(rank) as said:
        options = {"auto_find_batch_size": True, "max_steps": 6}
        given = {"train_dataset": tokens(40, 0), "args": arguments(folder, **options)}
        trainer: Any = Greedy(model=tiny(), strategy="diloco(4)", **given)
        trainer.train()
    return trainer._train_batch_size, trainer.laconic_run.stats().steps, said, weights_of(trainer.model)


def test_a_smaller_batch_is_found_and_trained_with(tmp_path: Path) -> None:
    results = ranks(2, out_of_memory, tmp_path)
    assert all(size < 4 and steps == 6 and not said for size, steps, said, _ in results)
    assert same(results[0][3], results[1][3])


def waits_for_nobody(rank: int, folder: Path) -> float:
    from transformers import TrainerCallback

    class Late(TrainerCallback):  # type: ignore[misc]
        waited = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun = time.monotonic()
            while rank == 1 and state.global_step == 1 and not (folder / "ahead").exists() and self.waited < 5:
                time.sleep(0.01)
                self.waited = time.monotonic() - begun

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 0 and state.global_step == 5:
                (folder / "ahead").touch()

    with started(rank):
        late = Late()
        trainer_of(folder, Job("diloco(8)", steps=8, options={"logging_steps": 8}), [late]).train()
    return late.waited


def test_steps_apart_wait_for_nobody(tmp_path: Path) -> None:
    # The Trainer counts the tokens of all ranks in each step, and DDP asks all of them for unused parameters.
    assert max(ranks(2, waits_for_nobody, tmp_path)) < 5


def uneven_tokens(rank: int, folder: Path, strategy: str) -> tuple[float, float]:
    """How far the update of one step is from that by the mean loss of this rank's tokens, and from a DDP's."""
    from transformers import TrainerCallback

    from laconic.integrations.transformers import LaconicTrainer

    seen: list[Any] = []

    class Seeing(LaconicTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append({name: value.clone() for name, value in inputs.items()})
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(weights_of(trainer.model))

    rows = [dict(tokens(8, 0)[place]) for place in range(8)]
    for number, row in enumerate(rows):
        row["labels"] = row["labels"].where(torch.arange(LENGTH) < LENGTH - number, -100)  # fewer and fewer count
    model = tiny(dropout=0.0)
    with started(rank):
        options = arguments(folder, max_steps=1, max_grad_norm=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given = {"args": options, "train_dataset": Samples(rows), "callbacks": [Keep()], "optimizers": (optimizer, None)}
        trainer = Seeing(model=model, strategy=strategy, **given)
        trainer.train()
    name = "transformer.h.0.mlp.c_fc.weight"
    reference = tiny(dropout=0.0)
    before = reference.state_dict()[name].clone()
    counted = int((seen[0]["labels"][:, 1:] != -100).sum())
    reference(**seen[0]).loss.backward()
    own = reference.get_parameter(name).grad
    shares: list[Any] = [None, None]
    dist.all_gather_object(shares, (counted, own))
    everyone = sum(count * gradient for count, gradient in shares) / sum(count for count, _ in shares)
    update = before - seen[1][name]
    return tuple(float((update - wanted).norm() / wanted.norm()) for wanted in (own, everyone))  # type: ignore[return-value]


@pytest.mark.parametrize("strategy", ["silent()", "ddp()"])
def test_a_step_apart_counts_the_ranks_own_tokens(strategy: str, tmp_path: Path) -> None:
    for own, everyone in ranks(2, uneven_tokens, tmp_path, strategy):
        assert (own < 1e-4) == (strategy == "silent()")
        assert (everyone < 1e-4) == (strategy == "ddp()")


def seq2seq(rank: int, folder: Path) -> Any:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from laconic.integrations.transformers import LaconicMixin

    class Ours(LaconicMixin, Seq2SeqTrainer):  # type: ignore[misc]
        pass

    torch.manual_seed(2)
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
    options = {
        "predict_with_generate": True,
        "generation_max_length": 4,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "max_steps": 5,
    }
    with started(rank) as said:
        given: dict[str, Any] = {"train_dataset": tokens(40, 0), "eval_dataset": tokens(16, 5)}
        trainer: Any = Ours(
            model=model, args=arguments(folder, Seq2SeqTrainingArguments, **options), strategy="diloco(4)", **given
        )
        trainer.train()
        predicted = trainer.predict(given["eval_dataset"], max_length=3)
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    cut = bool((predicted.predictions[:, 3:] == 0).all())
    return losses, (len(predicted.predictions), cut), trainer.laconic_run.stats().syncs, said, weights_of(trainer.model)


def test_the_mixin_with_another_trainer(tmp_path: Path) -> None:
    first, second = ranks(2, seq2seq, tmp_path)
    assert first[:4] == second[:4]
    assert (len(first[0]), first[1], first[2], first[3]) == (2, (16, True), 1, [])
    assert same(first[4], second[4])


def without_a_group(rank: int, folder: Path) -> tuple[list[str], Any, Any, list[str]]:
    """As `python script.py`: there is no process group, and no environment of a rank."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    dist.destroy_process_group()
    with as_torchrun_starts(0, 1) as said:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        options = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 4}
        trainer = trainer_of(folder, Job("diloco(4)", steps=6, options=options), [])
        trainer.train()
        alone = not dist.is_initialized()
        with trainer.laconic_run.consensus():
            trainer.save_model(str(folder / "after"))
        run = trainer.laconic_run
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # whoever calls us destroys it
    return said, (alone, run.stats().steps, str(run.strategy)), trainer.state.global_step, os.listdir(folder / "checkpoint-6")


def test_a_single_process_trains_and_is_told_once_that_nothing_is_attached(tmp_path: Path) -> None:
    [(said, run, steps, files)] = ranks(1, without_a_group, tmp_path)
    assert len(said) == 1
    assert "diloco(period=4) is not attached: this is a single process" in said[0]
    assert run == (True, 0, "diloco(period=4)")
    assert steps == 6
    assert "laconic" not in files


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["int8()", "diloco(4)"])
@pytest.mark.parametrize(
    "options", [{"torch_compile": True, "torch_compile_backend": "eager"}, {"neftune_noise_alpha": 0.1}], ids=str
)
def test_other_options(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    first, second = last_ranks(2, train, tmp_path, Job(strategy, options=options))
    assert same(first.weights, second.weights)
    assert first.stats.wire_bytes == first.predicted.wire_bytes


def failing(rank: int, folder: Path, strategy: str) -> tuple[str, float]:
    from laconic.integrations.transformers import LaconicTrainer

    class Broken(LaconicTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if rank == 1 and self.state.global_step == 2:
                raise ZeroDivisionError("no data today")
            return super().compute_loss(model, inputs, *args, **kwargs)

    with started(rank):
        given = {"train_dataset": tokens(40, 0), "args": arguments(folder, logging_steps=100)}
        trainer = Broken(model=tiny(), strategy=strategy, **given)
        begun = time.monotonic()
        with pytest.raises((ZeroDivisionError, RuntimeError)) as found:
            trainer.train()
    return f"{type(found.value).__name__}: {found.value}", time.monotonic() - begun


def test_an_exception_on_one_rank_ends_all_with_its_message(tmp_path: Path) -> None:
    (first, seconds), (second, _) = last_ranks(2, failing, tmp_path, "int8()")
    assert "rank 1 failed in step 3 with ZeroDivisionError: no data today" in first
    assert second == "ZeroDivisionError: no data today"
    assert seconds < 20
