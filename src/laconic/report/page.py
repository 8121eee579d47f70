"""A comparison as one HTML file: it carries all that it needs, and asks the network for nothing."""

import html
import json
from pathlib import Path

from laconic.report.charts import figures
from laconic.report.records import Results, write_whole
from laconic.report.summary import ground, rows, verdict
from laconic.report.terminal import cells, columns, legend

FILE = "report.html"

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.verdict { background: #f2f6fa; border-left: 4px solid #0072b2; padding: .75rem 1rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .small { color: #555; font-size: .85rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
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
  const shown = Object.fromEntries(chart.data.map(trace => [trace.legendgroup, trace.visible ?? true]));
  for (const other of charts) if (other !== chart)
    await Plotly.restyle(other, {visible: other.data.map(trace => shown[trace.legendgroup] ?? trace.visible ?? true)});
  repeating = false;
});
"""


def write(results: Results, folder: Path) -> Path:
    """The report next to the record."""
    path = folder / FILE
    write_whole(path, page(results))
    return path


def page(results: Results) -> str:
    """All of it as text. What came from the user is escaped."""
    from plotly.offline import get_plotlyjs  # slow to import, and not needed for tables

    title = html.escape(f"{results.task}, {results.workers} workers, link {results.link}")
    charts = "\n".join(
        f'<h2>{html.escape(heading)}</h2>\n<div class="chart"></div><script type="application/json">{_json(figure)}</script>'
        for heading, figure in figures(results).items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>laconic: {title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="verdict">{html.escape(verdict(results))}</p>
<div class="wide">{_table(results)}</div>
<p class="small">{html.escape(legend(results))}</p>
{charts}
<p class="small">A click on a name in a legend switches that strategy off and on in all charts; a double click shows it
alone. silent() sends nothing, so it has no place on an axis of bytes. Waiting is drawn at the end of its step.</p>
<h2>What this rests on</h2>
<p class="small">{html.escape(ground(results))}</p>
<p class="small">{html.escape(", ".join(f"{name} {version}" for name, version in results.versions.items()))}</p>
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _table(results: Results) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns(results))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row, results)) + "</tr>\n" for row in rows(results)
    )
    return f"<table>\n<tr>{head}</tr>\n{body}</table>"


def _json(data: object) -> str:
    """JSON that can't end the script element it stands in."""
    return json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
