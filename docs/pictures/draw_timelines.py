"""Draw docs/pictures/timeline*.svg: what a worker's training thread and its cable do, by the cost model, on one axis of time.

`laconic.cost.step_time` simulates the thread and the cable, and traces what they do. What it is given:

- the model of the lab's task bytes-gpt:2m, and what each strategy sends of it in which step, by `predict`;
- 4 workers behind links of 100 Mbit/s, as gloo's collectives use them;
- the seconds of a step without communication that were measured there: benchmarks/results/advisor_cells.json;
- how a step divides into its parts, and how fast numbers are encoded: the two constants below.

The lab's own step times of the same strategies are in that file, too; the picture shows them in brackets.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import drawing as d

import laconic
from laconic.advisor.candidates import PassesCodec
from laconic.advisor.estimates import Passes
from laconic.cost.link import parse
from laconic.cost.network import Network
from laconic.cost.step_time import CYCLES, Compute, Event, StepTime, step_time
from laconic.forecast.prediction import cycle_of, timeline_of
from laconic.lab.tasks import BytesGPT, Transformer

HERE = Path(__file__).parent
CELLS = HERE.parents[1] / "benchmarks/results/advisor_cells.json"
SIZE, WORKERS, LINK = "2m", 4, "100mbit"
PARTS = (8, 16, 1)  # forward, backward and optimizer, of 25: a backward takes twice as long as a forward
ENCODING = Passes(20e9)  # bytes a second that a core moves while four processes share two: given, not measured
SECONDS = 1.3  # on the axis: a step of ddp(), and some more
LEFT, RIGHT = 104, d.WIDTH - d.EDGE
COMPUTE_HEIGHT, WIRE_HEIGHT, BLOCK = 34, 24, 134


class Shown(NamedTuple):
    """A strategy, the name under which the lab has measured it, and the step of its cycle at which the picture begins."""

    strategy: str
    first: int = 0
    measured: str = ""


DDP, BF16, INT8, INT4 = Shown("ddp()"), Shown("bf16()"), Shown("int8()"), Shown("int4()")
POWERSGD = Shown("powersgd(rank=4)", measured="powersgd(rank=4, warmup=0)")
DILOCO = Shown("diloco(16, reducer=Quantized(8))", 14)
LATE = Shown("streaming_diloco(16, fragments=1, delay=3)", 11)
ADAM = Shown("local_adam()", 50, "local_adam(warmup=0)")
ADAM_LATE = Shown("local_adam(delay=1)", 49)
STREAMING = Shown(
    "streaming_diloco(16, fragments=4, delay=3)",
    8,
    "streaming_diloco(period=16, fragments=4, delay=3, blend=0.0, carry=True)",
)
PICTURES = {
    "timeline": ("The same second under four strategies", [DDP, INT8, ADAM_LATE, STREAMING]),
    "timeline_gradients": ("Gradients on fewer bytes", [DDP, BF16, INT8, INT4, POWERSGD]),
    "timeline_local": ("Local updates", [DILOCO, STREAMING, ADAM]),
    "timeline_delayed": ("The same bytes: blocking, late, in fragments", [DILOCO, LATE, STREAMING]),
}
KINDS = {  # of events of the thread: class, and the word of the legend
    "forward": ("fill-sky", "forward"),
    "backward": ("fill-blue", "backward"),
    "optimizer": ("fill-ink", "optimizer"),
    "work": ("fill-orange", "encodes, decodes"),
    "waiting": ("waits", "waits"),
}


def cell() -> dict[str, dict[str, float]]:
    """Milliseconds of a step that the lab measured, and that the cost model predicted there, by strategy."""
    found: list[dict[str, dict[str, dict[str, float]]]] = json.loads(CELLS.read_text())
    return next(one["runs"] for one in found if one["cell"] == [LINK, WORKERS, SIZE])


@cache
def model() -> Transformer:
    """What is trained."""
    return Transformer(*BytesGPT.SIZES[SIZE], BytesGPT.CONTEXT)


@cache
def simulated(shown: Shown, compute: Compute) -> tuple[StepTime, float, list[Event]]:
    """A step's time and bytes, on average, and what happens from the chosen step of the last cycle on."""
    strategy = laconic.strategy(shown.strategy)
    cycle = cycle_of(strategy)
    sent = timeline_of(strategy, model(), world_size=WORKERS, steps=cycle)
    trace: list[Event] = []
    cycles = CYCLES + -(-10 // cycle)  # so that the picture does not end before its axis
    steps = PassesCodec(ENCODING).steps(strategy, sent)
    time = step_time(steps, compute, Network(parse(LINK), both_ways=True), cycles=cycles, trace=trace)
    first = [event for event in trace if event.what == "forward"][(CYCLES - 1) * cycle + shown.first].begin
    moved = [Event(one.what, one.begin - first, one.end - first, one.wire_bytes) for one in trace if one.end > first]
    total = sum(exchange.traffic.wire_bytes for step in sent for exchange in step.exchanges)
    return time, total / cycle, [one for one in moved if one.begin < SECONDS]


def place(seconds: float) -> float:
    """On the axis."""
    return LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, seconds / SECONDS))


