"""Kernels, compiled before workers start: a compiler beside them would slow down what is measured."""

from collections.abc import Callable, Sequence


def ensure(strategies: Sequence[str], say: Callable[[str], object]) -> None:
    """Have what these strategies use compiled, if it is used at all and is not there yet."""
    import torch

    from laconic.kernels import compiling
    from laconic.run.state import kernels_of
    from laconic.strategies.parsing import strategy

    if not compiling.checked("auto"):
        return
    device = torch.device("cpu")
    kernels = {kernel for text in strategies for kernel in kernels_of(strategy(text))}
    try:
        if missing := compiling.missing(kernels, device):
            say(f"compiling {len(missing)} kernels, some seconds each, once a machine")
            compiling.prepare(missing, True, device)
    except RuntimeError as error:  # no compiler, or nowhere to keep what it makes
        say(f"strategies run without compiled kernels: {error}")
