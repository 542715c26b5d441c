"""A mit-mot of PyTensor's scans as a window that slides over its buffer.

At step `t` a mit-mot reads rows ``t + k`` of its buffer, for taps `k` from 0 to `K`, and writes
some of them again. Row ``t + K`` is met for the first time at step `t`, and row `t` for the last
time. So the rows of the buffer enter as a sequence, the `K` rows in between are carried, and the
rows that leave are an output::

    v_j = c_j  (j < K),   v_K = x_t          the window
    w   = v with the rows written that the step writes
    c_j ← w_{j+1},        z_t = w_0

A gradient only adds to most rows of its window, ``w_j = v_j + f_j``. What the buffer holds there
need not be known until the row is read at a smaller tap, so it enters there: at tap 0 for the
gradients of all loops users write. Then the sequence is the cotangent of the trace itself, and
what is carried starts as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Add
from pytensor.tensor.elemwise import Elemwise

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm
from scanlib.ops.graph import conform
from scanlib.ops.loop import Carry, Loop, Output, Sequence
from scanlib.rewrites.adopt.adopt_buffers import entering_rows, zero_row


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


def entering_tap(window: BufferWindow, results: list[Variable]) -> int:
    """Return the smallest tap where rows may enter; `results` is all that a step computes.

    Up to it, what a step does to the row is to add.
    """
    tap = window.depth
    while tap > 0 and _rest(window, tap, results) is not None:
        tap -= 1
    return tap


def _rest(window: BufferWindow, tap: int, results: list[Variable]) -> list[Variable] | None:
    """Return what a step adds to a row, as a list of terms; None if it does anything else."""
    variable, value = window.read.get(tap), window.written.get(tap)
    if value is None:
        read = variable is not None and variable in set(ancestors(results))
        return None if read else []
    if variable is None:
        return None
    terms = _terms(value)
    rest = [term for term in terms if term is not variable]
    if len(rest) != len(terms) - 1:
        return None
    others = list(results)
    for i, result in enumerate(others):
        if result is value:
            others[i : i + 1] = []
            break
    return None if variable in set(ancestors([*others, *rest])) else rest


def _terms(variable: Variable) -> list[Variable]:
    node = variable.owner
    if node is None or not isinstance(node.op, Elemwise) or not isinstance(node.op.scalar_op, Add):
        return [variable]
    type = variable.type
    if any(
        inp.type.dtype != type.dtype or inp.type.broadcastable != type.broadcastable
        for inp in node.inputs
    ):
        return [variable]
    return [term for inp in node.inputs for term in _terms(inp)]


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
    depth, tap = window.depth, entering_tap(window, results)
    type = window.row_type
    zero = zero_row(window.buffer)
    starts = [zero] * depth
    behind: list[Variable] = []
    if tap == 0 and depth:
        found = entering_rows(window.buffer, depth, steps, rows)
        if found.first:
            starts[0] = _sum(found.first)
        sequences, behind = found.sequences, found.tail
    else:
        for j in range(tap):
            starts[j] = window.buffer[j]
        stop = steps + tap
        sequences = [window.buffer[tap : stop.variable()]]
        if tap < depth:
            behind = [window.buffer[stop.variable() : (steps + depth).variable()]]
    if sequences:
        total = _sum([orient(rows) for rows in sequences])
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
            after[j] = zeros if written is None else _sum(rest) if rest else zeros
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


def _sum(values: list[Variable]) -> Variable:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def whole_buffer(
    window: BufferWindow,
    slid: Slid,
    results: dict[int, Variable],
    steps: LengthForm,
    rows: Lengths,
    reverse: bool,
) -> Variable:
    """Return the buffer as PyTensor's loop leaves it, in the order of the steps.

    It is an array that is joined of the rows that left, those that are left in the window, and
    those that never entered; most readers want one of these parts only.
    """
    depth = window.depth
    left = results[id(slid.leaving)]
    parts = [left[::-1] if reverse else left]
    if depth:
        kept = stack([results[id(carry)] for carry in slid.carries])
        if slid.behind:
            late = kept[slid.enters :] + _sum(slid.behind)
            kept = pt.join(0, kept[: slid.enters], late) if slid.enters else late
        parts.append(kept)
    end = steps + depth
    if not rows.agrees(window.buffer, end):
        parts.append(window.buffer[end.variable() :])
    if len(parts) == 1:
        return parts[0]
    if not reverse:
        return pt.join(0, *parts)
    turned = [left if part is parts[0] else _turned(part) for part in parts]
    return pt.join(0, *turned[::-1])[::-1]


def _turned(part: Variable) -> Variable:
    return part if part.type.shape[0] == 1 else part[::-1]


def stack(rows: list[Variable]) -> Variable:
    """Return single rows as an array."""
    lifted = [pt.expand_dims(row, 0) for row in rows]
    return lifted[0] if len(lifted) == 1 else pt.join(0, *lifted)
