"""Variables of the environment that have no effect here, or whose lack has one: a line says so."""

import os
import sys
import warnings

NAME = "LACONIC_STRATEGY"
STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_said = False


def expect_no_effect() -> None:
    """This process is not a training script: the variable is not for it."""
    global _said
    _said = True


def explain_unread() -> None:
    """Say once that the variable has no effect in this process, if it is set and `laconic.auto` was never imported."""
    global _said
    if _said or NAME not in os.environ or "laconic.script.auto" in sys.modules:
        return
    _said = True
    if os.environ.get("RANK", "0") == "0":
        print(  # noqa: T201
            f"laconic: {NAME}={os.environ[NAME]} has no effect here: start the script by `laconic run`, or have it "
            "`import laconic.auto` before it builds its model",
            file=sys.stderr,
            flush=True,
        )


def warn_of_restarts(backend: str) -> None:
    """Say on the first rank that restarts by torchrun may fail, where that is so.

    torchrun keeps one store for all attempts. Gloo finds the addresses of dead processes there, and in one of four restarts it
    could not connect (torch 2.13).
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0" or backend != "gloo" or os.environ.get(STORE) == "1" or os.environ.get("RANK", "0") != "0":
        return
    warnings.warn(
        f"torchrun may start this job again, and with gloo that sometimes fails; before torchrun, export {STORE}=1",
        stacklevel=4,
    )
