"""Functions compiled ahead of time: made by torch's inductor, loaded without it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic._torch.private_names import part


def load(path: Path, device: torch.device) -> Callable[[list[Tensor]], None]:
    """The function in that file; it takes some milliseconds, and doesn't import the compiler."""
    loader = part(part(part(torch, "_C"), "_aoti"), "AOTIModelPackageLoader")
    index: int | None = device.index
    run: Callable[[list[Tensor]], None] = loader(str(path), "model", False, 1, -1 if index is None else index).run
    return run


def compile_to(path: Path, function: Callable[..., None], example: Sequence[Tensor], sizes: Sequence[Sequence[str]]) -> None:
    """Compile a function that writes into its tensors, for any sizes; those of the same name are the same."""
    import torch._inductor
    import torch._inductor.config
    from torch.export import Dim, export

    # Each process decides itself how many threads it has.
    torch._inductor.config.cpp.dynamic_threads = True
    # A multiplication and an addition are two roundings, as they are in the function itself.
    torch._inductor.config.cpp.enable_floating_point_contract_flag = "off"

    named: dict[str, Any] = {name: Dim(name, min=2, max=1 << 40) for each in sizes for name in each}
    shapes = tuple({place: named[name] for place, name in enumerate(each)} for each in sizes)
    program = export(_Writes(function), tuple(example), dynamic_shapes=(shapes,))
    part(torch, "_inductor").aoti_compile_and_package(program, package_path=str(path))


class _Writes(nn.Module):
    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: Tensor) -> tuple[()]:
        self._function(*tensors)
        return ()
