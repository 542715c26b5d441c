"""A Kalman filter: small matrices, factored and solved at every step."""

import numpy as np
import pytensor.tensor as pt

from benchmarks.model import Array, Graph, Library, Loop

STEPS, STATES, OBSERVED = 500, 4, 2


def build_kalman(library: Library) -> Graph:
    """The log-likelihood of the observations, by the filter of every textbook."""
    observed, mean = pt.dmatrix("observed"), pt.dvector("mean")
    names = ("covariance", "transition", "design", "noise", "shocks")
    covariance, transition, design, noise, shocks = map(pt.dmatrix, names)

    def step(y, mean, covariance, transition, design, noise, shocks):
        error = y - design @ mean
        spread = covariance @ design.T
        forecast = design @ spread + noise
        gain = pt.linalg.solve(forecast, spread.T, assume_a="pos").T
        updated = mean + gain @ error
        kept = pt.eye(STATES) - gain @ design
        remaining = kept @ covariance @ kept.T + gain @ noise @ gain.T
        distance = error @ pt.linalg.solve(forecast, error, assume_a="pos", b_ndim=1)
        log_det = pt.log(pt.linalg.det(forecast))
        likelihood = -0.5 * (OBSERVED * np.log(2 * np.pi) + log_det + distance)
        return transition @ updated, transition @ remaining @ transition.T + shocks, likelihood

    parameters = [transition, design, noise, shocks]
    _, _, terms = library.scan(
        step,
        sequences=[observed],
        outputs_info=[mean, covariance, None],
        non_sequences=parameters,
        strict=True,
        return_updates=False,
    )
    return Graph([observed, mean, covariance, *parameters], terms, parameters, cost=pt.sum(terms))


def kalman_data() -> list[Array]:
    """500 steps of a stable system."""
    rng = np.random.default_rng(7)
    transition = rng.standard_normal((STATES, STATES))
    transition *= 0.9 / np.abs(np.linalg.eigvals(transition)).max()
    return [
        rng.standard_normal((STEPS, OBSERVED)),
        np.zeros(STATES),
        np.eye(STATES),
        transition,
        rng.standard_normal((OBSERVED, STATES)),
        0.5 * np.eye(OBSERVED),
        0.3 * np.eye(STATES),
    ]


LOOPS = (
    Loop(
        name="kalman",
        title="Kalman filter, 500 × 4 states × 2 observations",
        build=build_kalman,
        data=kalman_data,
        hand=["filters.kalman"],
        workspace=lambda data, gradient: [],
        jax="kalman",
        has_cost=True,
        tolerance=1e-8,
        notes=["the hand-written loop is NumPy's"],
    ),
)
