"""Arrays that a step reads at the number of the step are sequences of the loop.

A step may count: with a row of ``arange(n)``, or a state that begins with a number and grows by
one. What it reads of an array ``x`` at the count, ``x[t - 1]``, is one row of ``x`` for each step.
Read as a sequence, it takes part in all that is done with rows over time, and its gradient is
written row by row where that of an index adds to a whole array at every step. An array is read so
if it is known to have as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar.basic import Add, Cast, Sub
from pytensor.tensor.basic import ARange, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import integer_dtypes

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.graph import depends_on, row_type
from scanlib.ops.loop import Loop
from scanlib.ops.loop import Sequence as LoopSequence

_WHOLE = slice(None)


@dataclass(frozen=True)
class _Count:
    """A number that grows by one from step to step, or with `backwards` shrinks to `start`."""

    start: int
    backwards: bool = False


def read_counted_rows(loop: Loop) -> None:
    """Turn what steps read of arrays at their own number into sequences of the loop."""
    arrays = {part.inner: (part.outer, part.name) for part in loop.non_sequences}
    nodes = []
    for node in toposort(loop.body_outputs()):
        if isinstance(node.op, Subtensor):
            source = node.inputs[0]
            if isinstance(source, Constant):
                arrays[source] = source, None
            if source in arrays:
                nodes.append(node)
    if not nodes:
        return
    lengths = Lengths(sure=True)
    counts, steps = _counts(loop, lengths)
    varying = depends_on(loop.body_outputs(), [v for v in loop.body_inputs() if v not in arrays])
    rows: dict[tuple[Variable, int, _Count], Variable] = {}
    replaced: dict[Variable, Variable] = {}
    for node in nodes:
        source, name = arrays[node.inputs[0]]
        axis, count, rest = _place(node, counts, varying)
        if count is None:
            continue
        key = source, axis, count
        if key not in rows:
            along = pt.moveaxis(source, axis, 0) if axis else source
            outer = _rows(along, count, lengths.of(source, axis), steps, loop)
            if outer is None:
                continue
            rows[key] = row_type(outer)()
            loop.sequences.append(LoopSequence(outer, rows[key], name))
        whole = all(index == _WHOLE for index in rest)
        replaced[node.outputs[0]] = rows[key] if whole else rows[key][tuple(rest)]
    loop.substitute(replaced)


def _rows(
    array: Variable, count: _Count, length: LengthForm, steps: list[LengthForm], loop: Loop
) -> Variable | None:
    """Return the rows of an array at all counts, None if it may have fewer."""
    gaps = [length - each - count.start for each in steps]
    left = next((gap.constant for gap in gaps if gap.constant is not None), None)
    start = count.start or None
    if count.start < 0 or (left is not None and left < 0):
        return None
    if left is not None:
        rows = array[start : -left or None]
    elif any((each + count.start).at_most(length) for each in steps):
        rows = array[start : loop.length() + count.start]
    else:
        return None
    return rows[::-1] if count.backwards else rows


def _counts(loop: Loop, lengths: Lengths) -> tuple[dict[Variable, _Count], list[LengthForm]]:
    """Return the counts among the inputs of a step, and the forms of the number of steps."""
    counts: dict[Variable, _Count] = {}
    steps = [] if loop.n_steps is None else [lengths.integer(loop.n_steps)]
    for part in loop.sequences:
        view = lengths.view(part.outer)
        steps.append(lengths.of_view(view))
        made = view.base.owner
        if made is None or not isinstance(made.op, ARange):
            continue
        first, last, apart = made.inputs
        start, front = constant_integer(first), view.front.constant
        if start is None or front is None or constant_integer(apart) != 1:
            continue
        counts[part.row] = _Count(start + front, view.flipped)
        if view.is_whole:
            steps.append(lengths.integer(last) - start)
    for state in [] if loop.reverse else loop.recurrent:
        value, first = state.taps.get(-1), state.initial
        while first.owner is not None and _is_conversion(first.owner):
            first = first.owner.inputs[0]
        start = constant_integer(first)
        if state.depth == 1 and start is not None and _plus(state.next, value) == 1:
            counts[value] = _Count(start)
    return counts, steps


def _place(
    node: Apply, counts: dict[Variable, _Count], varying: set[Variable]
) -> tuple[int, _Count | None, Sequence[Any]]:
    """Return the axis along which a node reads one item at a count, the count, and the other
    indices."""
    indices = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    places = [k for k, index in enumerate(indices) if isinstance(index, Variable)]
    places = [k for k in places if indices[k] in varying]
    moving = [inp for inp in node.inputs[1:] if inp in varying]
    if len(places) != 1 or len(moving) != 1:
        return 0, None, ()
    (k,) = places
    if any(index != _WHOLE for index in indices[:k]):
        return 0, None, ()
    for value, count in counts.items():
        offset = _plus(indices[k], value)
        if offset is not None:
            return (
                k,
                _Count(count.start + offset, count.backwards),
                [*indices[:k], *indices[k + 1 :]],
            )
    return 0, None, ()


def _is_conversion(node: Apply) -> bool:
    """Whether a node makes the same integer of another dtype or type."""
    op = getattr(node.op, "scalar_op", node.op)
    if isinstance(op, Cast):
        return node.outputs[0].type.dtype in integer_dtypes
    return isinstance(op, ScalarFromTensor | TensorFromScalar | DimShuffle)


def _plus(variable: Variable, value: Variable) -> int | None:
    """Return which constant integer is added to a value, None if that is not what is done."""
    added = 0
    while variable is not value:
        node = variable.owner
        if node is None:
            return None
        op = getattr(node.op, "scalar_op", node.op)
        variable, *others = node.inputs
        if _is_conversion(node):
            continue
        if not isinstance(op, Add | Sub) or len(others) != 1:
            return None
        number = constant_integer(others[0])
        if number is None and isinstance(op, Add):
            number, variable = constant_integer(variable), others[0]
        if number is None:
            return None
        added += number if isinstance(op, Add) else -number
    return added
