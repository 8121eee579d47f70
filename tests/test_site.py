"""The documentation site: nothing is left out of it, and it works in a browser, on a phone, in the dark, without a network."""

import functools
import http.server
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import laconic

ROOT = Path(__file__).parents[1]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PHONE = 360
NAV = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
GENERATED = {"examples/index.md", "contributing.md", "changelog.md"}  # of files outside of docs/


def part(module: str, name: str) -> Any:
    """Something of what builds the site."""
    sys.path.insert(0, str(ROOT / "docs/_site"))
    try:
        return runpy.run_path(str(ROOT / f"docs/_site/{module}.py"))[name]
    finally:
        sys.path.pop(0)


@functools.cache
def public_names() -> dict[str, str]:
    found: dict[str, str] = part("public_names", "public_names")()
    return found


def test_every_page_is_in_the_nav_once() -> None:
    assert len(NAV) == len(set(NAV)) > 30
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(NAV) - GENERATED == there


def test_every_public_name_is_in_the_reference_once_and_has_a_docstring() -> None:
    assert [name for name, text in public_names().items() if not text] == [], "without a docstring"
    text = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    # A module's page has the names of the module, unless it says that it has none.
    whole = set(re.findall(r"^::: (\S+)$(?!\n    options:\n(?: .*\n)*? +members: \[\])", text, re.MULTILINE))
    lacking = [name for name in public_names() if name not in shown and name.rpartition(".")[0] not in whole]
    assert lacking == [], "write `::: name` into a page of docs/reference/"


def test_public_names_are_those_that_python_has() -> None:
    module = laconic.compat.ddp_comm_hooks.powerSGD_hook
    names = set(public_names())
    assert {f"laconic.{name}" for name in laconic.__all__} <= names
    assert {f"laconic.checkpoint.{name}" for name in laconic.checkpoint.__all__} <= names
    assert {f"{module.__name__}.{name}" for name in module.__all__} <= names
    assert "laconic.elastic.attach" in names, "though a module has this name, too"
    assert public_names()["laconic.Exact"] == inspect.getdoc(laconic.Exact)
    assert "laconic.integrations.lightning.attach" in names, "which Fabric's module has"


DOCSTRING = """Send less.

Maths: x = g + e.  Bytes: 2(N-1)/N * n. Memory: none.
Paper: Seide et al., arXiv:1901.09847.

Arguments:
  `bits`: how many,
    at least 1.
  `block`: of what size.

    ddp(bits=4)

>>> 1 + 1  # doctest: +SKIP
2

>>> 2 + 2
4
"""
MARKDOWN = """Send less.

**Maths:** x = g + e.

**Bytes:** 2(N-1)/N * n.

**Memory:** none.

**Paper:** Seide et al., [arXiv:1901.09847](https://arxiv.org/abs/1901.09847).

**Arguments:**

- `bits`: how many, at least 1.
- `block`: of what size.

```python
ddp(bits=4)
```

```pycon
>>> 1 + 1
2

>>> 2 + 2
4
```
"""


def test_docstrings_are_plain_text_and_become_markdown() -> None:
    assert part("plain_markdown", "from_docstring")(DOCSTRING, str.rstrip) == MARKDOWN


def test_pages_are_for_git_hosts_and_become_what_the_site_takes() -> None:
    page = "Two things:\n- [one](a.py)\n- two\n\n```python\n>>> a = 1\n```\n```\n$ ls\n```\n"
    shown = part("plain_markdown", "for_site")(page, str.upper)
    assert shown == "TWO THINGS:\n\n- [ONE](A.PY)\n- TWO\n\n```pycon\n>>> a = 1\n```\n```console\n$ ls\n```\n"
    inside = "- one\n\n  ```\n  a\n  ```\n\n  more\n  of it\n- two\n"
    shown = part("plain_markdown", "for_site")(inside, str.rstrip)
    assert shown == "- one\n\n    ```text\n    a\n    ```\n\n    more\n  of it\n\n- two\n", "what belongs to an item"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Not on the test's screen."""


