"""Which recurrences in matrices are left to the loop for what their matrices would cost.

A lowered recurrence reads a matrix for each step. Where the loop itself multiplies with a fixed
matrix and with a row, as the adjoint of ``h_t = tanh(x_t + U h_{t-1})`` does with ``U`` and
``1 - h_t²``, the matrices ``diag(1 - h_t²) U`` of all steps would have to be made: `d` times as
many numbers as the loop moves, and as many more for each item of a batch.

Small matrices cost little memory, but what makes them is compiled, node by node. Elementwise work
becomes one function. Products and sums do not: with those of a Kalman filter of two states,
``F (I - k_t hᵀ)`` and its adjoints, a gradient of 1,000 steps takes two thirds of the time that the
loop takes, and five times as long to compile.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Dot

from scanlib.ops.graph import depends_on
from scanlib.ops.loop import Loop

# Matrices up to this size are made for every step at no cost to speak of. (A filter of two states
# and their covariance, six numbers, takes 1.3 to 2.9 times as long with matrices.)
SMALL = 4


def builds_matrices(loop: Loop, steps: Mapping[Variable, Variable], matrix: Variable) -> bool:
    """Whether a recurrence's matrices of all steps cost more than what they are made of.

    Parameters
    ----------
    loop : Loop
        The loop, whose steps either read matrices that differ from step to step, or do not.
    steps : mapping of Variable to Variable
        The next value of every recurrent value in the loop's body.
    matrix : Variable
        The matrix of one step, with the state's other axes in front of its own two.
    """
    rows = {sequence.row for sequence in loop.sequences}
    if not rows.intersection(ancestors([matrix])) or _step_has_matrices(steps, rows):
        return False
    if _is_made_of_products(matrix, rows):
        return True
    if any(length != 1 for length in matrix.type.shape[:-2]):
        return max((length or SMALL + 1 for length in matrix.type.shape[-2:]), default=0) > SMALL
    size = max((length or 0 for length in matrix.type.shape[-2:]), default=0)
    return size > SMALL or (size == 0 and len(steps) > 1)


def _is_made_of_products(matrix: Variable, rows: set[Variable]) -> bool:
    """Whether products or sums that differ from step to step make a matrix."""
    varying = depends_on([matrix], list(rows))
    for node in toposort([matrix]):
        op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
        if node.outputs[0] in varying and isinstance(op, Dot | CAReduce | SolveBase):
            return True
    return False


def _step_has_matrices(steps: Mapping[Variable, Variable], rows: set[Variable]) -> bool:
    """Whether a step multiplies a state with a matrix that differs from step to step."""
    targets = list(steps.values())
    dependent = depends_on(targets, list(steps))
    varying = depends_on(targets, list(rows))
    for node in toposort(targets):
        product = _product(node)
        if product is None or not any(inp in dependent for inp in product.inputs):
            continue
        for operand in product.inputs:
            is_row = operand in varying and operand not in dependent
            if is_row and operand.type.ndim >= 2 and True not in operand.type.broadcastable[-2:]:
                return True
    return False


def _product(node: Apply) -> Apply | None:
    """Return a node that multiplies with a matrix or solves with one, None if this is none."""
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    if isinstance(op, Dot | SolveBase):
        return node
    if not isinstance(op, CAReduce) or not isinstance(op.scalar_op, ps.Add):
        return None
    above = node.inputs[0].owner
    if above is None or not isinstance(above.op, Elemwise):
        return None
    broadcasts = any(
        inp.type.broadcastable != node.inputs[0].type.broadcastable for inp in above.inputs
    )
    return above if broadcasts and isinstance(above.op.scalar_op, ps.Mul) else None
