"""Draw the figures of ``docs/parallel-scan.md``: ways to compute all running sums of eight numbers.

Every number in a figure is computed here, by the algorithm that the figure shows::

    python scripts/parallel_scan_figures.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
VALUES = [3, 1, 7, 0, 4, 1, 6, 3]
INPUT, PARTIAL, FINAL = "#dfe6ee", "#fbe3c0", "#cfe8cf"
LINE = "#44546a"
Axes = Any


def cell(axes: Axes, x: float, y: float, text: object, color: str, wide: float = 0.66) -> None:
    """Draw one value at a place."""
    box = plt.Rectangle((x - wide / 2, y - 0.2), wide, 0.4, facecolor=color, edgecolor=LINE, lw=0.8)
    axes.add_patch(box)
    axes.text(x, y, str(text), ha="center", va="center", fontsize=9.5)


def row(axes: Axes, y: float, values: Sequence[object], color: str) -> None:
    """Draw a value for every place; ``None`` leaves a place empty."""
    for x, value in enumerate(values):
        if value is not None:
            cell(axes, x, y, value, color)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = LINE,
    bend: float = 0,
) -> None:
    """Draw an arrow from the lower edge of one cell to the upper edge of another."""
    style = {"arrowstyle": "-|>", "color": color, "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
    style["connectionstyle"] = f"arc3,rad={bend}"
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def down(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = LINE
) -> None:
    """Draw an arrow between cells of two rows."""
    arrow(axes, (start[0], start[1] - 0.2), (end[0], end[1] + 0.21), color)


def label(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Write a note beside the cells."""
    options = {"ha": "left", "va": "center", "fontsize": 9, "color": LINE} | options
    axes.text(x, y, text, **options)


