"""What PyTensor's scans are given in buffers: initial rows, cotangents put into zeros, windows.

A buffer has a row for every step, and the rows before the first step at its beginning. PyTensor
allocates it without values and sets the initial rows; the cotangent of a buffer is an array of
zeros into which the cotangents of what was read are added. Here both are read back, so that a
loop is given the rows themselves.

A mit-mot is a window that slides over its buffer. At step `t` it reads rows ``t + k`` of it, for
taps `k` from 0 to `K`, and writes some of them again. Row ``t + K`` is met for the first time at
step `t`, and row `t` for the last time. So the rows of the buffer enter as a sequence, the `K` rows
in between are carried, and the rows that leave are an output::

    v_j = c_j  (j < K),   v_K = x_t          the window
    w   = v with the rows written that the step writes
    c_j ← w_{j+1},        z_t = w_0

A gradient only adds to most rows of its window, ``w_j = v_j + f_j``. What the buffer holds there
need not be known until the row is read at a smaller tap, so it enters there: at tap 0 for the
gradients of all loops users write. Then the sequence is the cotangent of the trace itself, and
what is carried starts as zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import Alloc, AllocEmpty
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import TensorType

from scanlib.lengths.arrays import Lengths, slice_of
from scanlib.lengths.forms import LengthForm, number
from scanlib.lengths.numbers import constant_index, indices_of
from scanlib.ops.gradient.cotangents import is_zeros, terms_of
from scanlib.ops.graph import conform, lifted_row
from scanlib.ops.loop import Carry, Loop, Output, Part, Sequence
from scanlib.rewrites.simplify.last_rows import last_row_reads


def initial_rows(buffer: Variable, depth: int, steps: LengthForm, rows: Lengths) -> Variable | None:
    """Return the first `depth` rows of a buffer, None if other than `steps` rows may follow."""
    if buffer.owner is not None and isinstance(buffer.owner.op, SpecifyShape):
        array, rows_given, *_ = buffer.owner.inputs
        if not isinstance(rows_given.type, TensorType):  # as for sizes that batches have lost
            buffer = array
    fits = rows.agrees(buffer, steps + depth)
    node, index = buffer.owner, slice_of(buffer.owner)
    if node is not None and isinstance(node.op, IncSubtensor) and node.op.set_instead_of_inc:
        base, value = node.inputs[:2]
        is_head = index is not None and index.start is None and index.step is None
        if index is not None and is_head and index.stop is not None:
            stop = rows.integer(index.stop)
            given = rows.of(value) if value.type.ndim else number(1)
            empty = base.owner is not None and isinstance(base.owner.op, AllocEmpty)
            # ``initial[:depth]`` may have fewer rows than that, which is an error of the loop.
            # Memory without values is made for nothing but initial rows, and room for all steps.
            whole = value.type.ndim == buffer.type.ndim and value.type.shape[0] in (None, depth)
            if whole and (stop == given or empty):
                more = rows.of(buffer) - steps
                if fits or more == stop or (_is_opaque(more) and _is_opaque(stop)):
                    return value
    if fits and node is not None and isinstance(node.op, Alloc):  # whose length may be unknown
        value, _, *sizes = node.inputs
        if value.type.ndim < buffer.type.ndim or value.type.shape[0] == 1:
            return pt.alloc(value, depth, *sizes)
    return buffer[:depth] if fits else None


def _is_opaque(form: LengthForm) -> bool:
    """Whether a form is an integer that enters from outside: that of a loop around this one,
    whose step does not show how it was computed."""
    symbols = [symbol for symbol, _ in form.terms]
    return (
        len(symbols) == 1
        and form == LengthForm.of(*symbols[0])
        and symbols[0][0] == "integer"
        and symbols[0][1].owner is None
    )


def only_row(rows: Variable, buffer: Variable) -> Variable:
    """Return the row that was made into a buffer's only initial row."""
    row, node = lifted_row(rows), buffer.owner
    if row is None and node is not None and isinstance(node.op, Alloc):  # zeros are seen so
        value, _, *sizes = node.inputs
        if value.type.ndim < buffer.type.ndim:
            return pt.alloc(value, *sizes) if sizes else value
    return buffer[0] if row is None else row


def is_shared(rows: Variable) -> bool:
    """Whether a state starts from what a shared variable holds."""
    return isinstance(lifted_row(rows), SharedVariable)


@dataclass
class Placed:
    """Rows that stand in an array from row `start` on."""

    value: Variable
    start: LengthForm
    rows: LengthForm


