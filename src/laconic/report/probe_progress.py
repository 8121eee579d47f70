"""How far a probe is: a bar in a terminal, a few plain lines elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

LINES = 4


class Progress:
    """Called with the share of the time that has passed, from 0 to 1."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._said = 0

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            columns = (TextColumn("probing"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("probing", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, share: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=share)
        elif int(share * LINES) > self._said:
            self._said = int(share * LINES)
            self._console.print(f"probing: {self._said / LINES:.0%}", highlight=False)
