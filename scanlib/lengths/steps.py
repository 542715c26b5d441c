"""What loops say of lengths: how many steps they take, and how many rows their results have.

An Op that is a loop has a method ``steps_of(node)`` that returns `Steps`. That is all that is known
here of loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytensor.graph.basic import Apply, Variable

from scanlib.lengths.numbers import constant_integer


class Rows(NamedTuple):
    """The rows of a result: so many, and one more for each step if `each_step`."""

    others: int
    each_step: bool


@dataclass(frozen=True)
class Steps:
    """What a loop says of lengths.

    `n_steps` is the number of steps, the greatest one of a loop that may stop; None if the
    sequences tell, which have one row for each step. `rows` has, for each result, those of its axis
    of time if it has one, and `like` an array that has the same axes, but for time, or None.
    """

    n_steps: Variable | None
    sequences: list[Variable]
    rows: Sequence[Rows | None]
    like: Sequence[Variable | None]
    may_stop: bool = False

    def known(self) -> int | None:
        """Return the number of steps where it is known when the graph is built.

        Where a number of steps is given, sequences do not tell: they may have another length,
        which is an error when the loop runs.
        """
        if self.may_stop:
            return None
        if self.n_steps is not None:
            return constant_integer(self.n_steps)
        lengths = (sequence.type.shape[0] for sequence in self.sequences)
        return next((length for length in lengths if length is not None), None)


def steps_of(node: Apply) -> Steps | None:
    """Return what a node says of lengths if it is a loop."""
    method = getattr(node.op, "steps_of", None)
    return None if method is None else method(node)
