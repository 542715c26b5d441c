"""Recurrence families: loops that run in blocks of steps, against the plain loop."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import assert_derivatives
from tests.families import FAMILIES, LENGTHS, assert_close, assert_lowered, both, kernels
from tests.modes import MODES

SHORT = (0, 1, 2, 3, 5, 8, 9, 33)
FLOATS = [
    name
    for name, case in FAMILIES.items()
    if case.dtype in ("float32", "float64") and name != "far"
]


@pytest.fixture(autouse=True)
def backend(request):
    with kernels(getattr(request, "param", "numba")):
        yield


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "backend", [pytest.param("numba", marks=pytest.mark.slow), "C"], indirect=True
)
@pytest.mark.parametrize("name", FAMILIES)
def test_values(name):
    case = FAMILIES[name]
    inputs, traces = case.render()
    function = pytensor.function(inputs, traces, mode=MODES["c"], on_unused_input="ignore")
    (op,) = assert_lowered(function)
    assert sorted(recurrence.family for recurrence in op.recurrences) == sorted(case.families)
    for steps in LENGTHS:
        values = case.values(steps)
        before = [value.copy() for value in values]
        results = function(*values)
        for actual, expected in zip(results, case.reference(values), strict=True):
            assert_close(actual, expected, f"{name}, {steps} steps")
        for value, old in zip(values, before, strict=True):
            np.testing.assert_array_equal(value, old)
        for actual, again in zip(results, function(*values), strict=True):
            assert actual.tobytes() == again.tobytes(), "results differ from run to run"


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOATS)
def test_gradients(name):
    """The loop of a gradient is lowered as well; it walks backwards."""
    case = FAMILIES[name]
    inputs, traces = case.render()
    rng = np.random.default_rng(5)
    weight = pt.vector("weight", dtype=case.dtype)
    cost = sum((trace * weight).sum() for trace in traces)
    gradients = pytensor.grad(cost, inputs, disconnected_inputs="ignore")
    function, plain = both([*inputs, weight], gradients, MODES["c"])
    if name not in ("affine-fixed", "affine-fixed-f32", "cumsum", "cumsum-f32", "geometric"):
        assert_lowered(function)
    for steps in (*SHORT, 1025):
        values = [*case.values(steps), rng.uniform(-1, 1, steps).astype(case.dtype)]
        for actual, expected in zip(function(*values), plain(*values), strict=True):
            assert_close(actual, expected, f"{name}, {steps} steps")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["affine", "ar3-per-step", "three", "log-affine", "reads-states"])
def test_second_derivatives(name):
    case = FAMILIES[name]
    inputs, traces = case.render()
    cost = sum((trace**2).sum() for trace in traces)
    values = case.values(6)

    def reference(*values):
        return float(sum((trace**2).sum() for trace in case.reference(list(values))))

    assert_derivatives(cost, dict(zip(inputs, values, strict=True)), reference, MODES["c"])


@pytest.mark.parametrize("name", ["affine", "two", "maximum", "arma"])
def test_in_numba_mode(name):
    case = FAMILIES[name]
    inputs, traces = case.render()
    function = pytensor.function(inputs, traces, mode=MODES["numba"])
    assert_lowered(function)
    for steps in LENGTHS:
        values = case.values(steps)
        for actual, expected in zip(function(*values), case.reference(values), strict=True):
            assert_close(actual, expected, f"{name}, {steps} steps")


@pytest.mark.parametrize("name", ["affine", "season", "shift-register"])
def test_initial_values_that_are_constants(name):
    case = FAMILIES[name]
    inputs, traces = case.render(constant_start=True)
    function = pytensor.function(inputs, traces, mode=MODES["c"])
    assert_lowered(function)
    for steps in SHORT:
        values = case.values(steps)
        results = function(*values[: len(inputs)])
        for actual, expected in zip(results, case.reference(values), strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize("steps", [0, 1, 9, 1025])
def test_static_lengths(steps):
    x = pt.tensor("x", dtype="float64", shape=(steps,))
    trace = scanlib.scan(lambda x, h: 0.5 * h + x, x, 2.0, return_updates=False)
    assert trace.type.shape == (steps,)
    function = pytensor.function([x], [trace, pytensor.grad(trace.sum(), x)], mode=MODES["c"])
    assert_lowered(function)
    value = np.random.default_rng(1).normal(size=steps)
    h, expected = 2.0, []
    for item in value:
        h = 0.5 * h + item
        expected.append(h)
    trace, gradient = function(value)
    np.testing.assert_allclose(trace, expected, rtol=1e-12, atol=1e-12)
    left = steps - np.arange(steps)
    np.testing.assert_allclose(gradient, 2 - 0.5 ** (left - 1.0), rtol=1e-12)


def test_last_rows_and_sums_without_a_history():
    x = pt.vector("x")
    trace = scanlib.scan(lambda x, h, g: [0.5 * h + x, 0.9 * g + h], x, [1.0, 0.0],
                         return_updates=False)  # fmt: skip
    outputs = [trace[0][-1], trace[1][-2], trace[1].sum()]
    function, plain = both([x], outputs, MODES["c"])
    assert_lowered(function)
    for steps in (2, 3, 9, 1023, 1024, 1025, 1026, 2049):
        value = np.random.default_rng(steps).normal(size=steps)
        for actual, expected in zip(function(value), plain(value), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-11)
    with pytest.raises(IndexError):
        function(np.ones(1))


def test_arrays_that_are_not_contiguous():
    case = FAMILIES["affine"]
    inputs, traces = case.render()
    function = pytensor.function(inputs, traces, mode=MODES["c"])
    a, b, h = case.values(4100)
    table = np.stack([a[:2050], b[:2050]], axis=1)
    for pair in ((a[::2], b[::2]), (a[::-1], b[::-1]), (a[::-3], b[2::3][: len(a[::-3])]),
                 (table[:, 0], table[:, 1]), (a[1:1026], b[2:1027])):  # fmt: skip
        size = min(map(len, pair))
        values = [pair[0][:size], pair[1][:size], h]
        assert_close(function(*values)[0], case.reference(values)[0])


@pytest.mark.parametrize("backend", ["numba", "C"], indirect=True)
def test_a_maximum_of_a_state_is_one_of_its_values():
    """What later recurrences read of a state is what the loop returns, to the last digit."""
    x = pt.vector("x")

    def step(x, total, highest):
        total = total + x
        return [total, pt.maximum(highest, total)]

    total, highest = scanlib.scan(step, x, [0.0, 0.0], return_updates=False)
    gradient = pytensor.grad(highest.sum(), x)
    function, plain = both([x], [total, highest, gradient], MODES["c"])
    assert_lowered(function, 2)
    value = np.random.default_rng(0).normal(size=2000)
    actual, expected = function(value), plain(value)
    np.testing.assert_array_equal(actual[1], np.maximum.accumulate(np.r_[0.0, actual[0]])[1:])
    for mine, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["numba", "C"], indirect=True)
def test_gradients_of_clamped_sums(backend):
    """Derivatives of extremes ask which operand they are equal to."""
    x = pt.vector("x")
    trace = scanlib.scan(lambda x, h: pt.maximum(h + x, 0.0), x, 0.0, return_updates=False)
    function, plain = both([x], [trace, pytensor.grad(trace.sum(), x)], MODES["c"])
    assert_lowered(function, 2)
    value = np.random.default_rng(0).normal(size=3000)
    for mine, wanted in zip(function(value), plain(value), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-11, atol=1e-11)


def test_clips_with_bounds_out_of_order():
    """A clip compares with its lower bound first; it is then no minimum of a maximum."""
    x, high = pt.vector("x"), pt.scalar("high")
    trace = scanlib.scan(
        lambda x, h, high: pt.clip(h + x, -1.0, high), x, 0.0, high, return_updates=False
    )
    function, plain = both([x, high], trace, MODES["c"])
    value = np.random.default_rng(0).normal(size=99)
    for bound in (-2.0, 0.5):
        np.testing.assert_allclose(function(value, bound), plain(value, bound), atol=1e-14)


def test_switched_off():
    case = FAMILIES["affine"]
    inputs, traces = case.render()
    with pytensor.config.change_flags(scanlib__lower=False):
        function = pytensor.function(inputs, traces, mode=MODES["c"])
    with pytest.raises(AssertionError):
        assert_lowered(function)
    values = case.values(33)
    assert_close(function(*values)[0], case.reference(values)[0])
