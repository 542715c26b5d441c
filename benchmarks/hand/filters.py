"""A Kalman filter in NumPy, its gradient by the chain rule through every line of a step.

The derivative of ``X = F^{-1} B`` is ``dX = F^{-1} (dB - dF X)``.
"""

from typing import NamedTuple

import numpy as np

from benchmarks.model import Array


class Step(NamedTuple):
    """What the way back reads of one step."""

    error: Array
    spread: Array
    forecast: Array
    gain: Array
    updated: Array
    kept: Array
    remaining: Array
    term: float


def kalman_step(y: Array, mean: Array, covariance: Array, design: Array, noise: Array) -> Step:
    """Everything of a step but the prediction of the next."""
    error = y - design @ mean
    spread = covariance @ design.T
    forecast = design @ spread + noise
    gain = np.linalg.solve(forecast, spread.T).T
    updated = mean + gain @ error
    kept = np.eye(len(mean)) - gain @ design
    remaining = kept @ covariance @ kept.T + gain @ noise @ gain.T
    distance = error @ np.linalg.solve(forecast, error)
    log_det = np.log(np.linalg.det(forecast))
    term = -0.5 * (len(y) * np.log(2 * np.pi) + log_det + distance)
    return Step(error, spread, forecast, gain, updated, kept, remaining, term)


def kalman(
    observed: Array, mean: Array, covariance: Array, transition: Array, design: Array,
    noise: Array, shocks: Array,
) -> Array:  # fmt: skip
    """Log-likelihood of each observation given those before."""
    terms = np.empty(len(observed))
    for t, y in enumerate(observed):
        step = kalman_step(y, mean, covariance, design, noise)
        mean = transition @ step.updated
        covariance = transition @ step.remaining @ transition.T + shocks
        terms[t] = step.term
    return terms


def kalman_gradient(
    observed: Array, mean: Array, covariance: Array, transition: Array, design: Array,
    noise: Array, shocks: Array,
) -> tuple[float, Array, Array, Array, Array]:  # fmt: skip
    """The log-likelihood, with its derivatives by the four matrices."""
    steps, before, total = [], [], 0.0
    for y in observed:
        step = kalman_step(y, mean, covariance, design, noise)
        steps.append(step)
        before.append((mean, covariance))
        mean = transition @ step.updated
        covariance = transition @ step.remaining @ transition.T + shocks
        total += step.term
    matrices = (transition, design, noise, shocks)
    d_T, d_Z, d_H, d_Q = (np.zeros_like(matrix) for matrix in matrices)
    d_mean, d_cov = np.zeros_like(mean), np.zeros_like(covariance)
    for step, (mean, covariance) in zip(steps[::-1], before[::-1], strict=True):
        d_T += np.outer(d_mean, step.updated)
        d_T += d_cov @ transition @ step.remaining.T + d_cov.T @ transition @ step.remaining
        d_Q += d_cov
        d_updated = transition.T @ d_mean
        d_left = transition.T @ d_cov @ transition
        d_kept = d_left @ step.kept @ covariance.T + d_left.T @ step.kept @ covariance
        d_before = step.kept.T @ d_left @ step.kept
        d_gain = d_left @ step.gain @ noise.T + d_left.T @ step.gain @ noise
        d_H += step.gain.T @ d_left @ step.gain
        d_gain -= d_kept @ design.T
        d_Z -= step.gain.T @ d_kept
        d_gain += np.outer(d_updated, step.error)
        d_error = step.gain.T @ d_updated
        inverse = np.linalg.inv(step.forecast)
        weighted = inverse @ step.error
        d_error -= 0.5 * (weighted + inverse.T @ step.error)
        d_forecast = 0.5 * np.outer(inverse.T @ step.error, weighted) - 0.5 * inverse.T
        d_turned = inverse.T @ d_gain.T
        d_forecast -= d_turned @ step.gain
        d_spread = d_turned.T + design.T @ d_forecast
        d_H += d_forecast
        d_Z += d_forecast @ step.spread.T + d_spread.T @ covariance - np.outer(d_error, mean)
        d_mean = d_updated - design.T @ d_error
        d_cov = d_before + d_spread @ design
    return total, d_T, d_Z, d_H, d_Q
