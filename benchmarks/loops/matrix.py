"""``h[t] = A h[t-1] + b[t]``, with one matrix for all steps and with one for each step."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytensor.tensor as pt

from benchmarks.model import (
    Array,
    Graph,
    Library,
    Loop,
    direct_function,
    like,
    of_value,
    with_cotangent,
)

STEPS = 10_000


@cache
def build_matrix(per_step: bool) -> Callable[[Library], Graph]:
    """The loop by a step function."""

    def step(b: Any, h: Any, A: Any) -> Any:
        return A @ h + b

    def step_with_matrix(A: Any, b: Any, h: Any) -> Any:
        return A @ h + b

    def build(library: Library) -> Graph:
        A = pt.dtensor3("A") if per_step else pt.dmatrix("A")
        b, start = pt.dmatrix("b"), pt.dvector("start")
        trace = library.scan(
            step_with_matrix if per_step else step,
            sequences=[A, b] if per_step else [b],
            outputs_info=[start],
            non_sequences=[] if per_step else [A],
            strict=True,
            return_updates=False,
        )
        return of_value([A, b, start], trace, [A, b])

    return build


@cache
def build_linear_scan(per_step: bool) -> Callable[[], Graph]:
    """The same without a step function."""

    def build() -> Graph:
        function = direct_function("linear_scan")
        A = pt.dtensor3("A") if per_step else pt.dmatrix("A")
        b, start = pt.dmatrix("b"), pt.dvector("start")
        return of_value([A, b, start], function(A, b, init=start, matrix=True), [A, b])

    return build


def matrix_data(size: int, per_step: bool) -> Callable[[], list[Array]]:
    """Matrices with a spectral radius of about 0.9, and what is added."""

    def data() -> list[Array]:
        rng = np.random.default_rng(10)
        shape = (STEPS, size, size) if per_step else (size, size)
        arrays = [
            0.9 * rng.standard_normal(shape) / np.sqrt(size),
            rng.standard_normal((STEPS, size)),
            rng.standard_normal(size),
        ]
        if not per_step:
            arrays[0] *= 0.9 / np.max(np.abs(np.linalg.eigvals(arrays[0])))
        return with_cotangent(arrays, like=1)

    return data


def make_matrix(size: int, per_step: bool, goal: tuple[float, float], quick: bool) -> Loop:
    """The loop for one size of matrices."""
    kind = "step_" if per_step else ""
    which = "A[t]" if per_step else "A"
    return Loop(
        name=f"matrix{size}" + ("_per_step" if per_step else ""),
        title=f"{which} h + b[t], 10,000, d = {size}",
        build=build_matrix(per_step),
        data=matrix_data(size, per_step),
        hand=[f"matrix.{kind}loops", f"matrix.{kind}products"],
        workspace=like([1], [1, 0, 1]),
        direct=("linear_scan", build_linear_scan(per_step)),
        jax="matrix_per_step" if per_step else "matrix" if size < 64 else "matrix_sequential",
        goals={False: goal[0], True: goal[1]},
        quick=quick,
    )


LOOPS = (
    make_matrix(4, per_step=False, goal=(0.4, 0.5), quick=True),
    make_matrix(4, per_step=True, goal=(0.4, 0.5), quick=False),
    make_matrix(16, per_step=False, goal=(1.0, 1.0), quick=True),
    make_matrix(16, per_step=True, goal=(1.0, 1.0), quick=False),
    make_matrix(64, per_step=False, goal=(1.0, 1.0), quick=False),
)
