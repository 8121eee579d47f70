"""Syncs that are out of line with those before."""

import math
from collections.abc import Sequence

ENOUGH = 8  # syncs before anything is called out of line
MEMORY = 64


class Norms:
    """How large the syncs were that were accepted; the same numbers on all ranks, so that they judge alike."""

    def __init__(self, limit: float | None, norms: Sequence[float] = ()) -> None:
        self.norms = list(norms)
        self._limit = limit

    def problem(self, squares: Sequence[float], broken: Sequence[str] = ()) -> str | None:
        """What is wrong with a sync in which the replicas came so far, squared; None: it is accepted, and remembered.

        `broken` are the names of those that are not finite.
        """
        if not all(map(math.isfinite, squares)):
            return f"the parameters of {', '.join(broken) or 'a replica'} are not finite"
        norm = math.sqrt(sum(squares) / len(squares))
        if self._limit is not None and len(self.norms) >= ENOUGH:
            mean = sum(self.norms) / len(self.norms)
            spread = math.sqrt(sum((each - mean) ** 2 for each in self.norms) / len(self.norms))
            if norm - mean > self._limit * max(spread, 1e-3 * mean):
                return f"replicas came {norm:.3g} from the anchor, {mean:.3g} ± {spread:.2g} in the syncs before"
        self.norms = [*self.norms, norm][-MEMORY:]
        return None
