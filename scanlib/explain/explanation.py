"""`Explanation`: what `scanlib.explain` returns, as text and as HTML.

Text is at most `WIDTH` columns wide. HTML, for notebooks, is the same with details folded away.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from scanlib.explain.data import LoopExplanation, Part
from scanlib.ops.loop_rewrite import AdoptedLoop

WIDTH = 100
KEY_WIDTH = 12
MAX_NAME = 28
COLUMNS = ("role", "name", "dtype", "row", "taps", "kept", "recurrence")


@dataclass(frozen=True)
class Explanation:
    """What `scanlib.explain` returns: answers when printed, HTML in a notebook, data in `loops`.

    Attributes
    ----------
    loops : list of LoopExplanation
        In the order of computation.
    source : str
        What was explained: "compiled function", or "graph".
    linker : str
        The linker that runs it, or would.
    adoption : tuple of AdoptedLoop
        The loops of `pytensor.scan` that were there, where adoption is switched on, and what
        became of each; see `scanlib.enable`.
    splits : list of (str, str)
        The name of every loop that was taken apart, and what left it.
    failures : list of str
        Errors in scanlib's rewrites, and what was left as it was for them.
    devices : tuple of str
        For a function of `scanlib.shard`, how each loop was cut over devices at the last call:
        pieces, rounds of exchange, bytes.
    unrolled : list of (str, str, int)
        The loops whose few steps are part of each step of another: the name of that one, their own,
        and their numbers of steps.
    """

    loops: list[LoopExplanation] = field(default_factory=list)
    source: str = "graph"
    linker: str = ""
    adoption: tuple[AdoptedLoop, ...] = ()
    splits: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    devices: tuple[str, ...] = ()
    unrolled: list[tuple[str, str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the three answers as text."""
        if not self.loops and not self.splits:
            return "\n".join([self._headline(), *_wrapped(self._notes(), "")])
        lines = [f"What runs ({self._headline()})"]
        for number, loop in enumerate(self.loops, start=1):
            before = self.loops[number - 2] if number > 1 else None
            lines += _wrapped([f"{number}. {what_runs(loop, before)}"], "  ")
        lines += _wrapped(self._notes(), "  ")
        grades = [f"{loop.grade}, because {loop.because}" for loop in self.loops]
        actions = [loop.action for loop in self.loops]
        for heading, answers in (("How good that is", grades), ("What you can do", actions)):
            answers = numbered(answers or ["nothing: no loop remains"])
            lines += [heading, *_wrapped(answers, "  ")]
        return "\n".join([*lines, "Details: print(explanation.details())"])

    __repr__ = __str__

    def details(self) -> str:
        """Return text with all that is known: data, memory, schedules and obstacles."""
        loops = ("\n".join(_loop(loop, f"{i}.", "")) for i, loop in enumerate(self.loops, start=1))
        return "\n\n".join([self._headline(), *loops])

    def _repr_html_(self) -> str:
        details = (
            f"<details><summary>details</summary><pre>{escape(self.details())}</pre></details>"
        )
        return f"<pre>{escape(str(self))}</pre>{details}"

    def to_dict(self) -> dict[str, Any]:
        """Return dictionaries, sequences, strings and numbers, fit for `json.dumps`."""
        return {**asdict(self), "loops": [loop.to_dict() for loop in self.loops]}

    def _headline(self) -> str:
        """Return the line that says what was explained."""
        count = len(self.loops)
        loops = {0: "no loops", 1: "1 loop"}.get(
            count, f"{count} loops in the order of computation"
        )
        return f"{loops}; {self.source}, {self.linker} linker"

    def _notes(self) -> list[str]:
        """Return what became of loops that are no more or were adopted, and what failed."""
        taken = [loop.name for loop in self.adoption if loop.reason is None]
        lines = [f"adopted from pytensor.scan: {', '.join(taken)}"] if taken else []
        left = [loop for loop in self.adoption if loop.reason is not None]
        lines += [f"left to PyTensor: {loop.name}, because {loop.reason}" for loop in left]
        lines += [f"computed outside '{name}': {what}" for name, what in self.splits]
        for outer, name, steps in dict.fromkeys(self.unrolled):
            many = f"the {steps} steps" if steps > 1 else "the one step"
            verb = "are" if steps > 1 else "is"
            lines.append(f"{many} of '{name}' {verb} part of each step of '{outer}'")
        lines += [f"over devices: {line}" for line in self.devices]
        return lines + list(self.failures)


def numbered(answers: Sequence[str]) -> list[str]:
    """Return each answer once, with the numbers of the loops it is for, if not for all."""
    places: dict[str, list[int]] = {}
    for number, answer in enumerate(answers, start=1):
        places.setdefault(answer, []).append(number)
    if len(places) == 1:
        return list(places)
    return [f"{', '.join(map(str, own))}. {answer}" for answer, own in places.items()]


