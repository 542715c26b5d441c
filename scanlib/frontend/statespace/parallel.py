r"""The Kalman filter as a scan of associative elements.

What the observation of one step does to whatever state came before is a function of five parts::

    x[t] | x[t-1], y[t] ~ N(A x[t-1] + b, C)        y[t] | x[t-1] ∝ exp(ηᵀ x - xᵀ J x / 2)

With the factor ``S Sᵀ = Z Q Zᵀ + H`` of an observation after a known state, ``G = S⁻¹ Z`` and
``W = S⁻¹ Z Q``, where `Q` is the covariance of the state's disturbance::

    e = S⁻¹ (y - Z c - d)     A = (I - Wᵀ G) F     b = c + Wᵀ e     C = Q - Wᵀ W
    η = (G F)ᵀ e              J = (G F)ᵀ (G F)

and a first element in which `c`, `Q` are the first state's moments and `F` is zero. Two elements
compose, with ``M = I + C₁ J₂``::

    A = A₂ M⁻¹ A₁      b = A₂ M⁻¹ (b₁ + C₁ η₂) + b₂      C = A₂ M⁻¹ C₁ A₂ᵀ + C₂
    η = A₁ᵀ M⁻ᵀ (η₂ - J₂ b₁) + η₁                        J = A₁ᵀ M⁻ᵀ J₂ A₁ + J₁

No covariance is inverted: `M` has eigenvalues of one or more however singular `C₁` is. Square-root
elements hold ``U Uᵀ = C`` and ``V Vᵀ = J``; with the lower factor `Ψ` of ``[[U₁ᵀ V₂, I], [V₂, 0]]``
(products of its blocks stand for those of `M`), composing takes orthogonal transformations alone.
Densities follow from the filtered moments, all steps at once.

Sources: S. Särkkä, Á. F. García-Fernández, "Temporal parallelization of Bayesian smoothers", IEEE
Transactions on Automatic Control 66, 2021; F. Yaghoobi, A. Corenflos, S. Hassan, S. Särkkä,
"Parallel square-root statistical linear regression for inference in nonlinear state space models",
2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.frontend.associative_functions import associative_scan
from scanlib.frontend.scan_function import scan
from scanlib.frontend.statespace.filter import (
    Parts,
    Walk,
    factor,
    innovation,
    masked,
    predict,
    sequential,
    solve,
)
from scanlib.frontend.statespace.model import Observations, StateSpace, dtype_of
from scanlib.frontend.statespace.smoother import root
from scanlib.ops.lowered.found_results import FoundResults

Element = tuple[Variable, ...]


def covariance_element(own: dict[str, Any], y: Variable, seen: Variable | None) -> list[Variable]:
    """Return the element of one step; see the module's text."""
    move, shift, noise = own["transition"], own["state_intercept"], own["process_noise"]
    z, h, error = masked(own, y, seen, shift)
    spread = z @ noise
    lower = factor(spread @ z.T + h)
    w, g, e = solve(lower, spread), solve(lower, z), solve(lower, error)
    pulled = g @ move
    keep = pt.eye(shift.shape[0], dtype=shift.dtype) - w.T @ g
    return [keep @ move, shift + w.T @ e, noise - w.T @ w, pulled.T @ e, pulled.T @ pulled]


def compose(first: Element, then: Element) -> Element:
    """Return the element of two stretches of steps, one after the other."""
    (a1, b1, c1, eta1, j1), (a2, b2, c2, eta2, j2) = first, then
    size = b1.shape[0]
    matrix = pt.eye(size, dtype=b1.dtype) + c1 @ j2
    right = pt.concatenate([a1, (b1 + c1 @ eta2)[:, None], c1], axis=1)
    solved = a2 @ pt.linalg.solve(matrix, right)
    moved = pt.concatenate([(eta2 - j2 @ b1)[:, None], j2 @ a1], axis=1)
    back = a1.T @ pt.linalg.solve(matrix.T, moved)
    cov, info = solved[:, size + 1 :] @ a2.T + c2, back[:, 1:] + j1
    return (
        solved[:, :size],
        solved[:, size] + b2,
        (cov + cov.T) / 2,
        back[:, 0] + eta1,
        (info + info.T) / 2,
    )


def root_element(own: dict[str, Any], y: Variable, seen: Variable | None) -> list[Variable]:
    """Return the element of one step with factors in the place of `C` and `J`."""
    move, shift = own["transition"], own["state_intercept"]
    z, h, error = masked(own, y, seen, shift)
    of_noise, count = root(own["process_noise"]), y.shape[0]
    zeros = pt.zeros([shift.shape[0], count], dtype=shift.dtype)
    above = pt.concatenate([z @ of_noise, root(h)], axis=1)
    joint = lower_factor(pt.concatenate([above, pt.concatenate([of_noise, zeros], axis=1)]))
    lower, gain, left = joint[:count, :count], joint[count:, :count], joint[count:, count:]
    g, e = solve(lower, z), solve(lower, error)
    pulled = (g @ move).T
    square = pt.concatenate([pulled, pt.zeros_like(move)], axis=1)
    keep = pt.eye(shift.shape[0], dtype=shift.dtype) - gain @ g
    return [keep @ move, shift + gain @ e, left, pulled @ e, lower_factor(square)]


