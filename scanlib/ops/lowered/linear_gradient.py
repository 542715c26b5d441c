r"""Derivatives of `LinearScan`.

Write the forward recurrence by rows of the history: ``H[t+1] = A_t H[t] + b_t``. With ``g`` the
cotangent of the history, the cotangent of a row together with all later ones is

    Λ[t] = Aᵀ_t Λ[t+1] + g[t],    Λ[T] = g[T]

which is again a `LinearScan` in the other direction, with offset ``g[:-1]`` and initial row
``g[-1:]``; for vectors with the same `A` on the other side. From it

    dA_t = Λ[t+1] H[t]ᵀ,    db_t = Λ[t+1],    dh_init = Λ[0].

For a fixed `A` the sum over time is one matrix product. In the other semirings the step is
nonlinear, ``H[t+1] = f(A_t, H[t]) + b_t``, with the Jacobian

    W_t[i, j] = ∂H[t+1][i] / ∂H[t][j] = ∂H[t+1][i] / ∂A_t[i, j]

of weights that sum to one over `j`: a softmax in the log semiring, the choice of the extreme
term in the others (one for each term that attains it, as for `pytensor.tensor.max`). They are
computed for all steps at once; the adjoint is a real `LinearScan` with them as coefficients, and
``dA_t[i, j] = Λ[t+1][i] W_t[i, j]``. (M. Mohri, "Semiring frameworks and algorithms for
shortest-distance problems", 2002.)
"""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Variable

from scanlib.ops.derivatives import Variables, pullback_rule, pushforward_rule
from scanlib.ops.lowered.linear_scan import LinearScan, Parts


def _conj(variable: Variable) -> Variable:
    return pt.conj(variable) if np.dtype(variable.type.dtype).kind == "c" else variable


def _rows(op: LinearScan, history: Variable) -> tuple[Variable, Variable]:
    """Return the states before and after every step."""
    first, second = history[:-1], history[1:]
    return (second, first) if op.reverse else (first, second)


def _traced(op: LinearScan, parts: Parts, out: Variable) -> Variable:
    """Return the whole history."""
    if not op.untraced:
        return out
    return op.with_options(untraced=False)(*op.join(parts))


def _columns(op: LinearScan, variable: Variable) -> Variable:
    """Return states as matrices on which the matrix stands at the left: ``(…, d, m)``."""
    if op.vector:
        return variable[..., None]
    return variable if op.side == "left" else variable.mT


def _stepwise(op: LinearScan, matrix: Variable, batch: int) -> Variable:
    """Return the matrices with time and batch axes to broadcast, acting from the left."""
    if op.coefficient == "fixed":
        matrix = matrix[None]
    missing = 0 if matrix.type.ndim == batch + 3 else batch
    if missing:
        matrix = pt.expand_dims(matrix, tuple(range(1, 1 + missing)))
    return matrix if op.side == "left" else matrix.mT


def _adjoint(op: LinearScan, matrix: Variable, cotangent: Variable, parts: Parts) -> Variable:
    """Return Λ with the layout of a history."""
    side, mask = op.side, parts.mask
    if op.vector:
        side = "right" if op.side == "left" else "left"
    else:
        matrix = matrix.mT
        mask = None if mask is None else mask.T
    masks = [] if mask is None else [mask]
    adjoint = op.with_options(
        semiring="real",
        side=side,
        reverse=not op.reverse,
        has_offset=not op.untraced,
        has_n_steps=op.untraced and op.coefficient == "fixed",
        untraced=False,
        required_steps=0,
    )
    rights = [] if parts.right is None else [parts.right]
    if op.untraced:
        n_steps = [op.length(parts)] if adjoint.has_n_steps else []
        return adjoint(*n_steps, matrix, *rights, cotangent, *masks)
    inner = cotangent[1:] if op.reverse else cotangent[:-1]
    last = cotangent[:1] if op.reverse else cotangent[-1:]
    return adjoint(matrix, *rights, inner, last, *masks)


