"""How many steps a worker brings to the next sync, fragment by fragment."""

from collections.abc import Iterable, Sequence


class Progress:
    """Steps since each fragment's delta left; those of a delta that came to nothing count again."""

    def __init__(self, fragments: int) -> None:
        self.steps = [0] * fragments
        self._outstanding: dict[int, int] = {}
        self._counted = [0] * fragments  # of these, the steps that others may have committed without this worker's knowledge

    def stepped(self) -> None:
        """One more step in all fragments."""
        self.steps = [steps + 1 for steps in self.steps]

    def departed(self, fragments: Iterable[int]) -> None:
        """These deltas have left."""
        for fragment in fragments:
            self._outstanding[fragment] = self.steps[fragment]
            self.steps[fragment] = 0

    def undo(self, fragments: Sequence[int]) -> None:
        """Deltas that were outstanding have been dropped."""
        for fragment in fragments:
            self.steps[fragment] += self._outstanding.pop(fragment, 0)

    def doubt(self, fragments: Sequence[int]) -> None:
        """The steps so far of these may have been committed, or not."""
        for fragment in fragments:
            self._counted[fragment] = self.steps[fragment]

    def kept(self, *, keep: bool, committed: bool) -> list[int]:
        """What is brought along with a peer's state: with `keep`, the steps so far, but for those that were committed."""
        counted = self._counted if committed else [0] * len(self.steps)
        return [steps - gone if keep else 0 for steps, gone in zip(self.steps, counted, strict=True)]

    def start_again(self, *, keep: bool, committed: bool) -> None:
        """The state is a peer's now."""
        self.steps, self._counted = self.kept(keep=keep, committed=committed), [0] * len(self.steps)
        self._outstanding = {}
