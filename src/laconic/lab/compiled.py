"""Kernels, compiled before workers start: a compiler beside them would slow down what is measured."""

from collections.abc import Callable, Sequence


def ensure(strategies: Sequence[str], say: Callable[[str], object]) -> None:
    """Have what these strategies use compiled, if it is used at all and is not there yet."""
    import torch

    from laconic.kernels import cache, compiling
    from laconic.run.state import kernels_of
    from laconic.strategies.parsing import strategy

    if not compiling.checked("auto"):
        return
    device = torch.device("cpu")
    kernels = {kernel for text in strategies for kernel in kernels_of(strategy(text))}
    missing = [kernel for kernel in kernels if not cache.trusted(cache.file(kernel, device))]
    if not missing:
        return
    say(f"compiling {len(missing)} kernels, some seconds each, once a machine; kept in {cache.folder()}")
    try:
        compiling.prepare(missing, True, device)
    except compiling.CompilerError as error:
        say(f"strategies run without compiled kernels: {error}")
