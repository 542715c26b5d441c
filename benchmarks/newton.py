"""Loops solved by Newton's method for all their steps: iterations, agreement and time.

Run as ``python -m benchmarks.newton`` (``--longest 10000`` for shorter loops). The loop is a gated
recurrent unit with eight states and random weights: uniform within ±1/√8, as libraries initialize
them, or normal with a standard deviation of a scale over √8. Above a scale of about two, small
differences grow from step to step for long stretches, and beyond three all the time (a Lyapunov
exponent above zero): nothing of this kind converges there.

`Levenberg` is what `damped` is compared with: Newton's method within a trust region, every
iteration of which is a Kalman smoother whose observations are the iterate before (ELK, Gonzalez and
others, 2024); its damping is adapted by the residual as well.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from scanlib.ops.errors import ConvergenceError

STATES = 8
METHODS = {
    "Newton": scanlib.Newton(tolerance=1e-7, max_iterations=60),
    "diagonal": scanlib.Newton(tolerance=1e-7, max_iterations=60, jacobian="diagonal"),
    "damped": scanlib.Newton(tolerance=1e-7, max_iterations=60, damping="adaptive"),
}


def weights(scale: float | None, seed: int) -> list[np.ndarray]:
    """Return the weights of inputs and, scaled, of states: three matrices each; None: uniform."""
    rng = np.random.default_rng(seed)
    shape = (3, STATES, STATES)
    if scale is None:
        return [rng.uniform(-1, 1, shape) / np.sqrt(STATES) for _ in range(2)]
    return [factor * rng.normal(size=shape) / np.sqrt(STATES) for factor in (1.0, scale)]


def gru(x, h, w, u):
    """Return the next state of a gated recurrent unit."""
    z = pt.sigmoid(w[0] @ x + u[0] @ h)
    r = pt.sigmoid(w[1] @ x + u[1] @ h)
    return z * h + (1 - z) * pt.tanh(w[2] @ x + u[2] @ (r * h))


def lyapunov_exponent(states: np.ndarray, x: np.ndarray, w: np.ndarray, u: np.ndarray) -> float:
    """Return the mean growth of a small difference from step to step."""
    difference, growth = np.full(STATES, STATES**-0.5), 0.0
    for h, row in zip(np.vstack([np.zeros(STATES), states[:-1]]), x, strict=True):
        z, r = (1 / (1 + np.exp(-(w[k] @ row + u[k] @ h))) for k in (0, 1))
        c = np.tanh(w[2] @ row + u[2] @ (r * h))
        dz = z * (1 - z) * (u[0] @ difference)
        dr = r * (1 - r) * (u[1] @ difference)
        dc = (1 - c**2) * (u[2] @ (dr * h + r * difference))
        difference = z * difference + dz * (h - c) + (1 - z) * dc
        size = np.linalg.norm(difference)
        growth += np.log(size)
        difference = difference / size
    return growth / len(x)


def linearized(before: np.ndarray, x: np.ndarray, w: Any, u: Any) -> tuple[Any, Any]:
    """Return the states after those of all steps, and the Jacobians of the steps."""
    z, r = (1 / (1 + np.exp(-(x @ w[k].T + before @ u[k].T))) for k in (0, 1))
    c = np.tanh(x @ w[2].T + (r * before) @ u[2].T)
    dz, dr = ((v * (1 - v))[:, :, None] * u[k] for k, v in enumerate((z, r)))
    one = np.eye(STATES)
    dc = (1 - c**2)[:, :, None] * (u[2] @ (r[:, :, None] * one + before[:, :, None] * dr))
    jacobian = z[:, :, None] * one + dz * (before - c)[:, :, None] + (1 - z)[:, :, None] * dc
    return z * before + (1 - z) * c, jacobian


class Levenberg:
    """Newton's method whose steps are damped by a Kalman smoother."""

    def __init__(self) -> None:
        y, shift, move = pt.matrix("y"), pt.matrix("shift"), pt.tensor3("move")
        first, precision = pt.vector("first"), pt.scalar("precision")
        one = np.eye(STATES)
        model = scanlib.StateSpace(
            move, one, one, one / precision, first, one, state_intercept=shift
        )
        smooth = scanlib.kalman_smoother(y, model, True).mean
        self.smooth = pytensor.function([y, move, shift, first, precision], smooth)

    def __call__(self, x: np.ndarray, w: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, int]:
        """Return states and iterations.

        Raises
        ------
        ConvergenceError
            If there are too many.
        """
        states, precision, least = np.zeros((len(x), STATES)), 1e-3, np.inf
        found, jacobians = linearized(np.vstack([np.zeros(STATES), states[:-1]]), x, w, u)
        for count in range(1, 61):
            shift = found[1:] - np.einsum("tij,tj->ti", jacobians[1:], states[:-1])
            last = np.zeros((1, STATES))
            moves = np.concatenate([jacobians[1:], last[None] * np.eye(STATES)])
            shifts = np.vstack([shift, last])
            new = self.smooth(states, moves, shifts, found[0], precision)
            after, own = linearized(np.vstack([np.zeros(STATES), new[:-1]]), x, w, u)
            residual, change = float(np.linalg.norm(after - new)), abs(new - states).max()
            if residual < least:
                states, found, jacobians, least = new, after, own, residual
                precision = max(precision / 10, 1e-12)
                if change <= 1e-7:
                    return states, count
            else:
                precision *= 10
        raise ConvergenceError("60 iterations")


def compiled(method: Any) -> Any:
    """Return the function from rows and weights to states and the number of iterations."""
    x, w, u = pt.matrix("x"), pt.tensor3("w"), pt.tensor3("u")
    h, _ = scanlib.scan(gru, x, pt.zeros(STATES), [w, u], method=method, name="gru")
    count = pt.constant(0) if method == "sequential" else scanlib.newton_iterations(h)
    return pytensor.function([x, w, u], [h, count])


def seconds(function: Any, *arguments: np.ndarray) -> float:
    """Return the processor time of a call, the best of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        function(*arguments)
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=100_000)
    longest = parser.parse_args().longest
    functions = {name: compiled(method) for name, method in METHODS.items()}
    functions["Levenberg"] = Levenberg()
    sequential = compiled("sequential")
    print("| weights, seed | steps | Lyapunov exponent | method | iterations | error | time |")
    print("|---|---|---|---|---|---|---|")
    scales = (None, 1.0, 2.0, 3.0, 2.6, 3.0, 4.0)
    cases = list(zip(scales, (0, 0, 0, 1, 2, 0, 0), strict=True))
    for scale, seed in cases:
        w, u = weights(scale, seed)
        for steps in [n for n in (1000, 10_000, 100_000) if n <= longest]:
            if scale not in (None, 1) and steps > 10_000:
                continue
            x = np.random.default_rng(1).normal(size=(steps, STATES))
            expected, _ = sequential(x, w, u)
            exponent = lyapunov_exponent(expected, x, w, u)
            base = seconds(sequential, x, w, u)
            for name, function in functions.items():
                if name == "Levenberg" and steps > 1000:
                    continue
                kind = "uniform" if scale is None else f"{scale:g}"
                row = f"| {kind}, {seed} | {steps} | {exponent:.3f} | {name} |"
                try:
                    found, count = function(x, w, u)
                except ConvergenceError:
                    print(f"{row} not converged | | |", flush=True)
                    continue
                error = abs(found - expected).max()
                ratio = seconds(function, x, w, u) / base
                print(f"{row} {count} | {error:.0e} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
