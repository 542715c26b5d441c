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
from typing import TYPE_CHECKING, Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.raise_op import CheckAndRaise

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.graph import is_differentiable, is_tensor
from scanlib.ops.messages import loop_title

if TYPE_CHECKING:
    from scanlib.ops.loop import Loop


class Schedule(ABC):
    """How a gradient cuts a loop into segments. Hashable: it is part of an Op."""

    @abstractmethod
    def first(self, loop: Loop) -> tuple[Variable, Schedule | None]:
        """Return the length of a loop's segments, and the schedule inside a segment."""

    def check(self, loop: Loop) -> None:
        """Raise a `ValueError` if no gradient of the loop can follow this schedule."""
        return


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


@dataclass(frozen=True)
class Memory(Schedule):
    """Checkpoints that fit into a number of bytes, for `scanlib.scan` and its `checkpoint`.

    The fewest levels that fit are taken: everything is stored if there is room for it. Where the
    number of steps and the sizes of the states are known when the graph is built, there are as
    many levels as it takes; else there are three, and their lengths are computed when the
    function runs.

    Parameters
    ----------
    bytes : int
        The memory for states and for what a gradient stores of a segment. What the user
        gets (results, gradients) and what the user gives are not part of it.

    Raises
    ------
    TypeError, ValueError
        If `bytes` is no positive integer. `scanlib.scan` raises `ValueError` if the bytes are
        sure to be too few, and a gradient where that shows when it runs.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> h = pt.vector("h")
    >>> trace = scanlib.scan(
    ...     lambda h: pt.tanh(1.5 * h),
    ...     outputs_info=h,
    ...     n_steps=1000,
    ...     checkpoint=scanlib.Memory(2**20),
    ...     return_updates=False,
    ... )
    >>> gradient = pytensor.function([h], pytensor.grad(trace[-1].sum(), h))
    """

    bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.bytes, int) or isinstance(self.bytes, bool):
            raise TypeError(f"Memory takes a number of bytes, got {self.bytes!r}")
        if self.bytes < 1:
            raise ValueError(f"Memory takes a positive number of bytes, got {self.bytes}")

    def first(self, loop: Loop) -> tuple[Variable, Schedule | None]:
        start, step = _sizes_in_bytes(loop)
        steps = constant_integer(loop.length())
        if isinstance(start, Variable) or isinstance(step, Variable) or steps is None:
            return _Budget(float(self.bytes), 2).first(loop)
        free = self.bytes - _WORKING_ROWS * step
        if step * steps <= free:
            return _length(steps + 1), None
        lengths = _balanced(float(start), float(step), steps, free)
        if lengths is None:
            raise ValueError(
                f"{loop_title(loop.name, loop.function)}: checkpoint=Memory({self.bytes}) is too "
                f"little for {steps} steps that store {step} bytes each, from starts of {start} "
                "bytes; give more bytes"
            )
        return _length(lengths[0]), Lengths(lengths[1:]) if lengths[1:] else None

    def check(self, loop: Loop) -> None:
        steps = constant_integer(loop.length())
        if steps is not None and not any(isinstance(x, Variable) for x in _sizes_in_bytes(loop)):
            self.first(loop)
            return
        start, step = _sizes_in_bytes(loop, least=True)
        if start and self.bytes <= _WORKING_ROWS * step:
            raise ValueError(
                f"{loop_title(loop.name, loop.function)}: checkpoint=Memory({self.bytes}) is too "
                f"little: a gradient holds {_WORKING_ROWS} steps of at least {step} bytes each; "
                "give more bytes"
            )


# What a step and the gradient of a step hold besides what is stored.
_WORKING_ROWS = 6
_MOST_LEVELS = 8


def _balanced(start: float, step: float, steps: int, free: float) -> tuple[int, ...] | None:
    """Return the lengths of the fewest levels that fit, each of which takes as many bytes."""
    for levels in range(2, _MOST_LEVELS + 1):
        share = (start ** (levels - 1) * step * steps) ** (1 / levels)
        if levels * share > free:
            continue
        lengths, left = [], float(steps)
        for _ in range(levels - 1):
            left = left * start / share
            lengths.append(max(1, ceil(left)))
        return tuple(lengths)
    return None


@dataclass(frozen=True)
class _Budget(Schedule):
    """`Memory` where sizes are known at run time only: `levels` more levels may follow.

    A level that is not needed gets segments longer than the loop: there are none, and all steps
    are a tail, which is stored.
    """

    bytes: float
    levels: int

    def first(self, loop: Loop) -> tuple[Variable, Schedule | None]:
        start, step = (_as_float(size) for size in _sizes_in_bytes(loop))
        steps = _as_float(loop.length())
        free = pt.maximum(self.bytes - (_WORKING_ROWS * step if self.levels == 2 else 0.0), 1.0)
        # What an inner level gets; a third goes to the starts of this one.
        inner = self.bytes * 2 / 3 if self.levels == 2 else self.bytes
        two = pt.sqrt(start * step * steps)
        if self.levels == 2:
            three = (start * start * step * steps) ** (1.0 / 3.0)
            message = f"checkpoint=Memory({self.bytes:.0f}) is too little for the loop"
            free = CheckAndRaise(ValueError, message)(free, pt.le(3.0 * three, free))
            several = 3.0 * start * steps / free
        else:
            several = steps + 1.0
        cut = pt.switch(pt.le(2.0 * two, free), start * steps / pt.maximum(two, 1.0), several)
        length = pt.switch(pt.le(step * steps, inner), steps + 1.0, pt.maximum(pt.ceil(cut), 1.0))
        rest = _Budget(inner, self.levels - 1) if self.levels > 1 else None
        return pt.cast(length, "int64"), rest


def _as_float(size: Any) -> Variable:
    return pt.cast(pt.as_tensor_variable(size), "float64")


def _sizes_in_bytes(loop: Loop, least: bool = False) -> tuple[Any, Any]:
    """Return the bytes of one start of a segment and of one stored step, as numbers if known.

    A stored step holds a row of every state and output, and the cotangent of a row of
    every sequence that has one. With `least`, sizes that are not known count as 1.
    """
    start: Any = 0
    step: Any = 0
    for state in loop.states:
        row = _bytes(state.initial, 1, least)
        start, step = start + state.depth * row, step + row
    for carry in loop.carries:
        row = _bytes(carry.initial, 0, least) if is_tensor(carry.value) else _GENERATOR
        start, step = start + row, step + row
    for sequence in loop.sequences:
        if is_differentiable(sequence.row):
            step = step + _bytes(sequence.outer, 1, least)
    for output in loop.outputs:
        known = output.value.type.shape
        if None not in known:
            step = step + prod(known) * np.dtype(output.value.type.dtype).itemsize
    return start, max(step, 1) if isinstance(step, int) else step


_GENERATOR = 64  # of a generator of the default kind


def _bytes(variable: Variable, first: int, least: bool) -> Any:
    """Return the bytes of what lies behind the axes from `first` on."""
    size: Any = np.dtype(variable.type.dtype).itemsize
    for axis in range(first, variable.type.ndim):
        known = variable.type.shape[axis]
        if known is None:
            known = 1 if least else variable.shape[axis]
        size = size * known
    return size