def placements(variable: Variable, length: LengthForm, rows: Lengths) -> list[Placed]:
    """Return an array of so many rows as a sum of rows placed in zeros."""
    whole = [Placed(variable, number(0), length)]
    if is_zeros(variable):
        return []
    node = variable.owner
    if node is None:
        return whole
    terms = terms_of(variable)
    if len(terms) > 1:
        return [placed for term in terms for placed in placements(term, length, rows)]
    if isinstance(node.op, Subtensor):
        view = rows.view(variable)
        if view.base is variable or not (view.flipped and view.is_whole):
            return whole
        return [_turned(placed, length) for placed in placements(view.base, length, rows)]
    if isinstance(node.op, IncSubtensor):
        added = _added(variable, length, rows)
        return whole if added is None else added
    return whole


def _turned(placed: Placed, length: LengthForm) -> Placed:
    """Return where rows stand in the reversed array."""
    value = placed.value if placed.rows == number(1) else placed.value[::-1]
    return Placed(value, length - placed.start - placed.rows, placed.rows)


def _added(variable: Variable, length: LengthForm, rows: Lengths) -> list[Placed] | None:
    """Return the parts of rows added to, or set in, an array."""
    node = variable.owner
    base, value = node.inputs[:2]
    if node.op.set_instead_of_inc and not is_zeros(base):
        return None
    indices = indices_of(node)
    row = value.type.broadcastable[value.type.ndim - base.type.ndim + 1 :]
    if len(indices) != 1 or value.type.ndim < base.type.ndim - 1:
        return None
    if row != base.type.broadcastable[1:]:
        return None
    before, index = placements(base, length, rows), indices[0]
    if not isinstance(index, slice):
        position = constant_index(index)
        if position is None or value.type.ndim != base.type.ndim - 1:
            return None
        start = number(position) if position >= 0 else length + position
        return [*before, Placed(pt.expand_dims(value, 0), start, number(1))]
    cut = rows.cut(length, index)
    if cut is None or value.type.ndim != base.type.ndim:
        return None
    front, back, turned = cut
    # A value that is not broadcast has as many rows as there is room for.
    given = length - front - back
    if value.type.shape[0] == 1 and given != number(1):
        return None
    inner = placements(value, given, rows)
    if turned:
        inner = [_turned(placed, given) for placed in inner]
    return [*before, *(Placed(p.value, front + p.start, p.rows) for p in inner)]


def entering_rows(
    buffer: Variable, depth: int, steps: LengthForm, rows: Lengths
) -> tuple[list[Variable], list[Variable], list[Variable]]:
    """Sort the rows of a buffer, each time as terms of a sum: those of which one enters per step,
    those that the window holds before the first step, and `depth` more that stay behind.

    A single row at the beginning need not enter: it can be in the window from the start. If
    there are no steps it is the first of those that stay, where the window leaves it as well.
    """
    sequences, first, tail = list[Variable](), list[Variable](), list[Variable]()
    end = steps + depth
    longer = not rows.agrees(buffer, end)
    others: list[Placed] = []
    for placed in placements(buffer, rows.of(buffer) if longer else end, rows):
        at_start = placed.start.is_zero
        if at_start and placed.rows == steps:
            sequences.append(placed.value)
        elif at_start and placed.rows == end:
            sequences.append(_cut(placed.value, number(0), steps))
            tail.append(_cut(placed.value, steps, end))
        elif at_start and placed.rows == number(1):
            first.append(only_row(placed.value, placed.value))
        elif placed.start == steps and placed.rows == number(depth):
            tail.append(placed.value)
        elif not end.at_most(placed.start):
            others.append(placed)
    if others:
        rest = pt.zeros_like(buffer)
        for placed in others:
            rest = pt.inc_subtensor(
                _cut(rest, placed.start, placed.start + placed.rows), placed.value
            )
        sequences.append(_cut(rest, number(0), steps))
        tail.append(_cut(rest, steps, end))
    return sequences, first, tail


def _cut(variable: Variable, start: LengthForm, stop: LengthForm) -> Variable:
    first = None if start.is_zero else start.variable()
    return variable[first : stop.variable()]


@dataclass
class BufferWindow:
    """A mit-mot: its buffer, and for each tap the variable a step reads and what it writes.

    Taps are counted from the oldest one; `depth` is the greatest.
    """

    buffer: Variable
    read: dict[int, Variable]
    written: dict[int, Variable]

    @property
    def depth(self) -> int:
        return max([*self.read, *self.written])

    @property
    def row_type(self) -> Any:
        return next(iter(self.read.values())).type


@dataclass
class Slid:
    """The parts of a loop that a window became.

    `enters` is the tap where its rows enter, `behind` the rows of the buffer that are to be
    added to the carries from that tap on.
    """

    leaving: Output
    carries: list[Carry]
    enters: int
    behind: list[Variable]


