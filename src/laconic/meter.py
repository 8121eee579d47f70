"""The meter: what a run sends, how long it waits and what it loses, step by step, to files that others can read.

    with laconic.attach(model, optimizer, "int8()") as run:
        laconic.Meter(run, "runs/first")

Every rank writes `rank-R.jsonl`: a line a step, of what is counted anyway; a line a sync; a line a swap; and, every `every`
steps, a line of what compression lost in each layer, which takes passes over the data. `laconic watch runs/first` shows it
while it runs, `laconic report runs/first` makes a page of it.
"""

import json
import math
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from laconic.comm.inspection import Inspector
from laconic.forecast import layer_bytes
from laconic.run.engine import Engine
from laconic.run.run import Run, engine_of
from laconic.run.stats import Counts, Observer
from laconic.strategies.strategy import Strategy

VERSION = 1
FLUSH_SECONDS = 1.0


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: Mapping[str, Any]) -> None:
        """One row."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class Source(Protocol):
    """What a meter reads of a run."""

    @property
    def paused_seconds(self) -> float:
        """That are no part of any step."""
        ...

    def observe(self, observer: Observer) -> Inspector:
        """Have it told of every step, and of the end."""
        ...

    def counts(self) -> Counts:
        """What it has cost since it was attached."""
        ...

    def layer_bytes(self) -> dict[str, int]:
        """What one exchange of each layer sends, by the strategy of this moment."""
        ...

    def start(self) -> dict[str, Any]:
        """Who this rank is, and among whom."""
        ...

    def events(self) -> list[dict[str, Any]]:
        """Rows of what has happened since the last step, by a `kind` of their own; they are forgotten then."""
        ...


class Metered(Protocol):
    """A run that brings its own source: one of `laconic.elastic`."""

    @property
    def step(self) -> int: ...
    @property
    def strategy(self) -> Strategy: ...
    def stats(self) -> Any: ...
    def source(self) -> Source: ...


class _Attached:
    """Of a run that `laconic.attach` has made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.observe, self.counts = engine.observe, engine.counter.here

    @property
    def paused_seconds(self) -> float:
        return self._engine.paused_seconds

    def layer_bytes(self) -> dict[str, int]:
        return layer_bytes(self._engine.strategy, self._engine.model, self._engine.replicas.world)

    def start(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "rank": engine.group.rank,
            "world": engine.group.world,
            "shards": engine.ranks.shards,
            "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        }

    def events(self) -> list[dict[str, Any]]:
        return []


class Meter:
    """Writes a run's rows to a folder until the run ends; all ranks make one.

    Each rank writes `rank-R.jsonl`, a row a line: a `start`; a `step` with seconds, bytes, collectives, `wait_seconds` and
    `work_seconds`; a `sync` with the drift of the replicas, for each averaging between steps; `layers` with what compression
    lost in each; a `swap`; and the `end`, with all of `run.stats()`. What is not finite or not known is null. `laconic watch
    FOLDER` shows it while it runs, `laconic report FOLDER` makes a page of it. Of an elastic run, each worker writes
    `worker-NAME.jsonl`, and a row of every sync: who took part, by which weights.

    Bytes: none on the network.

    Not: a look into the layers takes passes over the data. Set `every` to 0 where a step is to be timed.

    Arguments:
      `run`: what `laconic.attach` or `laconic.elastic.attach` returned, still attached.
      `folder`: where to write; it is made. A run that resumes goes on in the same file; one that begins anew keeps the former
        file as `rank-R.jsonl.old`.
      `every`: steps between two looks into the layers; 0: never. Default 100.
      `tensorboard`: whether the first rank writes the same numbers for TensorBoard, which must be installed, into the folder
        `tensorboard` in `folder`. Default False.

    It raises a ValueError for an `every` below 0, and an ImportError where TensorBoard is not installed.

    >>> import json, pathlib, tempfile, torch, laconic
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model, folder = torch.nn.Linear(4, 2), tempfile.mkdtemp()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "local_sgd(2)") as run:
    ...     meter = laconic.Meter(run, folder)
    ...     for batch in torch.ones(2, 8, 4):
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    >>> [
    ...     json.loads(line)["kind"]
    ...     for line in pathlib.Path(folder, "rank-0.jsonl").read_text().splitlines()
    ... ]
    ['start', 'step', 'step', 'sync', 'end']
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, run: Run | Metered, folder: str | Path, *, every: int = 100, tensorboard: bool = False) -> None:
        if not isinstance(every, int) or every < 0:  # type: ignore[redundant-expr]  # it may be anything
            raise ValueError(f"every must be a number of steps, or 0 for never, got {every!r}")
        self._run, self._every = run, every
        self._source: Source = _Attached(engine_of(run)) if isinstance(run, Run) else run.source()
        self._bytes: dict[str, int] = {}
        self._strategy = str(run.strategy)
        self._unseen: set[str] = set()  # layers that the look which goes on has not come to
        start = self._start()
        folder, worker = Path(folder), start.get("worker")
        name = f"rank-{start['rank']}" if worker is None else f"worker-{worker}"
        # A worker that was started again goes on with the run of the others, whatever its own clock says.
        self._sinks: list[Sink] = [JsonLines(folder / f"{name}.jsonl", anew=run.step == 0)]
        if tensorboard and start["rank"] == 0:
            self._sinks.append(TensorBoard(folder / "tensorboard"))
        self._before, self._time = self._source.counts(), time.perf_counter()
        self._paused = self._source.paused_seconds
        self._inspector = self._source.observe(self)
        self._inspector.watching = True
        self._look_ahead()
        self._write(start)

    def stepped(self) -> None:
        """The run has made a step; it calls this itself."""
        step, counts, now = self._run.step, self._source.counts(), time.perf_counter()
        spent = counts + -self._before
        if str(self._run.strategy) != self._strategy:
            self._swapped(step - 1)
        self._write(
            {
                "kind": "step",
                "step": step,
                "time": time.time(),
                "seconds": now - self._time - (self._source.paused_seconds - self._paused),
                "payload_bytes": spent.total.payload_bytes,
                "wire_bytes": spent.total.wire_bytes,
                "collectives": spent.total.collectives,
                "wait_seconds": spent.wait_seconds,
                "work_seconds": spent.work_seconds,
            }
        )
        for sync in self._inspector.syncs:
            self._write({"kind": "sync", **{key: getattr(sync, key) for key in sync.__dataclass_fields__}})
        for event in self._source.events():
            self._write(event)
        if self._inspector.layers:
            self._write({"kind": "layers", "step": step, "layers": self._layers()})
            self._unseen -= self._inspector.layers.keys()
            self._inspector.layers.clear()
        self._look_ahead()
        self._before, self._time, self._paused = counts, now, self._source.paused_seconds

    def ended(self, failure: str | None) -> None:
        """The run is over; it calls this itself.

        Arguments:
          `failure`: the error that ended it, in words; None: all went well.
        """
        self._inspector.watching = self._inspector.looking = False
        self._write({"kind": "end", "time": time.time(), "failure": failure, **_totals(self._run.stats())})
        for sink in self._sinks:
            sink.close()

    def _swapped(self, step: int) -> None:
        """The run goes on by another strategy, after `step` steps."""
        strategy = self._run.strategy
        self._strategy, self._bytes = str(strategy), {}
        row = {"kind": "swap", "step": step, "time": time.time(), "strategy": self._strategy, "cycle": strategy.cycle or 1}
        self._write(row)

    def _look_ahead(self) -> None:
        """Layers are looked at in the exchanges that follow this step, until each has come once."""
        if self._every and self._run.step % self._every == 0:
            self._inspector.looking = True
            self._unseen = set(self._layer_bytes())
        elif self._inspector.looking and self._unseen and self._run.strategy.averaging is not None:
            return  # what is averaged seldom, or a fragment at a time, is looked at when it is
        else:
            self._inspector.looking = False

    def _layers(self) -> dict[str, dict[str, float | None]]:
        sent = self._layer_bytes()
        return {
            name: {
                "error": layer.error,
                "residual": None if layer.residual is None else float(layer.residual),
                "wire_bytes": sent.get(name),
            }
            for name, layer in self._inspector.layers.items()
        }

    def _layer_bytes(self) -> dict[str, int]:
        """Worked out once for each strategy: a run may swap it."""
        if not self._bytes:
            self._bytes = self._source.layer_bytes()
        return self._bytes

    def _start(self) -> dict[str, Any]:
        return {
            "kind": "start",
            "version": VERSION,
            "time": time.time(),
            "strategy": self._strategy,
            "cycle": self._run.strategy.cycle or 1,
            "step": self._run.step,
            **self._source.start(),
            "torch": torch.__version__,
            "host": platform.node(),
        }

    def _write(self, row: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(row)


class JsonLines:
    """A line a row. A run that goes on, after a restart, goes on in the same file; if one begins anew, the former is kept.

    Of a process that was killed, the last line may be half a line; what goes on begins a new one. JSON has no NaN: what is
    not finite is null.
    """

    def __init__(self, path: Path, *, anew: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew and path.exists():
            path.replace(path.with_name(f"{path.name}.old"))
        torn = path.exists() and _last_byte(path) not in (b"", b"\n")
        self._file = path.open("a", buffering=1 << 16)
        if torn:
            self._file.write("\n")
        self._flushed = time.monotonic()

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(row, allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(row))
        self._file.write(text + "\n")
        if row["kind"] != "step" or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """The numbers of all rows as scalars: `laconic/wire_bytes`, `laconic/sync/cosine`, `laconic/error/<layer>`, ..."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboard=True needs TensorBoard: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == "layers":
            for name, layer in row["layers"].items():
                self._scalars({f"{key}/{name}": value for key, value in layer.items() if key != "wire_bytes"}, row["step"])
        elif row["kind"] in ("step", "sync"):
            prefix = "sync/" if row["kind"] == "sync" else ""
            numbers = {f"{prefix}{key}": value for key, value in row.items() if key not in ("kind", "step", "time")}
            self._scalars(numbers, row["step"])

    def _scalars(self, numbers: Mapping[str, float | None], step: int) -> None:
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(f"laconic/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _totals(stats: Any) -> dict[str, Any]:
    return {key: getattr(stats, key) for key in stats.__dataclass_fields__}
