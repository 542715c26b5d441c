"""What the matrix of a recurrence is multiplied and added up from, beside the step itself.

``(B h) * w`` has the matrix ``diag(w) B``, which a step does not compute: it may overflow, vanish,
or be NaN where the step gives a number. `factors_of` finds the values that such a matrix is made
of.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import Alloc, Eye, Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, SpecifyShape

_ARITHMETIC = (ps.Add, ps.Sub, ps.Mul, ps.TrueDiv, ps.Reciprocal)
_VIEWS = (Alloc, DimShuffle, Reshape, SpecifyShape)


def factors_of(matrix: Variable, body: Collection[Variable]) -> list[Variable]:
    """Return the values of a body of which new products, quotients and sums make a matrix.

    Parameters
    ----------
    matrix : Variable
        An expression of variables of the body.
    body : collection of Variable
        All variables of the body.

    Returns
    -------
    list of Variable
        Empty where the matrix is one that a step computes, perhaps with other axes or signs.
    """
    found: dict[Variable, None] = {}
    pending, seen = [(matrix, False)], set[tuple[Variable, bool]]()
    while pending:
        variable, inside = pending.pop()
        if (variable, inside) in seen or _is_unit(variable):
            continue
        seen.add((variable, inside))
        node = variable.owner
        if node is None or variable in body:
            if inside:
                found[variable] = None
            continue
        inside = inside or _computes(node)
        pending += [(inp, inside) for inp in node.inputs if _is_number(inp)]
    return list(found)


def _is_number(variable: Variable) -> bool:
    dtype = getattr(variable.type, "dtype", None)
    return dtype is not None and np.dtype(dtype).kind in "fc"


def _computes(node: Apply) -> bool:
    """Whether a node makes other numbers of those that it is given."""
    core = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    if isinstance(core, Dot | CAReduce):
        return True
    if not isinstance(node.op, Elemwise) or not isinstance(node.op.scalar_op, _ARITHMETIC):
        return False
    if isinstance(node.op.scalar_op, ps.TrueDiv | ps.Reciprocal):
        return not _is_unit(node.inputs[-1])
    return sum(not _is_unit(inp) for inp in node.inputs) > 1


def _is_unit(variable: Variable) -> bool:
    """Whether all items are known to be zero, one or minus one."""
    if isinstance(variable, Constant):
        data = np.asarray(variable.data)
        return data.dtype.kind in "biufc" and bool(np.isin(np.abs(data), (0, 1)).all())
    node = variable.owner
    if node is None:
        return False
    if isinstance(node.op, Eye):
        return True
    if isinstance(node.op, _VIEWS):
        return _is_unit(node.inputs[0])
    if isinstance(node.op, Join):
        return all(_is_unit(inp) for inp in node.inputs[1:])
    if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Second):
        return _is_unit(node.inputs[1])
    return False
