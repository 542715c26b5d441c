"""The matrix recurrences that `scanlib.ops.lowered.linear_scan` runs, found in the body of a loop.

In the real semiring the next value is a matrix times the state plus something, which
`scanlib.analysis.matrix_affine` finds out. In the log and tropical semirings it is
``⊕_j (A[i, j] + h[j]) + c[i]``: the reduction ``⊕`` over an axis of the state is looked for, and
the form of what it reads must be the state itself plus a matrix. The smallest of numbers may be
written as minus the largest of their opposites.
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
from scanlib.analysis.matrix_affine import (
    NotAffineError,
    Propagation,
    broadcasts,
    is_minus_one,
    name_of,
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
        One axis for each other axis of the state, then `i` and `j`.
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


def recognize(state: Variable, following: Variable) -> MatrixRecurrence:
    """Return the recurrence of a state's next value.

    Parameters
    ----------
    state, following : Variable
        The body's variable of the state, and the one of its next value.

    Raises
    ------
    NotAffineError
        If the next value is of another form.
    """
    dependent = depends_on([following], [state])
    if following not in dependent:
        raise NotAffineError(f"{name_of(following)} does not depend on the state before it")
    found = _in_other_semiring(state, following, dependent)
    if found is not None:
        return found
    form = Propagation(state, dependent).form(following)
    if form.axes != tuple(range(state.type.ndim)):
        raise NotAffineError(f"{name_of(following)} has the state's axes in another order")
    if form.both is not None:
        return MatrixRecurrence("real", 0, form.both[0], form.offset, form.both[1])
    if not form.terms:
        raise NotAffineError(f"{name_of(following)} is elementwise in the state")
    if len(form.terms) > 1:
        raise NotAffineError(f"{name_of(following)} has matrices on both sides of the state")
    ((axis, matrix),) = form.terms.items()
    if form.weight is not None:
        matrix = matrix + _diagonal(form.weight, axis, matrix, state)
    return MatrixRecurrence("real", axis, matrix, form.offset)


def _diagonal(weight: Any, axis: int, matrix: Variable, state: Variable) -> Variable:
    """Return an elementwise factor as a matrix along one axis of the state."""
    eye = pt.eye(matrix.shape[-1], dtype=state.type.dtype)
    if isinstance(weight, int):
        return weight * eye
    others = [k for k in range(weight.type.ndim) if k != axis]
    # A choice, not a product: what is not finite stays where it is.
    zero = pt.zeros((), state.type.dtype)
    return pt.switch(eye, weight.dimshuffle(*others, axis, "x"), zero)


def _in_other_semiring(
    state: Variable, following: Variable, dependent: set[Variable]
) -> MatrixRecurrence | None:
    """Return ``⊕_j (A[i, j] + h[j]) + c[i]`` if the next value is that, else None."""
    variable, offset = following, None
    sign = 1
    while True:
        node = variable.owner
        if node is None:
            return None
        if isinstance(node.op, SpecifyShape):
            variable = node.inputs[0]
            continue
        scalar = node.op.scalar_op if isinstance(node.op, Elemwise) else None
        varying = [inp for inp in node.inputs if inp in dependent]
        if isinstance(scalar, ps.Add | ps.Sub | ps.Neg | ps.Mul) and len(varying) == 1:
            (variable,) = varying
            others = [inp for inp in node.inputs if inp is not variable]
            added = [pt.cast(inp, state.type.dtype) for inp in others]
            if isinstance(scalar, ps.Neg):
                sign = -sign
            elif isinstance(scalar, ps.Mul):
                # The smallest of numbers is minus the largest of their opposites.
                if len(others) != 1 or not is_minus_one(others[0]):
                    return None
                sign = -sign
            elif isinstance(scalar, ps.Sub):
                if variable is not node.inputs[0]:
                    return None
                offset = plus(offset, -added[0] if sign > 0 else added[0])
            else:
                for term in added:
                    offset = plus(offset, term if sign > 0 else -term)
            continue
        break
    semiring, terms, axis = _reduction(node)
    if terms is None or axis is None or variable.type.ndim != state.type.ndim:
        return None
    try:
        form = Propagation(state, dependent).form(terms)
    except NotAffineError:
        return None
    last = state.type.ndim - 1
    if not isinstance(form.weight, int) or form.weight != sign or form.terms:
        return None
    if sign < 0 and semiring == "log":
        return None
    if form.axes[axis] != last or form.offset is None:
        return None
    rest = [place for k, place in enumerate(form.axes) if k != axis]
    wanted = [*range(last), None]
    if rest != wanted or form.offset.type.dtype != state.type.dtype:
        return None
    others = [form.axes.index(k) for k in range(last)]
    row = next(k for k, place in enumerate(form.axes) if place is None)
    if broadcasts(form.offset, row) or broadcasts(form.offset, axis):
        return None
    matrix = form.offset.dimshuffle(*others, row, axis)
    if sign < 0:
        semiring, matrix = {"max": "min", "min": "max"}[semiring], -matrix
    return MatrixRecurrence(semiring, last, matrix, offset)


def _reduction(node: Apply) -> tuple[str, Variable | None, int | None]:
    """Return the semiring, terms and axis of a reduction."""
    op = node.op
    semiring = "log"
    if LOG_SUM_EXP is not None and isinstance(op, LOG_SUM_EXP):
        return semiring, node.inputs[0], op.axis[0] if len(op.axis) == 1 else None
    if isinstance(op, Elemwise) and isinstance(op.scalar_op, ps.Log):
        above = node.inputs[0].owner
        if above is None or not isinstance(above.op, TensorSum):
            return semiring, None, None
        exponential = above.inputs[0].owner
        if exponential is None or not isinstance(exponential.op, Elemwise):
            return semiring, None, None
        if not isinstance(exponential.op.scalar_op, ps.Exp):
            return semiring, None, None
        node, terms = above, exponential.inputs[0]
    elif isinstance(op, Max | Min):
        semiring = "max" if isinstance(op, Max) else "min"
        terms = node.inputs[0]
    else:
        return semiring, None, None
    axes = node.op.axis if isinstance(node.op, CAReduce) else None
    axes = tuple(range(terms.type.ndim)) if axes is None else tuple(axes)
    return semiring, terms, axes[0] if len(axes) == 1 else None
