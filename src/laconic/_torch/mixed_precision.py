"""What a DDP with `mixed_precision=` gives to its parameters, and optimizers that parameters carry with them."""

from typing import Any

from torch.distributed import utils

from laconic._torch.private_names import part


def restore(parameter: Any) -> None:
    """Give a parameter its values in full precision back; the next forward fills the low-precision copy again."""
    parameter.data = part(parameter, "_fp_param")
    part(utils, "_free_storage")(part(parameter, "_mp_param"))


def end_forward(parameter: Any) -> None:
    """At the end of a backward: a forward installs its hooks anew, and what needs no gradient has met none that restores it."""
    if hasattr(parameter, "_ddp_mp_hook_state"):
        parameter._ddp_mp_hook_state[1].remove()
        del parameter._ddp_mp_hook_state
    if not parameter.requires_grad and not hasattr(parameter, "_ddp_ignored"):
        parameter.data = part(parameter, "_fp_param")


def optimizers_in_backward(parameter: object) -> list[Any] | None:
    """The optimizers that `_apply_optimizer_in_backward` gave to a parameter; None: it was given none."""
    given = getattr(parameter, "_in_backward_optimizers", None)
    return None if given is None else list(given)
