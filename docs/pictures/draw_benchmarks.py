"""Draw the pictures of docs/benchmarks.md from benchmarks/results: `python docs/pictures/draw_benchmarks.py`.

Plotly's figures as a headless Chromium shows them. Every number comes from a result file.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.subplots import make_subplots

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks/results"
OURS, THEIRS, LIMIT = "#1f5fa8", "#b3b3b3", "#d9d9d9"
COLOURS = ("#b3b3b3", "#1f5fa8", "#c0562f", "#4d8b5a", "#8a5fa8", "#c9a227")  # of families, one each


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def short(name: str) -> str:
    """A label that fits: without the arguments of the long ones."""
    return name.partition("(24, fragments")[0] if "streaming_diloco(" in name else name


def colour(name: str) -> str:
    return LIMIT if "silent" in name else OURS if "laconic" in name else THEIRS


def rates() -> go.Figure:
    links = [link for link in ("none", "1gbit", "100mbit", "10mbit") if (RESULTS / f"rates-{link}.json").exists()]
    figure = make_subplots(
        cols=len(links), shared_yaxes=True, subplot_titles=[f"link: {link}" for link in links], horizontal_spacing=0.02
    )
    for column, link in enumerate(links, 1):
        found = [row for row in rows(f"rates-{link}") if row["share of the silent rate"]][::-1]
        shares, errors = [[float(row[key]) for row in found] for key in ("share of the silent rate", "+-")]
        names = [short(row[""]) for row in found]
        figure.add_bar(
            x=shares, y=names, orientation="h", marker_color=[colour(name) for name in names],
            text=[f"{share:.2f}" for share in shares], textposition="inside", insidetextanchor="start",
            error_x={"array": errors}, row=1, col=column,
        )  # fmt: skip
        figure.update_xaxes(range=[0, 1.2], row=1, col=column)
    return figure.update_layout(title="Share of the rate without communication", height=520, width=1150, showlegend=False)


def learning() -> go.Figure:
    figure = go.Figure()
    curves = json.loads((RESULTS / "learning_curves.json").read_text())
    for name, curve in curves.items():
        if "longer" not in name:
            figure.add_scatter(
                x=[point[0] for point in curve], y=[point[1] for point in curve], name=name, mode="lines+markers"
            )
    figure.update_xaxes(title="seconds", type="log").update_yaxes(title="held-out loss")
    return figure.update_layout(title="Loss for seconds, 100 Mbit/s, equal samples (first seed)", height=480, width=1000)


def growth() -> go.Figure:
    figure = go.Figure()
    for row in rows("growth"):
        worlds = {int(key[2:]): float(value) for key, value in row.items() if key.startswith("N=")}
        dash = "dot" if row[""].startswith("torch") else "dash" if "phases=1" in row[""] else "solid"
        figure.add_scatter(x=list(worlds), y=list(worlds.values()), name=row[""], mode="lines+markers", line_dash=dash)
    figure.update_xaxes(title="ranks", type="log", tickvals=[2, 4, 8, 16, 64, 256]).update_yaxes(
        title="bytes sent, in sizes of the gradient", type="log"
    )
    return figure.update_layout(title="Bytes of one rank as the world grows", height=480, width=1000)


def compressors() -> go.Figure:
    found = rows("compressor_cost")
    names = list(dict.fromkeys(f"{row['reducer']}<br>against {row['against']}" for row in found))[::-1]
    figure = go.Figure()
    for processes, paint in ((4, LIMIT), (2, THEIRS), (1, OURS)):
        times = {f"{row['reducer']}<br>against {row['against']}": row for row in found if row["processes"] == processes}
        figure.add_bar(
            x=[float(times[name]["relative"]) for name in names],
            error_x={"array": [float(times[name]["+-"]) for name in names]},
            y=names,
            orientation="h",
            marker_color=paint,
            name=f"{processes} processes" if processes > 1 else "1 process",
        )
    figure.add_vline(x=1, line_dash="dot")
    figure.update_xaxes(type="log", title="time, relative to torch's hook")
    figure.update_layout(legend_traceorder="reversed")
    return figure.update_layout(title="Compressing 19 MB of gradients, kernels compiled, two cores", height=900, width=1000)


def frontier() -> go.Figure:
    found = [row for row in rows("frontier") if row["family"]]
    every = dict.fromkeys(row["setting"] for row in found)
    settings = [name for name in every if name.startswith("transformer") and ", adamw" in name]
    figure = make_subplots(1, len(settings), subplot_titles=[name.replace(", adamw", "<br>adamw") for name in settings])
    colours = dict(zip(dict.fromkeys(row["family"] for row in found), COLOURS, strict=False))
    for place, setting in enumerate(settings, 1):
        for family, colour in colours.items():
            points = [row for row in found if (row["setting"], row["family"]) == (setting, family)]
            points.sort(key=lambda row: float(row["bytes"].split("/")[1]))
            losses = [[float(part) for part in row["above ddp, %"].split(" ± ")] for row in points]
            figure.add_scatter(
                x=[float(row["bytes"].split("/")[1]) for row in points],
                y=[mean for mean, _ in losses],
                error_y={"array": [spread for _, spread in losses], "thickness": 1},
                text=[row["strategy"] for row in points],
                name=family,
                mode="markers",
                marker={"color": colour, "size": 9},
                legendgroup=family,
                showlegend=place == 1,
                row=1,
                col=place,
            )
    figure.update_xaxes(type="log", title="one in so many of ddp's bytes", tickvals=[4, 8, 16, 32, 64, 128], range=[0.5, 2.2])
    figure.update_yaxes(title="loss above ddp's, %", col=1)
    figure.update_yaxes(range=[-1.2, 3])
    return figure.update_layout(height=440, width=1200)  # the titles of its parts leave no room for one over all


def averaging() -> go.Figure:
    found = [row for row in rows("averaging_cost") if row["who"] != "torch"][::-1]
    names = [f"{row['who']}: {row['what'].split(',')[0]}{', ' + row['link'] if row['link'] else ''}" for row in found]
    figure = go.Figure(
        go.Bar(
            x=[float(row["best, relative"]) for row in found],
            y=names,
            orientation="h",
            marker_color=OURS,
            text=[row["best, relative"] for row in found],
        )
    )
    figure.add_vline(x=1, line_dash="dot")
    return figure.update_layout(
        title="Averaging 50 million parameters, relative to torch's PeriodicModelAverager", height=400, width=1000
    )


def startup() -> go.Figure:
    found = rows("startup")[::-1]
    figure = go.Figure(
        go.Bar(
            x=[float(row["extra ms"]) for row in found],
            y=[f"{row['command']}<br>above {row['above']}" for row in found],
            orientation="h",
            marker_color=OURS,
            text=[row["extra ms"] for row in found],
        )
    )
    figure.update_xaxes(title="milliseconds")
    return figure.update_layout(title="Start-up", height=360, width=1000)


def main() -> None:
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("pictures need Chromium: apt install chromium")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for draw in (rates, learning, frontier, growth, compressors, averaging, startup):
            try:
                figure = draw()
            except FileNotFoundError as error:
                print(f"not drawn, because there is no {error.filename}: docs/pictures/{draw.__name__}.png")
                continue
            figure.update_layout(template="plotly_white", margin={"l": 10, "r": 10, "t": 60, "b": 10})
            figure.update_yaxes(automargin=True)
            page = Path(folder, "page.html")
            figure.write_html(page, include_plotlyjs=True)
            window = browser.new_page(viewport={"width": figure.layout.width + 20, "height": figure.layout.height + 20})
            window.goto(page.as_uri())
            window.wait_for_selector(".plotly .main-svg")
            window.locator(".plotly-graph-div").screenshot(path=str(HERE / f"{draw.__name__}.png"))
            window.close()
            print(f"drawn: docs/pictures/{draw.__name__}.png")
        browser.close()


if __name__ == "__main__":
    main()
