"""Iterations of which only the last value counts: a power, and Newton's method for a root."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from benchmarks.model import Array, Graph, Library, Loop

NEWTON_TOLERANCE = 1e-12


def build_power(library: Library) -> Graph:
    """``A**k`` elementwise."""
    A, k = pt.dvector("A"), pt.lscalar("k")
    powers = library.scan(
        lambda result, A: result * A,
        outputs_info=[pt.ones_like(A)],
        non_sequences=[A],
        n_steps=k,
        strict=True,
        return_updates=False,
    )
    return Graph([A, k], powers[-1], [A], cost=powers[-1].sum())


def power_data() -> list[Array]:
    """Ten numbers near one."""
    return [np.linspace(0.999, 1.001, 10), np.array(1_000, dtype="int64")]


def power_workspace(data: Sequence[Array], gradient: bool) -> list[Array]:
    """The result, or all powers and two rows for the way back."""
    A, k = data
    if not gradient:
        return [np.zeros_like(A)]
    return [np.zeros((int(k) + 1, A.size)), np.zeros_like(A), np.zeros_like(A)]


def build_newton(library: Library) -> Graph:
    """A cube root, until the step is negligible."""
    target, start = pt.dscalars("target", "start")

    def step(root: Any, target: Any) -> Any:
        better = root - (root**3 - target) / (3.0 * root**2)
        settled = pt.abs(better - root) <= NEWTON_TOLERANCE * pt.abs(better)
        return better, library.until(settled)

    roots = library.scan(
        step,
        outputs_info=[start],
        non_sequences=[target],
        n_steps=100,
        strict=True,
        return_updates=False,
    )
    return Graph([target, start], roots[-1], [target], cost=roots[-1])


def newton_data() -> list[Array]:
    """A number and a first guess far from its root."""
    return [np.array(1e6), np.array(1.0)]


LOOPS = (
    Loop(
        name="newton",
        title="Newton with until, scalar",
        build=build_newton,
        data=newton_data,
        hand=["iterations.newton"],
        workspace=lambda data, gradient: [],
        jax="newton",
        goals={False: 1.1, True: 1.1},
        has_cost=True,
        plus_call=True,
        reference_gradient=False,
        quick=True,
        notes=["JAX: lax.while_loop, which is differentiated forwards only"],
    ),
    Loop(
        name="power",
        title="last row of A**k, k = 1,000, 10 wide",
        build=build_power,
        data=power_data,
        hand=["iterations.power"],
        workspace=power_workspace,
        jax="power",
        goals={False: 1.1, True: 1.1},
        has_cost=True,
        plus_call=True,
        quick=True,
    ),
)
