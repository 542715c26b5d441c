"""Explanations as HTML for notebooks: nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from scanlib.explain.data import FUSED, IN_ORDER, PARALLEL, LoopExplanation
from scanlib.explain.pictures import svg
from scanlib.explain.text import facts, headline, notes, table, title, what_runs

if TYPE_CHECKING:
    from scanlib.explain.explanation import Explanation

_BADGES = {PARALLEL: "parallel", FUSED: "fused", IN_ORDER: "ordered"}
_DARK = (
    "--ink:#e4e6eb;--soft:#a3a9b5;--card:#20242c;--line:#3b414d;--parallel:#4cc38a;--fused:#7aa2f7;"
    "--ordered:#e0af68"
)
_STYLE = f"""<style>
.scanlib-explanation{{--ink:#1f2430;--soft:#5c6370;--card:#f7f8fa;--line:#d5d9e0;--parallel:#12814d;
--fused:#2b5fc4;--ordered:#a45f00;color:var(--ink);font:14px/1.45 system-ui,sans-serif;
max-width:60em}}
@media (prefers-color-scheme:dark){{:root:not([data-jp-theme-light=true],
[data-md-color-scheme=default]) .scanlib-explanation{{{_DARK}}}}}
[data-jp-theme-light=false] .scanlib-explanation,[data-md-color-scheme=slate] .scanlib-explanation,
.vscode-dark .scanlib-explanation{{{_DARK}}}
.scanlib-explanation section{{background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:.6em .9em;margin:.6em 0}}
.scanlib-explanation p{{margin:.25em 0}}
.scanlib-explanation small,.scanlib-explanation summary{{color:var(--soft)}}
.scanlib-explanation b.grade{{border:1px solid;border-radius:1em;padding:0 .6em;font-weight:600}}
.scanlib-explanation .parallel{{color:var(--parallel)}}
.scanlib-explanation .fused{{color:var(--fused)}}
.scanlib-explanation .ordered{{color:var(--ordered)}}
.scanlib-explanation table{{color:inherit;font:inherit;border-collapse:collapse;
margin:.4em 0;display:block;overflow-x:auto}}
.scanlib-explanation th,.scanlib-explanation td{{text-align:left!important;vertical-align:top;
padding:.15em .8em .15em 0;background:none;color:inherit;border:0}}
.scanlib-explanation th{{color:var(--soft);font-weight:400;white-space:nowrap}}
.scanlib-explanation .bar{{background:var(--line);height:4px;border-radius:2px}}
.scanlib-explanation .bar i{{display:block;background:var(--fused);height:4px;border-radius:2px}}
.scanlib-explanation figure{{margin:.4em 0;overflow-x:auto}}
.scanlib-explanation svg{{max-width:none}}
.scanlib-explanation svg rect{{fill:var(--card);stroke:var(--line)}}
.scanlib-explanation svg text{{fill:var(--ink);font-size:11px;text-anchor:middle}}
.scanlib-explanation svg .edge{{fill:none;stroke:var(--soft)}}
.scanlib-explanation svg .state rect,.scanlib-explanation svg .next rect{{stroke:var(--ordered);
stroke-dasharray:4 2}}
.scanlib-explanation svg .operation rect{{stroke:var(--fused)}}
</style>"""


def html(explanation: Explanation) -> str:
    """Return an explanation as an HTML fragment."""
    loops = explanation.loops
    cards = "".join(
        _card(loop, before) for loop, before in zip(loops, [None, *loops], strict=False)
    )
    lines = "".join(f"<p>{escape(line)}</p>" for line in notes(explanation))
    head = f"<small>{escape(headline(explanation))}</small>"
    return f'<div class="scanlib-explanation">{_STYLE}{head}{lines}{cards}</div>'


def _card(loop: LoopExplanation, before: LoopExplanation | None = None) -> str:
    """Return the three answers on a loop, and its details folded away."""
    bar = ""
    if loop.share is not None:
        bar = f'<div class="bar"><i style="width:{100 * min(loop.share, 1):.0f}%"></i></div>'
    pictures = "".join(
        f"<figure><small>{when}</small><br>{svg(drawn, f'a step of {loop.name}, {when}')}</figure>"
        for when, drawn in (("as written", loop.before), ("as computed", loop.after))
        if drawn is not None
    )
    steps = f"<details><summary>graph of one step</summary>{pictures}</details>" * bool(pictures)
    rows = "".join(f"<tr>{_cell(key, 'th')}{_cell(value)}</tr>" for key, value in facts(loop))
    inner = "".join(map(_card, loop.inner))
    inside = f"<details><summary>loops inside a step</summary>{inner}</details>" * bool(inner)
    return (
        f"<section><p><b>{escape(what_runs(loop, before))}</b></p>{bar}"
        f'<p><b class="grade {_BADGES[loop.grade]}">{loop.grade}</b> '
        f"because {escape(loop.because)}</p><p>What you can do: {escape(loop.action)}</p>{steps}"
        f"<details><summary>details</summary><p>{escape(title(loop))}</p><table>{rows}</table>"
        f"{_parts(loop)}</details>{inside}</section>"
    )


def _parts(loop: LoopExplanation) -> str:
    """Return the table of parts."""
    if not loop.parts:
        return ""
    head, *rows = table(loop)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{''.join(_cell(name, 'th') for name in head)}</tr>{body}</table>"


def _cell(content: str, tag: str = "td") -> str:
    return f"<{tag}>{escape(content)}</{tag}>"
