"""What is advised on where there is a model: a task that is timed here, a measured script, a config of transformers."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.advisor.candidates import PassesCodec, candidates, meta_model
from laconic.advisor.catalogue import OptimizerKind
from laconic.advisor.estimates import MEMORY_BYTES_PER_SECOND, Passes
from laconic.advisor.quantities import Workers
from laconic.advisor.subjects import WHOLE_STEP, Subject, work_words
from laconic.cost.codec import SCATTERED, Codec, WorkModel
from laconic.cost.step_time import Compute
from laconic.cost.step_timer import SKIPPED, StepTimer

VERSION = 1  # of the file of `laconic run --advise`
STEPS, FEWEST, LONGEST_SECONDS = 20, 3, 10.0  # of a task: so many are timed, as time allows
TIMED_HERE = "Encoding and decoding were timed on this machine's CPU, on tensors of the model's shapes."


class Trainable(Protocol):
    """A task of the lab, as far as it is timed."""

    name: str

    def model(self) -> nn.Module:
        """A new model."""
        ...

    def optimizer(self, model: nn.Module) -> Optimizer:
        """An optimizer over its parameters."""
        ...

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Any]:
        """Batches without an end."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of one batch."""
        ...


def of_task(
    task: Trainable,
    workers: Workers,
    memory_bytes_per_second: float | None,
    extra: Sequence[str],
    progress: Callable[[str], None],
) -> Subject:
    """A few steps of the task are made in this process, with real batches, by as many threads as torch takes by itself."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    batches = task.batches(0, workers.count, 0)
    progress(f"timing {task.name} in this process: {SKIPPED} steps that are not counted, then up to {STEPS}")
    timer, began = StepTimer(model, [optimizer]), time.perf_counter()
    while timer.timed < (STEPS if time.perf_counter() - began < LONGEST_SECONDS else FEWEST):
        _train(task, model, optimizer, next(batches))
        timer.tick()
    timer.stop()
    compute = timer.compute()
    assert compute is not None, "steps were timed"
    said = [f"The compute is that of this machine, timed in {timer.timed} steps of one process: {_parts(compute)}."]
    return _of_model(task.name, model, compute, workers, kind_of(optimizer), memory_bytes_per_second, extra, progress, said)


def _train(task: Trainable, model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def of_measured(
    path: Path,
    workers: Workers,
    optimizer: OptimizerKind | None,
    memory_bytes_per_second: float | None,
    extra: Sequence[str],
    progress: Callable[[str], None],
) -> Subject:
    """What `laconic run --advise` wrote of a script; `optimizer` None: the script's own."""
    data = _read(path)
    forward, backward, step = data["compute"]
    compute = Compute(forward, backward, step)
    model = meta_model(data["parameters"], getattr(torch, data["dtype"]))
    said = [f"The compute is that of the script, timed in one process: {_parts(compute)}."]
    kind: OptimizerKind = optimizer or ("sgd" if data.get("optimizer") == "sgd" else "adam")
    return _of_model("the script", model, compute, workers, kind, memory_bytes_per_second, extra, progress, said)


def of_config(
    name: str,
    step_seconds: float,
    workers: Workers,
    optimizer: OptimizerKind,
    memory_bytes_per_second: float | None,
    extra: Sequence[str],
    progress: Callable[[str], None],
) -> Subject:
    """A model type of transformers, or a config.json, on meta tensors: only its shapes are needed."""
    model = config_model(name)
    memory = memory_bytes_per_second or MEMORY_BYTES_PER_SECOND  # the step was timed elsewhere, and so is the rest
    return _of_model(name, model, Compute.of(step_seconds), workers, optimizer, memory, extra, progress, [WHOLE_STEP])


