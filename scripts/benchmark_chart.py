"""The chart and the short table of the benchmarks page, from the full table on the same page.

``python scripts/benchmark_chart.py`` draws ``docs/figures/benchmarks-chart.svg`` and prints the
short table. It needs matplotlib. ``python -m benchmarks --page FILE`` writes the full table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURE = ROOT / "docs" / "figures" / "benchmarks-chart.svg"
INK = "#808890"  # readable on white and on black
PEERS = {"/ pytensor.scan": ("pytensor.scan", "#8a94a6"), "/ lax.scan": ("JAX", "#c98a2b")}
# Loops by the name that the full table gives them, and what the chart calls them.
SHOWN = {
    "a[t] h + b[t], 100,000, float64": "AR(1), 100,000 steps",
    "AR(2) by taps, 100,000": "AR(2), 100,000 steps",
    "GARCH, 10,000": "GARCH(1,1), 10,000 steps",
    "a[t] h + b[t], 10,000 × 256, float64": "256 series, 10,000 steps",
    "cumulative logaddexp, 1,000,000": "running logsumexp, 1,000,000 steps",
    "A h + b[t], 10,000, d = 4": "4 × 4 matrix recurrence, 10,000 steps",
    "tanh RNN, 1,000 × 32 × 128, float32": "RNN, 1,000 steps of 32 × 128",
    "LSTM, 1,000 × 32 × 128, float32": "LSTM, 1,000 steps of 32 × 128",
    "Kalman filter, 500 × 4 states × 2 observations": "Kalman filter, 500 steps of 4 states",
}
PASS = "forward + gradient"


def rows() -> list[dict[str, str]]:
    """Return the rows of the full table as dictionaries."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    first = next(i for i, line in enumerate(lines) if line.startswith("| loop | pass | by |"))
    heads, *found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:]
    ]
    return [dict(zip(heads, row, strict=True)) for row in found if len(row) == len(heads)]


def times_faster(row: dict[str, str], column: str) -> float | None:
    """Return how many times the time of scanlib another one takes."""
    return 1 / float(row[column]) if row[column] else None


def shown() -> dict[str, dict[str, str]]:
    """Return the rows of the chart with their names in it."""
    chosen = {row["loop"]: row for row in rows() if row["pass"] == PASS and row["by"] == "scan"}
    return {name: chosen[loop] for loop, name in SHOWN.items()}


def draw(path: Path) -> None:
    """Draw how many times faster loops are with their gradients, on a transparent ground."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    found = shown()
    style: Any = {"font.size": 11, "text.color": INK, "svg.hashsalt": "scanlib"}
    with mpl.rc_context({**style, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": INK}):
        figure, axis = plt.subplots(figsize=(9, 4.6), layout="constrained")
        for offset, (column, (label, color)) in zip((0.2, -0.2), PEERS.items(), strict=True):
            widths = [times_faster(row, column) or 1.0 for row in found.values()]
            places = [len(found) - 1 - i + offset for i in range(len(found))]
            axis.barh(places, widths, height=0.38, color=color, label=f"than {label}")
            for place, width in zip(places, widths, strict=True):
                axis.text(
                    width * 1.05,
                    place,
                    rounded(width),
                    va="center",
                )
        axis.set_yticks(range(len(found))[::-1], list(found))
        axis.set_xscale("log")
        axis.set_xlim(1, 700)
        axis.set_xticks([1, 10, 100], ["1", "10", "100"])
        axis.set_title("times faster, value and gradient", color=INK, fontsize=11, loc="left")
        for edge in ("top", "right", "left"):
            axis.spines[edge].set_visible(False)
        axis.tick_params(left=False)
        axis.legend(frameon=False, labelcolor=INK, loc="lower right")
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def table() -> str:
    """Return the short table in Markdown."""
    columns = ("scanlib / hand", "/ pytensor.scan", "/ lax.scan", "/ lax.associative_scan")
    heads = ("plain numba loop", "pytensor.scan", "JAX scan", "JAX associative scan")
    lines: list[tuple[str, ...]] = [("loop, value and gradient", *heads), ("---",) * 5]
    for name, row in shown().items():
        lines.append((name, *(rounded(times_faster(row, column)) for column in columns)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rounded(value: float | None) -> str:
    """Return two digits of a number, or as many as stand before the point."""
    return "" if value is None else f"{value:.2g}" if value < 99 else f"{value:.0f}"


if __name__ == "__main__":
    draw(FIGURE)
    print(table())