def what_runs(loop: LoopExplanation, before: LoopExplanation | None = None) -> str:
    """Return one sentence on a loop; `before` is the loop computed before it."""
    if loop.gradient and before is not None and loop.name == f"{before.name}_gradient":
        name = f"gradient of '{before.name}'"
    elif loop.name == "gradient":
        name = "gradient of a loop"
    else:
        name = f"loop '{loop.name}'" if loop.name != "loop" else "loop"
    if loop.gradient and before is not None and (loop.op, loop.work) == (before.op, before.work):
        return (
            f"{name}: the same" + ", from the last step to the first" * loop.reverse + _time(loop)
        )
    many = f"{loop.steps:,} steps" if loop.steps is not None else "steps"
    many = f"at most {many}" if loop.until and loop.steps is not None else many
    order = ", from the last to the first" * loop.reverse
    where = f", inside {loop.inside}" * (loop.inside is not None)
    return f"{name}: {many} of {loop.work}{order}{where}{_time(loop)}"


def _time(loop: LoopExplanation) -> str:
    if loop.seconds is None:
        return ""
    share = "" if loop.share is None else f", {loop.share:.0%} of the call"
    units = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}
    size = next((size for size in units if loop.seconds >= size), 1e-6)
    return f" ({loop.seconds / size:.3g} {units[size]}{share})"


def title(loop: LoopExplanation) -> str:
    """Return the name of a loop and what kind of loop it is."""
    kind = [loop.op] + ["gradient"] * loop.gradient + ["until"] * loop.until
    return f"{loop.name}: {', '.join(kind)}" + f", inside {loop.inside}" * bool(loop.inside)


def facts(loop: LoopExplanation) -> list[tuple[str, str]]:
    """Return what there is to say of a loop but for its parts and inner loops."""
    known = "T, known at run time" if loop.steps is None else f"T = {loop.steps}"
    count = f"at most {known.removeprefix('T = ')}" if loop.until else known
    found = [
        ("steps", count + ", from the last row to the first" * loop.reverse),
        *(("step" * (i == 0), text) for i, text in enumerate(loop.step)),
        ("grade", f"{loop.grade}, because {loop.because}"),
        ("to do", loop.action),
        ("schedule", loop.schedule),
        ("runs", loop.runs),
    ]
    if loop.threads > 1:
        found.append(("threads", f"up to {loop.threads}, {loop.shares}"))
    read, written = loop.bytes_read(), loop.bytes_written()
    if read is not None and written is not None:
        found.append(("memory", f"reads {read} and writes {written} bytes per step"))
    obstacles = [str(obstacle) for obstacle in loop.obstacles] or ["nothing"]
    return found + [("in the way" * (i == 0), text) for i, text in enumerate(obstacles)]


def cells(part: Part) -> tuple[str, ...]:
    """Return the row of a part in the table of the parts of a loop."""
    row = ""
    if part.shape is not None:
        row = "×".join("?" if n is None else str(n) for n in part.shape) or "scalar"
    name = part.name if len(part.name) <= MAX_NAME else f"{part.name[: MAX_NAME - 1]}…"
    taps, stored = " ".join(map(str, part.taps)), part.stored or ""
    recurrence = part.recurrence or ("none" if part.role == "state" else "")
    return part.role, name, part.dtype, row, taps, stored, recurrence


def table(loop: LoopExplanation) -> list[tuple[str, ...]]:
    """Return the parts as rows, headings first; columns without entries are left out."""
    rows = [COLUMNS, *(cells(part) for part in loop.parts)]
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return list(zip(*kept, strict=True))


def _loop(loop: LoopExplanation, number: str, indent: str) -> list[str]:
    """Return the block of one loop."""
    lines = [f"{indent}{number} {title(loop)}"]
    indent += " " * (len(number) + 1)
    for key, value in facts(loop):
        lines += _entry(key, textwrap.wrap(value, WIDTH - len(indent) - KEY_WIDTH), indent)
    rows = table(loop) if loop.parts else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += _entry("data", aligned, indent)
    for i, inner in enumerate(loop.inner, start=1):
        lines += _entry("inside", ["every step runs:"], indent) if i == 1 else []
        lines += _loop(inner, f"{number}{i}.", indent + "  ")
    return lines


def _wrapped(lines: Sequence[str], indent: str) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line, WIDTH, initial_indent=indent, subsequent_indent=indent + "   "
        )
    ]


def _entry(key: str, lines: list[str], indent: str) -> list[str]:
    heads = [key.ljust(KEY_WIDTH), *([" " * KEY_WIDTH] * (len(lines) - 1))]
    return [(indent + head + line).rstrip() for head, line in zip(heads, lines, strict=False)]
