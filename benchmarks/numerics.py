"""How precise the discounted sum is in single precision.

    y[t] = x[t] + gamma * y[t-1],   gamma = 0.99, t = 0 … 9,999

The experiment of the README of torch-discounted-cumsum (A. Obukhov, 2021): the largest absolute
difference from the sequential sum in double precision, over inputs of ones and over standard
normal noise. Inputs and gamma are rounded to single precision before either sum sees them, so that
what is left are the errors of summing. That package gives 2.8e-4 (sequential) and 9.9e-5 (its
parallel kernel on a GPU) for ones, 1.8e-5 and 1.5e-5 for noise, with a gamma rounded on one side
only. The goals here are for ones and for the first draw of noise; more draws show the spread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytensor.tensor as pt

from benchmarks.loops.affine import build_discounted, build_discounted_cumsum, discounted_by_lfilter
from benchmarks.model import (
    OURS,
    AbsentError,
    Array,
    Graph,
    compiled,
    compiled_direct,
    direct_function,
    hand_function,
    of_value,
)
from benchmarks.timing import median

LENGTH = 10_000
GAMMA = np.float32(0.99)
DRAWS = 20
ONES_GOAL, NOISE_GOAL = 2.7e-5, 5.0e-6

Sum = Callable[[Array, Array], Array]


@dataclass
class ErrorRow:
    """The largest errors of one way to sum; `judged` if the goals are for it."""

    name: str
    judged: bool
    ones: float | None = None
    noise: list[float] = field(default_factory=list)
    absent: str = ""

    def errors(self) -> list[float | None]:
        """Ones, the first draw of noise, the median of the draws and the worst."""
        if self.ones is None:
            return [None] * 4
        return [self.ones, self.noise[0], median(self.noise), max(self.noise)]

    def met(self) -> bool | None:
        """Whether both goals are met; None where there are none."""
        if not self.judged or self.ones is None:
            return None
        return self.ones <= ONES_GOAL and self.noise[0] <= NOISE_GOAL

    def record(self) -> dict[str, Any]:
        """The row as the JSON file holds it."""
        return {
            "name": self.name,
            "ones": self.ones,
            "ones_goal": ONES_GOAL if self.judged else None,
            "noise": self.noise,
            "noise_goal": NOISE_GOAL if self.judged else None,
            "absent": self.absent,
        }


def sequential(x: Array, gamma: Array) -> Array:
    """The sum by one loop in the precision of its arguments."""
    y = np.empty_like(x)
    hand_function("affine.discounted", gradient=False)(x, gamma[()], y)
    return y


def reference(x: Array) -> Array:
    """The same numbers summed in double precision."""
    return sequential(x.astype("float64"), np.array(GAMMA, dtype="float64"))


def by_scan(x: Array, gamma: Array) -> Array:
    return compiled(build_discounted("float32"), OURS, False)(x, gamma)[0]


def by_direct(x: Array, gamma: Array) -> Array:
    function = compiled_direct(build_discounted_cumsum("float32"), False)
    return function(x, gamma)[0]


@cache
def build_reversed() -> Graph:
    """The sum of what comes after, as in reinforcement learning."""
    x, gamma = pt.fvector("x"), pt.fscalar("gamma")
    function = direct_function("discounted_cumsum")
    return of_value([x, gamma], function(x, gamma, reverse=True), [x])


def by_reversed(x: Array, gamma: Array) -> Array:
    """Summed from the other end of the same numbers, and turned round again."""
    function = compiled_direct(build_reversed, False)
    return np.ascontiguousarray(function(x[::-1].copy(), gamma)[0][::-1])


def by_jax(parallel: bool) -> Sum:
    def summed(x: Array, gamma: Array) -> Array:
        if find_spec("jax") is None:
            raise AbsentError("jax not installed")
        from benchmarks import jax_loops

        call = jax_loops.bind("discounted", parallel, False, [x, gamma])
        assert call is not None
        return np.asarray(call())

    return summed


SUMS: dict[str, tuple[Sum, bool]] = {
    "scanlib.scan": (by_scan, True),
    "scanlib.discounted_cumsum": (by_direct, True),
    "scanlib.discounted_cumsum, reverse": (by_reversed, True),
    "hand-written loop": (sequential, False),
    "SciPy's lfilter": (discounted_by_lfilter, False),
    "lax.scan": (by_jax(False), False),
    "lax.associative_scan": (by_jax(True), False),
}


def largest_error(summed: Sum, x: Array) -> float:
    """Largest absolute difference from the sum in double precision."""
    y = summed(x, np.array(GAMMA))
    if y.dtype != np.float32:
        raise TypeError(f"expected a sum in float32, got {y.dtype}")
    return float(np.max(np.abs(y - reference(x))))


def measure_errors(draws: int = DRAWS) -> list[ErrorRow]:
    """Run the experiment for everybody."""
    rng = np.random.default_rng(0)
    inputs: Sequence[Array] = [rng.standard_normal(LENGTH).astype("float32") for _ in range(draws)]
    rows = []
    for name, (summed, judged) in SUMS.items():
        row = ErrorRow(name, judged)
        try:
            row.ones = largest_error(summed, np.ones(LENGTH, dtype="float32"))
            row.noise = [largest_error(summed, x) for x in inputs]
        except AbsentError as reason:
            row.absent = str(reason)
        except Exception as error:
            row.ones, row.absent = None, f"failed: {type(error).__name__}"
        rows.append(row)
    return rows
