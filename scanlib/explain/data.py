"""What an explanation consists of: dataclasses that hold no graph, and become JSON.

Symbols: `T` is the number of steps, `K` the number of initial rows of a state. A size that is
not known before the function runs has a name: ``c`` or ``c0, c1, …`` for the channels of an
elementwise loop, ``n0, n1, …`` for other axes, each where it stands in `Part.shape`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

Size = int | str


@dataclass(frozen=True)
class Bytes:
    """A number of bytes: a sum of products of an integer with unknown sizes.

    Attributes
    ----------
    terms : tuple of (int, tuple of str)
        Every factor with the names of the sizes that it multiplies.
    """

    terms: tuple[tuple[int, tuple[str, ...]], ...] = ()

    @classmethod
    def of(cls, itemsize: int, shape: tuple[Size, ...]) -> Bytes:
        """Return the bytes of an array."""
        factor, names = itemsize, []
        for size in shape:
            if isinstance(size, int):
                factor *= size
            else:
                names.append(size)
        return cls(((factor, tuple(sorted(names))),)) if factor else cls()

    @property
    def value(self) -> int | None:
        """The number, None if it is not known before the function runs."""
        return None if any(names for _, names in self.terms) else sum(n for n, _ in self.terms)

    def __add__(self, other: Bytes) -> Bytes:
        total: dict[tuple[str, ...], int] = {}
        for factor, names in (*self.terms, *other.terms):
            total[names] = total.get(names, 0) + factor
        ordered = sorted(total, key=lambda names: (-len(names), names))
        return Bytes(tuple((total[names], names) for names in ordered))

    def times(self, factor: int) -> Bytes:
        """Return so many times the number."""
        return Bytes(tuple((factor * own, names) for own, names in self.terms))

    def __str__(self) -> str:
        if self.value is not None:
            return readable(self.value)
        terms = ["·".join([str(factor), *names]) for factor, names in self.terms]
        return f"{terms[0]} B" if len(terms) == 1 else f"({' + '.join(terms)}) B"

    def to_dict(self) -> dict[str, Any]:
        """Return the number, if known, and its text."""
        return {"value": self.value, "text": str(self)}


def readable(number: int) -> str:
    """Return a number of bytes with a decimal unit and three digits."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            digits = ".3g" if number < 1000 * size else ".0f"
            return f"{number / size:{digits}} {unit}"
    return f"{number} B"


@dataclass(frozen=True)
class Part:
    """A sequence, state, carry, non-sequence or output of a loop.

    Attributes
    ----------
    role : {"sequence", "state", "carry", "non-sequence", "output"}
    name : str
        Its name, or its role and number, counted from 0.
    dtype : str
        Its dtype; for what is no tensor, its type.
    shape : tuple of (int or str), or None
        The shape of one row (of the whole for a non-sequence); None for what is no tensor.
    taps : tuple of int
        For a state, which past values a step reads.
    stored : str or None
        What of it outlives a step: "history" (all rows), "last rows", "last value" (a carry),
        "rows" (an output). None for inputs.
    family : str or None
        For a state or carry, the recurrence family it belongs to, "sum over time", or
        "no recurrence". None if it is of no family, or nobody looked for one.
    """

    role: str
    name: str
    dtype: str
    shape: tuple[Size, ...] | None
    taps: tuple[int, ...] = ()
    stored: str | None = None
    family: str | None = None


@dataclass(frozen=True)
class Obstacle:
    """What stands in the way of a faster loop; `part` is the part concerned, if it is one."""

    part: str | None
    reason: str

    def __str__(self) -> str:
        return self.reason if self.part is None else f"{self.part}: {self.reason}"


@dataclass(frozen=True)
class History:
    """A history that is stored: ``T + depth`` rows of `row` bytes."""

    name: str
    depth: int
    row: Bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries."""
        return {"name": self.name, "depth": self.depth, "row": self.row.to_dict()}


@dataclass(frozen=True)
class MemoryUse:
    """The arrays with a time axis that a loop reads and writes.

    Attributes
    ----------
    read, written : Bytes
        Per step: rows of sequences; rows of histories and outputs.
    whole : Bytes
        Arrays that every step sees whole: the non-sequences.
    histories : tuple of History
        The histories that are stored.
    """

    read: Bytes
    written: Bytes
    whole: Bytes
    histories: tuple[History, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries."""
        return {
            "read_per_step": self.read.to_dict(),
            "written_per_step": self.written.to_dict(),
            "whole": self.whole.to_dict(),
            "histories": [history.to_dict() for history in self.histories],
        }


@dataclass(frozen=True)
class LoopExplanation:
    """One loop.

    Attributes
    ----------
    name : str
        Its name, "loop" if it has none.
    op : str
        The kind of node: "Scan", "ElemwiseScan", "LinearScan", "AssociativeScan", or
        "pytensor.scan".
    steps : int or None
        The number of steps, None if it is known at run time only. With `until`, the greatest.
    reverse, until, gradient : bool
        Whether it walks from the last row to the first, may end early, and is the gradient of
        another loop (told by the name that gradients get).
    schedule, why, runs : str
        How the steps are walked, the reason for that, and what runs them.
    threads : int
        How many threads it may use.
    shares : str or None
        What each of several threads does, and from which size on.
    parts : tuple of Part
    obstacles : tuple of Obstacle
        What stands in the way of more.
    memory : MemoryUse or None
        None where scanlib does not know.
    inner : tuple of LoopExplanation
        Loops inside a step, as the body is compiled.
    inside : str or None
        The Op in whose inner graph the loop was found, if it is not a part of the graph itself.
    """

    name: str
    op: str
    steps: int | None
    reverse: bool
    until: bool
    gradient: bool
    schedule: str
    why: str
    runs: str
    parts: tuple[Part, ...]
    obstacles: tuple[Obstacle, ...] = ()
    memory: MemoryUse | None = None
    inner: tuple[LoopExplanation, ...] = ()
    inside: str | None = None
    threads: int = 1
    shares: str | None = None

    def part(self, name: str) -> Part:
        """Return the part of that name.

        Raises
        ------
        KeyError
            If there is none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(f"no part {name!r}; there are {[part.name for part in self.parts]}")

    def to_dict(self) -> dict[str, Any]:
        """Return dictionaries, lists, strings and numbers alone, fit for `json.dumps`."""
        result = {
            name: getattr(self, name)
            for name in (
                *("name", "op", "steps", "reverse", "until", "gradient"),
                *("schedule", "why", "runs", "threads", "shares", "inside"),
            )
        }
        result["parts"] = [_plain(asdict(part)) for part in self.parts]
        result["obstacles"] = [asdict(obstacle) for obstacle in self.obstacles]
        result["memory"] = None if self.memory is None else self.memory.to_dict()
        result["inner"] = [loop.to_dict() for loop in self.inner]
        return result


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    """Return a dictionary with lists for tuples, as JSON has them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in part.items()}


@dataclass(frozen=True)
class AdoptedLoop:
    """A loop of `pytensor.scan`: `reason` says why it was not adopted, None if it was."""

    name: str
    reason: str | None = None
