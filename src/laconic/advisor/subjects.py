"""What is advised on: a model's exchanges and the compute of a step. From numbers alone, it imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from laconic.advisor import shapes
from laconic.advisor.advice import Candidate
from laconic.advisor.catalogue import OptimizerKind
from laconic.advisor.estimates import MEMORY_BYTES_PER_SECOND, Passes, estimated
from laconic.advisor.quantities import Workers
from laconic.cost.network import Speed
from laconic.cost.step_time import Compute

KINDS = ("AllReduce", "AllGather", "AllToAll")
# Of machines that are not known, where a fast network is for: hosts that keep up with any link of today.
FAST_HOSTS = {kind: {2: Speed(50e-6, 1 / 100e9)} for kind in KINDS}


@dataclass(frozen=True)
class Subject:
    """A model, in words; what its candidates send; what a step computes. `assumptions` says what was not measured."""

    words: str
    families: list[list[Candidate]] = field(repr=False)
    compute: Compute
    weight_bytes: float  # of what is trained
    optimizer: OptimizerKind
    measured_here: bool  # hosts are then taken to be like this one, else to keep up with the link
    assumptions: list[str]
    frozen_bytes: float = 0.0

    @property
    def training_bytes(self) -> float:
        """Weights, gradients and the optimizer's memory; activations are not known."""
        return self.weight_bytes * (4 if self.optimizer == "adam" else 3) + self.frozen_bytes


def of_numbers(
    parameters: int,
    step_seconds: float,
    workers: Workers,
    optimizer: OptimizerKind,
    memory_bytes_per_second: float | None = None,
    extra: Sequence[str] = (),
) -> Subject:
    """A model of which the number of parameters and the time of a step are known. `extra` strategies need torch."""
    model = shapes.decoder(parameters)
    passes = Passes(memory_bytes_per_second or MEMORY_BYTES_PER_SECOND)
    if extra:
        from laconic.advisor.candidates import PassesCodec, candidates, meta_model

        sizes = {"node": workers.per_node}
        found = candidates(
            meta_model(model.shapes), workers.count, PassesCodec(passes), sizes=sizes, optimizer=optimizer, extra=extra
        )
    else:
        found = estimated(model.shapes, workers.count, passes, per_node=workers.per_node, optimizer=optimizer)
    numbers = shapes.size(list(model.shapes.values()))
    said = [
        f"Of the model, only its number of parameters is known. Shapes are those of {model}.",
        WHOLE_STEP,
        work_words(passes),
    ]
    return Subject(
        f"{numbers:,} parameters",
        found,
        Compute.of(step_seconds),
        4.0 * numbers,
        optimizer,
        measured_here=False,
        assumptions=said,
    )


WHOLE_STEP = (
    "Of the compute, only --step-ms is known: the compute of a step in ms, on one machine, without communication. A third of "
    "it is taken as forward and two thirds as backward."
)
ON_HOSTS_LIKE_THIS = (
    "The hosts are like this machine: a collective takes 50 µs and moves 4 GB/s at most (laconic probe measures it)."
)
ON_FAST_HOSTS = "The hosts keep up with the link, and a collective takes 50 µs (laconic probe measures it)."


def work_words(passes: Passes) -> str:
    """How encoding and decoding was estimated."""
    return (
        "Encoding and decoding are counted in passes over memory, which were timed on a CPU, at "
        f"{passes.bytes_per_second / 1e9:g} GB/s (--memory-gb-per-second). Nothing was measured on a GPU."
    )
