"""What mkdocs is told of this project: pages for files outside of docs/, links from names to the reference, and its holes.

Documents link to files as git hosts want it, `../examples/resume.py`. On the site, each such file is a page.
"""

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from command_line import command_line
from docstrings import Links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from output_blocks import has_wide_table, with_columns
from plain_markdown import for_site
from public_names import public_names
from search_index import weigh

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FOLDERS = ["examples"]  # which are in the nav
TARGET = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?")
GENERATED = re.compile(r"<!-- generated: (\w+) -->.*?<!-- end -->", re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yml": "yaml", ".json": "json"}

_shown: dict[str, str] = {}  # the file of the repository that each page from outside of docs/ shows
_anchors: set[str] = set()  # what the reference has, as it was built
_links = Links()


def on_pre_build(config: MkDocsConfig) -> None:
    """Refuse to build a reference with holes."""
    without = [name for name, text in public_names().items() if not text]
    if without:
        raise PluginError(f"public names without a docstring: {', '.join(without)}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that a page links to, or a page of that kind."""
    waiting = ["CONTRIBUTING.md", "CHANGELOG.md", *FOLDERS]
    for page in files.documentation_pages():
        waiting += _outside(f"docs/{page.src_uri}", page.content_string)
    _shown.clear()
    while waiting:
        path = waiting.pop()
        if place_of(path) in _shown:
            continue
        origin, text = _content(path)
        _shown[place_of(path)] = origin
        files.append(File.generated(config, place_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
        waiting += _outside(origin, text)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links as the site has them, names that lead to the reference, and what is generated."""
    place = page.file.src_uri
    origin = _shown.get(place, f"docs/{place}")
    if has_wide_table(markdown):
        page.meta["hide"] = ["toc"]
    markdown = GENERATED.sub(lambda found: {"names": _all_names, "commands": command_line}[found[1]](), markdown)

    def prose(line: str) -> str:
        return _links.insert(TARGET.sub(lambda found: _relative(found[1], found[2] or "", origin, place), line))

    return for_site(markdown, prose)


def on_page_content(html: str, **_: object) -> str:
    """Blocks of output that can be read on every screen."""
    return with_columns(html)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Note what the reference has."""
    if page.file.src_uri.startswith("reference/"):
        _anchors.update(re.findall(r'id="(laconic[\w.]*)"', output))
    return output


@event_priority(-100)  # after the search has written its index
def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a reference that lacks a public name, and weigh what the search finds."""
    missing = sorted(set(public_names()) - _anchors)
    if missing:
        raise PluginError(
            f"docs/reference/ lacks public names; write `::: name` into one of its pages for {', '.join(missing)}"
        )
    weigh(Path(config.site_dir))


def place_of(path: str) -> str:
    """The page, from docs/, that shows a file or a folder of the repository."""
    if path in PAGES or path.startswith("docs/"):
        return PAGES.get(path, path.removeprefix("docs/"))
    if path.endswith("/README.md") or (ROOT / path).is_dir():
        return f"{path.removesuffix('/README.md')}/index.md"
    return f"{path}.md"


def _outside(origin: str, text: str) -> Iterator[str]:
    """The files outside of docs/ that a document links to."""
    for target, _ in TARGET.findall(text) if origin.endswith(".md") else []:
        path = _path(target, origin)
        if not path.startswith("docs/") and path not in PAGES and (ROOT / path).exists():
            yield path


def _path(target: str, origin: str) -> str:
    """What a document links to, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _relative(target: str, anchor: str, origin: str, place: str) -> str:
    """A link of a document, from its page on the site; as it was if it leads nowhere, for mkdocs to complain of."""
    path = _path(target, origin)
    if not (ROOT / path).exists():
        return target + anchor
    anchor = "" if path == "README.md" else anchor  # the front page stands for it, and has other sections
    return posixpath.relpath(place_of(path), posixpath.dirname(place) or ".") + anchor


def _content(path: str) -> tuple[str, str]:
    """The file that stands for a path, and its text as a page."""
    file = ROOT / path
    if file.is_dir():
        readme = f"{path}/README.md"
        return readme, (ROOT / readme).read_text() if (ROOT / readme).exists() else _listing(file)
    if file.suffix == ".md":
        return path, file.read_text()
    code = f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n````"
    return path, f"---\nhide: [toc]\nsearch:\n  boost: 0.5\n---\n\n# {path}\n\n{code}\n"


def _listing(folder: Path) -> str:
    """A folder without a README: its scripts, with what each is for."""
    rows = []
    for file in sorted(folder.glob("*.py")):
        said = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        rows += [f"| [{file.name}]({file.name}) | {said} |"] if said else []
    return "\n".join([f"# {folder.name}", "", "| file | |", "|---|---|", *rows, ""])


def _all_names() -> str:
    """Every public name with the first line of its docstring, by the page of the reference that has it."""
    pages = re.findall(r"^\| \[(.+)\]\((\w+)\.md\) \|", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE)
    place = {name: page for _, page in pages for name in re.findall(r"^::: (\S+)$", _reference(page), re.MULTILINE)}
    rows: dict[str, list[str]] = {page: [] for _, page in pages}
    for name, text in sorted(public_names().items(), key=lambda item: item[0].lower()):
        owner = name
        while owner not in place:  # a name without a line of its own is on the page of its module
            owner = owner.rpartition(".")[0]
        first = text.strip().partition("\n")[0].replace("|", r"\|")
        shown = name.replace("laconic.compat.", "", 1)
        rows[place[owner]].append(f"| [`{shown}`][{name}] | {first} |")
    tables = [f"### {title}\n\n| name | |\n|---|---|\n" + "\n".join(rows[page]) for title, page in pages if rows[page]]
    return '<div class="names" markdown>\n\n' + "\n\n".join(tables) + "\n\n</div>"


def _reference(page: str) -> str:
    return (ROOT / f"docs/reference/{page}.md").read_text()
