r"""Affine recurrences of vectors and of covariances: what smoothers and gradients walk back with.

For matrices ``M[t]``, ``t = 0 … T-1``, and from the first row ``v[0]``, or ``V[0]``::

    x[t+1] = M[t] x[t] + v[t+1]        X[t+1] = M[t] X[t] M[t]ᵀ + V[t+1]

or from the last row to the first (`reverse`). As a scan of elements, ``(M₁, V₁)`` and then
``(M₂, V₂)`` are ``(M₂ M₁, M₂ V₁ M₂ᵀ + V₂)``. The derivative of such a recurrence is another one in
the other direction, with ``Mᵀ``: parallel in time, of any order.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.frontend.associative_functions import associative_scan
from scanlib.ops.loop import Loop, Results, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.lowered.found_results import FoundResults

Element = tuple[Variable, Variable]


def walk_vectors(
    matrices: Variable, rows: Variable, reverse: bool = False, in_parallel: bool = False
) -> Variable:
    """Return the history of a recurrence of vectors.

    Parameters
    ----------
    matrices : Variable, (T, …, m, m)
    rows : Variable, (T + 1, …, m)
    reverse : bool
    in_parallel : bool
        Whether this is a scan of elements.
    """
    return _walk(False, matrices, rows, reverse, in_parallel)


def walk_squares(
    matrices: Variable, rows: Variable, reverse: bool = False, in_parallel: bool = False
) -> Variable:
    """Return the same of a recurrence of covariances; `rows` has shape (T + 1, …, m, m)."""
    return _walk(True, matrices, rows, reverse, in_parallel)


def _walk(
    is_square: bool, matrices: Variable, rows: Variable, reverse: bool, in_parallel: bool
) -> Variable:
    start, others = (rows[-1:], rows[:-1]) if reverse else (rows[:1], rows[1:])
    move, row, tap = (
        pt.TensorType(v.type.dtype, shape=v.type.shape[1:])() for v in (matrices, others, others)
    )
    results = Loop(
        sequences=[SequencePart(matrices, move), SequencePart(others, row)],
        states=[State(start, {-1: tap}, _moved(is_square, move, tap) + row)],
        reverse=reverse,
        name="kalman_affine",
    ).apply()
    if not in_parallel:
        return results.histories[0]

    def compose(first: Element, then: Element) -> Element:
        return then[0] @ first[0], _moved(is_square, then[0], first[1]) + then[1]

    # Nothing comes before the first row, whatever its matrix is.
    edge = pt.zeros([1, *list(matrices.shape)[1:]], dtype=matrices.type.dtype)
    whole = pt.concatenate([matrices, edge] if reverse else [edge, matrices])
    _, found = associative_scan(compose, (whole, rows), reverse=reverse)
    op = FoundResults(results.node.op, _owed_to_squares if is_square else _owed_to_vectors)
    return op.make_node(*results.node.inputs, found).outputs[0]


def _moved(is_square: bool, matrix: Variable, value: Variable) -> Variable:
    """Return ``M x``, or ``M X Mᵀ``; of batches, where there are any."""
    if is_square:
        return matrix @ value @ pt.swapaxes(matrix, -1, -2)
    if value.type.ndim == 1:
        return matrix @ value
    return (matrix @ value[..., None])[..., 0]


def _owed_to_vectors(loop: Loop, results: Results, cotangents: list[Variable]) -> list[Variable]:
    """Return the cotangents of all states: the recurrence in the other direction."""
    back = pt.swapaxes(loop.sequences[0].outer, -1, -2)
    return [walk_vectors(back, cotangents[0], not loop.reverse, True)]


def _owed_to_squares(loop: Loop, results: Results, cotangents: list[Variable]) -> list[Variable]:
    """Return the same for covariances."""
    back = pt.swapaxes(loop.sequences[0].outer, -1, -2)
    return [walk_squares(back, cotangents[0], not loop.reverse, True)]
