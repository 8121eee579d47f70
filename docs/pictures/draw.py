"""Draw the README's pictures from a comparison: `python docs/pictures/draw.py laconic-compare`.

The table is drawn by rich, the report by a headless Chromium. Nothing is retouched.
"""

import io
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from laconic.report import comparison_records as records
from laconic.report import page, terminal

HERE = Path(__file__).parent


def table(results: records.Results, file: Path) -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    terminal.show(results, console)
    console.save_svg(str(file), title="laconic compare")


def report(path: Path, file: Path) -> None:
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("pictures of the report need Chromium: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 980, "height": 800})
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
