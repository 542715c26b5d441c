"""Loops solved by Newton's method for all their steps: iterations, agreement and time.

Run as ``python -m benchmarks.newton`` (``--longest 10000`` for shorter loops). The loop is a gated
recurrent unit with eight states and random weights of a scale: 1 for the usual initialization.
Above a scale of about two, small differences grow from step to step for long stretches, and beyond
three all the time (a Lyapunov exponent above zero): nothing of this kind converges there.
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


def weights(scale: float, seed: int) -> list[np.ndarray]:
    """Return the weights of inputs and, scaled, of states: three matrices each."""
    rng = np.random.default_rng(seed)
    shape = (3, STATES, STATES)
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
    sequential = compiled("sequential")
    print("| scale, seed | steps | Lyapunov exponent | method | iterations | error | time |")
    print("|---|---|---|---|---|---|---|")
    cases = [(1.0, 0), (2.0, 0), (3.0, 1), (2.6, 2), (3.0, 0), (4.0, 0)]
    for scale, seed in cases:
        w, u = weights(scale, seed)
        for steps in [n for n in (1000, 10_000, 100_000) if n <= longest]:
            if scale != 1 and steps > 10_000:
                continue
            x = np.random.default_rng(1).normal(size=(steps, STATES))
            expected, _ = sequential(x, w, u)
            exponent = lyapunov_exponent(expected, x, w, u)
            base = seconds(sequential, x, w, u)
            for name, function in functions.items():
                row = f"| {scale:g}, {seed} | {steps} | {exponent:.3f} | {name} |"
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
