"""The figure of ``python -m benchmarks --plot FILE``: ratios by loop, and how times grow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Measurement
from benchmarks.model import OURS, PASSES, THEIRS
from benchmarks.peers import ASSOCIATIVE, CALL, COPY, DIRECT, HAND, LAX, LFILTER
from benchmarks.report import elements
from benchmarks.sweep import ELEMENTS, LENGTH, Sweeps
from benchmarks.timing import median

# Marker, colour and label. The colours are Okabe and Ito's, which colour-blind readers tell apart.
STYLES = {
    OURS: ("o", "#D55E00", "scanlib.scan"),
    DIRECT: ("D", "#E69F00", "scanlib, direct function"),
    THEIRS: ("s", "#0072B2", "pytensor.scan"),
    LAX: ("^", "#009E73", "lax.scan"),
    ASSOCIATIVE: ("v", "#56B4E9", "lax.associative_scan"),
    LFILTER: ("P", "#CC79A7", "scipy lfilter"),
    COPY: ("|", "#777777", "moving the bytes"),
}
HAND_STYLE = ("x", "black", "hand-written loop")


def draw_plot(path: Path, measurements: Sequence[Measurement], sweeps: Sweeps | None) -> None:
    """Draw the ratios of both passes, and the sweeps below where there are any."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    loops = list(dict.fromkeys(m.loop.title for m in measurements))
    heights = [1.6 + 0.42 * len(loops)] if measurements else []
    heights += [5.0] if sweeps else []
    figure = plt.figure(figsize=(15, sum(heights) + 1.2), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    handles: dict[str, Any] = {}
    if measurements:
        shared = None
        for column, gradient in enumerate(PASSES):
            axes = figure.add_subplot(grid[0, column], sharey=shared)
            shared = shared or axes
            chosen = [m for m in measurements if m.gradient == gradient]
            draw_ratios(axes, loops, chosen, handles)
            axes.set_title(PASSES[gradient])
            axes.tick_params(labelleft=column == 0)
    if sweeps:
        for column, axis in enumerate(sweeps):
            draw_sweep(figure.add_subplot(grid[-1, column]), axis, sweeps[axis], handles)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_ratios(
    axes: Any, loops: Sequence[str], measurements: Sequence[Measurement], handles: dict[str, Any]
) -> None:
    """Times relative to the hand-written loop, a line for each loop."""
    heights = {title: -row for row, title in enumerate(loops)}
    for row in range(0, len(loops), 2):
        axes.axhspan(-row - 0.5, -row + 0.5, color="#f4f4f4", zorder=0)
    line = axes.axvline(1.0, color="black", linewidth=1, zorder=1)
    handles.setdefault("hand-written loop = 1", line)
    for name, (marker, color, label) in STYLES.items():
        ratios = [(heights[m.loop.title], m.ratio(name, HAND)) for m in measurements]
        seen = [(height, ratio.median) for height, ratio in ratios if ratio is not None]
        if seen:
            own = name in (OURS, DIRECT)
            dots = axes.scatter(
                [ratio for _, ratio in seen],
                [height for height, _ in seen],
                marker=marker,
                color=color,
                s=70 if own else 45,
                zorder=4 if own else 3,
                linewidths=2 if marker == "|" else 0.6,
                edgecolors=None if marker == "|" else "white",
            )
            handles.setdefault(label, dots)
    for m in measurements:
        if m.goal is not None:
            height = heights[m.loop.title]
            call = m.ratio(CALL, HAND) if m.loop.plus_call else None
            goal = m.goal + (call.median if call else 0.0)
            (drawn,) = axes.plot([goal, goal], [height - 0.42, height + 0.42], "k-", linewidth=3)
            handles.setdefault("goal", drawn)
    axes.set_xscale("log")
    axes.set_yticks([-row for row in range(len(loops))], loops)
    axes.set_ylim(-len(loops) + 0.5, 0.5)
    axes.set_xlabel("time / time of the hand-written loop")
    axes.grid(axis="x", which="major", color="#cccccc")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def draw_sweep(
    axes: Any,
    axis: str,
    points: Sequence[tuple[int, Measurement]],
    handles: dict[str, Any],
) -> None:
    """Nanoseconds per element against length or width."""
    for name, (marker, color, label) in {**STYLES, HAND: HAND_STYLE}.items():
        seen = [
            (size, 1e9 * median(m.samples[name]) / elements(m))
            for size, m in points
            if name in m.samples
        ]
        if seen:
            (drawn,) = axes.plot(*zip(*seen, strict=True), marker=marker, color=color)
            handles.setdefault(label, drawn)
    axes.set_xscale("log")
    axes.set_yscale("log")
    per_width = "" if axis == LENGTH else f" (length × width = {ELEMENTS:,})"
    axes.set_title(f"a[t] h + b[t], forward, by {axis}{per_width}")
    axes.set_xlabel(axis)
    axes.set_ylabel("ns per element")
    axes.grid(which="major", color="#cccccc")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