def config_model(name: str) -> nn.Module:
    """`gpt2`, another model type, or the path of a config.json; built without weights and without the internet."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError as error:
        raise ValueError(
            "--config needs transformers: in laconic's folder, pip install '.[transformers]'; or give --params instead"
        ) from error
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        config = _config_of(path, AutoConfig)
    elif name in CONFIG_MAPPING_NAMES:
        config = AutoConfig.for_model(name)
    else:
        raise ValueError(
            f"transformers has no model type {name!r} (such as gpt2, llama, bert), and nothing is downloaded: give a type, or "
            "the path of the model's config.json"
        )
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (ValueError, AttributeError, TypeError, ImportError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"transformers can't build a language model of {name}: {first}; give --params instead") from error
    return model


def _config_of(path: Path, auto: Any) -> Any:
    try:
        data = json.loads(path.read_text())
        kind = data.pop("model_type")
        return auto.for_model(kind, **data)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} is no config of a model that transformers knows ({type(error).__name__}: {error}); it must be the JSON "
            "file that save_pretrained writes, with its model_type"
        ) from error


def _of_model(
    words: str,
    model: nn.Module,
    compute: Compute,
    workers: Workers,
    optimizer: OptimizerKind,
    memory_bytes_per_second: float | None,
    extra: Sequence[str],
    progress: Callable[[str], None],
    said: Sequence[str],
) -> Subject:
    """Encoding is timed here, unless the memory of another device is given."""
    codec: WorkModel = Codec()
    how = TIMED_HERE
    if memory_bytes_per_second is not None:
        passes = Passes(memory_bytes_per_second)
        codec, how = PassesCodec(passes), work_words(passes)
    progress("working out what each strategy sends")
    sizes = {"node": workers.per_node}
    found = candidates(model, workers.count, codec, sizes=sizes, optimizer=optimizer, extra=extra)
    if isinstance(codec, Codec) and codec.scatter > SCATTERED:
        how += f" WARNING: {scatter_words(codec.scatter)}"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trained)
    return Subject(
        f"{words}, {numbers:,} parameters",
        found,
        compute,
        float(sum(parameter.nbytes for parameter in trained)),
        optimizer,
        frozen_bytes=float(sum(one.nbytes for one in model.parameters() if not one.requires_grad)),
        measured_here=memory_bytes_per_second is None,
        assumptions=[*said, how],
    )


def scatter_words(scatter: float) -> str:
    """What to think of such timings."""
    return (
        f"the timings of one exchange scatter: their quartiles are {scatter:.0%} of the median apart. The machine is busy; ask "
        "again while nothing else runs."
    )


def kind_of(optimizer: Optimizer) -> OptimizerKind:
    """Adam and what is like it have betas."""
    return "adam" if "betas" in optimizer.defaults else "sgd"


def _parts(compute: Compute) -> str:
    parts = {"forward": compute.forward, "backward": compute.backward, "optimizer": compute.optimizer}
    return ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in parts.items())


def _read(path: Path) -> Mapping[str, Any]:
    """The file, checked: it was written by another process, or by hand."""
    again = "write it again with laconic run --advise"
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"what was measured can't be read from {path}: {error}; {again}") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise ValueError(f"{path} has version {found!r}, and this laconic reads version {VERSION}; {again}")
    compute, parameters = data.get("compute"), data.get("parameters")
    if not isinstance(compute, list) or len(compute) != 3 or not all(map(_is_number, compute)) or not sum(compute) > 0:
        raise ValueError(f"compute in {path} must be the seconds of forward, backward and optimizer, got {compute!r}; {again}")
    if not isinstance(parameters, dict) or not all(_is_shape(shape) for shape in parameters.values()):
        raise ValueError(f"parameters in {path} must be shapes by name, such as {{'weight': [10, 10]}}; {again}")
    if not isinstance(getattr(torch, str(data.get("dtype")), None), torch.dtype):
        raise ValueError(f"dtype in {path} must be one of torch's, such as 'float32', got {data.get('dtype')!r}; {again}")
    return data


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and size >= 0 for size in value)