class Site:
    """The site, served, in a browser; with what the browser said and asked for meanwhile."""

    def __init__(self, browser: Browser, address: str, *, dark: bool = False, width: int = 1280) -> None:
        self.address, self.said, self.asked = address, list[str](), list[str]()
        self.window: Page = browser.new_page(color_scheme="dark" if dark else "light", viewport={"width": width, "height": 800})
        self.window.on("console", lambda message: self.said.append(f"{self.window.url}: {message.text}"))
        self.window.on("pageerror", lambda error: self.said.append(f"{self.window.url}: {error}"))
        self.window.on("request", lambda request: self.asked.append(request.url))
        self.window.on("response", lambda answer: self.said.extend([] if answer.ok or answer.status == 304 else [answer.url]))

    def open(self, page: str) -> None:
        answer = self.window.goto(f"{self.address}/{page.removesuffix('.md')}.html")
        assert answer is not None
        assert answer.ok, page

    def colour(self) -> str:
        return str(self.window.evaluate("getComputedStyle(document.body).backgroundColor"))

    def check(self) -> None:
        """It was quiet, and asked no other host."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith((self.address, "data:", "blob:"))] == []
        self.window.close()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "LACONIC_SITE" in os.environ:  # `make docs` has built it
        return ROOT / os.environ["LACONIC_SITE"]
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no browser is installed: apt install chromium")
    quiet = [
        "--no-sandbox",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=quiet)
        yield browser
        browser.close()


@pytest.mark.soak
def test_every_page_in_light_and_dark_and_on_a_phone(browser: Browser, address: str) -> None:
    colours = set()
    for dark in (False, True):
        width = PHONE if dark else 1280
        site = Site(browser, address, dark=dark, width=width)
        for page in NAV:
            site.open(page)
            assert site.window.locator("article h1").count() == 1, page
            assert site.window.evaluate("[...document.images].every(image => image.complete && image.naturalWidth)"), page
            colours.add((dark, site.colour()))
            assert site.window.evaluate("document.documentElement.scrollWidth") <= width, f"{page} must not scroll sideways"
        site.check()
    assert len(colours) == 2, "one background a mode"


@pytest.mark.soak
def test_the_toggle_changes_the_mode_and_is_remembered(browser: Browser, address: str) -> None:
    site = Site(browser, address)
    site.open("index")
    light = site.colour()
    site.window.get_by_title("Switch to dark mode").click()
    dark = site.colour()
    site.open("concepts")
    assert site.colour() == dark != light
    site.check()


FIRST = {
    "ErrorFeedback": "reference/reducers.html#laconic.ErrorFeedback",
    "attach": "reference/attach.html#laconic.attach",
    "error feedback": "reference/reducers.html#laconic.ErrorFeedback",
    "powersgd": "reference/strategies.html#laconic.powersgd",  # and not torch's hook, in laconic.compat
    "PeerError": "reference/errors.html#laconic.PeerError",
    "resume": "checkpoint.html",
}


@pytest.mark.soak
@pytest.mark.parametrize("words", FIRST)
def test_the_search_leads_to_what_defines_the_words(browser: Browser, address: str, words: str) -> None:
    site = Site(browser, address)
    site.open("index")
    site.window.locator("input.md-search__input").fill(words)
    page, _, anchor = FIRST[words].partition("#")
    found = site.window.locator(".md-search-result__link").nth(1 if anchor else 0)  # the first is its page
    found.click()
    site.window.wait_for_url(re.compile(rf"/{re.escape(page)}[^#]*{f'#{re.escape(anchor)}' if anchor else ''}$"))
    if anchor:
        assert site.window.locator(f"[id='{anchor}']").is_visible()
    site.check()


CUT = """[...document.querySelectorAll('pre > code, .columns')].filter(one => {
    const style = getComputedStyle(one), more = one.scrollWidth - one.clientWidth;
    return more > 1 && (style.overflowX !== 'auto' || !style.backgroundImage.includes('gradient'));
}).map(one => one.textContent.slice(0, 60))"""


@pytest.mark.soak
@pytest.mark.parametrize("width", [PHONE, 1280])
def test_output_wraps_and_what_scrolls_shows_it(browser: Browser, address: str, width: int) -> None:
    site = Site(browser, address, width=width)
    for page in ("network", "choosing", "benchmarks", "compression", "start", "reference/reducers", "reference/cli"):
        site.open(page)
        assert site.window.evaluate(CUT) == [], page
    site.open("network")
    tables = site.window.locator(".columns.drawn")
    wider = tables.evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length")
    assert tables.count() > 1
    assert wider == (tables.count() if width == PHONE else 0), "at this width the tables fit the page"
    site.check()


@pytest.mark.soak
def test_the_list_of_all_names_fits_a_phone(browser: Browser, address: str) -> None:
    site = Site(browser, address, width=PHONE)
    site.open("reference/index")
    assert site.window.locator(".names h3").count() > 8, "a heading for each page of the reference"
    assert site.window.locator(".names td:first-child a").count() == len(public_names())
    wide = "all => all.filter(one => one.getBoundingClientRect().right > innerWidth).map(one => one.textContent)"
    assert site.window.locator(".names a").evaluate_all(wide) == []
    site.check()


def test_output_is_split_into_prose_and_columns() -> None:
    long = "word " * 31
    code = f"$ laconic  show\n{long.strip()}\nbroken here\n\n┏━━┓\n┃ <b>&lt;</b>┃\n- an item"
    before, after = '<div class="language-text highlight"><pre><code>', "</code></pre></div>"
    shown = part("output_blocks", "with_columns")(f"{before}{code}\n{after}")
    table = '<span class="columns drawn" tabindex="0" style="--columns: 4">┏━━┓\n┃ <b>&lt;</b>┃\n</span>'
    assert shown == f"{before}$ laconic  show\n{long}broken here\n\n{table}- an item\n{after}"
