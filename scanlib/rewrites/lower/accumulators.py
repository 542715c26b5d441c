"""Parts of a loop that only add up: the next value is the value before it plus something.

Nothing else of a step reads such a part, so that it is a sum over time.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import Elemwise

from scanlib.ops.graph import Readers, is_tensor, readers_of
from scanlib.ops.loop import Carry, Loop, State


def added_up(part: State | Carry, readers: Readers) -> Variable | None:
    """Return what a step adds to a part that only adds up and is not stored, else None.

    Parameters
    ----------
    part : State or Carry
    readers : dict
        What `readers_of` returns for the body.
    """
    if isinstance(part, Carry):
        return _addend(part.value, part.next, readers)
    if not part.untraced or set(part.taps) != {-1}:
        return None
    return _addend(part.taps[-1], part.next, readers)


def split_sums(loop: Loop) -> tuple[list[tuple[Carry, Variable]], list[Carry]]:
    """Return the carries that only add up, each with what a step adds, and the other carries."""
    readers = readers_of(loop.body_outputs())
    found = [(carry, added_up(carry, readers)) for carry in loop.carries]
    sums = [(carry, added) for carry, added in found if added is not None]
    return sums, [carry for carry, added in found if added is None]


def _addend(value: Variable, following: Variable, readers: Readers) -> Variable | None:
    """Return what is added to a value on its way to the next one, None if it goes elsewhere.

    Sums in another dtype are none: small integers wrap around.
    """
    if not is_tensor(value) or any(reader is not None for reader in readers[following]):
        return None
    total, added = value, None
    while total is not following:
        node = readers[total][0] if len(readers[total]) == 1 else None
        if node is None:
            return None
        op = node.op.scalar_op if isinstance(node.op, Elemwise) else None
        minus = isinstance(op, ps.Sub) and node.inputs[0] is total
        if not (minus or isinstance(op, ps.Add)):
            return None
        for inp in node.inputs:
            if inp is total:
                continue
            term = pt.cast(inp, value.type.dtype)
            term = -term if minus else term
            added = term if added is None else added + term
        total = node.outputs[0]
        if total.type.dtype != value.type.dtype:
            return None
    return added if added is not None and added.type.ndim == value.type.ndim else None
