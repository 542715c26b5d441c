"""How many rows arrays have, and which rows of which array a slice of a slice holds.

PyTensor's scans, and the gradients it makes of them, cut, reverse and cut again everything that
enters or leaves a loop. `Rows` reads such a chain of slices as one `View` of the array at its
beginning: ``base[front : len(base) - back]``, from the first row to the last or `flipped`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.scalar.basic import Add, Cast, Identity, Neg, ScalarMinimum, Sub
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    Join,
    ScalarFromTensor,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import join_of
from scanlib.ops.graph import constant_index
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt.adopt_forms import LengthForm, Symbol, minimum, number, resolve

NONE = number(0)


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

    def flip(self) -> View:
        return View(self.base, self.front, self.back, not self.flipped)

    def cut(self, front: LengthForm, back: LengthForm) -> View:
        """Take rows off both ends of the view, as its reader counts them."""
        if self.flipped:
            front, back = back, front
        return View(self.base, self.front + front, self.back + back, self.flipped)


def slice_of(node: Apply | None) -> slice | None:
    """Return the index of a node that slices the first axis, and does nothing else."""
    if node is None or not isinstance(node.op, Subtensor | IncSubtensor):
        return None
    skipped = 1 if isinstance(node.op, Subtensor) else 2
    indices = indices_from_subtensor(node.inputs[skipped:], node.op.idx_list)
    return indices[0] if len(indices) == 1 and isinstance(indices[0], slice) else None


def flipped(variable: Variable) -> Variable:
    """Return the rows in the opposite order; what was flipped already is turned back."""
    node = variable.owner
    index = slice_of(node) if node is not None and isinstance(node.op, Subtensor) else None
    if index is None or index.start is not None or index.stop is not None:
        return variable[::-1]
    return node.inputs[0] if constant_index(index.step) == -1 else variable[::-1]


class Rows:
    """Numbers of rows and views, remembered while a graph does not change.

    Parameters
    ----------
    steps : LengthForm, optional
        What every array has at least as many rows as; a loop's sequences are such arrays.
    known : dict, optional
        Symbols that are known to be numbers; see `adopt_lengths`.
    """

    def __init__(
        self, steps: LengthForm | None = None, known: dict[Symbol, int] | None = None
    ) -> None:
        self.steps = steps
        self.known: dict[Symbol, int] = {} if known is None else known
        self._rows: dict[Variable, LengthForm] = {}
        self._integers: dict[Variable, LengthForm] = {}

    # Numbers of rows

    def of(self, variable: Variable) -> LengthForm:
        """Return the number of rows of an array."""
        if variable not in self._rows:
            self._rows[variable] = self._count(variable)
        return resolve(self._rows[variable], self.known)

    def _count(self, variable: Variable) -> LengthForm:
        static = variable.type.shape[0]
        if static is not None:
            return number(static)
        node = variable.owner
        own = LengthForm.of("rows", variable)
        if node is None:
            return own
        op = node.op
        if isinstance(op, Subtensor):
            view = self.view(variable)
            return own if view.base is variable else self.of_view(view)
        if isinstance(op, IncSubtensor | SpecifyShape):
            return self.of(node.inputs[0])
        if isinstance(op, Alloc | AllocEmpty):
            return self.integer(size_of(node))
        if isinstance(op, Scan):
            return self._of_loop(node, variable)
        if isinstance(op, Join):
            parts = joined_parts(node)
            return sum((self.of(part) for part in parts), number(0)) if parts else own
        if isinstance(op, DimShuffle) and op.new_order and op.new_order[0] == 0:
            return self.of(node.inputs[0])
        if isinstance(op, Elemwise):
            wide = [inp for inp in node.inputs if inp.type.shape[0] != 1]
            return self.of(wide[0]) if wide else number(1)
        return own

    def agrees(self, variable: Variable, rows: LengthForm) -> bool:
        """Whether an array is known to have so many rows.

        What elementwise operations combine has one length, known perhaps as a number for one
        operand and as the length of a loop for another.
        """
        view = self.view(variable)
        wanted = rows + view.front + view.back
        return self._may_be(view.base, wanted)

    def _may_be(self, variable: Variable, rows: LengthForm) -> bool:
        if self.of(variable) == rows:
            return True
        node = variable.owner
        if node is None:
            return False
        if isinstance(node.op, IncSubtensor):
            return self.agrees(node.inputs[0], rows)
        if isinstance(node.op, Elemwise):
            return any(self.agrees(inp, rows) for inp in node.inputs if inp.type.shape[0] != 1)
        return False

    def of_view(self, view: View) -> LengthForm:
        """Return the number of rows of a view."""
        return self.of(view.base) - view.front - view.back

    def _of_loop(self, node: Apply, variable: Variable) -> LengthForm:
        """Return the rows of a result of a canonical loop: its steps, and initial rows."""
        signature = node.op.signature
        position = node.outputs.index(variable)
        depth = 0
        if position < signature.n_states:
            depth = signature.depths[position]
            if signature.untraced[position]:
                return number(depth)
        elif position < signature.n_states + signature.n_carries:
            return LengthForm.of("rows", variable)
        if signature.has_stop:
            return self._steps_that_ran(node) + depth
        inputs = signature.split_inputs(node.inputs)
        if inputs.n_steps is not None:
            return self.integer(inputs.n_steps) + depth
        # All sequences have one length; of one of them it may be known what it is.
        lengths = [self.of(sequence) for sequence in inputs.sequences]
        own = [LengthForm.of("rows", sequence) for sequence in inputs.sequences]
        known = (length for length, name in zip(lengths, own, strict=True) if length != name)
        return next(known, lengths[0]) + depth

    @staticmethod
    def _steps_that_ran(node: Apply) -> LengthForm:
        """Return the steps of a loop with `until`: what its first stacked result has of them."""
        signature = node.op.signature
        outputs = signature.split_outputs(node.outputs)
        if outputs.histories:
            return LengthForm.of("rows", outputs.histories[0]) - signature.depths[0]
        return LengthForm.of("rows", outputs.outputs[0])

    # Integers of the graph

    def integer(self, variable: Any) -> LengthForm:
        """Return what is known of an integer scalar."""
        if isinstance(variable, int | np.integer):
            return number(int(variable))
        if variable not in self._integers:
            self._integers[variable] = self._read_integer(variable)
        return resolve(self._integers[variable], self.known)

    def _read_integer(self, variable: Variable) -> LengthForm:
        own = LengthForm.of("integer", variable)
        if isinstance(variable, Constant):
            return number(int(np.asarray(variable.data).item()))
        node = variable.owner
        if node is None:
            return own
        op = node.op
        if isinstance(op, ScalarFromTensor | TensorFromScalar):
            return self.integer(node.inputs[0])
        if isinstance(op, Shape_i):
            return self.of(node.inputs[0]) if op.i == 0 else own
        if isinstance(op, Subtensor):
            return self._from_shape(node) or own
        if isinstance(op, Elemwise):
            return self._from_arithmetic(op.scalar_op, node.inputs) or own
        return self._from_arithmetic(op, node.inputs) or own

    def _from_shape(self, node: Apply) -> LengthForm | None:
        """Return the meaning of ``shape(x)[0]``."""
        source = node.inputs[0].owner
        if source is None or not isinstance(source.op, Shape):
            return None
        indices = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
        is_first = len(indices) == 1 and not isinstance(indices[0], slice)
        if not is_first or constant_index(indices[0]) != 0:
            return None
        return self.of(source.inputs[0])

    def _from_arithmetic(self, op: Any, inputs: list[Variable]) -> LengthForm | None:
        if isinstance(op, Cast | Identity):
            source = inputs[0].type.dtype
            return self.integer(inputs[0]) if source.startswith(("int", "uint")) else None
        if isinstance(op, ScalarMinimum):
            return minimum(self.integer(inp) for inp in inputs)
        if isinstance(op, Sub):
            return self.integer(inputs[0]) - self.integer(inputs[1])
        if isinstance(op, Neg):
            return -self.integer(inputs[0])
        if isinstance(op, Add):
            total = number(0)
            for inp in inputs:
                total = total + self.integer(inp)
            return total
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
        return None if front is None or back is None else (front, back, False)

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


def size_of(node: Apply) -> Variable:
    """Return the number of rows that an allocation makes."""
    return node.inputs[0 if isinstance(node.op, AllocEmpty) else 1]


def joined_parts(node: Apply | None) -> list[Variable]:
    """Return the parts that a node joins along the first axis and does not convert; or nothing."""
    if node is None or not isinstance(node.op, Join):
        return []
    axis, parts = join_of(node)
    converted = any(part.type.dtype != node.outputs[0].type.dtype for part in parts)
    return [] if converted or axis != 0 else parts


def stack(rows: list[Variable]) -> Variable:
    """Return single rows as an array."""
    lifted = [pt.expand_dims(row, 0) for row in rows]
    return lifted[0] if len(lifted) == 1 else pt.join(0, *lifted)
