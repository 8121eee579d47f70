"""What a strategy may do to the loss, in four classes from mild to strong."""

import enum


class Risk(enum.IntEnum):
    """A class of strategies: each may do more to the loss than those below it.

    - SAME: the arithmetic of DDP.
    - ROUNDING: gradients are rounded to fewer bits. Nothing is kept, and nothing arrives later.
    - DELAY: what a step does not send is sent in later steps, by error feedback.
    - LOCAL: replicas step on their own between averagings, which is another training.

    >>> Risk.DELAY.words, Risk.read("rounding") < Risk.DELAY
    ('delayed', True)
    """

    SAME = 0
    ROUNDING = 1
    DELAY = 2
    LOCAL = 3

    @property
    def words(self) -> str:
        """For a person."""
        return ("same arithmetic", "rounding only", "delayed", "changes the training")[self]

    @property
    def option(self) -> str:
        """As `--risk` takes it."""
        return self.name.lower()

    @classmethod
    def read(cls, text: str) -> "Risk":
        """From `same`, `rounding`, `delay` or `local`."""
        found = {one.option: one for one in cls}
        if text not in found:
            raise ValueError(f"a risk is one of {', '.join(found)}, from mild to strong; got {text!r}")
        return found[text]
