"""Models of time series: GARCH and an autoregression of order two."""

import numpy as np
import pytensor.tensor as pt

from benchmarks.model import Array, Graph, Library, Loop, like


def build_garch(library: Library) -> Graph:
    """The variances of a GARCH model and its mean loss."""
    omega, alpha, beta, first = pt.dscalars("omega", "alpha", "beta", "first")
    squares = pt.dvector("squares")
    variances = library.scan(
        lambda square, variance, omega, alpha, beta: omega + alpha * square + beta * variance,
        sequences=[pt.concatenate([first[None], squares[:-1]])],
        outputs_info=[first],
        non_sequences=[omega, alpha, beta],
        strict=True,
        return_updates=False,
    )
    cost = pt.mean(pt.log(variances) + squares / variances)
    inputs = [omega, alpha, beta, squares, first]
    return Graph(inputs, variances, [omega, alpha, beta], cost=cost)


def garch_data() -> list[Array]:
    """Parameters, squared returns and the variance before them."""
    squares = np.random.default_rng(1).standard_normal(10_000) ** 2
    return [np.array(0.02), np.array(0.10), np.array(0.88), squares, np.array(1.0)]


def garch_by_lfilter(
    omega: Array, alpha: Array, beta: Array, squares: Array, first: Array
) -> Array:
    """SciPy's filter over what the variance does not enter."""
    from scipy.signal import lfilter

    inputs = np.empty_like(squares)
    inputs[0] = omega + alpha * first
    inputs[1:] = omega + alpha * squares[:-1]
    return lfilter([1.0], [1.0, -float(beta)], inputs, zi=[beta * first])[0]


def build_ar2(library: Library) -> Graph:
    """An autoregression with two taps and the mean of its squares."""
    first, second = pt.dscalars("first", "second")
    shocks, start = pt.dvectors("shocks", "start")
    trace = library.scan(
        lambda shock, older, newer, first, second: first * newer + second * older + shock,
        sequences=[shocks],
        outputs_info=[{"initial": start, "taps": [-2, -1]}],
        non_sequences=[first, second],
        strict=True,
        return_updates=False,
    )
    cost = pt.mean(trace**2)
    return Graph([first, second, shocks, start], trace, [first, second], cost=cost)


def ar2_data() -> list[Array]:
    """Coefficients, shocks and the two values before them."""
    shocks = np.random.default_rng(2).standard_normal(100_000)
    return [np.array(0.6), np.array(0.3), shocks, np.array([0.5, -0.5])]


def ar2_by_lfilter(first: Array, second: Array, shocks: Array, start: Array) -> Array:
    """SciPy's filter with two coefficients."""
    from scipy.signal import lfilter, lfiltic

    denominator = [1.0, -float(first), -float(second)]
    before = lfiltic([1.0], denominator, start[::-1])
    return lfilter([1.0], denominator, shocks, zi=before)[0]


LOOPS = (
    Loop(
        name="garch",
        title="GARCH, 10,000",
        build=build_garch,
        data=garch_data,
        hand=["series.garch"],
        workspace=like([3], [3]),
        jax="garch",
        lfilter=garch_by_lfilter,
        goals={False: 1.05, True: 1.1},
        has_cost=True,
        quick=True,
    ),
    Loop(
        name="ar2",
        title="AR(2) by taps, 100,000",
        build=build_ar2,
        data=ar2_data,
        hand=["series.ar2"],
        workspace=like([2], [2]),
        jax="ar2",
        lfilter=ar2_by_lfilter,
        goals={False: 0.35, True: 0.5},
        has_cost=True,
        quick=True,
    ),
)
