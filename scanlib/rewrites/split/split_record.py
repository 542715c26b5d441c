"""What splitting did to the loops of a graph, kept with the graph for `scanlib.explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytensor.graph.features import Feature
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import features


@dataclass(frozen=True)
class SplitNote:
    """What left one loop.

    Attributes
    ----------
    loop : str
        The loop's name, "loop" if it has none.
    before, after : int
        Values evaluated for all steps before the loop, and outputs evaluated after it.
    sums : int
        Accumulators that became sums over rows or matrix products.
    stored : int
        Values that the loop stores for what comes after it.
    loops : int
        Loops it was divided into; 1 if one remains, 0 if none does.
    """

    loop: str
    before: int = 0
    after: int = 0
    sums: int = 0
    stored: int = 0
    loops: int = 1

    def __str__(self) -> str:
        if self.loops > 1:
            return f"{self.loops} loops, of which one can be lowered to a kernel at least"
        said = []
        if self.before:
            said.append(f"{_count(self.before, 'value')} computed for all steps before the loop")
        if self.after:
            where = " after the loop" if self.loops else ""
            said.append(f"{_count(self.after, 'output')} computed for all steps{where}")
        if self.sums:
            said.append(f"{_count(self.sums, 'sum')} taken over all steps at once")
        if self.stored:
            said.append(f"{_count(self.stored, 'value')} stored for that")
        if not self.loops:
            said.append("no loop remains")
        return "; ".join(said)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class SplitRecord(Feature):
    """The notes of a graph, in the order in which loops were taken apart.

    `whole` are loops, each with its inputs, that are known to stay one loop.
    """

    def __init__(self) -> None:
        self.notes: list[SplitNote] = []
        self.whole: set[tuple[Any, ...]] = set()


def record(fgraph: FunctionGraph, note: SplitNote) -> None:
    """Add a note to a graph."""
    record_of(fgraph).notes.append(note)


def notes_of(fgraph: FunctionGraph) -> list[SplitNote]:
    """Return what splitting did to the loops of a graph."""
    return [note for record in features(fgraph, SplitRecord) for note in record.notes]


def record_of(fgraph: FunctionGraph) -> SplitRecord:
    """Return the record of a graph, which has one from then on."""
    found = next(iter(features(fgraph, SplitRecord)), None)
    if found is None:
        found = SplitRecord()
        fgraph.attach_feature(found)
    return found
