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
Densities follow from the filtered moments, all steps at once. So do derivatives, which are those of
the filter that goes from step to step, at what was found: decompositions of singular matrices have
none. Covariances do not depend on means, and with `M`, `u` as in `filter` the cotangents are::

    λ[t] = Mᵀ λ[t+1] + g[t]        Λ[t] = Mᵀ Λ[t+1] M + Mᵀ λ[t+1] uᵀ + G[t]

The smoother of square-root elements composes them from the end as well: with the ``η``, ``V`` of
all steps to come, and the filtered mean `m` and factor `U`, the smoothed factor is ``U L⁻ᵀ``, where
``L Lᵀ = I + Uᵀ V Vᵀ U``.

Sources: S. Särkkä, Á. F. García-Fernández, "Temporal parallelization of Bayesian smoothers", IEEE
Transactions on Automatic Control 66, 2021; F. Yaghoobi, A. Corenflos, S. Hassan, S. Särkkä,
"Parallel square-root statistical linear regression for inference in nonlinear state space models",
2022.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.frontend.associative_functions import associative_scan
from scanlib.frontend.statespace.filter import (
    Row,
    Walk,
    gain,
    innovation,
    masked,
    masked_noise,
    predict,
    read_parts,
    sequential,
    solve,
)
from scanlib.frontend.statespace.model import Observations, StateSpace
from scanlib.frontend.statespace.smoother import affine_history, root, smoothed
from scanlib.frontend.trees import flatten
from scanlib.ops.graph import row_type
from scanlib.ops.loop import Loop, Results
from scanlib.ops.lowered.found_results import FoundResults, at_all_steps, with_derivatives_of
from scanlib.ops.row_ops.triangular import TriangularFactor

Element = tuple[Variable, ...]


def covariance_element(own: Row) -> list[Variable]:
    """Return the element of one step; see the module's text."""
    move, shift, noise = own["transition"], own["state_intercept"], own["process_noise"]
    z, error = masked(own, shift)
    lower, w, g = gain(z, noise, masked_noise(own))
    e, pulled = solve(lower, error), g @ move
    kept = move - w.T @ pulled
    return [kept, shift + w.T @ e, noise - w.T @ w, pulled.T @ e, pulled.T @ pulled]


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


def root_element(own: Row) -> list[Variable]:
    """Return the element of one step with factors in the place of `C` and `J`.

    The covariances that it gets are factors as well.
    """
    move, shift, seen = own["transition"], own["state_intercept"], own["seen"]
    of_noise, of_observation = own["process_noise"], own["observation_cov"]
    z, error = masked(own, shift)
    above = [z @ of_noise, of_observation]
    if seen is not None:
        above = [above[0], of_observation * seen[:, None], pt.diag(1 - seen)]
    below = [of_noise, *(pt.zeros_like(above[0].T) for _ in above[1:])]
    count: Any = z.type.shape[0] or z.shape[0]  # JAX asks for a number where there is one
    joint = lower_factor(pt.concatenate([pt.concatenate(v, axis=1) for v in (above, below)]))
    lower, gain, left = joint[:count, :count], joint[count:, :count], joint[count:, count:]
    g, e = solve(lower, z), solve(lower, error)
    pulled = (g @ move).T
    square = pt.concatenate([pulled, pt.zeros_like(move)], axis=1)
    kept = move - gain @ pulled.T
    return [kept, shift + gain @ e, left, pulled @ e, lower_factor(square)]


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
    """Return a lower triangular `L` with ``L Lᵀ = wide wideᵀ``; it is no wider than high."""
    return TriangularFactor()(wide.T).T


ELEMENTS: dict[str, tuple[Callable[..., list[Variable]], Callable[[Element, Element], Element]]] = {
    "parallel": (covariance_element, compose),
    "square-root": (root_element, compose_roots),
}


