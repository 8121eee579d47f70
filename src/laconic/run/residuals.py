"""Residuals of a former strategy: what its error feedback had not sent yet goes into the next exchange, once."""

from collections.abc import Mapping

from laconic.comm.bucket import RESIDUAL, Slot
from laconic.gradients.hook import GradientHook
from laconic.reducers.base import Reducer
from laconic.reducers.error_feedback import Release


class Residuals:
    """Sees to it that a reducer without error feedback sends what the slots still hold, and that it is then forgotten."""

    def __init__(self, memory: Mapping[str, Slot]) -> None:
        self._memory = memory
        self._looked = 0  # after how many exchanges the slots were last looked at

    def released_by(self, reducer: Reducer) -> Reducer:
        """Residuals pass on to a reducer that has a place for them; otherwise they go into its next exchange."""
        held = any(RESIDUAL in slot for slot in self._memory.values())
        return Release(reducer) if held and RESIDUAL not in reducer.all_memory() else reducer  # released twice is doubled

    def drop_release(self, hook: GradientHook) -> None:
        """Once the residuals of a former strategy have been sent, go on without the wrapper that sends them.

        Its collectives are those of the reducer inside, so a rank that had none to send may drop it before the others do.
        """
        if not isinstance(hook.reducer, Release) or hook.exchanges == self._looked:
            return
        self._looked = hook.exchanges
        if any(bool(slot[RESIDUAL].any()) for slot in self._memory.values() if RESIDUAL in slot):
            return  # a mean was not finite: they go into the next exchange
        for slot in self._memory.values():
            slot.pop(RESIDUAL, None)
        hook.reducer = hook.reducer.inner
