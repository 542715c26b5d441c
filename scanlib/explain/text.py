"""Explanations as text, at most `WIDTH` columns wide."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from scanlib.explain.data import Bytes, LoopExplanation, MemoryUse, Part, readable

if TYPE_CHECKING:
    from scanlib.explain.explanation import Explanation

WIDTH = 100
MIN_NAME = 12
KEY_WIDTH = 12
EXAMPLE_STEPS = 1000
COLUMNS = ("role", "name", "dtype", "row", "taps", "kept", "family")
NAME = COLUMNS.index("name")


def text(explanation: Explanation) -> str:
    """Return an explanation as text."""
    lines = [*adoption(explanation), *splits(explanation), *explanation.failures]
    blocks = ["\n".join([headline(explanation), *_wrapped(lines)])]
    for number, loop in enumerate(explanation.loops, start=1):
        blocks.append("\n".join(_loop(loop, f"{number}.", "")))
    return "\n\n".join(blocks)


def splits(explanation: Explanation) -> list[str]:
    """Return what became of the loops that were taken apart, a sentence each."""
    return [f"{name} was taken apart: {what}" for name, what in explanation.splits]


def headline(explanation: Explanation) -> str:
    """Return the line that says what was explained."""
    count = len(explanation.loops)
    where = f"{explanation.source}, {explanation.linker} linker"
    if not count:
        return f"no loops ({where})"
    if count == 1:
        return f"1 loop ({where})"
    return f"{count} loops in the order of computation ({where})"


def adoption(explanation: Explanation) -> list[str]:
    """Return the lines that say what became of loops of `pytensor.scan`."""
    taken = [loop.name for loop in explanation.adoption if loop.reason is None]
    lines = [f"adopted from pytensor.scan: {', '.join(taken)}"] if taken else []
    left = [loop for loop in explanation.adoption if loop.reason is not None]
    return lines + [f"left to PyTensor: {loop.name}, because {loop.reason}" for loop in left]


def _wrapped(lines: list[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def title(loop: LoopExplanation) -> str:
    """Return the name of a loop and what kind of loop it is."""
    kind = [loop.op]
    if loop.gradient:
        kind.append("gradient")
    if loop.until:
        kind.append("until")
    if loop.inside:
        kind.append(f"inside {loop.inside}")
    return f"{loop.name}: {', '.join(kind)}"


def facts(loop: LoopExplanation) -> list[tuple[str, str]]:
    """Return what there is to say of a loop but for its parts, obstacles and inner loops."""
    found = [
        ("steps", steps(loop)),
        ("schedule", loop.schedule),
        ("why", loop.why),
        ("runs", loop.runs),
    ]
    if loop.threads > 1:
        found.append(("threads", f"up to {loop.threads}, {loop.shares}"))
    if loop.memory is not None:
        found += memory(loop.memory, loop.steps, loop.until)
    return found


def steps(loop: LoopExplanation) -> str:
    """Return how many steps there are, and in which direction."""
    known = "T, known at run time" if loop.steps is None else f"T = {loop.steps}"
    count = f"at most {known.removeprefix('T = ')}" if loop.until else known
    return count + (", from the last row to the first" if loop.reverse else "")


def memory(memory: MemoryUse, known: int | None, until: bool) -> list[tuple[str, str]]:
    """Return what is read and written, and what is stored."""
    found = []
    if memory.read.terms or memory.written.terms:
        found.append(("memory", _traffic(memory, known, until)))
    else:
        found.append(("memory", "no array with a time axis is read or written"))
    if memory.whole.terms:
        found.append(("", f"every step reads arrays of {memory.whole} whole"))
    for history in memory.histories:
        row = history.row.value
        if row is not None and known is not None:
            size = ("at most " if until else "") + readable(row * (known + history.depth))
        else:
            size = f"(T + {history.depth})·{_factor(history.row)}"
        found.append(("stored", f"the history of {history.name}: {size}"))
    return found


def _traffic(memory: MemoryUse, known: int | None, until: bool) -> str:
    """Return what is read and written, per step and for a number of steps."""
    rows = known if known is not None else EXAMPLE_STEPS
    when = ("at most" if until else "in all") if known is not None else f"for T = {EXAMPLE_STEPS}"
    line = f"reads {memory.read} and writes {memory.written} per step"
    read, written = memory.read.times(rows), memory.written.times(rows)
    if read.value is not None and written.value is not None:
        line += f"; {read} and {written} {when}"
    return line


def _factor(size: Bytes) -> str:
    """Return a number of bytes as a factor of a product."""
    return str(size) if size.value is None else f"{size.value} B"


def cells(part: Part, op: str) -> tuple[str, ...]:
    """Return the row of a part in the table of the parts of a loop.

    A dash stands for a family that nobody looked for.
    """
    if part.shape is None:
        shape = ""
    else:
        shape = "scalar" if not part.shape else "×".join(map(str, part.shape))
    unknown = "none" if op == "ElemwiseScan" else "-"
    return (
        *(part.role, part.name, part.dtype, shape),
        " ".join(map(str, part.taps)),
        part.stored or "",
        part.family or (unknown if part.role in ("state", "carry") else ""),
    )


def table(loop: LoopExplanation, room: int) -> list[str]:
    """Return the parts as lines of aligned columns; columns without entries are left out.

    Names are cut where the lines would be wider than `room`.
    """
    rows = [COLUMNS, *(cells(part, loop.op) for part in loop.parts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True) if any(column[1:])]
    names = max(len(row[NAME]) for row in rows)
    space = max(MIN_NAME, names - max(0, sum(widths) + 2 * (len(widths) - 1) - room))
    rows = [(*row[:NAME], _short(row[NAME], space), *row[NAME + 1 :]) for row in rows]
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*kept, strict=True)
    ]


def _short(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + "…"


def _loop(loop: LoopExplanation, number: str, indent: str) -> list[str]:
    """Return the block of one loop."""
    lines = [f"{indent}{number} {title(loop)}"]
    indent += " " * (len(number) + 1)
    first = 5 if loop.threads > 1 else 4
    for key, value in facts(loop)[:first]:
        lines += _entry(key, value, indent)
    if loop.parts:
        room = WIDTH - len(indent) - KEY_WIDTH
        lines += _lines("parts", table(loop, room), indent)
    for key, value in facts(loop)[first:]:
        lines += _entry(key, value, indent)
    for i, obstacle in enumerate(loop.obstacles):
        lines += _entry("in the way" if i == 0 else "", f"{obstacle}", indent)
    if not loop.obstacles:
        lines += _entry("in the way", "nothing", indent)
    for i, inner in enumerate(loop.inner, start=1):
        if i == 1:
            lines += _entry("inside", "every step runs:", indent)
        lines += _loop(inner, f"{number}{i}.", indent + "  ")
    return lines


def _entry(key: str, value: str, indent: str) -> list[str]:
    room = WIDTH - len(indent) - KEY_WIDTH
    return _lines(key, textwrap.wrap(value, room, break_long_words=False), indent)


def _lines(key: str, lines: list[str], indent: str) -> list[str]:
    heads = [key.ljust(KEY_WIDTH), *([" " * KEY_WIDTH] * (len(lines) - 1))]
    return [(indent + head + line).rstrip() for head, line in zip(heads, lines, strict=True)]