def _rest(window: BufferWindow, tap: int, results: list[Variable]) -> list[Variable] | None:
    """Return what a step adds to a row, as a list of terms; None if it does anything else."""
    variable, value = window.read.get(tap), window.written.get(tap)
    if value is None:
        read = variable is not None and variable in set(ancestors(results))
        return None if read else []
    if variable is None:
        return None
    terms = terms_of(value)
    rest = [term for term in terms if term is not variable]
    if len(rest) != len(terms) - 1:
        return None
    others = list(results)
    for i, result in enumerate(others):
        if result is value:
            others[i : i + 1] = []
            break
    return None if variable in set(ancestors([*others, *rest])) else rest


def slide(
    loop: Loop,
    window: BufferWindow,
    results: list[Variable],
    steps: LengthForm,
    rows: Lengths,
    orient: Callable[[Variable], Variable],
) -> tuple[Slid, dict[Variable, Variable]]:
    """Add a window's sequence, carries and output to a loop.

    Returns them, and what replaces the variables that a step read. `orient` puts rows in the
    order of the steps into the order in which the loop reads them.
    """
    # The smallest tap where rows may enter: up to it, what a step does to the row is to add.
    tap = depth = window.depth
    while tap > 0 and _rest(window, tap, results) is not None:
        tap -= 1
    type = window.row_type
    dtype = window.buffer.type.dtype
    zero = pt.zeros_like(window.buffer[0]) if type.ndim else pt.zeros((), dtype=dtype)
    starts = [zero] * depth
    behind: list[Variable] = []
    if tap == 0 and depth:
        sequences, first, behind = entering_rows(window.buffer, depth, steps, rows)
        if first:
            starts[0] = reduce(add, first)
    else:
        for j in range(tap):
            starts[j] = window.buffer[j]
        stop = steps + tap
        sequences = [window.buffer[tap : stop.variable()]]
        if tap < depth:
            behind = [window.buffer[stop.variable() : (steps + depth).variable()]]
    if sequences:
        total = reduce(add, [orient(rows) for rows in sequences])
        if total.type.dtype != window.buffer.type.dtype:
            total = pt.cast(total, window.buffer.type.dtype)
        loop.sequences.append(Sequence(total, type()))

    carries = [Carry(conform(start, type), type(), zero) for start in starts]
    values: dict[int, Variable | None] = {j: carry.value for j, carry in enumerate(carries)}
    values[depth] = None
    if sequences:
        row, carried = loop.sequences[-1].row, values[tap]
        values[tap] = row if carried is None else carried + row
    replacements = {}
    after: dict[int, Variable] = {}
    for j in range(depth + 1):
        value, variable = values[j], window.read.get(j)
        written = window.written.get(j)
        if value is None:
            value = zeros = pt.zeros_like(carries[0].value) if carries else pt.zeros_like(zero)
            rest = _rest(window, j, results) or []
            after[j] = zeros if written is None else reduce(add, rest) if rest else zeros
        else:
            after[j] = value if written is None else written
        if variable is not None:
            replacements[variable] = value
    for j, carry in enumerate(carries):
        carry.next = after[j + 1]
    leaving = Output(after[0])
    loop.carries += carries
    loop.outputs.append(leaving)
    return Slid(leaving, carries, tap, behind), replacements


def whole_buffer(
    window: BufferWindow,
    slid: Slid,
    steps: LengthForm,
    rows: Lengths,
    reverse: bool,
    results: dict[Part, Variable],
) -> Variable:
    """Return the buffer as PyTensor's loop leaves it, in the order of the steps.

    It is an array that is joined of the rows that left, those that are left in the window, and
    those that never entered; most readers want one of these parts only.
    """
    depth = window.depth
    left = results[slid.leaving]
    parts = [left[::-1] if reverse else left]
    if depth:
        kept = pt.join(0, *(pt.expand_dims(results[carry], 0) for carry in slid.carries))
        if slid.behind:
            late = kept[slid.enters :] + reduce(add, slid.behind)
            kept = pt.join(0, kept[: slid.enters], late) if slid.enters else late
        parts.append(kept)
    end = steps + depth
    if not rows.agrees(window.buffer, end):
        parts.append(window.buffer[end.variable() :])
    if not reverse:
        return pt.join(0, *parts)
    others = [part if part.type.shape[0] == 1 else part[::-1] for part in parts[1:]]
    return pt.join(0, *others[::-1], left)[::-1]


def last_reads(
    fgraph: FunctionGraph, out: Variable, is_updated: bool = False
) -> tuple[dict[Variable, tuple], bool]:
    """Return the reads of a buffer's last row with what follows the index, and whether there
    are no others.

    What is read through the trace is a row that a step wrote. Of a shared variable that is
    updated PyTensor reads so what it holds after the loop: if there were no steps, what it
    held before.
    """
    found, only = last_row_reads(fgraph, out, 1)
    reads = {
        read.old: tuple(read.rest)
        for read in found
        if read.back == 1 and not read.several and (is_updated or not read.needs_step)
    }
    return reads, only and len(reads) == len(found)
