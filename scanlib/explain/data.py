"""What an explanation consists of: dataclasses that hold no graph, and become JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

PARALLEL, FUSED, IN_ORDER = "fully parallel", "one fused pass", "step by step"
NOTHING = "nothing: this is as fast as it gets"


def verdict(grade: str, because: str, action: str = NOTHING) -> dict[str, Any]:
    """Return how good what runs is, why it is no better, and what the author can do."""
    return {"grade": grade, "because": because, "action": action}


@dataclass(frozen=True)
class Part:
    """A sequence, state, non-sequence or output of a loop.

    Attributes
    ----------
    role : {"sequence", "state", "non-sequence", "output"}
    name : str
        Its name, or its role and number, counted from 0.
    dtype : str
        Its dtype; for what is no tensor, its type.
    shape : tuple of (int or None), or None
        The shape of one row (of the whole for a non-sequence), None for a size that is not known
        before the function runs; None for what is no tensor.
    stored : str or None
        What of it outlives a step: "history" (all rows), "last rows", "last value", "rows" (an
        output). None for inputs.
    recurrence : str or None
        For a state, its recurrence class, "sum over time", or "no recurrence". None if it is of
        no class, or the loop is not elementwise.
    taps : tuple of int
        For a state whose values are stored, which past values a step reads.
    """

    role: str
    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    stored: str | None = None
    recurrence: str | None = None
    taps: tuple[int, ...] = ()

    def row_bytes(self) -> int | None:
        """Return the bytes of one row, None if not known; 0 for what is no tensor."""
        if self.shape is None:
            return 0
        sizes = [size for size in self.shape if size is not None]
        known = len(sizes) == len(self.shape)
        return prod(sizes) * np.dtype(self.dtype).itemsize if known else None


@dataclass(frozen=True)
class Obstacle:
    """What stands in the way of a faster loop; `part` is the part concerned, if it is one.

    `action` is what the author of the loop can do about it, if anything.
    """

    part: str | None
    reason: str
    action: str | None = None

    def __str__(self) -> str:
        return self.reason if self.part is None else f"{self.part}: {self.reason}"


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
    work : str
        What a step consists of.
    steps : int or None
        The number of steps, None if it is known at run time only. With `until`, the greatest.
    reverse, until, gradient : bool
        Whether it runs from the last row to the first, may end early, and is the gradient of
        another loop (told by the name that gradients get).
    grade : {"fully parallel", "one fused pass", "step by step"}
    because, action : str
        The reason for the grade; what the author of the loop can do.
    schedule, runs : str
        The order in which steps and rows are computed, and what runs them.
    parts : tuple of Part
    obstacles : tuple of Obstacle
        What stands in the way of more.
    inner : tuple of LoopExplanation
        Loops inside a step, as the body is compiled.
    inside : str or None
        The Op in whose inner graph the loop was found, if it is not a part of the graph itself.
    threads : int
        How many threads it may use.
    shares : str or None
        What each of several threads does, and from which size on.
    step : tuple of str
        What a step computes, as far as it is short: ``next y = (phi * y) + x``.
    seconds, share : float or None
        Time per call and its part of the whole call, if the function was compiled with
        ``profile=True`` and has been called.
    """

    name: str
    op: str
    work: str
    steps: int | None
    reverse: bool
    gradient: bool
    grade: str
    because: str
    action: str
    schedule: str
    runs: str
    parts: tuple[Part, ...]
    obstacles: tuple[Obstacle, ...] = ()
    until: bool = False
    inner: "tuple[LoopExplanation, ...]" = ()
    inside: str | None = None
    threads: int = 1
    shares: str | None = None
    step: tuple[str, ...] = ()
    seconds: float | None = None
    share: float | None = None

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

    def bytes_read(self) -> int | None:
        """Return the bytes of sequences that a step reads; None where sizes are not known."""
        return _total(part for part in self.parts if part.role == "sequence")

    def bytes_written(self) -> int | None:
        """Return the bytes that a step adds to histories and outputs; None if not known."""
        return _total(part for part in self.parts if part.stored in ("history", "rows"))

    def to_dict(self) -> dict[str, Any]:
        """Return dictionaries, sequences, strings and numbers, fit for `json.dumps`."""
        memory = {"bytes_read": self.bytes_read(), "bytes_written": self.bytes_written()}
        return {**asdict(self), **memory}


def _total(parts: Iterable[Part]) -> int | None:
    sizes = [part.row_bytes() for part in parts]
    return None if None in sizes else sum(sizes)  # type: ignore[arg-type]
