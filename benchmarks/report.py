"""The tables that ``python -m benchmarks`` prints."""

from collections.abc import Mapping, Sequence

from benchmarks.measure import Measurement
from benchmarks.model import OURS, PASSES, THEIRS
from benchmarks.numerics import ErrorRow
from benchmarks.peers import (
    ASSOCIATIVE,
    CALL,
    COPY,
    DIRECT,
    FRESH,
    HAND,
    LAX,
    LFILTER,
    NEW_PAGES,
)
from benchmarks.timing import median

LEGEND = """\
Ratios of times, medians of paired samples; below one, scanlib is faster. `hand`: a hand-written
numba loop on one thread into memory allocated before. `goal` and `met`: for the ratio to `hand`
(`+ call`: after one empty call was taken off). `copy`: moving the bytes, every input once and every
result once. `memory / hand`: allocating and touching results, from reused memory to new pages.
`call / hand`: one call of a PyTensor function that does nothing. `Ops`: scanlib's Ops in the
compiled function; a loop that only has `Scan` was not lowered."""

BASES = (THEIRS, LAX, ASSOCIATIVE, LFILTER, COPY)


def speed_rows(measurement: Measurement) -> list[list[str]]:
    """A line for the step function, and one for the direct function if there is one."""
    return [
        speed_row(measurement, subject)
        for subject in (OURS, DIRECT)
        if subject in measurement.samples or measurement.absent.get(subject)
    ]


def speed_row(measurement: Measurement, subject: str) -> list[str]:
    """The figures of one way to write one pass over one loop."""
    loop, samples = measurement.loop, measurement.samples
    written = "scan" if subject == OURS or loop.direct is None else loop.direct[0]
    names = [loop.title, PASSES[measurement.gradient], written]
    if subject not in samples:
        return [*names, measurement.absent[subject], *[""] * (len(SPEED_HEADINGS) - 4)]
    to_hand = measurement.ratio(subject, HAND)
    assert to_hand is not None
    spread = f"{show_ratio(to_hand.low)}–{show_ratio(to_hand.high)}"
    cells = [show_ratio(to_hand.median), spread, *goal_cells(measurement, subject)]
    for base in BASES:
        ratio = measurement.ratio(subject, base)
        cells.append(show_ratio(ratio.median) if ratio else measurement.absent.get(base, ""))
    memory = [measurement.ratio(name, HAND) for name in (FRESH, NEW_PAGES)]
    cells.append("–".join(show_ratio(ratio.median) for ratio in memory if ratio))
    call = measurement.ratio(CALL, HAND)
    cells.append(show_ratio(call.median) if call else "")
    cells += [show_seconds(median(samples[HAND])), show_seconds(median(samples[subject]))]
    return [*names, *cells, measurement.operations.get(subject) or "none"]


SPEED_HEADINGS = (
    "loop",
    "pass",
    "by",
    "scanlib / hand",
    "quartiles",
    "goal",
    "met",
    *(f"/ {base.replace('associative', 'assoc')}" for base in BASES),
    "memory / hand",
    "call / hand",
    "hand",
    "scanlib",
    "Ops",
)


def goal_cells(measurement: Measurement, subject: str) -> list[str]:
    """The goal, and whether it was met."""
    misses = measurement.misses(subject)
    if misses is None or measurement.goal is None:
        return ["", ""]
    goal = f"≤ {measurement.goal:g}" + (" + call" if measurement.loop.plus_call else "")
    if measurement.loop.lfilter_goal is not None and not measurement.gradient:
        goal += f", lfilter ≤ {measurement.loop.lfilter_goal:g}"
    if measurement.loop.plus_call:
        ratio = measurement.goal_ratio(subject)
        assert ratio is not None
        suffix = f" ({show_ratio(ratio.median)})"
    else:
        suffix = f" ({', '.join(misses)})" if misses == [LFILTER] else ""
    return [goal, ("no" if misses else "yes") + suffix]


def speed_table(measurements: Sequence[Measurement]) -> str:
    """All loops, with the notes below."""
    lines = [row for measurement in measurements for row in speed_rows(measurement)]
    notes: dict[str, None] = {}
    for measurement in measurements:
        for note in measurement.notes:
            notes[f"* {measurement.loop.title}: {note}"] = None
    return "\n".join([draw(SPEED_HEADINGS, lines, left=3), "", LEGEND, *notes])


PAGE_HEADINGS = ("loop", "pass", "by", "scanlib / hand", *(f"/ {base}" for base in BASES))


def speed_page(measurements: Sequence[Measurement]) -> str:
    """The ratios as a table in Markdown, with fewer columns."""
    rows = [row for measurement in measurements for row in speed_rows(measurement)]
    columns = [SPEED_HEADINGS.index(name) for name in ("loop", "pass", "by", "scanlib / hand")]
    bases = SPEED_HEADINGS.index("met") + 1
    lines = [PAGE_HEADINGS, ["---"] * len(PAGE_HEADINGS)]
    for row in rows:
        lines.append([*(row[k] for k in columns), *row[bases : bases + len(BASES)]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def errors_table(rows: Sequence[ErrorRow]) -> str:
    """The largest errors of the discounted sum in single precision."""
    lines = [
        [
            row.name,
            *(f"{error:.1e}" if error is not None else row.absent for error in row.errors()),
            "" if row.met() is None else yes(bool(row.met())),
        ]
        for row in rows
    ]
    headings = (
        "discounted sum, 10,000, float32, largest error",
        "ones (goal ≤ 2.7e-5)",
        "noise, first draw (goal ≤ 5.0e-6)",
        "noise, median of draws",
        "noise, worst draw",
        "met",
    )
    return draw(headings, lines, left=1)


def sweep_table(sweeps: Mapping[str, Sequence[tuple[int, Measurement]]]) -> str:
    """Time per element as length or width grows."""
    tables = []
    for axis, points in sweeps.items():
        names = list(dict.fromkeys(name for _, m in points for name in m.samples))
        lines = [
            [
                f"{size:,}",
                *(
                    f"{1e9 * median(m.samples[name]) / elements(m):.3g}"
                    if name in m.samples
                    else ""
                    for name in names
                ),
            ]
            for size, m in points
        ]
        tables.append(draw((f"ns per element, by {axis}", *names), lines, left=0))
    return "\n\n".join(tables)


def elements(measurement: Measurement) -> int:
    """How many numbers the loop computes."""
    return max(measurement.bytes_written // 8, 1)


def yes(met: bool) -> str:
    """A word for the column ``met``."""
    return "yes" if met else "no"


def show_ratio(ratio: float) -> str:
    """Two decimals for small ratios, fewer for large ones."""
    if ratio < 0.0095:
        return f"{ratio:.0e}" if ratio > 0 else f"{ratio:.2f}"
    return f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"


def show_seconds(seconds: float) -> str:
    """Three digits with the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def draw(headings: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """One Markdown table with its columns aligned, the first `left` of them to the left."""
    rows = [list(headings), *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    rule = [
        "-" * width if column < left else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in rows[1:])])
