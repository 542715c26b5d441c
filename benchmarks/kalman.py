"""Kalman filters: scanlib's beside pymc-extras', which are loops of `pytensor.scan`.

Run as ``python -m benchmarks.kalman`` where pymc-extras is installed (Python 3.12 and later);
without it scanlib's methods are compared with each other. Times are processor times: until the
first results are there (`compile`), from an empty cache, and of later calls, the median of five.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib

Arrays = dict[str, np.ndarray]


def varmax(states: int, observed: int) -> Arrays:
    """Return the matrices of a vector autoregression that is observed with noise."""
    rng = np.random.default_rng(1)
    move = rng.normal(size=(states, states))
    move *= 0.8 / np.abs(np.linalg.eigvals(move)).max()
    return {
        "transition": move,
        "observation": rng.normal(size=(observed, states)),
        "state_cov": np.eye(states),
        "observation_cov": 0.5 * np.eye(observed),
        "initial_mean": np.zeros(states),
        "initial_cov": np.eye(states),
    }


def ours(arrays: Arrays, method: str) -> tuple[list[Any], Any]:
    """Return symbols and the log likelihood."""
    y = pt.matrix("y")
    symbols = {n: pt.TensorType("float64", v.shape)(n) for n, v in arrays.items()}
    found = scanlib.kalman_filter(y, scanlib.StateSpace(**symbols), True, method)
    return [y, *symbols.values()], found.log_likelihood


def theirs(arrays: Arrays, kind: str) -> tuple[list[Any], Any]:
    """Return symbols and the log likelihood of pymc-extras."""
    from pymc_extras.statespace import filters

    y = pt.matrix("y")
    symbols = {n: pt.TensorType("float64", v.shape)(n) for n, v in arrays.items()}
    states, observed = len(arrays["initial_mean"]), len(arrays["observation_cov"])
    kalman = getattr(filters, kind)()
    outputs = kalman.build_graph(
        y,
        symbols["initial_mean"],
        symbols["initial_cov"],
        pt.zeros(states),
        pt.zeros(observed),
        symbols["transition"],
        symbols["observation"],
        pt.eye(states),
        symbols["observation_cov"],
        symbols["state_cov"],
    )
    density = next(v for v in outputs if "loglik" in (v.name or ""))
    return [y, *symbols.values()], density.sum()


def seconds(function: Callable[..., Any], values: list[np.ndarray]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    function(*values)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    print("| model | filter | compile, s | value, ms | with gradient, ms | difference |")
    print("|---|---|---|---|---|---|")
    for states, observed in ((2, 1), (6, 2), (12, 3)):
        arrays = varmax(states, observed)
        y = np.random.default_rng(2).normal(size=(steps, observed))
        built = {f"scanlib, {m}": ours(arrays, m) for m in ("sequential", "convergent", "parallel")}
        if find_spec("pymc_extras"):
            for kind in ("StandardFilter", "UnivariateFilter"):
                built[f"pymc-extras, {kind}"] = theirs(arrays, kind)
        functions, compiled = {}, {}
        values = [y, *arrays.values()]
        for name, (inputs, cost) in built.items():
            start = time.process_time()
            value = pytensor.function(inputs, cost)
            wrt = [v for v in inputs[1:] if v.name in ("transition", "observation_cov")]
            both = pytensor.function(inputs, [cost, *pytensor.grad(cost, wrt)])
            found = both(*values)[0], value(*values)
            compiled[name] = time.process_time() - start
            functions[name] = value, both, found
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
        for _ in range(5):
            for name, (value, both, _) in functions.items():
                own = [seconds(f, values) for f in (value, both)]
                times[name].append((own[0], own[1]))
        expected = functions["scanlib, sequential"][2][1]
        for name, (_, _, found) in functions.items():
            value, both = 1000 * np.median(times[name], axis=0)
            difference = abs(found[1] / expected - 1)
            print(
                f"| {states} states, {observed} observed | {name} | {compiled[name]:.1f} | "
                f"{value:.1f} | {both:.1f} | {difference:.0e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
