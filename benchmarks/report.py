"""Rows of the table, and how they are printed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.loops import OURS, THEIRS
from benchmarks.timing import Ratio, paired_ratio

HAND = "hand loop"

HEADINGS = (
    "loop",
    "pass",
    f"{OURS} / {THEIRS}",
    "quartiles",
    f"{OURS} / {HAND}",
    THEIRS,
    OURS,
)


@dataclass(frozen=True)
class Row:
    """One line of the table: a loop, a pass over it, and the paired times of everybody."""

    loop: str
    passed: str
    samples: Mapping[str, Sequence[float]]

    @property
    def ratio(self) -> Ratio:
        """Time of scanlib by the time of ``pytensor.scan``."""
        return paired_ratio(self.samples[OURS], self.samples[THEIRS])

    @property
    def hand_ratio(self) -> Ratio | None:
        """Time of scanlib by the time of the hand-written loop, where there is one."""
        if HAND not in self.samples:
            return None
        return paired_ratio(self.samples[OURS], self.samples[HAND])

    def cells(self) -> list[str]:
        """The row as the table shows it."""
        ratio, hand_ratio = self.ratio, self.hand_ratio
        return [
            self.loop,
            self.passed,
            show_ratio(ratio.median),
            f"{show_ratio(ratio.low)} to {show_ratio(ratio.high)}",
            show_ratio(hand_ratio.median) if hand_ratio else "",
            show_seconds(median(self.samples[THEIRS])),
            show_seconds(median(self.samples[OURS])),
        ]

    def record(self) -> dict[str, Any]:
        """The row as the JSON file holds it."""
        return {
            "loop": self.loop,
            "pass": self.passed,
            "ratio": asdict(self.ratio),
            "hand_ratio": asdict(self.hand_ratio) if self.hand_ratio else None,
            "seconds": {name: list(times) for name, times in self.samples.items()},
        }


def show_ratio(ratio: float) -> str:
    """Two decimals for small ratios, fewer for large ones."""
    return f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"


def show_seconds(seconds: float) -> str:
    """Three digits with the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def table(rows: Sequence[Row]) -> str:
    """All rows as one Markdown table with its columns aligned."""
    lines = [list(HEADINGS), *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    left = 2  # the names stand left, the figures right
    rule = [
        "-" * width if column < left else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]

    def draw(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    return "\n".join([draw(lines[0]), draw(rule), *(draw(line) for line in lines[1:])])
