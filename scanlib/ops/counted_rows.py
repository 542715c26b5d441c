"""Arrays that a step reads at the number of the step are sequences of the loop.

A step may count: with a row of ``arange(n)``, or a state that begins with a number and grows by
one. What it reads of an array ``x`` at the count, ``x[t - 1]``, is one row of ``x`` for each step.
Read as a sequence, it takes part in all that is done with rows over time, and its gradient is
written row by row where that of an index adds to a whole array at every step. An array is read so
if it is known to have as many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import ARange
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.type import integer_dtypes

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm
from scanlib.lengths.numbers import constant_integer, indices_of
from scanlib.ops.graph import depends_on, is_tensor, lifted_row, row_type
from scanlib.ops.loop import Loop, Sequence

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


def _rows(
    array: Variable, count: _Count, length: LengthForm, steps: list[LengthForm], loop: Loop
) -> Variable | None:
    """Return the rows of an array at all counts, None if it may have fewer."""
    ends = [each + count.start for each in steps]
    if count.start < 0 or not any(end.at_most(length) for end in ends):
        return None
    left = [gap for end in ends if (gap := (length - end).constant) is not None]
    stop = -left[0] or None if left else loop.length() + count.start
    rows = array[count.start or None : stop]
    return rows[::-1] if count.backwards else rows


def _counts(loop: Loop, lengths: Lengths) -> tuple[dict[Variable, _Count], list[LengthForm]]:
    """Return the counts among the inputs of a step, and forms of the number of steps; one may be
    negative where there are none."""
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
        value, row = state.taps.get(-1), lifted_row(state.initial)
        if state.depth != 1 or value is None or not _is_integer(value):
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


def _is_integer(variable: Variable) -> bool:
    return is_tensor(variable) and not variable.type.ndim and variable.dtype in integer_dtypes


def _difference(variable: Variable, value: Variable, lengths: Lengths) -> int | None:
    """Return which constant is added to an integer, None if that is not what is done."""
    return (lengths.integer(variable) - lengths.integer(value)).constant
