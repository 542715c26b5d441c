"""Parts of a loop that only add up: the next value is the value before it plus something.

Nothing else of a step reads such a part, so that it is a sum over time.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import Elemwise

from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Carry, Loop, State
from scanlib.ops.recursion import MOST_TERMS

Readers = dict[Variable, list[Apply]]


def added_up(part: State | Carry, loop: Loop, readers: Readers | None = None) -> Variable | None:
    """Return what a step adds to a part that only adds up and is not stored, else None.

    Parameters
    ----------
    part : State or Carry
    loop : Loop
    readers : dict, optional
        What `readers_of` returns for the body, for those who ask for many parts.
    """
    if isinstance(part, State):
        if not part.untraced or set(part.taps) != {-1}:
            return None
        part = Carry(part.initial, part.taps[-1], part.next)
    outputs = loop.body_outputs()
    return _addend(part, outputs, readers_of(outputs) if readers is None else readers)


def split_sums(loop: Loop) -> tuple[list[tuple[Carry, Variable]], list[Carry]]:
    """Return the carries that only add up, each with what a step adds, and the other carries."""
    sums, rest = [], []
    outputs = loop.body_outputs()
    readers = readers_of(outputs)
    for carry in loop.carries:
        added = _addend(carry, outputs, readers)
        if added is None:
            rest.append(carry)
        else:
            sums.append((carry, added))
    return sums, rest


def readers_of(outputs: list[Variable]) -> Readers:
    """Return the nodes of a step that read each variable."""
    readers: Readers = {}
    for node in toposort(outputs):
        for inp in set(node.inputs):
            readers.setdefault(inp, []).append(node)
    return readers


def _reaches(
    start: Variable,
    ends: set[Variable],
    readers: Readers,
    blocker: Variable,
) -> bool:
    """Whether one of some variables depends on another, not by way of a blocker."""
    seen, pending = {start}, [start]
    while pending:
        variable = pending.pop()
        if variable in ends:
            return True
        for node in readers.get(variable, ()):
            new = [out for out in node.outputs if out not in seen and out is not blocker]
            seen.update(new)
            pending += new
    return False


def _addend(carry: Carry, outputs: list[Variable], readers: Readers) -> Variable | None:
    """Return what a step adds to a carry that only adds up, else None."""
    if not is_tensor(carry.value):
        return None
    summands = _summands(carry.next, carry.value)
    if sum(variable is carry.value and sign > 0 for sign, variable in summands) != 1:
        return None
    others = [(sign, variable) for sign, variable in summands if variable is not carry.value]
    if len(others) != len(summands) - 1 or not others:
        return None
    if carry.next in readers:
        return None
    ends = {*outputs, *(variable for _, variable in others)} - {carry.next}
    if _reaches(carry.value, ends, readers, carry.next):
        return None
    added = None
    for sign, summand in others:
        variable = pt.cast(summand, carry.value.type.dtype)
        if added is None:
            added = variable if sign > 0 else -variable
        else:
            added = added + variable if sign > 0 else added - variable
    assert added is not None
    return added if added.type.ndim == carry.value.type.ndim else None


def _summands(variable: Variable, value: Variable) -> list[tuple[int, Variable]]:
    """Take the sums and differences apart in which a value may stand.

    Those in another dtype are summands themselves: small integers wrap around.
    """
    found: list[tuple[int, Variable]] = []
    pending = [(1, variable)]
    while pending:
        sign, term = pending.pop()
        op = None if term.owner is None else getattr(term.owner.op, "scalar_op", None)
        inner = sign > 0 and term is not value and term.type.dtype == value.type.dtype
        if inner and isinstance(op, ps.Add | ps.Sub) and isinstance(term.owner.op, Elemwise):
            first, *others = term.owner.inputs
            after = -1 if isinstance(op, ps.Sub) else 1
            pending += [*((after, other) for other in reversed(others)), (1, first)]
        else:
            found.append((sign, term))
        if len(found) + len(pending) > MOST_TERMS:
            return [(1, variable)]
    return found
