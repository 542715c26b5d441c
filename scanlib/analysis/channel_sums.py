"""Sums over channels in the body of a loop, and what a step makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Constant, Variable
from pytensor.scalar.basic import Add, Cast
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape

from scanlib.ops.graph import is_tensor
from scanlib.ops.recursion import Task, finished, taken_apart


class MultipleOfSum(NamedTuple):
    """A sum over channels in an expression, and whether the expression is more than that sum."""

    total: Variable
    scaled: bool


def multiple_of_sum(variable: Variable) -> MultipleOfSum | None:
    """Return the sum of which an expression is a multiple, None if it is none.

    With other axes or another sign, or as a number of a type that holds every such sum, it is the
    sum itself: that of its terms with other axes, another sign, or in the other type.
    """
    return finished(_multiple_of_sum(variable, {}))


def _multiple_of_sum(variable: Variable, known: dict[Variable, MultipleOfSum | None]) -> Task:
    if variable not in known:
        known[variable] = yield _find_multiple(variable, known)
    return known[variable]


def _find_multiple(variable: Variable, known: dict[Variable, MultipleOfSum | None]) -> Task:
    node = variable.owner
    if node is None:
        return None
    if isinstance(node.op, CAReduce):
        return MultipleOfSum(variable, False) if isinstance(node.op.scalar_op, Add) else None
    if isinstance(node.op, DimShuffle):
        return (yield _multiple_of_sum(node.inputs[0], known))
    if not isinstance(node.op, Elemwise):
        return None
    op = node.op.scalar_op
    if not isinstance(op, Cast | ps.Neg | ps.Mul | ps.TrueDiv):
        return None
    may_hold = node.inputs[:1] if isinstance(op, ps.TrueDiv) else node.inputs
    found = []
    for inp in may_hold:
        term = yield _multiple_of_sum(inp, known)
        if term is not None:
            found.append((inp, term))
    if len(found) != 1:
        return None
    ((inp, term),) = found
    before, after = inp.type.dtype, variable.type.dtype
    # A sum of single floats may overflow, its terms in double precision do not.
    whole = before == after or np.dtype(before).kind in "biu"
    exact = whole and is_sum_of_converted(before, after)
    exact = exact and all(other is inp or _is_sign(other) for other in node.inputs)
    return MultipleOfSum(term.total, term.scaled or not exact)


def is_sum_of_converted(before: str, after: str) -> bool:
    """Whether a sum in one dtype, converted to another, is the sum of the converted terms.

    It is not where the sum is rounded, or where sums of small integers wrap around.
    """
    wraps = np.dtype(before).kind in "biu" and np.dtype(before).itemsize < 8
    return before == after or (np.can_cast(before, after) and not wraps)


def _is_sign(variable: Variable) -> bool:
    """Whether a factor is one or minus one."""
    if not isinstance(variable, Constant):
        return False
    return bool(np.all(np.abs(np.asarray(variable.data, dtype=variable.type.dtype)) == 1))


def terms_of_sum(variable: Variable) -> list[Variable]:
    """Return the terms of nested additions (shape checks looked through).

    Additions in another dtype are terms themselves: small integers wrap around.
    """

    def parts(term: Variable) -> Sequence[Variable] | None:
        node = term.owner
        if node is None or not is_tensor(term) or term.type.dtype != variable.type.dtype:
            return None
        if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Add):
            return node.inputs
        return node.inputs[:1] if isinstance(node.op, SpecifyShape) else None

    return taken_apart(variable, parts)
