"""Operations that PyTensor would evaluate row by row, or not at all, as one batch over time.

==========================  =======================================================
in a step                   for all steps
==========================  =======================================================
``E[i_t]``                  ``E[i]``, a gather of rows
``solve(A, b_t)``           one solve with `T` right sides, ``solve(A, Bᵀ)ᵀ``
``check(x_t, condition_t)`` one check that every step's condition holds
``x_t @ y_t`` in a batch    a product with one more batch axis
``x_t.reshape((-1, 2))``    one reshape; what -1 stands for follows from the sizes of a row
==========================  =======================================================

All of them give a result of zero rows for zero steps.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.shape import Reshape

from scanlib._compat import INDEX_READS
from scanlib.lengths.numbers import constant_integer
from scanlib.rewrites.over_time.split_cost import core

Value = tuple[Variable, bool]


def batched(node: Apply, inputs: list[Value]) -> Variable | None:
    """Return the values of a node for all steps, None if it has no form of its own.

    Parameters
    ----------
    node : Apply
        A node of a body.
    inputs : list of (Variable, bool)
        Its inputs' values, and whether they have a time axis. One of them has.
    """
    op = core(node)
    values = [value for value, _ in inputs]
    varies = [has_time for _, has_time in inputs]
    if isinstance(op, CheckAndRaise):
        return _check(op, inputs)
    if isinstance(node.op, INDEX_READS):
        return values[0][values[1]] if varies == [False, True] and len(values) == 2 else None
    if isinstance(op, SolveBase) and varies == [False, True] and values[0].type.ndim == 2:
        return _solve(op, *values)
    if isinstance(op, Reshape) and varies == [True, False]:
        return _reshape(node, *values)
    return None


def _check(op: CheckAndRaise, inputs: list[Value]) -> Variable:
    """Return the checked value, one check for all steps; the value may be the same at each."""
    (value, has_time), *conditions = inputs
    if not has_time:
        steps = next(condition for condition, varies in conditions if varies).shape[0]
        value = pt.broadcast_to(value, (steps, *tuple(value.shape)))
    return op(value, *(pt.all(condition) for condition, _ in conditions))


def _solve(op: SolveBase, matrix: Variable, right: Variable) -> Variable:
    """Return the solutions for the right sides of all steps, of shape (T, n) or (T, n, m)."""
    properties = {name: getattr(op, name) for name in op.__props__}
    many = type(op)(**(properties | {"b_ndim": 2}))
    if right.type.ndim == 2:
        return many(matrix, right.T).T
    steps, size, columns = right.shape
    joined = right.dimshuffle(1, 0, 2).reshape((size, steps * columns))
    return many(matrix, joined).reshape((size, steps, columns)).dimshuffle(1, 0, 2)


def _reshape(node: Apply, rows: Variable, shape: Variable) -> Variable:
    """Return rows in another shape, no rows as well: nothing could tell then what -1 is."""
    known = node.outputs[0].type.shape
    given = [shape[i] if size is None else size for i, size in enumerate(known)]
    sizes = [rows.shape[axis] for axis in range(1, rows.type.ndim)]
    rest = prod(sizes) // pt.maximum(pt.abs(prod(given)), 1)
    full = []
    for size, static in zip(given, known, strict=True):
        if static is None:
            is_open = constant_integer(size) == -1
            size = rest if is_open else pt.switch(pt.lt(size, 0), rest, size)
        full.append(size)
    return rows.reshape((rows.shape[0], *full))


def elementwise_region(
    node: Apply, known: Collection[Variable]
) -> tuple[list[Apply], list[Variable]]:
    """Return the elementwise nodes above a node, itself included, and what they read."""
    region: list[Apply] = []
    ends: dict[Variable, None] = {}
    pending = [node]
    seen = {node}
    while pending:
        current = pending.pop()
        region.append(current)
        for inp in current.inputs:
            above = inp.owner
            if isinstance(inp, Constant):
                continue
            if above is None or inp in known or not isinstance(above.op, Elemwise):
                ends[inp] = None
            elif above not in seen:
                seen.add(above)
                pending.append(above)
    return region, list(ends)
