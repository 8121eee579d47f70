"""Draw the pictures of a comparison: `python docs/pictures/draw.py laconic-compare`.

The table is drawn by rich, in a terminal of 96 columns, the report by a headless Chromium. No number is retouched.
"""

import io
import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from laconic.report import comparison_records as records
from laconic.report import page, terminal

HERE = Path(__file__).parent
COLUMNS = 96  # on a page they are about 7 px wide each; a wider table would be too small to read


def table(results: records.Results, file: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    terminal.show(results, console)
    # Without the fonts that rich would load from another host, and with a name for screen readers.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="laconic compare"), flags=re.DOTALL)
    drawn = drawn.replace("<svg ", '<svg role="img" aria-labelledby="title" ', 1)
    file.write_text(drawn.replace("<style>", '<title id="title">The table of a comparison</title>\n    <style>', 1))


def report(path: Path, file: Path) -> None:
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("pictures of the report need Chromium: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 700, "height": 800}, device_scale_factor=2)  # as wide as a page shows it
        window.goto(path.resolve().as_uri())
        window.wait_for_selector(".chart .legend")
        window.screenshot(path=str(file), full_page=True)
        browser.close()


def main(folder: Path) -> None:
    results = records.read(folder)
    table(results, HERE / "table.svg")
    report(page.write(results, folder), HERE / "report.png")
    print(f"drawn from {folder}: {HERE / 'table.svg'}, {HERE / 'report.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "laconic-compare"))
