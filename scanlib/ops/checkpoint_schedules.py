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
    """Segments of given lengths, the outermost first."""

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
        steps, share = _steps(loop), (self.levels - 1) / self.levels
        rest = Levels(self.levels - 1) if self.levels > 2 else None
        # A little less than the root, which may be rounded up from a whole number.
        return _length(steps**share - 1e-6), rest


def _steps(loop: Loop) -> Any:
    """Return the number of steps as a real number, or as a variable where it is not known."""
    known = constant_integer(loop.length())
    return _as_real(loop.length() if known is None else known)


def _as_real(number: Any) -> Any:
    return pt.cast(number, "float64") if isinstance(number, Variable) else float(number)


def _length(steps: Any) -> Variable:
    """Return a number of steps, rounded up, at least one."""
    if isinstance(steps, Variable):
        return pt.cast(pt.maximum(pt.ceil(steps), 1.0), "int64")
    return pt.constant(max(1, ceil(steps)), dtype="int64")


@dataclass(frozen=True)
class Memory(Schedule):
    """Checkpoints that fit into a number of bytes, for `scanlib.scan` and its `checkpoint`.

    The fewest levels that fit, of up to three, are taken: everything is stored if there is room for
    it. Where the number of steps or the sizes of the states are not known when the graph is built,
    the lengths of segments are computed when the function runs.

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
        return _Budget(self.bytes, 2).first(loop)

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


@dataclass(frozen=True)
class _Budget(Schedule):
    """`Memory` of a loop, or of a segment: `levels` more levels may follow.

    Where sizes are known at run time only, a level that is not needed gets segments longer than the
    loop: there are none, and all steps are a tail, which is stored.
    """

    bytes: float
    levels: int

    def first(self, loop: Loop) -> tuple[Variable, Schedule | None]:
        start, step = map(_as_real, _sizes_in_bytes(loop))
        steps = _steps(loop)
        is_known = not any(isinstance(number, Variable) for number in (start, step, steps))
        xp, is_whole = (np if is_known else pt), self.levels == 2
        free = xp.maximum(self.bytes - _WORKING_ROWS * step if is_whole else self.bytes, 1.0)
        stored, two = step * steps, 2.0 * xp.sqrt(start * step * steps)
        three = 3.0 * (start * start * step * steps) ** (1.0 / 3.0)
        enough = xp.minimum(xp.minimum(stored, two), three) <= free
        if is_whole and not is_known:
            message = f"checkpoint=Memory({self.bytes}) is too little for the loop"
            free = CheckAndRaise(ValueError, message)(free, enough)
        elif is_whole and not enough:
            raise ValueError(
                f"{loop_title(loop.name, loop.function)}: checkpoint=Memory({self.bytes}) is too "
                f"little for {steps:.0f} steps that store {step:.0f} bytes each, from starts of "
                f"{start:.0f} bytes; give more bytes"
            )
        # Of three levels, the starts of the first get a third of the bytes.
        several = 3.0 * start * steps / free if is_whole else steps + 1.0
        cut = xp.where(two <= free, 2.0 * start * steps / xp.maximum(two, 1.0), several)
        length = xp.where(stored <= free, steps + 1.0, cut)
        is_enough = is_known and bool(xp.minimum(stored, two) <= free)
        rest = _Budget(self.bytes * 2 / 3, 1) if is_whole and not is_enough else None
        return _length(length), rest


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


_GENERATOR = 256  # of a generator of the default kind


def _bytes(variable: Variable, first: int, least: bool) -> Any:
    """Return the bytes of what lies behind the axes from `first` on."""
    size: Any = np.dtype(variable.type.dtype).itemsize
    for axis in range(first, variable.type.ndim):
        known = variable.type.shape[axis]
        if known is None:
            known = 1 if least else variable.shape[axis]
        size = size * known
    return size
