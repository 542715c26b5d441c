"""Cumulative maximum, product and logaddexp of a million numbers."""

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

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

LENGTH = 1_000_000

Combine = Callable[[Variable, Variable], Variable]


def build_cumulative(combine: Combine, first: float) -> Callable[[Library], Graph]:
    """The results of a combination of the last result with the next row."""

    def build(library: Library) -> Graph:
        x = pt.dvector("x")
        trace = library.scan(
            lambda x, h: combine(h, x),
            sequences=[x],
            outputs_info=[np.float64(first)],
            strict=True,
            return_updates=False,
        )
        return of_value([x], trace, [x])

    return build


def by_name(name: str) -> tuple[str, Callable[[], Graph]]:
    """The same by a function of scanlib."""

    def build() -> Graph:
        x = pt.dvector("x")
        return of_value([x], direct_function(name)(x, axis=0), [x])

    return name, build


def walk() -> list[Array]:
    """A random walk, whose maximum rises often and not always."""
    steps = np.random.default_rng(6).standard_normal(LENGTH)
    return with_cotangent([np.cumsum(steps) / np.sqrt(LENGTH)], like=0)


def near_one() -> list[Array]:
    """Factors whose products neither vanish nor overflow."""
    noise = np.random.default_rng(7).standard_normal(LENGTH)
    return with_cotangent([np.exp(1e-3 * noise)], like=0)


def noise() -> list[Array]:
    """Standard normal numbers."""
    return with_cotangent([np.random.default_rng(8).standard_normal(LENGTH)], like=0)


LOOPS = (
    Loop(
        name="cummax",
        title="cumulative max, 1,000,000",
        build=build_cumulative(pt.maximum, -np.inf),
        data=walk,
        hand=["cumulative.maximum"],
        workspace=like([0], [0, 0]),
        direct=by_name("cummax"),
        jax="cummax",
        goals={False: 0.7, True: 0.7},
        quick=True,
    ),
    Loop(
        name="cumprod",
        title="cumulative product, 1,000,000",
        build=build_cumulative(pt.mul, 1.0),
        data=near_one,
        hand=["cumulative.product"],
        workspace=like([0], [0, 0]),
        jax="cumprod",
        goals={False: 0.6, True: 0.7},
    ),
    Loop(
        name="cumlogsumexp",
        title="cumulative logaddexp, 1,000,000",
        build=build_cumulative(pt.logaddexp, -np.inf),
        data=noise,
        hand=["cumulative.logaddexp"],
        workspace=like([0], [0, 0]),
        direct=by_name("cumlogsumexp"),
        jax="cumlogsumexp",
        goals={False: 0.25, True: 0.4},
        quick=True,
    ),
)
