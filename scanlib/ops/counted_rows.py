"""Arrays that a step reads at the number of the step are sequences of the loop.

A step may count: with a row of ``arange(n)``, or a state that begins with a number and grows by
one. What it reads of an array ``x`` at the count, ``x[t - 1]``, is one row of ``x`` for each step.
Read as a sequence, it takes part in all that is done with rows over time, and its gradient is
written row by row where that of an index adds to a whole array at every step. An array is read so
if it is known to have as many rows.

A slice at the count, ``x[t - 3 : t]``, has three items only where the array does not end before.
If it is known not to, the slice becomes these items; one of many gets its shape specified. So do
slices that are written.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm
from scanlib.lengths.numbers import constant_integer, indices_of, is_range
from scanlib.ops.graph import (
    before_writes,
    depends_on,
    is_integer,
    lifted_row,
    row_type,
    substitute,
)
from scanlib.ops.loop import Loop, Sequence
from scanlib.ops.scan import Scan

_WHOLE = slice(None)
MOST_ITEMS = 4  # of a slice that are read or written one by one


def counts_by(node: Apply, rows: Variable) -> bool:
    """Whether a loop counts by a range, which stays beside it: around the loop may be others, at
    whose steps the range has other lengths."""
    if not isinstance(node.op, Scan) or rows.owner is None or not is_range(rows):
        return False
    return not all(isinstance(number, Constant) for number in rows.owner.inputs)


@dataclass(frozen=True)
class _Count:
    """A number that grows by one from step to step, or with `backwards` shrinks to `start`."""

    start: int
    backwards: bool = False


@dataclass(frozen=True)
class _Steps:
    """Forms of the number of steps, and forms of what it is at most."""

    exact: list[LengthForm]
    most: list[LengthForm] = field(default_factory=list)

    def end_before(self, place: int, length: LengthForm) -> bool:
        """Whether the last step, the first one being at a place, is sure to be below a length."""
        return any((steps + place).at_most(length) for steps in (*self.exact, *self.most))


def read_counted_rows(loop: Loop) -> None:
    """Turn what steps read of arrays at their own number into sequences of the loop."""
    nodes = list(toposort(loop.body_outputs()))
    if not any(isinstance(node.op, Subtensor | IncSubtensor) for node in nodes):
        return
    lengths = Lengths(sure=True)
    counts, steps = _counts(loop, lengths)
    if not counts:
        return
    windows = _Windows(loop.sources(), lengths, counts, steps)
    found: dict[Variable, Variable] = {}
    for node in nodes:
        made = windows.by_items(node)
        if made is not None:
            found[node.outputs[0]] = substitute([made], found)[0]
    loop.substitute(found)
    arrays = {part.inner: (part.outer, part.name) for part in loop.non_sequences}
    nodes = [n for n in toposort(loop.body_outputs()) if isinstance(n.op, Subtensor)]
    sources = [node.inputs[0] for node in nodes]
    arrays |= {source: (source, None) for source in sources if isinstance(source, Constant)}
    varying = depends_on(loop.body_outputs(), [v for v in loop.body_inputs() if v not in arrays])
    rows: dict[tuple[Variable, int, _Count], Variable] = {}
    replaced: dict[Variable, Variable] = {}
    for node, inner in zip(nodes, sources, strict=True):
        if inner not in arrays:
            continue
        source, name = arrays[inner]
        read = _read_at_count(node, counts, varying, lengths)
        if read is None:
            continue
        axis, count, rest = read
        key = source, axis, count
        if key not in rows:
            along = pt.moveaxis(source, axis, 0) if axis else source
            outer = _rows(along, count, lengths.of(source, axis), steps, loop)
            if outer is None:
                continue
            rows[key] = row_type(outer)()
            loop.sequences.append(Sequence(outer, rows[key], name))
        whole = all(index == _WHOLE for index in rest)
        replaced[node.outputs[0]] = rows[key] if whole else rows[key][tuple(rest)]
    loop.substitute(replaced)


@dataclass(frozen=True)
class _Windows:
    """Slices of constant length at the count of a step, of arrays known not to end before."""

    sources: dict[Variable, tuple[Variable, int]]
    lengths: Lengths
    counts: dict[Variable, _Count]
    steps: _Steps

    def by_items(self, node: Apply) -> Variable | None:
        """Return the result of a node that reads or writes at such a slice, without one; None if it
        does not."""
        if not isinstance(node.op, Subtensor | IncSubtensor):
            return None
        array, indices = node.inputs[0], indices_of(node)
        for axis, index in enumerate(indices):
            if not isinstance(index, slice) or index.start is None or index.stop is None:
                continue
            apart = 1 if index.step is None else constant_integer(index.step)
            if not apart:
                continue
            places = self._places(array, axis, index, apart)
            if places:
                at = _Items(indices[:axis], places, apart, indices[axis + 1 :])
                return at.read(array) if isinstance(node.op, Subtensor) else at.write(node)
        return None

    def _places(self, array: Variable, axis: int, index: slice, apart: int) -> list[Variable]:
        """Return the indices of a slice; none where they are not known to be of the array."""
        width = _difference(index.stop, index.start, self.lengths)
        if width is None or width * apart <= 0:
            return []
        base = before_writes(array)
        source, lead = self.sources.get(base, (base, 0))
        length = self.lengths.of(source, axis + lead)
        for value, count in self.counts.items():
            offset = _difference(index.start, value, self.lengths)
            if offset is None or count.start + offset + min(width, 0) < 0:
                continue
            if self.steps.end_before(count.start + offset + max(width, 1) - 1, length):
                return [value + (offset + k) for k in range(0, width, apart)]
        return []


@dataclass(frozen=True)
class _Items:
    """Items of an array at some `places` along an axis, `apart` from each other, at the same
    indices of the axes `before` and `behind`."""

    before: list[Any]
    places: list[Variable]
    apart: int
    behind: list[Any]

    def read(self, array: Variable) -> Variable:
        axis = sum(isinstance(index, slice) for index in self.before)
        if len(self.places) <= MOST_ITEMS:
            return pt.stack([array[self._at(place)] for place in self.places], axis=axis)
        first, last = self.places[0], self.places[-1]
        if self.apart < 0:
            first, last = last, first
        part = array[self._at(slice(first, last + 1))]
        sizes: list[int | None] = [None] * part.type.ndim
        sizes[axis] = (len(self.places) - 1) * abs(self.apart) + 1
        part = pt.specify_shape(part, sizes)
        if self.apart == 1:
            return part
        return part[(*[_WHOLE] * axis, slice(None, None, self.apart))]

    def write(self, node: Apply) -> Variable | None:
        array, value = node.inputs[:2]
        places, values = self.places, self._values(value, array.type.ndim)
        if values is None or len(places) > MOST_ITEMS:
            if any(index != _WHOLE for index in (*self.before, *self.behind)):
                return None
            places, values = [places[0] + self.apart * np.arange(len(places))], [value]
        for place, item in zip(places, values, strict=True):
            part = array[self._at(place)]
            array = part.set(item) if node.op.set_instead_of_inc else part.inc(item)
        return array

    def _at(self, place: Any) -> tuple[Any, ...]:
        return (*self.before, place, *self.behind)

    def _values(self, value: Variable, rank: int) -> list[Variable] | None:
        """Return what is written at each place; None if it is not known how it is broadcast."""
        numbers = sum(not isinstance(index, slice) for index in self.behind)
        axis = value.type.ndim - (rank - len(self.before) - numbers)
        if axis < 0:
            return [value] * len(self.places)
        size = value.type.shape[axis]
        if size not in (1, len(self.places)):
            return None
        whole = (_WHOLE,) * axis
        return [value[(*whole, k if size > 1 else 0)] for k in range(len(self.places))]


def _rows(
    array: Variable, count: _Count, length: LengthForm, steps: _Steps, loop: Loop
) -> Variable | None:
    """Return the rows of an array at all counts, None if it may have fewer."""
    if count.start < 0 or not steps.end_before(count.start, length):
        return None
    ends = [each + count.start for each in steps.exact]
    left = [gap for end in ends if (gap := (length - end).constant) is not None]
    stop = -left[0] or None if left else loop.length() + count.start
    rows = array[count.start or None : stop]
    return rows[::-1] if count.backwards else rows


def _counts(loop: Loop, lengths: Lengths) -> tuple[dict[Variable, _Count], _Steps]:
    """Return the counts among the inputs of a step, and forms of the number of steps; one may be
    negative where there are none."""
    counts: dict[Variable, _Count] = {}
    steps = _Steps([] if loop.n_steps is None else [lengths.integer(loop.n_steps)])
    for part in loop.sequences:
        view = lengths.view(part.outer)
        steps.exact.append(lengths.of_view(view))
        base, front = view.base, view.front.constant
        if not is_range(base) or front is None:
            continue
        if isinstance(base, Constant):
            counts[part.row] = _Count(int(base.data[0]) + front, view.flipped)
            continue
        first, last, _ = base.owner.inputs
        start = constant_integer(first)
        if start is not None:
            counts[part.row] = _Count(start + front, view.flipped)
            most = lengths.integer(last) - start - front
            (steps.exact if view.is_whole else steps.most).append(most)
    for state in [] if loop.reverse else loop.recurrent:
        value, row = state.taps.get(-1), lifted_row(state.initial)
        if state.depth != 1 or value is None or not is_integer(value) or value.type.ndim:
            continue
        start = lengths.integer(state.initial if row is None else row).constant
        if start is not None and _difference(state.next, value, lengths) == 1:
            counts[value] = _Count(start)
    return counts, steps


def _read_at_count(
    node: Apply, counts: dict[Variable, _Count], varying: set[Variable], lengths: Lengths
) -> tuple[int, _Count, list[Any]] | None:
    """Return the axis along which a node reads one item of an array at a count, the count, and the
    other indices, the same at every step; None where it does not."""
    indices = indices_of(node)
    axis = next((k for k, index in enumerate(indices) if index != _WHOLE), None)
    if axis is None or [inp for inp in node.inputs[1:] if inp in varying] != [indices[axis]]:
        return None
    for value, count in counts.items():
        offset = _difference(indices[axis], value, lengths)
        if offset is not None:
            at = _Count(count.start + offset, count.backwards)
            return axis, at, [*indices[:axis], *indices[axis + 1 :]]
    return None


def _difference(variable: Variable, value: Variable, lengths: Lengths) -> int | None:
    """Return which constant is added to an integer, None if that is not what is done."""
    return (lengths.integer(variable) - lengths.integer(value)).constant
