"""LACONIC_STRATEGY where nobody reads it: a line says so."""

import os
import sys

NAME = "LACONIC_STRATEGY"

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
