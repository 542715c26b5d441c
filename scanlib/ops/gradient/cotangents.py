"""The cotangent of a history, taken apart.

A user reads the trace ``history[K:]`` and often only its last row, so the cotangent of a
history arrives as rows put into an array of zeros. Taking that apart again means that nothing
is padded: the trace's cotangent enters the backward loop as it is, and a cotangent of the last
row alone is the backward loop's initial value, with no sequence at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.scalar.basic import Add
from pytensor.tensor.basic import get_underlying_scalar_constant_value
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.subtensor import IncSubtensor

from scanlib.lengths.numbers import constant_index, indices_of
from scanlib.ops.gradient.step_pullback import is_connected, is_null
from scanlib.ops.graph import applies, conform, row_type, taken_apart
from scanlib.ops.loop import Carry, Loop
from scanlib.ops.loop import Sequence as SequencePart


@dataclass
class HistoryCotangent:
    """The sum of four parts, each None where it is zero.

    `rows` belongs to the T rows that the loop wrote, `last` to the last of them (the initial
    row next to it if there are no steps), `ends` to the last K rows of the history, `initial` to
    the K initial rows.
    """

    rows: Variable | None = None
    initial: Variable | None = None
    last: Variable | None = None
    ends: Variable | None = None

    def add(self, part: str, value: Variable) -> None:
        known = getattr(self, part)
        setattr(self, part, value if known is None else known + value)

    def add_rows(self, rows: Variable) -> None:
        """Add the cotangent of all rows that the steps wrote, the last row for itself."""
        for term in terms_of(rows):
            value, index = _placed_in_zeros(term)
            self.add("last" if index == -1 else "rows", value if index == -1 else term)


def split_history(cotangent: Variable, depth: int, reverse: bool) -> HistoryCotangent:
    """Take the cotangent of a history apart."""
    result = HistoryCotangent()
    for term in terms_of(cotangent):
        value, index = (term, None) if reverse else _placed_in_zeros(term)
        if index == depth:
            result.add_rows(value)
        elif index == -1:
            result.add("last", value)
        elif index == slice(-depth, None):
            result.add("ends", value)
        else:
            result.add("rows", term[:-depth] if reverse else term[depth:])
            result.add("initial", term[-depth:] if reverse else term[:depth])
    return result


def enter(
    loop: Loop,
    rows: Variable,
    kind: Any,
    name: str | None = None,
    walk: Callable[[Variable], Variable] | None = None,
) -> Variable:
    """Have a loop that walks back read the cotangents of all rows; return what its steps read.

    That of the last row waits for the last step: in a batch of loops with `until`, that is the last
    one of each.
    """
    parts, entering = HistoryCotangent(), list[Variable]()
    parts.add_rows(rows)
    if parts.last is not None:
        value = kind()
        loop.carries.append(Carry(conform(parts.last, kind), value, pt.zeros_like(value)))
        entering.append(value)
    if parts.rows is not None:
        walked = parts.rows if walk is None else walk(parts.rows)
        loop.sequences.append(SequencePart(walked, row_type(walked)(), name))
        entering.append(loop.sequences[-1].row)
    return reduce(add, entering)


def total_of(parts: Sequence[Variable | None]) -> Variable | None:
    """Return the sum of cotangents, the undefined one if there is any, None if there is none."""
    present = [part for part in parts if part is not None and is_connected(part)]
    undefined = next(filter(is_null, present), None)
    return undefined if undefined is not None or not present else reduce(add, present)


def terms_of(variable: Variable) -> list[Variable]:
    """Return the terms of a sum."""

    def parts(term: Variable) -> Sequence[Variable] | None:
        inputs = term.owner.inputs if applies(term.owner, Add) else []
        whole = [inp.type.broadcastable == term.type.broadcastable for inp in inputs]
        return inputs if inputs and all(whole) else None

    return taken_apart(variable, parts)


def _placed_in_zeros(variable: Variable) -> tuple[Variable, int | slice | None]:
    """Read ``zeros[start:] = value`` (returns value, start), ``zeros[-k:] = value`` (returns
    value, a slice) and ``zeros[-1] = value`` (returns value, -1); the index is None for others."""
    node, own = variable.owner, variable.type.broadcastable
    if node is None or not isinstance(node.op, IncSubtensor) or not is_zeros(node.inputs[0]):
        return variable, None
    index, *others = indices_of(node)
    value, given = node.inputs[1], node.inputs[1].type.broadcastable
    if isinstance(index, slice) and not others:
        start = constant_index(index.start)
        is_open = index.stop is None and index.step is None
        fits = is_open and len(given) == len(own) and given[1:] == own[1:]
        # One row in place of several would be repeated.
        if start and fits and (start >= -1 or not given[0]):
            return value, start if start > 0 else slice(start, None)
    elif not others and given == own[1:] and constant_index(index) == -1:
        return value, -1
    return variable, None


def is_zeros(variable: Variable) -> bool:
    """Whether an array holds zeros alone."""
    if isinstance(variable, Constant):
        data = np.asarray(variable.data)
        return data.size > 0 and not data.any()
    try:
        return not np.any(get_underlying_scalar_constant_value(variable))
    except NotScalarConstantError:
        return False
