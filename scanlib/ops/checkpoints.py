"""Schedules: which steps of a loop a gradient starts again from.

A checkpointed loop of `T` steps is cut into segments of `S` steps. The forward pass keeps the
states at the starts of the segments, ``T / S`` of them; the backward pass runs each segment
again, from the last to the first, and stores the steps of that segment alone. A segment may be
cut into segments itself: with `L` levels of equal depth, and lengths ``T^((L-1)/L), …, T^(1/L)``,
some ``L T^(1/L)`` rows are kept at a time and every step runs `L` times forward.

A. Griewank, A. Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26,
2000, gives the schedules that are optimal for a given number of checkpoints; T. Chen et al.,
"Training deep nets with sublinear memory cost", 2016, the square root of two levels. Levels of
equal depth recompute at most a little more than revolve does, and are loops with loops inside,
which a compiler knows how to treat.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.ops.graph import constant_integer, is_numeric, is_tensor

if TYPE_CHECKING:
    from scanlib.ops.loop import Loop


class Schedule(ABC):
    """How a gradient cuts a loop into segments. Hashable: it is part of an Op."""

    @abstractmethod
    def first(self, loop: Loop) -> tuple[Variable, Schedule | None]:
        """Return the length of a loop's segments, and the schedule inside a segment."""


@dataclass(frozen=True)
class Lengths(Schedule):
    """Segments of given lengths, the outermost first.

    Attributes
    ----------
    lengths : tuple of int
    """

    lengths: tuple[int, ...]

    def first(self, loop: Loop) -> tuple[Variable, Schedule | None]:
        rest = self.lengths[1:]
        return _length(self.lengths[0]), Lengths(rest) if rest else None


@dataclass(frozen=True)
class Levels(Schedule):
    """Checkpoints on a number of nested levels, for `scanlib.scan` and its `checkpoint`.

    With `L` levels, about ``L T^(1/L)`` rows of the states are in memory at a time, and every step
    runs `L` times forward: once for its value and ``L - 1`` times for the gradient. One level
    stores everything, as without checkpoints; two are ``"sqrt"``.

    Parameters
    ----------
    levels : int
        At least 1.

    Raises
    ------
    TypeError, ValueError
        If `levels` is no integer, or less than 1.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> h = pt.vector("h")
    >>> trace = scanlib.scan(
    ...     lambda h: pt.tanh(1.5 * h),
    ...     outputs_info=h,
    ...     n_steps=1000,
    ...     checkpoint=scanlib.Levels(3),
    ...     return_updates=False,
    ... )
    >>> gradient = pytensor.function([h], pytensor.grad(trace[-1].sum(), h))
    """

    levels: int

    def __post_init__(self) -> None:
        if not isinstance(self.levels, int) or isinstance(self.levels, bool):
            raise TypeError(f"Levels takes an integer, got {self.levels!r}")
        if self.levels < 1:
            raise ValueError(f"Levels takes a number of levels of at least 1, got {self.levels}")

    def first(self, loop: Loop) -> tuple[Variable, Schedule | None]:
        steps, share = loop.length(), (self.levels - 1) / self.levels
        rest = Levels(self.levels - 1) if self.levels > 2 else None
        known = constant_integer(steps)
        if known is not None:
            return _length(_root(known, share)), rest
        # A little less than the root, which may be rounded up from a whole number.
        root = pt.ceil(pt.cast(steps, "float64") ** share - 1e-6)
        return pt.cast(pt.maximum(root, 1.0), "int64"), rest


def _length(steps: int) -> Variable:
    return pt.constant(steps, dtype="int64")


def _root(steps: int, share: float) -> int:
    return max(1, ceil(steps**share - 1e-6))
