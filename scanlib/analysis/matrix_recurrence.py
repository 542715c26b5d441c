"""The matrix recurrences that `scanlib.ops.lowered.linear_scan` runs, found in the body of a loop.

In the real semiring the next value is a matrix times the state plus something, which its linear
form says (`scanlib.analysis.linear_forms`). In the log and tropical semirings it is ``⊕_j (A[i, j]
+ h[j]) + c[i]``: the reduction ``⊕`` over an axis of the state is looked for, and the form of what
it reads must be the state itself plus a matrix. The smallest of numbers may be written as minus the
largest of their opposites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.math import Max, Min
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.shape import SpecifyShape

from scanlib._compat import LOG_SUM_EXP
from scanlib.analysis.linear_forms import (
    LinearForms,
    NotAffineError,
    Sizes,
    is_minus_one,
    plus,
)
from scanlib.ops.graph import depends_on


@dataclass
class MatrixRecurrence:
    """A recognized recurrence of body variables.

    Attributes
    ----------
    semiring : str
    axis : int
        The axis of the state along which the matrix acts.
    matrix : Variable
        One axis for each other axis of the state, then `i` and `j`; with `across`, these two alone.
    offset : Variable or None
        What is added, in the layout of the state, to be broadcast.
    across : Variable or None
        The matrix along the last axis of a state that is a matrix, where there is one along each:
        ``h' = M h M_acrossᵀ + c``; `axis` is 0 then.
    """

    semiring: str
    axis: int
    matrix: Variable
    offset: Variable | None
    across: Variable | None = None


def of_one_state(forms: LinearForms, following: Variable) -> MatrixRecurrence | None:
    """Return the recurrence of one state, None if no full matrix acts along one of its axes.

    Parameters
    ----------
    forms : LinearForms
        Those of the state's next value, of one state.
    following : Variable
        The next value.
    """
    block, offset = forms.form(following)[0], forms.offset(following)
    ndim = following.type.ndim
    order = list(range(ndim))
    if len(block.sides) == 2 and ndim == 2 and block.ties == (0, 1):
        left, right = (block.sides[axis] for axis in order)
        return MatrixRecurrence("real", 0, left, offset, right)
    if len(block.sides) == 1 and block.ties == tuple(order):
        ((axis, matrix),) = block.sides.items()
        matrix = matrix.dimshuffle(*["x"] * (ndim - 1), 0, 1)
        return MatrixRecurrence("real", axis, matrix, offset)
    block = forms.opened(0, block)
    free = forms.free(0, block)
    if len(free) != 1 or not block.full:
        return None
    (axis,) = free
    if any(tie not in (own, None) for own, tie in zip(order, block.ties, strict=True)):
        return None
    others = [1 + k for k in order if k != axis]
    matrix = forms.value(block).dimshuffle(*others, 1 + axis, 0)
    return MatrixRecurrence("real", axis, matrix, offset)


def in_other_semiring(state: Variable, following: Variable, sizes: Sizes) -> Any:
    """Return ``⊕_j (A[i, j] + h[j]) + c[i]`` if the next value is that, else None."""
    dependent = depends_on([following], [state])
    variable, offset = following, None
    sign = 1
    while True:
        node = variable.owner
        if node is None or variable not in dependent:
            return None
        if isinstance(node.op, SpecifyShape):
            variable = node.inputs[0]
            continue
        scalar = node.op.scalar_op if isinstance(node.op, Elemwise) else None
        varying = [inp for inp in node.inputs if inp in dependent]
        if not isinstance(scalar, ps.Add | ps.Sub | ps.Neg | ps.Mul) or len(varying) != 1:
            break
        (variable,) = varying
        others = [inp for inp in node.inputs if inp is not variable]
        added = [pt.cast(inp, state.type.dtype) for inp in others]
        if isinstance(scalar, ps.Neg | ps.Mul):
            if isinstance(scalar, ps.Mul) and not (len(others) == 1 and is_minus_one(others[0])):
                return None
            sign = -sign
            continue
        if isinstance(scalar, ps.Sub):
            if variable is not node.inputs[0]:
                return None
            added = [-added[0]]
        for term in added:
            offset = plus(offset, term if sign > 0 else -term)
    semiring, terms, axis = _reduction(node)
    if terms is None or axis is None or variable.type.ndim != state.type.ndim:
        return None
    if sign < 0:
        if semiring == "log":
            return None
        semiring = {"max": "min", "min": "max"}[semiring]
    matrix = _added_matrix(state, terms, axis, sign, sizes)
    if matrix is None:
        return None
    return MatrixRecurrence(semiring, state.type.ndim - 1, matrix, offset)


def _added_matrix(
    state: Variable, terms: Variable, axis: int, sign: int, sizes: Sizes
) -> Variable | None:
    """Return the matrix `A` of terms ``A[i, j] + h[j]`` that run along `j` on an axis.

    With a negative sign the terms are ``-(A[i, j] + h[j])``.
    """
    try:
        forms = LinearForms([state], [terms], sizes)
    except NotAffineError:
        return None
    last = state.type.ndim - 1
    block, added = forms.form(terms).get(0), forms.offset(terms)
    if block is None or block.sides or added is None or block.ties[axis] != last:
        return None
    if sign > 0 and block.value is not None:
        return None
    if sign < 0 and (block.value is None or not is_minus_one(block.value)):
        return None
    rest = [tie for k, tie in enumerate(block.ties) if k != axis]
    if rest != [*range(last), None] or added.type.dtype != state.type.dtype:
        return None
    row = next(k for k, tie in enumerate(block.ties) if tie is None)
    if added.type.broadcastable[row] or added.type.broadcastable[axis]:
        return None
    matrix = added.dimshuffle(*(block.ties.index(k) for k in range(last)), row, axis)
    return matrix if sign > 0 else -matrix


def _reduction(node: Apply) -> tuple[str, Variable | None, int | None]:
    """Return the semiring, terms and axis of a reduction."""
    op = node.op
    if LOG_SUM_EXP is not None and isinstance(op, LOG_SUM_EXP):
        return "log", node.inputs[0], op.axis[0] if len(op.axis) == 1 else None
    if isinstance(op, Max | Min):
        semiring, terms = "max" if isinstance(op, Max) else "min", node.inputs[0]
    elif isinstance(op, Elemwise) and isinstance(op.scalar_op, ps.Log):
        above = node.inputs[0].owner
        if above is None or not isinstance(above.op, TensorSum):
            return "log", None, None
        exponential = above.inputs[0].owner
        if exponential is None or not isinstance(exponential.op, Elemwise):
            return "log", None, None
        if not isinstance(exponential.op.scalar_op, ps.Exp):
            return "log", None, None
        semiring, node, terms = "log", above, exponential.inputs[0]
    else:
        return "log", None, None
    axes = node.op.axis if isinstance(node.op, CAReduce) else None
    axes = tuple(range(terms.type.ndim)) if axes is None else tuple(axes)
    return semiring, terms, axes[0] if len(axes) == 1 else None
