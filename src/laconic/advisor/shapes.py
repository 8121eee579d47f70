"""The shapes of a model of which only the number of parameters is known, and how they are cut for the network. No torch.

Buckets, fragments and chunks are cut as `gradients`, `local.fragments` and `local.parameter_averaging` cut tensors; tests
compare them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Named = Mapping[str, Shape]
"""Shapes by parameter name, in the order of the model."""

NUMBER_BYTES = 4
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
SMALLEST, LARGEST = 10_000, 10**13
ASPECT = 96  # hidden size over layers: GPT-3's models have 64 to 128
VOCABULARY = 50_257
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Decoder:
    """A plain decoder: tied embeddings, and blocks of 12 hidden² numbers, without biases."""

    hidden: int
    layers: int
    vocabulary: int

    @property
    def shapes(self) -> dict[str, Shape]:
        """By name."""
        hidden = self.hidden
        block: dict[str, Shape] = {
            "norm1.weight": (hidden,),
            "attention.weight": (3 * hidden, hidden),
            "out.weight": (hidden, hidden),
            "norm2.weight": (hidden,),
            "up.weight": (4 * hidden, hidden),
            "down.weight": (hidden, 4 * hidden),
        }
        blocks = {f"blocks.{number}.{name}": shape for number in range(self.layers) for name, shape in block.items()}
        return {"embedding.weight": (self.vocabulary, hidden), **blocks, "norm.weight": (hidden,)}

    def __str__(self) -> str:
        return f"a plain decoder with hidden size {self.hidden}, {self.layers} layers and a vocabulary of {self.vocabulary}"


def decoder(parameters: int) -> Decoder:
    """One of so many parameters, to within its hidden size. The vocabulary takes what the blocks leave.

    >>> print(decoder(1_300_000_000))
    a plain decoder with hidden size 2176, 21 layers and a vocabulary of 49031
    """
    if not SMALLEST <= parameters <= LARGEST:
        raise ValueError(f"a model has from {SMALLEST:,} to {LARGEST:,} parameters here, got {parameters:,}")
    found = [_filled(parameters, hidden) for hidden in _sizes(parameters)]
    return min(found, key=lambda one: abs(math.log(one.hidden / one.layers / ASPECT)))


def _sizes(parameters: int) -> list[int]:
    """Hidden sizes worth a look: multiples of 64, or of 8 where the model is tiny."""
    guess = min((parameters * ASPECT / 12) ** (1 / 3), (parameters / 32) ** 0.5)  # at most a third in one block
    unit = 64 if guess >= 512 else 8
    sizes = {max(8, round(guess * factor / 100 / unit) * unit) for factor in range(40, 181, 5)}
    return sorted(size for size in sizes if _block(size) <= 0.75 * parameters)


def _filled(parameters: int, hidden: int) -> Decoder:
    table = min(VOCABULARY * hidden, parameters // 3)
    layers = max(1, round((parameters - table) / (12 * hidden**2)))
    while layers > 1 and parameters - layers * _block(hidden) < hidden * 64:
        layers -= 1
    return Decoder(hidden, layers, max(1, (parameters - layers * _block(hidden) - hidden) // hidden))


def _block(hidden: int) -> int:
    return 12 * hidden**2 + 2 * hidden


def count(text: str) -> int:
    """A number of parameters: `124m`, `1.3b`, `7000000`.

    >>> count("1.3b")
    1300000000
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbt]?)", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"a number of parameters is written as 124m, 1.3b or 7000000; got {text!r}")
    return round(float(found[1]) * UNITS[found[2]])


def size(shapes: Sequence[Shape]) -> int:
    """How many numbers."""
    return sum(math.prod(shape) for shape in shapes)


def buckets(named: Named) -> list[list[Shape]]:
    """DDP's: from the last parameter to the first, closed when 1 MiB is full, then each when 25 MiB are.

    >>> [len(bucket) for bucket in buckets({"a": (4,), "b": (512, 512), "c": (512, 512), "d": (4,)})]
    [2, 2]
    """
    made: list[list[Shape]] = [[]]
    held = 0
    for shape in reversed(list(named.values())):
        made[-1].append(shape)
        held += size([shape]) * NUMBER_BYTES
        if held >= (FIRST_BUCKET_BYTES if len(made) == 1 else BUCKET_BYTES):
            made.append([])
            held = 0
    return [bucket for bucket in made if bucket]


def fragments(named: Named, wanted: int) -> list[list[list[Shape]]]:
    """Layers in turn go to fragments; each in buckets of at most 25 MiB, or one parameter."""
    layers: dict[str, list[Shape]] = {}
    for name, shape in named.items():
        layers.setdefault(layer(name), []).append(shape)
    assert wanted <= len(layers), "the catalogue was asked for no more fragments than there are layers"
    parts: list[list[Shape]] = [[] for _ in range(wanted)]
    for number, shapes in enumerate(layers.values()):
        parts[number % wanted] += shapes
    return [_packed(part) for part in parts]


def layer(name: str) -> str:
    """Everything below one number in the names, such as blocks.3, or what shares the first part of its name."""
    path = name.split(".")
    number = next((place for place, word in enumerate(path) if word.isdecimal()), 0)
    return ".".join(path[: number + 1])


def _packed(shapes: Sequence[Shape]) -> list[list[Shape]]:
    made: list[list[Shape]] = []
    held = 0
    for shape in shapes:
        count_bytes = size([shape]) * NUMBER_BYTES
        if not made or held + count_bytes > BUCKET_BYTES:
            made.append([])
            held = 0
        made[-1].append(shape)
        held += count_bytes
    return made