def canvas(width: float, height: float, left: float, right: float, low: float) -> tuple[Any, Axes]:
    """Return an empty figure whose units are cells; rows go down from 0 to ``low``."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.set(xlim=(left, right), ylim=(low - 0.45, 0.45))
    axes.set_aspect("equal")
    axes.axis("off")
    return figure, axes


def sequential() -> Any:
    """One number after the other."""
    figure, axes = canvas(7.6, 2.0, -1.6, 8.2, -1.3)
    row(axes, 0, VALUES, INPUT)
    total = 0
    for x, value in enumerate(VALUES):
        total += value
        cell(axes, x, -1.2, total, FINAL)
        down(axes, (x, 0), (x, -1.2))
        if x:
            arrow(axes, (x - 1 + 0.33, -1.2), (x - 0.33, -1.2))
    label(axes, -0.5, 0, "x", ha="right")
    label(axes, -0.5, -1.2, "sums", ha="right")
    return figure


def reduction() -> Any:
    """The total alone, in a tree."""
    figure, axes = canvas(7.6, 3.4, -0.5, 9.9, -3.3)
    row(axes, 0, VALUES, INPUT)
    places, values = [float(x) for x in range(8)], list(VALUES)
    for level in (1, 2, 3):
        y = -1.1 * level
        pairs = range(0, len(values), 2)
        above = places
        places = [(above[i] + above[i + 1]) / 2 for i in pairs]
        values = [values[i] + values[i + 1] for i in pairs]
        for number, (x, value) in enumerate(zip(places, values, strict=True)):
            cell(axes, x, y, value, FINAL if level == 3 else PARTIAL)
            for parent in above[2 * number : 2 * number + 2]:
                down(axes, (parent, y + 1.1), (x, y))
        label(
            axes,
            7.7,
            y,
            f"level {level}: {len(values)} additions".replace("1 additions", "1 addition"),
        )
    return figure


def sweeps() -> Any:
    """Up to the total, and down again with what stands before each part."""
    figure, axes = canvas(7.6, 6.2, -0.5, 10.3, -7.0)
    row(axes, 0, VALUES, INPUT)
    values = list(VALUES)
    y = 0.0
    for step in (1, 2, 4):
        y -= 1.0
        for end in range(2 * step - 1, 8, 2 * step):
            values[end] += values[end - step]
            down(axes, (end - step, y + 1), (end, y))
            down(axes, (end, y + 1), (end, y))
        row(
            axes,
            y,
            [v if (x + 1) % (2 * step) == 0 else None for x, v in enumerate(values)],
            PARTIAL,
        )
        label(axes, 7.7, y, f"up, distance {step}")
    total, values[-1] = values[-1], 0
    y -= 1.0
    cell(axes, 7, y, 0, INPUT)
    label(axes, 7.7, y, f"0 in place of {total}")
    for step in (4, 2, 1):
        y -= 1.0
        for end in range(2 * step - 1, 8, 2 * step):
            left, right = values[end - step], values[end]
            values[end - step], values[end] = right, right + left
            down(axes, (end, y + 1), (end - step, y), "#2e7d32")
            down(axes, (end, y + 1), (end, y))
            arrow(axes, (end - step, y + 0.65), (end - 0.22, y + 0.21), "#b26a00")
            label(axes, end - step, y + 0.75, str(left), ha="center", color="#b26a00", fontsize=8)
        shown = [v if (x + 1) % step == 0 else None for x, v in enumerate(values)]
        row(axes, y, shown, FINAL if step == 1 else PARTIAL)
        label(axes, 7.7, y, f"down, distance {step}")
    return figure


def chunks() -> Any:
    """Two passes over the data, with a short scan between them."""
    figure, axes = canvas(7.6, 4.2, -0.6, 11.3, -4.6)
    size, before = 2, 0
    row(axes, 0, VALUES, INPUT)
    for chunk in range(4):
        start = size * chunk
        x = start + 0.5
        total = sum(VALUES[start : start + size])
        for place in range(start, start + size):
            down(axes, (place, 0), (x, -1.2))
        cell(axes, x, -1.2, total, PARTIAL)
        down(axes, (x, -1.2), (x, -2.4))
        cell(axes, x, -2.4, before, PARTIAL)
        if chunk:
            arrow(axes, (x - size + 0.33, -1.3), (x - 0.33, -2.3))
            arrow(axes, (x - size + 0.33, -2.4), (x - 0.33, -2.4))
        running = before
        for place in range(start, start + size):
            running += VALUES[place]
            down(axes, (x, -2.4), (start, -4.4)) if place == start else None
            cell(axes, place, -4.4, running, FINAL)
            if place > start:
                arrow(axes, (place - 1 + 0.33, -4.4), (place - 0.33, -4.4))
        before += total
    label(axes, 7.7, -1.2, "pass 1: a total for each chunk,\nchunks side by side")
    label(axes, 7.7, -2.4, "what stands before each chunk:\na scan of the totals")
    label(axes, 7.7, -4.4, "pass 2: the sums of each chunk,\nchunks side by side")
    label(axes, 7.7, -3.4, "x is read a second time")
    return figure


def registers() -> Any:
    """Steps that are composed before the state arrives."""
    figure, axes = canvas(7.6, 4.5, -1.4, 11.2, -5.1)
    for start, name in ((0, "h₀"), (5, "h₄")):
        steps = [f"f{'₁₂₃₄₅₆₇₈'[i]}" for i in range(4 * (start > 0), 4 + 4 * (start > 0))]
        for x, step in enumerate(steps):
            cell(axes, start + x, 0, step, INPUT)
        left, right = f"{steps[1]}{steps[0]}", f"{steps[3]}{steps[2]}"
        for middle, text in ((start + 0.5, left), (start + 2.5, right)):
            cell(axes, middle, -1.2, text, PARTIAL, 0.9)
            down(axes, (middle - 0.5, 0), (middle, -1.2))
            down(axes, (middle + 0.5, 0), (middle, -1.2))
        cell(axes, start + 1.5, -2.4, right + left, PARTIAL, 1.3)
        down(axes, (start + 0.5, -1.2), (start + 1.5, -2.4))
        down(axes, (start + 2.5, -1.2), (start + 1.5, -2.4))
        after = "h₄" if start == 0 else "h₈"
        down(axes, (start + 1.5, -2.4), (start + 3.4, -4.6))
        if start == 0:
            cell(axes, -0.9, -4.6, name, FINAL)
            arrow(axes, (-0.57, -4.6), (3.07, -4.6), "#2e7d32")
        else:
            arrow(axes, (3.73, -4.6), (8.07, -4.6), "#2e7d32")
        cell(axes, start + 3.4, -4.6, after, FINAL)
    label(axes, 8.9, -0.0, "steps, as\nfunctions")
    label(axes, 8.9, -1.2, "composed while\nno state waits")
    label(
        axes,
        0.9,
        -5.1,
        "one application for four steps: all that must wait for a state",
        color="#2e7d32",
    )
    return figure


def look_back() -> Any:
    """A block that adds up what its predecessors have published so far."""
    figure, axes = canvas(7.6, 3.3, -2.6, 8.9, -3.6)
    totals = [11, 9, 14, 6, 10]
    status = ["P", "P", "A", "A", "…"]
    label(axes, -1.0, 0, "total of\nthe block", ha="right")
    label(axes, -1.0, -1.1, "published", ha="right")
    prefix = 0
    for block, (total, state) in enumerate(zip(totals, status, strict=True)):
        x = 1.7 * block
        prefix += total
        cell(axes, x, 0, total, INPUT, 1.2)
        down(axes, (x, 0), (x, -1.1))
        shown = {"P": f"sum {prefix}", "A": f"total {total}", "…": "computing"}[state]
        cell(axes, x, -1.1, shown, {"P": FINAL, "A": PARTIAL, "…": "white"}[state], 1.3)
    for block, order in ((3, 1), (2, 2), (1, 3)):
        x = 1.7 * block
        arrow(axes, (6.8 - 0.1 * order, -2.5), (x, -1.32), "#b26a00", -0.15)
        label(axes, x + 0.12, -1.62, str(order), color="#b26a00", fontsize=9)
    found = f"{totals[3]} + {totals[2]} + {sum(totals[:2])} = {sum(totals[:4])}"
    text = f"block 4 looks back: {found}, and need not go on"
    label(axes, 8.4, -2.75, text, ha="right", color="#b26a00")
    label(
        axes,
        8.4,
        -3.35,
        f"it publishes the sum so far {sum(totals)}, for those behind it",
        ha="right",
    )
    return figure


FIGURES = {
    "sequential": sequential,
    "reduction": reduction,
    "sweeps": sweeps,
    "chunks": chunks,
    "registers": registers,
    "look-back": look_back,
}


def main() -> None:
    """Draw all figures; the same input gives the same files."""
    plt.rcParams["svg.hashsalt"] = "scanlib"
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw()
        path = FOLDER / f"scan-{name}.svg"
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)
        print(path.relative_to(FOLDER.parents[1]))


if __name__ == "__main__":
    main()
