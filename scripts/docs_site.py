"""MkDocs hooks: the pages of ``docs/`` as a site, without a change to the pages.

The pages are read in two places, in the repository and on the site, and are written for the first:

* they link to files outside ``docs/``. Such a file becomes a page of the site: Markdown as it
  stands, anything else as a listing;
* they indent nested lists by two spaces, where Python-Markdown wants four;
* the reference lists signatures and arguments. The docstrings in full are on a page of their own,
  generated from ``scanlib.__all__``.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
BLOCK = re.compile(r"^(?P<fence>`{3,})\w*\n.*?^(?P=fence)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml", ".yml": "yaml"}
DOCSTRINGS = "docstrings.md"
# Pages of the site that show a file outside docs/, with the path of that file.
GENERATED: dict[str, str] = {}


class TwoSpaces(Extension):
    """Nested lists are indented by two spaces."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 -- the name of Python-Markdown
        """Set the width that block processors count in, before they are asked."""
        md.tab_length = 2


def repository_path(page: str) -> str:
    """Return the path in the repository of what a page of the site shows."""
    return GENERATED.get(page, f"{DOCS}/{page}")


def site_path(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if path.endswith(".md"):
        return path.lower()
    return f"source/{path}.md"


def outside_code(text: str, change: Any) -> str:
    """Apply a function to the text between code blocks."""
    parts, start = [], 0
    for block in BLOCK.finditer(text):
        parts += [change(text[start : block.start()]), block[0]]
        start = block.end()
    return "".join([*parts, change(text[start:])])


def links(text: str, path: str) -> set[str]:
    """Return the files of the repository that the text of a file links to."""
    found: set[str] = set()

    def collect(part: str) -> str:
        found.update(match["target"] for match in LINK.finditer(part))
        return part

    outside_code(text, collect)
    folder = posixpath.dirname(path)
    targets = {posixpath.normpath(posixpath.join(folder, target)) for target in found}
    return {target for target in targets if (ROOT / target).is_file()}


def with_site_links(text: str, page: str) -> str:
    """Return the text of a page with links that hold in the site."""
    path, here = repository_path(page), posixpath.dirname(page)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["target"]))
        if "://" in match["target"] or not (ROOT / target).is_file():
            return match[0]  # MkDocs reports what does not exist
        place = posixpath.relpath(site_path(target), here or ".")
        return f"]({place}{match['anchor'] or ''})"

    return outside_code(text, lambda part: LINK.sub(moved, part))


def listing(path: str) -> str:
    """Return a page that shows a file as it is; the search leaves it out."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
    fence = "`" * 6
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{fence}{language}\n{text}\n{fence}\n"


def docstrings() -> str:
    """Return the page of all public docstrings, in the order of ``scanlib.__all__``.

    Functions are named by where they are defined: some have the name of a module beside them.
    """
    tree = ast.parse((ROOT / "scanlib" / "__init__.py").read_text(encoding="utf-8"))
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    places = imported("scanlib/__init__.py")
    parts = [
        f"## `scanlib.{name}`\n\n::: {places[name]}\n    options:\n"
        "      show_root_heading: false\n      show_root_toc_entry: false"
        for name in names
        if not name.startswith("_")
    ]
    return "\n\n".join(["# Docstrings", *parts]) + "\n"


def imported(path: str) -> dict[str, str]:
    """Return where the names are defined that a module imports from the package."""
    found: dict[str, str] = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scanlib."):
            package = ROOT / str(node.module).replace(".", "/") / "__init__.py"
            inner = imported(str(package.relative_to(ROOT))) if package.exists() else {}
            for alias in node.names:
                found[alias.name] = inner.get(alias.name, f"{node.module}.{alias.name}")
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make Markdown read lists as the repository does."""
    extensions: list[Any] = config.markdown_extensions  # typed as names, takes objects as well
    extensions.append(TwoSpaces())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside ``docs/`` that a page links to."""
    GENERATED.clear()
    pages = files.documentation_pages()
    waiting = {f"{DOCS}/{page.src_uri}": page.content_string for page in pages}
    while waiting:
        path, text = waiting.popitem()
        for target in links(text, path):
            place = site_path(target)
            if target.startswith(f"{DOCS}/") or place in GENERATED:
                continue
            GENERATED[place] = target
            if target.endswith(".md"):
                waiting[target] = (ROOT / target).read_text(encoding="utf-8")
                files.append(File.generated(config, place, content=waiting[target]))
            else:
                page = File.generated(config, place, content=listing(target))
                page.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(page)
    files.append(File.generated(config, DOCSTRINGS, content=docstrings()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their targets are in the site."""
    if page.file.src_uri == DOCSTRINGS or page.file.src_uri.startswith("source/"):
        return markdown
    return with_site_links(markdown, page.file.src_uri)
