"""The drawings of the documents are what their scripts draw, and can be read on a phone, in light and in dark."""

import importlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
OF_SEVERAL = ("draw_benchmarks", "draw_timelines")  # scripts that draw more than one
OF_ONE = ("concepts", "elastic", "mesh", "tree")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
PHONE, SMALLEST = 358, 11  # pixels: what a page shows of a picture on a phone, and of text that can be read
NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("script", [*OF_SEVERAL, *(f"draw_{name}" for name in OF_ONE)])
def test_a_drawing_is_what_its_script_draws(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PICTURES)
    module = importlib.import_module(script)
    drawn = {name: module.draw(name) for name in module.PICTURES} if script in OF_SEVERAL else {script[5:]: module.draw()}
    for name, picture in drawn.items():
        assert (PICTURES / f"{name}.svg").read_text() == picture, f"{name}.svg is old: run make pictures"


@pytest.mark.parametrize("file", sorted(PICTURES.glob("*.svg")), ids=lambda file: file.name)
def test_a_drawing_has_a_name_and_asks_nobody_for_anything(file: Path) -> None:
    text = file.read_text()
    root = ET.fromstring(text)
    assert root.findtext(f"{NAMESPACE}title"), "screen readers say it"
    elsewhere = re.findall(r"(?:href|src)=\S+|@import|url\((?!#)\S+", text)
    assert not elsewhere, "a page shows a drawing without what it asks others for"


@pytest.mark.parametrize("file", sorted(set(PICTURES.glob("*.svg")) - {PICTURES / "table.svg"}), ids=lambda file: file.name)
def test_a_drawing_can_be_read_on_a_phone_in_light_and_in_dark(file: Path) -> None:
    text = file.read_text()
    root = ET.fromstring(text)
    wide, high = map(float, root.attrib["viewBox"].split()[2:])
    size = float(re.findall(r"text \{ font: (\d+)px", text)[0])
    assert size * PHONE / wide >= SMALLEST
    panel = next(root.iter(f"{NAMESPACE}rect")).attrib
    assert (panel["class"], float(panel["width"]), float(panel["height"])) == ("panel", wide - 1, high - 1)
    for element in root.iter(f"{NAMESPACE}text"):
        assert 0 <= float(element.attrib["x"]) <= wide, element.text
        assert size <= float(element.attrib["y"]) <= high, element.text


def test_each_picture_is_shown_somewhere_and_said_in_words() -> None:
    shown = [found for page in PAGES for found in re.findall(r"!\[([^]]*)\]\([^)]*pictures/([^)]+)\)", page.read_text())]
    assert {name for _, name in shown} == {file.name for file in PICTURES.iterdir() if file.suffix in (".svg", ".png")}
    assert all(len(words) > 20 for words, _ in shown), "who can't see it reads what it shows"