def _weights(op: LinearScan, parts: Parts, before: Variable, after: Variable) -> Variable:
    """Return the Jacobian of every step, with side left: ``(T, *batch, d, m, d)``."""
    batch = op.batch_rank(parts.initial.type.ndim)
    matrix = _stepwise(op, parts.matrix, batch)
    plain = after if parts.offset is None else after - parts.offset
    state, value = _columns(op, before), _columns(op, plain)
    terms = matrix[..., :, None, :] + state.mT[..., None, :, :]
    value = value[..., None]
    if op.semiring == "log":
        # Where all terms are -inf, so is the value; no term has weight then.
        weight = pt.exp(terms - pt.switch(pt.eq(value, -np.inf), 0, value))
        return weight.astype(parts.initial.type.dtype)
    # The value is taken from the terms: `after - offset` is not exact.
    extreme = terms.max(axis=-1) if op.semiring == "max" else terms.min(axis=-1)
    return pt.eq(terms, extreme[..., None]).astype(parts.initial.type.dtype)


def _sum_to(op: LinearScan, gradient: Variable, matrix: Variable) -> Variable:
    """Sum a cotangent ``(T, *batch, d, d)`` over the axes that the matrix lacks."""
    first = 1 if op.coefficient == "steps" else 0
    batch = gradient.type.ndim - 3
    axes = [] if first else [0]
    if op.matrix_batch_rank(matrix.type.ndim) < batch:
        axes += range(1, 1 + batch)
    return gradient.sum(axis=tuple(axes)) if axes else gradient


def _matrix_gradient(op: LinearScan, parts: Parts, owed: Variable, before: Variable) -> Variable:
    """Return ``Σ Λ hᵀ`` over the axes that the matrix does not have."""
    left, right = (owed, before) if op.side == "left" else (before, owed)
    ndim = left.type.ndim
    inner = ndim - 1
    shared = [] if op.coefficient == "steps" else [0]
    batch = op.batch_rank(ndim)
    if not op.matrix_batch_rank(parts.matrix.type.ndim):
        shared += range(1, 1 + batch)
    conjugated = (left, _conj(right)) if op.side == "left" else (_conj(left), right)
    if len(shared) == 1 + batch:
        # Nothing of the batch remains: one matrix product.
        if not op.vector:
            shared.append(inner if op.side == "left" else inner - 1)
        return pt.tensordot(*conjugated, axes=(shared, shared))
    left, right = (_columns_of_product(op, v) for v in conjugated)
    return _sum_to(op, left @ right.mT, parts.matrix)


def _columns_of_product(op: LinearScan, variable: Variable) -> Variable:
    if op.vector:
        return variable[..., None]
    return variable if op.side == "left" else variable.mT


@pullback_rule.register(LinearScan)
def pullback(
    op: LinearScan, inputs: Variables, outputs: Variables, cotangents: Variables
) -> list[Variable]:
    """Return the cotangents of a recurrence's inputs."""
    parts, (out,), (cotangent,) = op.parts(inputs), outputs, cotangents
    if isinstance(cotangent.type, DisconnectedType):
        return [disconnected_type() for _ in inputs]
    history = _traced(op, parts, out)
    before, after = _rows(op, history)
    right = None
    if op.side == "both":
        owed_all, owed, matrix, right = _from_both_sides(op, parts, before, cotangent)
    elif op.semiring == "real":
        owed_all = _adjoint(op, _conj(parts.matrix), cotangent, parts)
        owed = _rows(op, owed_all)[1]
        matrix = _matrix_gradient(op, parts, owed, before)
    else:
        owed_all, owed, matrix = _nonlinear(op, parts, before, after, cotangent)
    initial = owed_all[-1:] if op.reverse else owed_all[:1]
    n_steps = disconnected_type() if op.has_n_steps else None
    mask = disconnected_type() if op.has_mask else None
    return op.join(type(parts)(n_steps, matrix, owed, initial, mask, right))


