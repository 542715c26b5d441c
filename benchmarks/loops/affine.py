"""``h[t] = a[t] * h[t-1] + b[t]`` for one and many channels, and the discounted sum."""

from collections.abc import Callable
from functools import cache

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


@cache
def build_affine(ndim: int, dtype: str) -> Callable[[Library], Graph]:
    """The loop over sequences of `ndim` dimensions."""

    def build(library: Library) -> Graph:
        a, b = (pt.tensor(name, dtype=dtype, shape=(None,) * ndim) for name in "ab")
        start = pt.tensor("start", dtype=dtype, shape=(None,) * (ndim - 1))
        trace = library.scan(
            lambda a, b, h: a * h + b,
            sequences=[a, b],
            outputs_info=[start],
            strict=True,
            return_updates=False,
        )
        return of_value([a, b, start], trace, [a, b])

    return build


@cache
def build_linear_scan(ndim: int, dtype: str) -> Callable[[], Graph]:
    """The same without a step function."""

    def build() -> Graph:
        function = direct_function("linear_scan")
        a, b = (pt.tensor(name, dtype=dtype, shape=(None,) * ndim) for name in "ab")
        start = pt.tensor("start", dtype=dtype, shape=(None,) * (ndim - 1))
        return of_value([a, b, start], function(a, b, init=start), [a, b])

    return build


def affine_data(shape: tuple[int, ...], dtype: str) -> Callable[[], list[Array]]:
    """Coefficients that neither grow nor forget at once, in the given shape."""

    def data() -> list[Array]:
        rng = np.random.default_rng(4)
        arrays = [
            rng.uniform(0.8, 1.1, shape),
            rng.standard_normal(shape),
            rng.standard_normal(shape[1:]),
        ]
        return with_cotangent([np.asarray(array, dtype=dtype) for array in arrays], like=1)

    return data


def tolerance(dtype: str) -> float:
    """The results are as long as the rounding errors of contracting sums allow."""
    return 1e-9 if dtype == "float64" else 1e-3


def make_affine(
    name: str, shape: tuple[int, ...], dtype: str, goals: dict[bool, float], quick: bool = False
) -> Loop:
    """The affine loop on one shape and dtype."""
    sizes = " × ".join(f"{size:,}" for size in shape)
    ndim = len(shape)
    return Loop(
        name=name,
        title=f"a[t] h + b[t], {sizes}, {dtype}",
        build=build_affine(ndim, dtype),
        data=affine_data(shape, dtype),
        hand=["affine.narrow" if ndim == 1 else "affine.wide"],
        workspace=like([1], [1, 0, 1]),
        direct=("linear_scan", build_linear_scan(ndim, dtype)),
        jax="affine",
        goals=goals,
        tolerance=tolerance(dtype),
        theirs=dtype == "float64",
        quick=quick,
    )


@cache
def build_discounted(dtype: str) -> Callable[[Library], Graph]:
    """The discounted sum of what came before."""

    def build(library: Library) -> Graph:
        x, gamma = pt.vector("x", dtype=dtype), pt.scalar("gamma", dtype=dtype)
        trace = library.scan(
            lambda x, y, gamma: x + gamma * y,
            sequences=[x],
            outputs_info=[pt.zeros((), dtype=dtype)],
            non_sequences=[gamma],
            strict=True,
            return_updates=False,
        )
        return of_value([x, gamma], trace, [x])

    return build


@cache
def build_discounted_cumsum(dtype: str) -> Callable[[], Graph]:
    """The same without a step function."""

    def build() -> Graph:
        function = direct_function("discounted_cumsum")
        x, gamma = pt.vector("x", dtype=dtype), pt.scalar("gamma", dtype=dtype)
        return of_value([x, gamma], function(x, gamma), [x])

    return build


def discounted_data(length: int, dtype: str) -> Callable[[], list[Array]]:
    """Noise, discounted by 0.99."""

    def data() -> list[Array]:
        x = np.random.default_rng(5).standard_normal(length).astype(dtype)
        return with_cotangent([x, np.array(0.99, dtype=dtype)], like=0)

    return data


def discounted_by_lfilter(x: Array, gamma: Array) -> Array:
    """SciPy's filter with a single coefficient."""
    from scipy.signal import lfilter

    one = np.ones(1, dtype=x.dtype)
    return lfilter(one, np.array([1, -gamma], dtype=x.dtype), x)


def make_discounted(name: str, dtype: str, goals: dict[bool, float], quick: bool = False) -> Loop:
    """The discounted sum of 100,000 numbers."""
    return Loop(
        name=name,
        title=f"discounted sum, 100,000, {dtype}",
        build=build_discounted(dtype),
        data=discounted_data(100_000, dtype),
        hand=["affine.discounted"],
        workspace=like([0], [0, 0]),
        direct=("discounted_cumsum", build_discounted_cumsum(dtype)),
        jax="discounted",
        lfilter=discounted_by_lfilter,
        goals=goals,
        lfilter_goal=0.1,
        tolerance=tolerance(dtype),
        theirs=dtype == "float64",
        quick=quick,
    )


_NARROW = {False: 0.35, True: 0.45}
_WIDE = {False: 1.1, True: 1.1}

LOOPS = (
    make_affine("affine_1e5", (100_000,), "float64", _NARROW, quick=True),
    make_affine("affine_1e5_f32", (100_000,), "float32", {False: 0.25}),
    make_affine("affine_1e6", (1_000_000,), "float64", _NARROW),
    make_affine("affine_1e6_f32", (1_000_000,), "float32", {False: 0.25}),
    make_affine("affine_2", (100_000, 2), "float64", {}, quick=True),
    make_affine("affine_2_f32", (100_000, 2), "float32", {}),
    make_affine("affine_256", (10_000, 256), "float64", _WIDE, quick=True),
    make_affine("affine_256_f32", (10_000, 256), "float32", {}),
    make_affine("affine_4096", (1_000, 4096), "float64", _WIDE),
    make_affine("affine_4096_f32", (1_000, 4096), "float32", {}),
    make_discounted("discounted", "float64", {False: 0.22, True: 0.25}, quick=True),
    make_discounted("discounted_f32", "float32", {False: 0.15}),
)