def elements(model: StateSpace, given: Observations, form: str) -> list[Variable]:
    """Return the elements of all steps."""
    (timed, fixed, (mean, cov)), steps = read_parts(model, given), given.values.shape[0]
    if form == "square-root":
        cov = root(cov)
        for own in (timed, fixed):
            for name in own.keys() & {"process_noise", "observation_cov"}:
                own[name] = root(own[name])

    def over_time(name: str) -> Variable:
        if name in timed:
            return timed[name]
        return pt.broadcast_to(fixed[name], [steps, *fixed[name].shape])

    firsts = {"transition": pt.zeros_like(cov), "process_noise": cov, "state_intercept": mean}
    if fixed["state_intercept"] is None:
        fixed["state_intercept"] = pt.zeros_like(mean)
    whole = timed | given.rows()
    for name, first in firsts.items():  # what leads to each step
        whole[name] = pt.concatenate([first[None], over_time(name)])[:steps]
    if form == "square-root":  # what is joined to rows is rows
        whole["observation_cov"] = over_time("observation_cov")
    element = ELEMENTS[form][0]
    return _map(lambda row: element({**fixed, **row}), "kalman_elements", whole)


def parallel(model: StateSpace, given: Observations, form: str = "parallel") -> Walk:
    """Return the filter's results, of a scan of associative elements."""
    timed, fixed, moments = read_parts(model, given)
    of_steps = elements(model, given, form)
    _, mean, spread, _, _ = associative_scan(ELEMENTS[form][1], tuple(of_steps))
    cov = spread if form == "parallel" else spread @ spread.mT

    def follow(row: Row) -> tuple[Variable, Variable]:
        return predict({**fixed, **row}, row["mean"], row["cov"])

    def results(row: Row) -> list[Variable]:
        return innovation({**fixed, **row}, row["mean"], row["cov"])[2]

    after = _map(follow, "kalman_predictions", timed | {"mean": mean, "cov": cov})
    before = [
        pt.concatenate([first[None], rows]) for first, rows in zip(moments, after, strict=True)
    ]
    own = timed | given.rows() | {"mean": before[0][:-1], "cov": before[1][:-1]}
    rest = _map(results, "kalman_densities", own)
    loop = sequential(model, given).predicted_mean.owner
    op = FoundResults(loop.op, owed_to_predictions)
    return Walk(*op.make_node(*loop.inputs, *before, mean, cov, *rest).outputs)


def owed_to_predictions(loop: Loop, results: Results, cotangents: list[Variable]) -> list[Variable]:
    """Return the cotangents of all predictions; see the module's text."""
    found = Walk(*results.histories, *results.outputs)
    direct, spread = cotangents
    back = found.move.mT
    means = affine_history(False, back, direct, reverse=True)
    moved = (back @ means[1:, ..., None])[..., 0]
    through = moved[..., :, None] * found.pull[..., None, :]
    for _ in range(through.type.ndim - spread.type.ndim):  # all series have the same covariances
        through = pt.sum(through, axis=1)
    through = pt.concatenate([through, pt.zeros_like(spread[:1])])
    total = spread + through
    total = (total + total.mT) / 2
    return [means, affine_history(True, back, total, reverse=True)]


def smoothed_by_factors(model: StateSpace, given: Observations, walk: Walk) -> list[Variable]:
    """Return the smoothed moments by square-root elements; see the module's text."""
    rows = tuple(elements(model, given, "square-root"))

    def from_end(later: Element, earlier: Element) -> Element:
        return compose_roots(earlier, later)

    _, mean, left, _, _ = associative_scan(compose_roots, rows)
    *_, eta, right = associative_scan(from_end, rows, reverse=True)

    one = pt.eye(model.initial_mean.shape[0], dtype=mean.type.dtype)

    def both(rows: list[Variable]) -> list[Variable]:
        mean, left, eta, right = rows
        joined = left.T @ right
        lower = lower_factor(pt.concatenate([pt.zeros_like(joined) + one, joined], axis=1))
        found = pt.linalg.solve_triangular(lower, left.T, lower=True, b_ndim=2)
        return [mean + found.T @ (found @ (eta - right @ (right.T @ mean))), found.T @ found]

    after = [pt.concatenate([v[1:], pt.zeros_like(v[:1])]) for v in (eta, right)]
    found = _map(both, "kalman_smoothed", [mean, left, *after])
    return with_derivatives_of(smoothed(walk, in_parallel=True), found)


def _map(step: Callable[..., Sequence[Variable]], name: str, rows: Any) -> list[Variable]:
    """Return what a function makes of a tree of rows, for those of all steps."""
    arrays, tree = flatten(rows)
    own = [row_type(v)() for v in arrays]
    pairs = list(zip(arrays, own, strict=True))
    return at_all_steps(pairs, step(tree.build(iter(own))), name)
