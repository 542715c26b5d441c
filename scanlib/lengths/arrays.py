"""How long arrays are, and which rows of which array a slice of a slice holds.

`Lengths` follows a length through a graph: from an axis of an array to what decides it, as a form
(`scanlib.lengths.forms`). It reads a chain of slices, as PyTensor's scans and the gradients of
these make them, as one `View` of the array at its beginning: ``base[front : len(base) - back]``,
from the first row to the last or `flipped`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Add, Cast, Identity, Neg, ScalarMinimum, Sub
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Join,
    ScalarFromTensor,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import integer_dtypes

from scanlib._compat import INDEX_WRITES, join_of
from scanlib.lengths.forms import LengthForm, Symbol, learn, minimum, number, resolve
from scanlib.lengths.numbers import constant_index, indices_of, measured, steps_of

NONE = number(0)
# The result has the shape of the first input.
SAME = (SpecifyShape, CheckAndRaise, Softmax, LogSoftmax, SortOp, ArgSortOp, *INDEX_WRITES)
ALLOCATIONS = (Alloc, AllocEmpty)


@dataclass(frozen=True)
class View:
    """Rows `front` to ``len(base) - back`` of `base`, the last one first if `flipped`."""

    base: Variable
    front: LengthForm = NONE
    back: LengthForm = NONE
    flipped: bool = False

    @property
    def is_whole(self) -> bool:
        return self.front.is_zero and self.back.is_zero

    def flip(self) -> "View":
        return View(self.base, self.front, self.back, not self.flipped)

    def cut(self, front: LengthForm, back: LengthForm) -> "View":
        """Take rows off both ends of the view, as its reader counts them."""
        if self.flipped:
            front, back = back, front
        return View(self.base, self.front + front, self.back + back, self.flipped)


def slice_of(node: Apply | None) -> slice | None:
    """Return the index of a node that slices the first axis, and does nothing else."""
    if node is None or not isinstance(node.op, Subtensor | IncSubtensor):
        return None
    indices = indices_of(node)
    return indices[0] if len(indices) == 1 and isinstance(indices[0], slice) else None


class Lengths:
    """Lengths and views, remembered while a graph does not change.

    Every array has at least `steps` rows; a loop's sequences are such arrays. Symbols may be known
    to be numbers; `learn_from` finds some. An array is taken to have as many rows as are cut off
    its ends; with `sure`, it must be known to.
    """

    def __init__(
        self,
        steps: LengthForm | None = None,
        known: dict[Symbol, int] | None = None,
        sure: bool = False,
    ) -> None:
        self.steps = steps
        self.known: dict[Symbol, int] = {} if known is None else known
        self.sure = sure
        self._axes: dict[tuple[Variable, int], LengthForm] = {}
        self._integers: dict[Variable, LengthForm] = {}

    # Axes

    def of(self, variable: Variable, axis: int = 0) -> LengthForm:
        """Return the length of an array along an axis."""
        if (variable, axis) not in self._axes:
            found = self._length(variable, axis)
            own = LengthForm.of_axis(variable, axis)
            self._axes[variable, axis] = own if found is None else found
        return resolve(self._axes[variable, axis], self.known)

    def _length(self, variable: Variable, axis: int) -> LengthForm | None:
        static = variable.type.shape[axis]
        if static is not None:
            return number(static)
        node = variable.owner
        if node is None:
            return None
        op = node.op
        if isinstance(op, Subtensor):
            return self._of_part(node, axis)
        if isinstance(op, SAME):
            return self.of(node.inputs[0], axis)
        if isinstance(op, CAReduce | Argmax):
            taken = range(node.inputs[0].type.ndim) if op.axis is None else op.axis
            left = [k for k in range(node.inputs[0].type.ndim) if k not in taken]
            return self.of(node.inputs[0], left[axis])
        if isinstance(op, Dot):
            side = int(axis == variable.type.ndim - 1 and node.inputs[1].type.ndim == 2)
            return self.of(node.inputs[side], node.inputs[side].type.ndim - 1 if side else axis)
        if isinstance(op, ALLOCATIONS):
            return self.integer(sizes_of(node)[axis])
        if isinstance(op, ARange) and op.dtype in integer_dtypes:
            start, stop, step = map(self.integer, node.inputs)
            return self._without(stop, start) if step == number(1) else None
        if isinstance(op, Join):
            along, parts = join_of(node)
            lengths = (self.of(part, axis) for part in (parts if along == axis else parts[:1]))
            return None if along is None else sum(lengths, NONE)
        if isinstance(op, DimShuffle):
            return self.of(node.inputs[0], op.new_order[axis])
        if isinstance(op, Elemwise):
            return self.of(_wide(node, axis)[0], axis)
        return self._of_loop(node, variable, axis)

    def _of_part(self, node: Apply, axis: int) -> LengthForm | None:
        """Return the length of an axis that an index takes all or some items of."""
        source, left = node.inputs[0], -1
        indices = indices_of(node)
        for k in range(source.type.ndim):
            index = indices[k] if k < len(indices) else slice(None)
            left += isinstance(index, slice)
            if left == axis:
                whole = self.of(source, k)
                cut = self.cut(whole, index)
                if cut is None:
                    return self._of_rest(whole, index)
                return whole - cut[0] - cut[1]
        return None

    def _of_rest(self, rows: LengthForm, index: slice) -> LengthForm | None:
        """Return how many rows a slice leaves that cuts off one end, so many rows if there are."""
        start, stop = index.start, index.stop
        place = constant_index(stop if start is None else start)
        if index.step is not None or place is None or None not in (start, stop):
            return None
        if (place < 0) != (start is None):  # it reads those rows
            return None
        return self._without(rows, number(abs(place)))

    def _without(self, rows: LengthForm, cut: LengthForm) -> LengthForm | None:
        """Return how many rows are left without some of them, or all there are."""
        if self._has(rows, cut):
            return rows - cut
        return None if cut.constant is None or cut.number < 0 else rows - minimum([rows, cut])

    def _of_loop(self, node: Apply, variable: Variable, axis: int) -> LengthForm | None:
        """Return the rows of a result of a loop: its steps, and initial rows."""
        steps = steps_of(node)
        if steps is None:
            return None
        position = node.outputs.index(variable)
        rows, like = steps.rows[position], steps.like[position]
        if rows is None or axis:
            return None if like is None or axis >= like.type.ndim else self.of(like, axis)
        if not rows.each_step:
            return number(rows.others)
        if steps.may_stop:  # what its first stacked result has of them
            first = next(i for i, each in enumerate(steps.rows) if each and each.each_step)
            others = steps.rows[first].others  # type: ignore[union-attr]
            return LengthForm.of_axis(node.outputs[first]) - others + rows.others
        if steps.n_steps is not None:
            return self.integer(steps.n_steps) + rows.others
        # All sequences have one length; of one of them it may be known what it is.
        lengths = [self.of(sequence) for sequence in steps.sequences]
        own = map(LengthForm.of_axis, steps.sequences)
        known = (length for length, name in zip(lengths, own, strict=True) if length != name)
        return next(known, lengths[0]) + rows.others

    def agrees(self, variable: Variable, length: LengthForm, axis: int = 0) -> bool:
        """Whether an array is known to be so long.

        What elementwise operations combine has one length, known perhaps as a number for one
        operand and as the length of a loop for another.
        """
        if not axis:
            view = self.view(variable)
            variable, length = view.base, length + view.front + view.back
        if self.of(variable, axis) == length:
            return True
        node = variable.owner
        if node is None:
            return False
        if isinstance(node.op, SAME):
            return self.agrees(node.inputs[0], length, axis)
        if isinstance(node.op, DimShuffle) and node.op.new_order[axis] != "x":
            return self.agrees(node.inputs[0], length, node.op.new_order[axis])
        if isinstance(node.op, Elemwise):
            return any(self.agrees(inp, length, axis) for inp in _wide(node, axis))
        return False

    def of_view(self, view: View) -> LengthForm:
        """Return the number of rows of a view."""
        return self.of(view.base) - view.front - view.back

    def learn_from(self, outputs: list[Variable], visited: set[Apply]) -> None:
        """Remember lengths that follow from the static shapes of operands beside them.

        What elementwise operations combine has one length, and so have the sequences of a loop. The
        type of a buffer knows what PyTensor computed of its length.
        """
        for node in toposort(outputs):
            if node in visited:
                continue
            visited.add(node)
            shape = getattr(node.outputs[0].type, "shape", ())
            length, inputs = (shape[0] if shape else None), list[Variable]()
            steps = steps_of(node)
            if steps is not None:
                inputs, length = steps.sequences, steps.known()
                if steps.n_steps is not None and not steps.may_stop:
                    # Its sequences have as many rows, or the loop raises an error.
                    if length is None:
                        known = (sequence.type.shape[0] for sequence in inputs)
                        length = next((each for each in known if each is not None), None)
                    if length is not None:
                        learn(self.integer(steps.n_steps), length, self.known)
            elif isinstance(node.op, Elemwise):
                inputs = node.inputs if shape else []
            elif isinstance(node.op, ALLOCATIONS) and length is not None:
                learn(self.integer(sizes_of(node)[0]), length, self.known)
            if length is None or length == 1:
                continue
            for inp in inputs:
                if inp.type.shape[0] is None:
                    learn(self.of(inp), length, self.known)

    # Integers of the graph

    def integer(self, variable: Any) -> LengthForm:
        """Return what is known of an integer scalar."""
        if isinstance(variable, int | np.integer):
            return number(int(variable))
        if variable not in self._integers:
            own = LengthForm.of("integer", variable)
            self._integers[variable] = self._read_integer(variable) or own
        return resolve(self._integers[variable], self.known)

    def _read_integer(self, variable: Variable) -> LengthForm | None:
        if isinstance(variable, Constant):
            return number(int(np.asarray(variable.data).item()))
        axis = measured(variable)
        if axis is not None:
            return self.of(*axis)
        if variable.owner is None:
            return None
        op, inputs = variable.owner.op, variable.owner.inputs
        op = getattr(op, "scalar_op", op)
        if isinstance(op, ScalarFromTensor | TensorFromScalar):
            return self.integer(inputs[0])
        if isinstance(op, Cast | Identity):
            return self.integer(inputs[0]) if inputs[0].type.dtype in integer_dtypes else None
        if isinstance(op, ScalarMinimum):
            return minimum(self.integer(inp) for inp in inputs)
        if isinstance(op, Sub):
            return self.integer(inputs[0]) - self.integer(inputs[1])
        if isinstance(op, Neg):
            return -self.integer(inputs[0])
        if isinstance(op, Add):
            return sum((self.integer(inp) for inp in inputs), NONE)
        return None

    # Views

    def view(self, variable: Variable) -> View:
        """Return what a chain of slices reads; the variable itself where that is not known."""
        node = variable.owner
        if node is not None and isinstance(node.op, SpecifyShape):
            return self.view(node.inputs[0])
        index = slice_of(node)
        if index is None or not isinstance(node.op, Subtensor):
            return View(variable)
        inner = self.view(node.inputs[0])
        cut = self.cut(self.of_view(inner), index)
        if cut is None:
            return View(variable)
        front, back, turned = cut
        inner = self._into_part(inner.cut(front, back))
        return inner.flip() if turned else inner

    def cut(self, rows: LengthForm, index: slice) -> tuple[LengthForm, LengthForm, bool] | None:
        """Return how many rows a slice cuts off the front and the back of an array, and whether
        it reads them backwards; None where that is not known."""
        step = 1 if index.step is None else constant_index(index.step)
        if step == -1 and index.stop is None:
            if index.start is None or constant_index(index.start) == -1:
                return number(0), number(0), True
            back = self._behind(rows, self.integer(index.start) + 1)
            return None if back is None else (number(0), back, True)
        if step != 1:
            return None
        front: LengthForm | None = number(0)
        back = number(0)
        if index.start is not None:
            front = self._before(rows, self.integer(index.start))
        if index.stop is not None:
            back = self._behind(rows, self.integer(index.stop))
        if front is None or back is None or not self._has(rows, front + back):
            return None
        return front, back, False

    def _has(self, rows: LengthForm, cut: LengthForm) -> bool:
        """Whether an array is sure to have the rows that are cut off; of one row it is no matter,
        as long as lengths are compared only."""
        is_row = cut.constant in (0, 1)
        return not self.sure or is_row or cut.at_most(rows)

    def _before(self, rows: LengthForm, start: LengthForm) -> LengthForm | None:
        """Return how many rows stand before a start."""
        known = start.constant
        if known is not None and known < 0:
            return rows + known if number(-known).at_most(rows) else None
        return start if self._is_position(start, rows) else None

    def _behind(self, rows: LengthForm, stop: LengthForm) -> LengthForm | None:
        """Return how many rows stand at and behind a stop."""
        known = stop.constant
        if known is not None and known < 0:
            return number(-known)
        if stop == self.steps:
            return rows - stop
        if not self._is_position(stop, rows):
            return None
        if rows.at_most(stop):
            return number(0)
        if stop.at_most(rows):
            return rows - stop
        return rows - minimum([rows, stop])

    def _is_position(self, form: LengthForm, rows: LengthForm) -> bool:
        """Whether a form counts rows from the front of an array, not from its end.

        An integer of the graph is taken to; what is left of a length after taking off a number may
        be negative, unless the length is known to be as great.
        """
        if form.is_length():
            return True
        return (rows - form).is_length() and (form.number >= 0 or self._least(form) >= 0)

    def _least(self, form: LengthForm) -> int:
        """Return the least value that a form may have, as far as minima that are known tell."""
        least = form.number
        for symbol, factor in form.terms:
            if factor < 0:
                return -1
            own = LengthForm.of(*symbol)
            least += factor * max(
                (
                    value
                    for (kind, forms), value in self.known.items()
                    if kind == "minimum" and own in forms
                ),
                default=0,
            )
        return least

    def _into_part(self, view: View) -> View:
        """Look into an array that is joined of parts, if the view reads one of them only."""
        parts = joined_parts(view.base.owner)
        before, total = number(0), self.of(view.base)
        for part in parts:
            rows = self.of(part)
            behind = total - before - rows
            if before.at_most(view.front) and behind.at_most(view.back):
                inner = self.view(part)
                front, back = view.front - before, view.back - behind
                inner = inner.cut(front, back)
                return inner.flip() if view.flipped else inner
            before = before + rows
        return view

    # Back to the graph

    def read(self, view: View) -> Variable:
        """Return a view as a variable: at most one slice, then at most one reversal."""
        front, back = view.front.constant, view.back.constant
        result = view.base
        if not view.is_whole:
            start = None if front == 0 else front if front else view.front.variable()
            if back is not None:
                stop = -back if back else None
            else:
                stop = (view.front + self.of_view(view)).variable()
            result = result[start:stop]
        return result[::-1] if view.flipped else result

    def is_simple(self, view: View) -> bool:
        """Whether a view can be read without arithmetic."""
        return view.front.constant is not None and view.back.constant is not None


def width_of(index: slice) -> int | None:
    """Return how many items a slice between computed places has where the array has them all, None
    if that is not known; it never has more."""
    if index.start is None or index.stop is None or index.step is not None:
        return None
    lengths = Lengths()
    width = (lengths.integer(index.stop) - lengths.integer(index.start)).constant
    return None if width is None or width <= 0 else width


def sizes_of(node: Apply) -> list[Variable]:
    """Return the sizes that an allocation makes."""
    return node.inputs[int(isinstance(node.op, Alloc)) :]


def _wide(node: Apply, axis: int) -> list[Variable]:
    """Return the operands of an elementwise operation that decide how long its results are."""
    wide = [inp for inp in node.inputs if inp.type.shape[axis] != 1]
    return wide or node.inputs[:1]


def joined_parts(node: Apply | None) -> list[Variable]:
    """Return the parts that a node joins along the first axis and does not convert; or nothing."""
    if node is None or not isinstance(node.op, Join):
        return []
    axis, parts = join_of(node)
    converted = any(part.type.dtype != node.outputs[0].type.dtype for part in parts)
    return [] if converted or axis != 0 else parts
