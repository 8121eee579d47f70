"""A comparison, or a run, as one HTML file: it carries all that it needs, and asks the network for nothing."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.report.charts import Figure, figures
from laconic.report.comparison_records import PAGE, Results, finite, write_whole
from laconic.report.summary import rows
from laconic.report.terminal import cells, columns, legend
from laconic.report.verdict import ground, verdict

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.verdict { background: #f2f6fa; border-left: 4px solid #0072b2; padding: .75rem 1rem; overflow-wrap: anywhere; }
.small { color: #555; font-size: .85rem; overflow-wrap: anywhere; }
/* A table may be wider than the text, up to the window. Beyond that it scrolls: a bar, and a shadow where more is, show it. */
.wide { position: relative; left: 50%; transform: translateX(-50%); width: fit-content; overflow-x: auto;
  min-width: 100%; max-width: max(100%, 100vw - 4rem); scrollbar-color: #767676 #eee;
  background: linear-gradient(to right, #fff 40%, transparent) 0 0 / 3rem 100% no-repeat local,
    linear-gradient(to left, #fff 40%, transparent) 100% 0 / 3rem 100% no-repeat local,
    linear-gradient(to right, #bbb, transparent) 0 0 / .7rem 100% no-repeat scroll,
    linear-gradient(to left, #bbb, transparent) 100% 0 / .7rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 11rem; overflow-wrap: anywhere; }
.chart { height: 26rem; }
"""

# A legend's click is a restyle of its own chart; it is repeated in the others.
SCRIPT = """
const charts = [...document.querySelectorAll('.chart')];
for (const chart of charts) {
  const figure = JSON.parse(chart.nextElementSibling.textContent);
  Plotly.newPlot(chart, figure.data, figure.layout, {responsive: true, displaylogo: false});
}
let repeating = false;
for (const chart of charts) chart.on('plotly_restyle', async () => {
  if (repeating) return;
  repeating = true;
  const named = chart.data.filter(trace => trace.legendgroup);
  const shown = Object.fromEntries(named.map(trace => [trace.legendgroup, trace.visible ?? true]));
  for (const other of charts) if (other !== chart)
    await Plotly.restyle(other, {visible: other.data.map(trace => shown[trace.legendgroup] ?? trace.visible ?? true)});
  repeating = false;
});
"""


def write(results: Results, folder: Path) -> Path:
    """The report next to the record."""
    path = folder / PAGE
    write_whole(path, page(results))
    return path


def page(results: Results) -> str:
    """A comparison. What came from the user is escaped."""
    body = [[*cells(row, results)] for row in rows(results)]
    return document(
        f"{results.task}, {results.who}, link {results.link}",
        verdict(results),
        [columns(results), *body],
        legend(results),
        figures(results),
        "A click on a name in a legend switches that strategy off and on in all charts; a double click shows it alone. "
        "silent() sends nothing, so it has no place on an axis of bytes. Waiting is drawn at the end of its step.",
        [ground(results), ", ".join(f"{name} {version}" for name, version in results.versions.items())],
    )


def document(
    title: str,
    lead: str,
    table: Sequence[Sequence[str]],
    legend: str,
    charts: Mapping[str, Figure],
    note: str,
    grounds: Sequence[str],
) -> str:
    """The page: all text is escaped here, and nothing else."""
    from plotly.offline import get_plotlyjs  # slow to import, and not needed for tables

    def small(text: str) -> str:
        return f'<p class="small">{html.escape(text)}</p>'

    drawn = "\n".join(
        f'<h2>{html.escape(heading)}</h2>\n<div class="chart"></div><script type="application/json">{_json(figure)}</script>'
        for heading, figure in charts.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>laconic: {html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="verdict">{html.escape(lead)}</p>
<div class="wide" tabindex="0">{_table(table)}</div>
{small(legend)}
{drawn}
{small(note)}
<h2>What this rests on</h2>
{"".join(map(small, grounds))}
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head."""
    made = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) + "</tr>"
        for tag, line in zip(["th", *["td"] * len(lines)], lines, strict=False)
    ]
    return "<table>\n" + "\n".join(made) + "\n</table>"


def _json(data: object) -> str:
    """JSON that can't end the script element it stands in. A NaN would end it: browsers don't read them."""
    return json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
