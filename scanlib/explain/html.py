"""Explanations as HTML for notebooks: plain elements, nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from scanlib.explain.data import LoopExplanation
from scanlib.explain.text import COLUMNS, adoption, cells, facts, headline, splits, title

if TYPE_CHECKING:
    from scanlib.explain.explanation import Explanation


def html(explanation: Explanation) -> str:
    """Return an explanation as an HTML fragment."""
    loops = "".join(
        _loop(loop, f"{number}. ") for number, loop in enumerate(explanation.loops, start=1)
    )
    lines = [headline(explanation), *adoption(explanation), *splits(explanation)]
    lines += explanation.failures
    head = "<br>".join(escape(line) for line in lines)
    return f'<div class="scanlib-explanation"><p>{head}</p>{loops}</div>'


def _loop(loop: LoopExplanation, number: str) -> str:
    obstacles = "".join(f"<li>{escape(str(obstacle))}</li>" for obstacle in loop.obstacles)
    rows = [*facts(loop)]
    body = "".join(f"<tr>{_cell(key, 'th')}{_cell(value, 'td')}</tr>" for key, value in rows)
    in_the_way = f"<ul>{obstacles}</ul>" if obstacles else "nothing"
    body += f"<tr>{_cell('in the way', 'th')}<td {_LEFT}>{in_the_way}</td></tr>"
    inner = "".join(
        _loop(own, f"{number.strip()}{i}. ") for i, own in enumerate(loop.inner, start=1)
    )
    return (
        f"<details open><summary>{escape(number + title(loop))}</summary>"
        f"<table>{body}</table>{_parts(loop)}"
        f"{f'<blockquote>{inner}</blockquote>' if inner else ''}</details>"
    )


def _parts(loop: LoopExplanation) -> str:
    """Return the table of parts, folded away."""
    if not loop.parts:
        return ""
    head = "".join(_cell(name, "th") for name in COLUMNS)
    rows = ""
    for part in loop.parts:
        row = "".join(_cell(cell, "td") for cell in cells(part, loop.op))
        rows += f"<tr>{row}</tr>"
    return (
        f"<details><summary>parts ({len(loop.parts)})</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></details>"
    )


_LEFT = 'style="text-align: left"'  # notebooks align cells of tables to the right


def _cell(content: str, tag: str) -> str:
    return f"<{tag} {_LEFT}>{escape(content)}</{tag}>"
