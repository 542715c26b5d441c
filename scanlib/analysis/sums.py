"""Sums over time: what steps add to a value that nothing else reads.

Additions in another dtype are no part of a sum: small integers wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.scalar import basic as ps
from pytensor.tensor.shape import SpecifyShape

from scanlib.ops.graph import Readers, applies, is_tensor, taken_apart
from scanlib.ops.loop import Carry, State


def summands(part: State | Carry, readers: Readers) -> list[Variable] | None:
    """Return what a step adds to a part that only adds up and is not stored, else None; `readers`
    are what `readers_of` returns for the body."""
    if isinstance(part, State) and (not part.untraced or set(part.taps) != {-1}):
        return None
    total, added = part.tap(-1), list[Variable]()
    if not is_tensor(total) or readers[part.next] != [None]:
        return None
    while total is not part.next:
        node = readers[total][0] if len(readers[total]) == 1 else None
        if node is None:
            return None
        others = [inp for inp in node.inputs if inp is not total]
        if applies(node, ps.Sub) and node.inputs[0] is total:
            added += [-pt.cast(inp, part.type.dtype) for inp in others]  # -(-128) is no int8
        elif applies(node, ps.Add):
            added += others
        elif not isinstance(node.op, SpecifyShape):
            return None
        total = node.outputs[0]
        if total.type.dtype != part.type.dtype:
            return None
    return added or None


def terms_of_sum(variable: Variable, dtype: str) -> list[Variable]:
    """Return the terms of nested additions in a dtype; shape checks are looked through."""

    def parts(term: Variable) -> Sequence[Variable] | None:
        node = term.owner
        if node is None or not is_tensor(term) or term.type.dtype != dtype:
            return None
        if applies(node, ps.Add):
            return node.inputs
        return node.inputs[:1] if isinstance(node.op, SpecifyShape) else None

    return taken_apart(variable, parts)