def compose_roots(first: Element, then: Element) -> Element:
    """Return the element of two stretches of steps, from factors to factors."""
    (a1, b1, u1, eta1, v1), (a2, b2, u2, eta2, v2) = first, then
    size = b1.shape[0]
    above = pt.concatenate([u1.T @ v2, pt.eye(size, dtype=b1.dtype)], axis=1)
    psi = lower_factor(pt.concatenate([above, pt.concatenate([v2, pt.zeros_like(v2)], axis=1)]))
    lower, below, rest = psi[:size, :size], psi[size:, :size], psi[size:, size:]
    left = pt.linalg.solve_triangular(lower, u1.T, lower=True, b_ndim=2).T  # U₁ Ψ₁₁⁻ᵀ

    def kept(value: Variable) -> Variable:
        return value - left @ (below.T @ value)  # M⁻¹ times the value

    backward = eta2 - v2 @ (v2.T @ b1)
    return (
        a2 @ kept(a1),
        a2 @ kept(b1 + u1 @ (u1.T @ eta2)) + b2,
        lower_factor(pt.concatenate([a2 @ left, u2], axis=1)),
        a1.T @ (backward - below @ (left.T @ backward)) + eta1,
        lower_factor(pt.concatenate([a1.T @ rest, v1], axis=1)),
    )


def lower_factor(wide: Variable) -> Variable:
    """Return a lower triangular `L` with ``L Lᵀ = wide wideᵀ``."""
    return pt.linalg.qr(wide.T, mode="economic")[1].T


ELEMENTS: dict[str, tuple[Callable[..., list[Variable]], Callable[[Element, Element], Element]]] = {
    "parallel": (covariance_element, compose),
    "square-root": (root_element, compose_roots),
}


def parallel(model: StateSpace, given: Observations, form: str = "parallel") -> Walk:
    """Return the filter's results, of a scan of associative elements."""
    dtype = dtype_of(given.values, model)
    parts = Parts.of(model, dtype)
    steps = given.values.shape[0]
    start = [pt.cast(v, dtype) for v in (model.initial_mean, model.initial_cov)]
    whole = dict(parts.timed)

    def from_first(name: str, first: Variable) -> Variable:
        """Return rows that lead to each step, `first` to the first one."""
        rows = parts.timed.get(name)
        if rows is None:
            fixed = parts.fixed.get(name, pt.zeros_like(first))
            rows = pt.broadcast_to(fixed, [steps, *fixed.shape])
        return pt.concatenate([first[None], rows])[:steps]

    whole["transition"] = from_first("transition", pt.zeros_like(start[1]))
    whole["process_noise"] = from_first("process_noise", start[1])
    whole["state_intercept"] = from_first("state_intercept", start[0])
    seen = [] if given.seen is None else [given.seen]
    element, combine = ELEMENTS[form]

    def of_step(y: Variable, *rest: Variable) -> list[Variable]:
        mask, rows = (rest[0], rest[1:]) if seen else (None, rest)
        own = dict(zip(whole, rows, strict=True))
        return element({"observation_intercept": None, **parts.fixed, **own}, y, mask)

    rows = [given.values, *seen, *whole.values()]
    elements = _map(of_step, rows, 5, "kalman_elements")
    _, mean, spread, _, _ = associative_scan(combine, tuple(elements))
    cov = spread if form == "parallel" else spread @ pt.swapaxes(spread, -1, -2)

    def follow(mean: Variable, cov: Variable, *own: Variable) -> list[Variable]:
        return predict(parts.at(own), mean, cov)

    after = _map(follow, [mean, cov, *parts.timed.values()], 2, "kalman_predictions")
    before = [pt.concatenate([v[None], rows]) for v, rows in zip(start, after, strict=True)]

    def density(y: Variable, *rest: Variable) -> list[Variable]:
        mask, (mean, cov, *own) = (rest[0], rest[1:]) if seen else (None, rest)
        return list(innovation(parts.at(own), y, mask, mean, cov))

    rows = [given.values, *seen, *(v[:-1] for v in before), *parts.timed.values()]
    w, e, densities, z = _map(density, rows, 4, "kalman_densities")
    return with_derivatives(model, given, [*before, w, e, densities, z, mean, cov])


def with_derivatives(model: StateSpace, given: Observations, found: list[Variable]) -> Walk:
    """Return what was found with the derivatives of the filter that goes from step to step."""
    walk = sequential(model, given)
    loop = walk.predicted_mean.owner
    return Walk(*FoundResults(loop.op).make_node(*loop.inputs, *found).outputs)


def _map(step: Callable[..., list[Variable]], rows: Any, count: int, name: str) -> list[Variable]:
    """Return what a function makes of all rows."""
    return scan(step, list(rows), [None] * count, return_updates=False, name=name)
