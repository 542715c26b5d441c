"""Kalman filters: scanlib's beside pymc-extras', which are loops of `pytensor.scan`.

Run as ``python -m benchmarks.kalman`` where pymc-extras is installed (Python 3.12 and later);
without it scanlib's methods are compared with each other. Times are processor times: until the
first results are there (`compile`), from an empty cache, and of later calls, the median of five
rounds in each of which all filters are called. `adopted` is pymc-extras' filter as it is after
``scanlib.enable()``. Ratios are times of pymc-extras' filter over those of a row.

A second table has the filter whose gain is fixed once it has settled, on a long series.
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


def theirs(arrays: Arrays) -> tuple[list[Any], Any]:
    """Return symbols and the log likelihood of pymc-extras' standard filter."""
    from pymc_extras.statespace import filters

    y = pt.matrix("y")
    symbols = {n: pt.TensorType("float64", v.shape)(n) for n, v in arrays.items()}
    states, observed = len(arrays["initial_mean"]), len(arrays["observation_cov"])
    outputs = filters.StandardFilter().build_graph(
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


class Filter:
    """A filter's value, and value with gradient by two matrices, compiled."""

    def __init__(self, inputs: list[Any], cost: Any, values: list[np.ndarray]) -> None:
        self.values = values
        start = time.process_time()
        value = pytensor.function(inputs, cost)
        wrt = [v for v in inputs[1:] if v.name in ("transition", "observation_cov")]
        both = pytensor.function(inputs, [cost, *pytensor.grad(cost, wrt)])
        self.functions = value, both
        self.value, (total, move, cov) = value(*values), both(*values)
        self.compiled = time.process_time() - start
        # What a covariance is differentiated along is symmetric.
        self.found = total, move, (cov + cov.T) / 2
        self.times: list[list[float]] = []

    def measure(self) -> None:
        self.times.append([seconds(f, self.values) for f in self.functions])

    def numbers(self) -> np.ndarray:
        """Return seconds: compiling, the value, value and gradient."""
        return np.array([self.compiled, *np.median(self.times, axis=0)])


def compared(filters: dict[str, Filter], base: str, title: str) -> None:
    """Measure filters in turn and print a row for each."""
    for _ in range(5):
        for each in filters.values():
            each.measure()
    first = next(iter(filters.values()))
    for name, each in filters.items():
        own, ratios = each.numbers(), filters[base].numbers() / each.numbers()
        differences = [
            np.abs(mine - theirs).max() / np.abs(theirs).max()
            for mine, theirs in zip(each.found, first.found, strict=True)
        ]
        times = f"{own[0]:.1f} | {1000 * own[1]:.2f} | {1000 * own[2]:.2f}"
        print(
            f"| {title} | {name} | {times} | {' | '.join(f'{r:.1f}' for r in ratios)} | "
            f"{differences[0]:.0e}, {max(differences[1:]):.0e} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--long", type=int, default=10_000, help="steps of the second table")
    options = parser.parse_args()
    rng = np.random.default_rng(2)
    head = (
        "| model | filter | compile, s | value, ms | with gradient, ms | ratios | | | difference |"
    )
    print(head + "\n|---|---|---|---|---|---|---|---|---|")
    for states, observed in ((2, 1), (4, 1), (8, 2)):
        arrays = varmax(states, observed)
        values = [rng.normal(size=(options.steps, observed)), *arrays.values()]
        filters = {"scanlib": Filter(*ours(arrays, "sequential"), values)}
        if find_spec("pymc_extras"):
            filters["pymc-extras"] = Filter(*theirs(arrays), values)
            with scanlib.enabled():
                filters["pymc-extras, adopted"] = Filter(*theirs(arrays), values)
        base = "pymc-extras" if "pymc-extras" in filters else "scanlib"
        compared(filters, base, f"{states} states, {observed} observed")
    print("\n" + head + "\n|---|---|---|---|---|---|---|---|---|")
    arrays = varmax(6, 2)
    values = [rng.normal(size=(options.long, 2)), *arrays.values()]
    filters = {m: Filter(*ours(arrays, m), values) for m in ("sequential", "convergent")}
    compared(filters, "sequential", f"6 states, 2 observed, {options.long} steps")


if __name__ == "__main__":
    main()
