"""Which matrix recurrences are left to the loop for what their matrices would cost.

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

A joined matrix holds zeros that nobody multiplied before. Joining pays where few of its blocks are
missing, and for small systems in any case: a step of a general loop takes as long as a few hundred
multiplications.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Dot

from scanlib.ops.connection import reached_by
from scanlib.ops.graph import depends_on
from scanlib.ops.loop import Loop
from scanlib.rewrites.over_time.peel import elementwise_region
from scanlib.rewrites.over_time.split_cost import core

# Matrices up to this size are made for every step at no cost to speak of. (A filter of two states
# and their covariance, six numbers, takes 1.3 to 2.9 times as long with matrices.)
SMALL_MATRIX = 4
SMALL = 32  # systems of so many numbers are joined whatever blocks are missing
SMALL_PER_STEP = 16  # the same, with a matrix for each step
WASTE = 2.0  # larger ones if the joined matrix has at most so many times their items
FEW_BLOCKS = (
    "its states are coupled by few or sparse matrices: joined, most of the matrix would be zeros"
)


class NotLinearError(Exception):
    """A loop is not a matrix recurrence with maps around it; the text says why."""


def check_sparsity(values: Sequence[Variable], nexts: Sequence[Variable]) -> None:
    """Refuse many numbers few of which depend on one another, before anything is computed.

    Raises
    ------
    NotLinearError
    """
    if len(values) <= SMALL or any(value.type.ndim for value in values):
        return
    used = sum(mask.bit_count() for mask in reached_by(values, nexts))
    if len(values) ** 2 > WASTE * used:
        raise NotLinearError(FEW_BLOCKS)


def check_joined_cost(
    sizes: Sequence[int | None],
    ranks: Sequence[int],
    full: Sequence[Sequence[int]],
    per_step: bool,
) -> None:
    """Refuse systems of which too much is missing.

    Parameters
    ----------
    sizes, ranks : sequence
        Of each state, without its batch.
    full : sequence of sequence of int
        For each next value, the states that all its items read.
    per_step : bool
        Whether the joined matrix differs from step to step.

    Raises
    ------
    NotLinearError
    """
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) and sum(known) <= (SMALL_PER_STEP if per_step else SMALL):
        return
    if any(rank > 1 for rank in ranks):
        raise NotLinearError("its states are matrices that the matrices do not keep apart")
    largest = max(known, default=0)
    guessed = [largest or 1 if size is None else size for size in sizes]
    if len(known) < len(sizes):
        guessed = [size if rank else 0 for size, rank in zip(guessed, ranks, strict=True)]
    used = sum(guessed[i] * guessed[j] for i, row in enumerate(full) for j in row)
    if sum(guessed) ** 2 > WASTE * used:
        raise NotLinearError(FEW_BLOCKS)


def check_step_matrices(loop: Loop, steps: Mapping[Variable, Variable], matrix: Variable) -> None:
    """Refuse recurrences whose matrices of all steps cost more than what they are made of.

    Parameters
    ----------
    loop : Loop
        The loop, whose steps either read matrices that differ from step to step, or do not.
    steps : mapping of Variable to Variable
        The next value of every recurrent value in the loop's body.
    matrix : Variable
        The matrix of one step, with the state's other axes in front of its own two.

    Raises
    ------
    NotLinearError
    """
    rows = {sequence.row for sequence in loop.sequences}
    if not rows.intersection(ancestors([matrix])) or _step_has_matrices(steps, rows):
        return
    largest = max(length or SMALL_MATRIX + 1 for length in matrix.type.shape[-2:])
    if _is_made_of_products(matrix, rows) or largest > SMALL_MATRIX:
        raise NotLinearError("making a matrix for each step would cost more than the steps do")


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
