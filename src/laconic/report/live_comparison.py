"""A comparison while it runs: a table that moves in a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from laconic.report.comparison_records import Record
from laconic.report.terminal import human


class Board:
    """One line a strategy: how far it is, how fast, its loss and its bytes."""

    def __init__(self, console: Console, strategies: Sequence[str], length: str, seeds: int) -> None:
        self._console, self._length, self._seeds = console, length, seeds
        self._lines = {text: _Line() for text in strategies}
        self._live = Live(get_renderable=self.table, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Board":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, strategy: str) -> None:
        line = self._lines[strategy]
        line.step, line.since = 0, None

    def heard(self, strategy: str, facts: dict[str, Any]) -> None:
        """A worker tells how many steps it will make, then which it is at, now and then its loss, and what its task prints."""
        if "line" in facts:
            self.say(f"{strategy}, worker {facts['rank']} prints: {facts['line']}")
            return
        line = self._lines[strategy]
        if "steps" in facts:
            line.steps = facts["steps"]
            return
        now = time.monotonic()
        if line.since is None:
            line.since = (now, facts["step"])
        elif now > line.since[0]:
            line.rate = (facts["step"] - line.since[1]) / (now - line.since[0])
        line.step, line.sent, line.loss = facts["step"], facts["bytes"], facts.get("loss", line.loss)

    def finish(self, record: Record, *, ran: bool = True) -> None:
        line = self._lines[record.strategy]
        line.done += 1
        line.step, line.loss, line.rate = 0, math.nan if record.val_loss is None else record.val_loss, 1e3 / record.step_ms
        line.sent = (record.wire_bytes_per_step["counted"] or 0.0) * record.steps
        if ran and not self._console.is_terminal:
            said = f"{record.strategy}, seed {record.seed}: {_loss(record)}, {record.step_ms:.1f} ms a step"
            self._console.print(f"{said}, {human(line.sent / record.steps)} a step", highlight=False, markup=False)

    def say(self, text: str) -> None:
        """A line that stays, above the table."""
        self._console.print(text, highlight=False, markup=False)

    def table(self) -> Table:
        """How it stands."""
        table = Table(title=f"{self._length} each, {self._seeds} seed{'s' if self._seeds > 1 else ''}")
        for place, name in enumerate(("strategy", "", "steps/s", "loss", "sent")):
            table.add_column(name, justify="right" if place > 1 else "left", overflow="fold", no_wrap=place > 1)
        for text, line in self._lines.items():
            part = min(1.0, line.step / line.steps) if line.steps else 0.0
            bar = ProgressBar(total=self._seeds, completed=min(self._seeds, line.done + part), width=24)
            numbers = (
                "" if line.rate is None else f"{line.rate:.1f}",
                "" if line.loss is None else f"{line.loss:.3f}" if math.isfinite(line.loss) else "diverged",
                "" if line.sent is None else human(line.sent),
            )
            table.add_row(escape(text), bar, *numbers)
        return table


def _loss(record: Record) -> str:
    return "diverged" if record.val_loss is None else f"loss {record.val_loss:.4f}"


class _Line:
    def __init__(self) -> None:
        self.done, self.step, self.steps = 0, 0, 0
        self.since: tuple[float, int] | None = None
        self.rate: float | None = None
        self.loss: float | None = None
        self.sent: float | None = None