def _from_both_sides(
    op: LinearScan, parts: Parts, before: Variable, cotangent: Variable
) -> tuple[Variable, Variable, Variable, Variable]:
    """Return Λ of ``h' = A h R + b``, its rows of all steps, and the cotangents of both matrices.

    ``Λ[t] = Aᵀ Λ[t+1] Rᵀ + g[t]``, ``dA = Λ[t+1] (H[t] R)ᵀ``, ``dR = (A H[t])ᵀ Λ[t+1]``.
    """
    matrix, right, before = _conj(parts.matrix), _conj(parts.right), _conj(before)
    adjoint_right = parts._replace(right=right.mT)
    owed_all = _adjoint(op, matrix, cotangent, adjoint_right)
    owed = _rows(op, owed_all)[1]
    left = owed @ (before @ right).mT
    other = (matrix @ before).mT @ owed
    if op.coefficient == "fixed":
        left, other = left.sum(axis=0), other.sum(axis=0)
    return owed_all, owed, left, other


def _nonlinear(
    op: LinearScan, parts: Parts, before: Variable, after: Variable, cotangent: Variable
) -> tuple[Variable, Variable, Variable]:
    """Return Λ, its rows of all steps, and the cotangent of the matrix."""
    weights = _weights(op, parts, before, after)  # (T, *batch, d, m, d)
    # Each column has its own Jacobian: columns join the batch, and states become vectors.
    jacobian = pt.moveaxis(weights, -2, -3)
    vectors = op.with_options(coefficient="steps", side="left", vector=True)

    def as_vectors(variable: Variable) -> Variable:
        return pt.moveaxis(_columns(op, variable), -1, -2)

    def back(variable: Variable) -> Variable:
        columns = pt.moveaxis(variable, -2, -1)
        if op.vector:
            return columns[..., 0]
        return columns if op.side == "left" else columns.mT

    owed_all = _adjoint(vectors, jacobian, as_vectors(cotangent), parts)
    owed = _rows(op, owed_all)[1]
    matrix = (owed[..., None] * jacobian).sum(axis=-3)
    matrix = matrix if op.side == "left" else matrix.mT
    return back(owed_all), back(owed), _sum_to(op, matrix, parts.matrix)


@pushforward_rule.register(LinearScan)
def pushforward(
    op: LinearScan, inputs: Variables, outputs: Variables, tangents: Variables
) -> list[Variable]:
    """Return the tangent of the result: the same recurrence of the tangents."""
    parts, moved = op.parts(inputs), op.parts(tangents)

    def known(variable: Variable | None) -> bool:
        return variable is not None and not isinstance(variable.type, DisconnectedType)

    if not any(known(v) for v in (moved.matrix, moved.right, moved.offset, moved.initial)):
        return [disconnected_type()]
    before, after = _rows(op, _traced(op, parts, outputs[0]))
    added = moved.offset if known(moved.offset) else pt.zeros_like(before)
    initial = moved.initial if known(moved.initial) else pt.zeros_like(parts.initial)
    batch = op.batch_rank(parts.initial.type.ndim)
    real = op.with_options(semiring="real", has_offset=True, has_n_steps=False)
    turn = (lambda v: v[..., 0]) if op.vector else (lambda v: v if op.side == "left" else v.mT)
    if op.side == "both":
        if known(moved.matrix):
            added = added + moved.matrix @ before @ parts.right
        if known(moved.right):
            added = added + parts.matrix @ before @ moved.right
        return [real(parts.matrix, parts.right, added, initial)]
    if op.semiring == "real":
        if known(moved.matrix):
            change = _stepwise(op, moved.matrix, batch) @ _columns(op, before)
            added = added + turn(change)
        masks = [parts.mask] if op.has_mask else []
        return [real(parts.matrix, added, initial, *masks)]
    weights = _weights(op, parts, before, after)
    if known(moved.matrix):
        change = (weights * _stepwise(op, moved.matrix, batch)[..., :, None, :]).sum(axis=-1)
        added = added + turn(change)
    vectors = real.with_options(coefficient="steps", side="left", vector=True)
    columns = [pt.moveaxis(_columns(op, v), -1, -2) for v in (added, initial)]
    result = vectors(pt.moveaxis(weights, -2, -3), *columns)
    return [turn(pt.moveaxis(result, -2, -1))]
