"""What makes the documentation site: links that leave ``docs/``, and figures drawn by a script."""

import importlib.util
import re
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    """Import a script of ``scripts/``, or skip where what it needs is not installed."""
    pytest.importorskip({"docs_site": "mkdocs", "parallel_scan_figures": "matplotlib"}[name])
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "page, shows, link, expected",
    [
        ("guide.md", None, "[a](api.md#flags)", "[a](api.md#flags)"),
        ("index.md", None, "[a](../README.md)", "[a](readme.md)"),
        ("guide.md", None, "[a](../scanlib/ops/loop.py)", "[a](source/scanlib/ops/loop.py.md)"),
        ("guide.md", None, "![a](figures/scan-chunks.svg)", "![a](figures/scan-chunks.svg)"),
        ("readme.md", "README.md", "[a](docs/guide.md#taps)", "[a](guide.md#taps)"),
        ("readme.md", "README.md", "[a](LICENSE)", "[a](source/LICENSE.md)"),
        ("guide.md", None, "[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("guide.md", None, "[a](../absent.md)", "[a](../absent.md)"),
        ("guide.md", None, "[a](#taps)", "[a](#taps)"),
    ],
)
def test_links_hold_in_the_site(page, shows, link, expected):
    site = load("docs_site")
    if shows:
        site.GENERATED[page] = shows
    assert site.with_site_links(f"see {link}.", page) == f"see {expected}."


def test_links_in_code_are_left_alone():
    site = load("docs_site")
    text = "```text\n[a](../README.md)\n```\n"
    assert site.with_site_links(text, "guide.md") == text
    assert site.links(text, "docs/guide.md") == set()


def test_all_pages_are_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": (\S+\.md)$", text, re.MULTILINE))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= listed


def test_the_figures_of_the_scan_page():
    figures = load("parallel_scan_figures")
    page = (ROOT / "docs" / "parallel-scan.md").read_text(encoding="utf-8")
    assert set(re.findall(r"figures/scan-([\w-]+)\.svg", page)) == set(figures.FIGURES)
    assert all((figures.FOLDER / f"scan-{name}.svg").exists() for name in figures.FIGURES)

    def texts(name):
        figure = figures.FIGURES[name]()
        found = [text.get_text() for text in figure.axes[0].texts]
        figures.plt.close(figure)
        return found

    sums = [str(total) for total in accumulate(figures.VALUES)]
    assert [t for t in texts("sequential") if t.isdigit()][8:] == sums
    assert [t for t in texts("chunks") if t.isdigit()][-2:] == sums[-2:]
    assert [t for t in texts("sweeps") if t.isdigit()][-8:] == ["0", *sums[:-1]]
    assert [t for t in texts("reduction") if t.isdigit()][-1] == sums[-1]
