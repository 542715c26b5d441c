"""Steps that reduce stacks of a few arrays are elementwise, and so are their gradients."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from scipy.special import logsumexp, softmax

import scanlib
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from tests.reference import reference_scan

rng = np.random.default_rng(11)
# How a step reduces a stack of its state and its row, with PyTensor and with NumPy.
STEPS = {
    "max": (lambda m, x, h, axis: m.max(m.stack([h + x, x, 0.5 * h], axis=axis), axis=axis)),
    "min": (lambda m, x, h, axis: m.min(m.stack([h + x, x], axis=axis), axis=axis)),
    "sum": (lambda m, x, h, axis: 0.5 * m.sum(m.stack([h, x], axis=axis), axis=axis)),
    "mean": (lambda m, x, h, axis: m.mean(m.stack([h, x, 2 * x], axis=axis), axis=axis)),
    "prod": (lambda m, x, h, axis: m.prod(m.stack([h + 1, m.tanh(x)], axis=axis), axis=axis)),
    "logsumexp": (
        lambda m, x, h, axis: (m.logsumexp if m is pt else logsumexp)(
            m.stack([h - 0.5, x], axis=axis), axis=axis
        )
    ),
    "softmax": (
        lambda m, x, h, axis: m.sum(
            (pt.special.softmax if m is pt else softmax)(3 * m.stack([h, x], axis=axis), axis=axis)
            * m.stack([h, x - 1], axis=axis),
            axis=axis,
        )
    ),
    "any": (
        lambda m, x, h, axis: (m.switch if m is pt else np.where)(
            m.any(m.stack([h > 1, x > 0], axis=axis), axis=axis), 0.5 * h, h + x
        )
    ),
    "between": (lambda m, x, h, axis: m.sum(m.exp(-(m.stack([h, x], axis=axis) ** 2)), axis=axis)),
}


@pytest.mark.parametrize("shape, axis", [((), 0), ((3,), 0), ((3,), -1), ((2, 3), 1)])
@pytest.mark.parametrize("name", STEPS)
def test_stacks_of_a_state_and_a_row(name, shape, axis):
    step, ndim = STEPS[name], len(shape)
    x, h = pt.tensor("x", shape=(None,) * (ndim + 1)), pt.tensor("h", shape=(None,) * ndim)
    trace = scanlib.scan(
        lambda x, h: step(pt, x, h, axis), sequences=[x], outputs_info=[h], return_updates=False
    )
    outputs = [trace, *pytensor.grad((trace**2).sum(), [x, h])]
    f = pytensor.function([x, h], outputs, mode="NUMBA")
    ops = [node.op for node in f.maker.fgraph.apply_nodes]
    assert any(isinstance(op, ElemwiseScan) for op in ops)
    # The derivative of a product counts zeros among its factors.
    assert name == "prod" or not any(isinstance(op, Scan) for op in ops)
    for steps in (0, 1, 7):
        values = rng.normal(size=(steps, *shape)), rng.normal(size=shape)
        (expected,) = reference_scan(
            lambda x, h: [step(np, x, h, axis)], [values[0]], [values[1]], rows=[(shape, "float64")]
        )
        found, *derivatives = f(*values)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        for k, derivative in enumerate(derivatives):
            moved = [value.copy() for value in values]
            for place in np.ndindex(derivative.shape):
                ends = []
                for sign in (1, -1):
                    moved[k][place] = values[k][place] + sign * 1e-6
                    ends.append(
                        (
                            reference_scan(
                                lambda x, h: [step(np, x, h, axis)],
                                [moved[0]],
                                [moved[1]],
                                rows=[(shape, "float64")],
                            )[0]
                            ** 2
                        ).sum()
                    )
                moved[k][place] = values[k][place]
                np.testing.assert_allclose(
                    derivative[place], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6
                )


@pytest.mark.parametrize("row", [(), (3,)])
@pytest.mark.parametrize("length", [2, None])
@pytest.mark.parametrize("multiply", ["dot", "turned", "sum"])
def test_vectors_times_stacks(multiply, length, row):
    """As in autoregressions; a vector of unknown length may have another, and stays one."""
    ndim = len(row)
    e, phi = pt.tensor("e", shape=(None,) * (ndim + 1)), pt.tensor("phi", shape=(length,))
    start = pt.tensor("start", shape=(None,) * (ndim + 1))

    def step(e, y2, y1, phi):
        if multiply == "dot":
            return pt.dot(phi, pt.stack([y1, y2])) + e
        if multiply == "turned":
            return pt.dot(pt.stack([y1, y2], axis=-1), phi) + e
        return (pt.shape_padright(phi, ndim) * pt.stack([y1, y2])).sum(axis=0) + e

    trace = scanlib.scan(
        step,
        sequences=[e],
        outputs_info=[{"initial": start, "taps": [-2, -1]}],
        non_sequences=[phi],
        return_updates=False,
    )
    f = pytensor.function([e, start, phi], [trace, pytensor.grad(trace.sum(), phi)], mode="NUMBA")
    ops = [node.op for node in f.maker.fgraph.apply_nodes]
    assert length is None or any(isinstance(op, ElemwiseScan) for op in ops)
    values, weights = rng.normal(size=(6, *row)), np.array([0.5, -0.3])
    past = list(rng.normal(size=(2, *row)))
    rows, slopes = list(past), [np.zeros((2, *row)) for _ in range(2)]
    for value in values:
        rows.append(weights[0] * rows[-1] + weights[1] * rows[-2] + value)
        own = weights[0] * slopes[-1] + weights[1] * slopes[-2]
        slopes.append(own + np.array([rows[-2], rows[-3]]))
    found, derivative = f(values, np.array(past), weights)
    np.testing.assert_allclose(found, rows[2:])
    np.testing.assert_allclose(derivative, sum(slopes).reshape(2, -1).sum(axis=1))


def test_means_of_small_dtypes_are_added_in_the_dtype_of_the_sum():
    x, h = pt.vector("x", dtype="int8"), pt.scalar("h", dtype="int64")
    trace = scanlib.scan(
        lambda x, h: pt.stack([x, x, x]).sum() + h * 0,
        sequences=[x],
        outputs_info=[h],
        return_updates=False,
    )
    values = np.array([100, -128, 127], "int8")
    np.testing.assert_array_equal(pytensor.function([x, h], trace)(values, 1), [300, -384, 381])


def test_products_of_matrices_that_a_step_stacks():
    x, h = pt.tensor("x", shape=(None, 2)), pt.tensor("h", shape=(2,))
    W = pt.tensor("W", shape=(2, 3))

    def step(x, h, W):
        rows = pt.stack([h, x, h * x])  # (3, 2)
        return pt.tanh((rows @ W).sum(axis=1)[:2] + pt.stack([h, x], axis=1) @ rows[0])

    trace = scanlib.scan(
        step, sequences=[x], outputs_info=[h], non_sequences=[W], return_updates=False
    )
    f = pytensor.function([x, h, W], trace)
    values, state, matrix = rng.normal(size=(4, 2)), rng.normal(size=2), rng.normal(size=(2, 3))
    expected, before = [], state
    for row in values:
        rows = np.stack([before, row, before * row])
        before = np.tanh(
            (rows @ matrix).sum(axis=1)[:2] + np.stack([before, row], axis=1) @ rows[0]
        )
        expected.append(before)
    np.testing.assert_allclose(f(values, state, matrix), expected)


def test_arrays_of_one_item_are_not_repeated():
    """A join repeats nothing."""
    x, h = pt.tensor("x", shape=(None, 1)), pt.dvector("h")
    trace = scanlib.scan(
        lambda x, h: h + pt.max(pt.stack([h, x]), axis=0),
        sequences=[x],
        outputs_info=[h],
        return_updates=False,
    )
    f = pytensor.function([x, h], trace)
    np.testing.assert_array_equal(f(np.ones((2, 1)), np.zeros(1)), [[1], [2]])
    with pytest.raises((ValueError, AssertionError), match=r"size|shape"):
        f(np.ones((2, 1)), np.zeros(3))


def test_deep_steps_are_searched_in_time():
    x, h = pt.dvector("x"), pt.dscalar("h")

    def step(x, h):
        for _ in range(12):
            h = pt.add(*(pt.tanh(h + k * x) for k in range(12)))
        return pt.sum(pt.stack([h, x]) * h)

    trace = scanlib.scan(step, sequences=[x], outputs_info=[h], return_updates=False)
    f = pytensor.function([x, h], trace)
    value, state = rng.normal(size=3), 0.5
    for k, found in enumerate(f(value, state)):
        inner = state
        for _ in range(12):
            inner = sum(np.tanh(inner + j * value[k]) for j in range(12))
        state = inner * inner + value[k] * inner
        np.testing.assert_allclose(found, state)


def test_long_stacks_stay_arrays():
    x, h = pt.dvector("x"), pt.dscalar("h")
    trace = scanlib.scan(
        lambda x, h: pt.max(pt.stack([h + 0.1 * k * x for k in range(20)])),
        sequences=[x],
        outputs_info=[h],
        return_updates=False,
    )
    f = pytensor.function([x, h], trace)
    value = rng.normal(size=4)
    expected, state = [], 0.0
    for row in value:
        state = max(state + 0.1 * k * row for k in range(20))
        expected.append(state)
    np.testing.assert_allclose(f(value, 0.0), expected)