def row(shown: Shown, y: float, measured: dict[str, dict[str, float]], compute: Compute) -> list[str]:
    """One strategy: its name, its numbers, the thread and the cable."""
    time, sent, events = simulated(shown, compute)
    lab = measured.get(shown.measured or shown.strategy)
    beside = f" (lab: {lab['measured']:,.0f})" if lab else ""
    size = f"{sent / 1e6:.1f} MB" if sent >= 1e6 else f"{sent / 1e3:.0f} kB"
    body = [
        d.text(d.EDGE, y, shown.strategy, "name"),
        d.text(d.EDGE, y + d.LINE, f"{time.seconds * 1e3:,.0f} ms a step{beside}, {size} a step"),
        d.text(d.EDGE, y + 59, "compute", "note"),
        d.text(d.EDGE, y + 92, "wire", "note"),
    ]
    upper, lower, steps = y + 36, y + 36 + COMPUTE_HEIGHT + 4, 0
    body.append(d.line("line-rule", f"M{LEFT} {lower + WIRE_HEIGHT:.0f}H{RIGHT}"))
    for event in events:
        left, right = place(event.begin), place(event.end)
        if event.what == "wire":
            body.append(d.box("fill-red", left, lower, max(0.8, right - left - 0.8), WIRE_HEIGHT, 2))
            continue
        body.append(d.box(KINDS[event.what][0], left, upper, max(0.5, right - left - 0.4), COMPUTE_HEIGHT, 1))
        if event.what == "forward":
            steps += 1
            if right - left > 14:
                body.append(d.text((left + right) / 2, upper + 23, str(steps), "on-sky middle"))
        elif event.what == "waiting" and right - left > 70:
            body.append(d.text((left + right) / 2, upper + 23, "waits", "middle"))
    return body


def legend(y: float) -> tuple[list[str], float]:
    """What colours mean."""
    samples = [(d.box(kind, -12, -9, 24, 18, 2), words) for kind, words in KINDS.values()]
    return d.legend(y, [*samples, (d.box("fill-red", -12, -9, 24, 18, 2), "a collective on the wire")])


def draw(name: str) -> str:
    """One of the PICTURES as SVG."""
    title, shown = PICTURES[name]
    measured = cell()
    silent = measured["silent()"]["measured"] / 1e3
    compute = Compute(*(silent * part / sum(PARTS) for part in PARTS))
    body = [d.text(d.EDGE, 32, title, "title")]
    top = 66
    for number, one in enumerate(shown):
        body += row(one, top + BLOCK * number, measured, compute)
    bottom = top + BLOCK * len(shown) - 28
    grid = [d.line("line-rule", f"M{place(at):.1f} 44V{bottom}") for at in (0.0, 0.5, 1.0)]
    words = ((0.0, "0 s"), (0.5, "0.5 s"), (1.0, "1 s"))
    body += [d.text(place(at), bottom + 20, word, "note middle") for at, word in words]
    samples, y = legend(bottom + 58)
    note = (
        f"Simulated by laconic's cost model: bytes-gpt:{SIZE}, 2.1 million parameters, {WORKERS} workers with 100 Mbit/s each, "
        f"{silent * 1e3:.0f} ms of compute a step. Numbers count steps. In brackets: measured in the lab."
    )
    y += 8
    notes = d.lines(d.EDGE, y, note, "note")
    described = f"Compute and wire of one worker in {SECONDS} seconds under {', '.join(one.strategy for one in shown)}. {note}"
    return d.picture(title, described, y + d.LINE * len(notes) - 4, [*grid, *body, *samples, *notes])


if __name__ == "__main__":
    for each in PICTURES:
        (HERE / f"{each}.svg").write_text(draw(each))
        print(f"drawn: docs/pictures/{each}.svg")
