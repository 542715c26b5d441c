"""Basic indices of arrays in generated code: where a part of an array is, and how large.

Indices are checked, and counted from the end where they are negative, before the loop if they are
the same for all steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pytensor.graph.basic import Constant, Variable

from scanlib.backends.numba.array_loops import ArrayLoops
from scanlib.backends.numba.places import Place


def is_simple(index: slice | Variable | int) -> bool:
    """Whether an index is a number, or a slice without a step or that flips an axis."""
    if not isinstance(index, slice):
        return True
    step = index.step
    if step is None:
        return True
    if not isinstance(step, Constant | int):
        return False
    number = integer_of(step)
    return number == 1 or (number == -1 and index.start is None and index.stop is None)


def integer_of(index: Constant | Variable | int) -> int:
    """Return the value of an index that is known."""
    return int(np.asarray(index.data)) if isinstance(index, Constant) else int(index)


class ArrayIndices(ArrayLoops):
    """Writes what finds the part of an array that basic indices select."""

    def indexed(self, place: Place, indices: tuple | list) -> Place:
        """Return the part of an array that basic indices select."""
        sizes, strides, moves = [], [], []
        for axis, size in enumerate(map(self.sizes.same, place.sizes)):
            stride = place.strides[axis]
            index = indices[axis] if axis < len(indices) else slice(None)
            if isinstance(index, slice):
                first, count, step = self._span(index, size)
                sizes.append(count)
                strides.append(stride if step == 1 else self.sizes.define(f"-{stride}", stride))
            else:
                first = self._checked_index(index, size)
            if first != "0":
                moves.append((first, stride))
        part = replace(place, sizes=tuple(sizes), strides=tuple(strides))
        if not moves:
            return part
        start = self.source.name("p")
        moved = f"{start} = shift({place.start}, {' + '.join(f'{k} * {n}' for k, n in moves)})"
        known = place.fixed and self.sizes.is_static(*(name for move in moves for name in move))
        (self.source.before_loop if known else self.source.line)(moved)
        return replace(part, start=start, fixed=known)

    def _checked_index(self, index: Variable | int, size: str) -> str:
        if isinstance(index, int | Constant):
            number = integer_of(index)
            known = self.sizes.is_static(size)
            if not size.isdigit() or not -int(size) <= number < int(size):
                condition = f"{size} <= {number if number >= 0 else -number - 1}"
                raising = "raise IndexError('index out of bounds')"
                if known:
                    self.source.check_before_loop(condition, raising)
                else:
                    self.source.line(f"if {condition}: {raising}")
            return str(number) if number >= 0 else self.sizes.define(f"{size} - {-number}", size)
        name = self.source.name("i")
        self.source.line(f"{name} = np.int64({self.scalar(index)})")
        self.source.line(f"{name} = {name} + {size} if {name} < 0 else {name}")
        with self.source.block(f"if {name} < 0 or {name} >= {size}:"):
            self.source.line("raise IndexError('index out of bounds')")
        return name

    def _span(self, index: slice, size: str) -> tuple[str, str, int]:
        """Return the first index of a slice, how many there are, and the step."""
        if index.step is not None and integer_of(index.step) == -1:
            return self.sizes.define(f"{size} - 1", size), size, -1
        start = "0" if index.start is None else self._bound(index.start, size)
        stop = size if index.stop is None else self._bound(index.stop, size)
        if start == "0":
            return start, stop, 1
        if start.isdigit() and stop.isdigit():
            return start, str(max(int(stop) - int(start), 0)), 1
        return start, self.sizes.define(f"max({stop} - {start}, 0)", start, stop), 1

    def _bound(self, bound: Variable | int, size: str) -> str:
        if isinstance(bound, int | Constant):
            number = integer_of(bound)
            if size.isdigit():
                return str(slice(number, None).indices(int(size))[0])
            if number >= 0:
                return "0" if number == 0 else self.sizes.define(f"min({number}, {size})", size)
            return self.sizes.define(f"max({size} - {-number}, 0)", size)
        name = self.source.name("i")
        self.source.line(f"{name} = np.int64({self.scalar(bound)})")
        self.source.line(f"{name} = {name} + {size} if {name} < 0 else {name}")
        self.source.line(f"{name} = min(max({name}, 0), {size})")
        return name
