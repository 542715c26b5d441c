"""Which recurrences in matrices are left to the loop for what their matrices would cost.

A lowered recurrence reads a matrix for each step. Where the loop itself multiplies with a fixed
matrix and with a row, as the adjoint of ``h_t = tanh(x_t + U h_{t-1})`` does with ``U`` and
``1 - h_t²``, the matrices ``diag(1 - h_t²) U`` of all steps would have to be made: `d` times as
many numbers as the loop moves, and as many more for each item of a batch. Where `d` is
not known it may be large: for 2 to 8 numbers the loop is 1.2 to 2.5 times slower, but
matrices for 32 numbers take twice the loop's time, for 128 ten times, and `d` times the memory.

Small matrices cost little memory, but what makes them is compiled, node by node. Elementwise work
becomes one function. Products and sums do not: with those of a Kalman filter of two states,
``F (I - k_t hᵀ)`` and its adjoints, a gradient of 1,000 steps takes two thirds of the time that the
loop takes, and five times as long to compile.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Dot

from scanlib.ops.graph import depends_on
from scanlib.ops.loop import Loop
from scanlib.rewrites.over_time.peel_nodes import elementwise_region
from scanlib.rewrites.over_time.split_cost import core

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
    return max((length or SMALL + 1 for length in matrix.type.shape[-2:]), default=0) > SMALL


def _is_made_of_products(matrix: Variable, rows: set[Variable]) -> bool:
    """Whether products or sums that differ from step to step make a matrix."""
    varying = depends_on([matrix], list(rows))
    for node in toposort([matrix]):
        if node.outputs[0] in varying and isinstance(core(node), Dot | CAReduce | SolveBase):
            return True
    return False


def _step_has_matrices(steps: Mapping[Variable, Variable], rows: set[Variable]) -> bool:
    """Whether a step multiplies a state with a matrix that differs from step to step."""
    targets = list(steps.values())
    dependent = depends_on(targets, list(steps))
    varying = depends_on(targets, list(rows))
    for node in toposort(targets):
        factors = _factors(node)
        if dependent.isdisjoint(factors):
            continue
        for factor in factors:
            is_row = factor in varying and factor not in dependent
            if is_row and factor.type.ndim >= 2 and True not in factor.type.broadcastable[-2:]:
                return True
    return False


def _factors(node: Apply) -> list[Variable]:
    """Return what a node multiplies, a product, a solve, or a reduction of elementwise work.

    ``Σ_j A_ij h_j``, ``max_j (A_ij + h_j)`` and the like are products, written as broadcasts.
    """
    if isinstance(core(node), Dot | SolveBase):
        return node.inputs
    above = node.inputs[0].owner if isinstance(core(node), CAReduce) else None
    if above is None or not isinstance(above.op, Elemwise):
        return []
    return elementwise_region(above, ())[1]
