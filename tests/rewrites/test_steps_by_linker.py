"""Matrix recurrences where linkers take steps: what is joined, what is lowered, and values."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from tests.modes import AT_ONCE, MODES
from tests.reference import reference_scan

T, D, N = 7, 3, 4


def two_taps(x, h1, h2, A, B):
    return [A @ h1 + B @ h2 + x]


def apart(x, h, g, A, B):
    return [A @ g + x, B @ h + x]


def together(x, h, g, A, B):
    return [A @ h + B @ g + x, B @ h + A @ g - x]


def rows(x, h, A, B):
    return [h @ (A - B) + x]


def rows_of_two_taps(x, h1, h2, A, B):
    return [h1 @ A + h2 @ B + x]


def own_matrices(x, h, A, B):
    return [((A - B) @ h[:, :, None])[:, :, 0] + x]


def kinds(function):
    nodes = function.maker.fgraph.apply_nodes
    return [sum(isinstance(node.op, kind) for node in nodes) for kind in (Scan, LinearScan)]


# The step, its states (how many rows each starts from, and their shapes), whether steps are faster
# where sizes are known, and where they are not.
CASES = {
    "two taps": (two_taps, [(2, D)], True, False),
    "two states": (apart, [(D,), (D,)], True, False),
    "all read all": (together, [(D,), (D,)], False, False),
    "a batch": (rows, [(N, D)], True, True),
    "two taps of a batch": (rows_of_two_taps, [(2, N, D)], True, True),
    "a batch of matrices": (own_matrices, [(N, D)], False, False),
}


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_lowered(name, mode, known):
    step, shapes, *stay = CASES[name]
    has_taps = step in (two_taps, rows_of_two_taps)

    def symbol(shape):
        return pt.tensor(shape=shape if known else (None,) * len(shape), dtype="float64")

    rng = np.random.default_rng(1)
    batched = step is own_matrices
    data = [rng.normal(size=(T, D))]
    data += [rng.normal(size=shape) for shape in shapes]
    data += [rng.normal(size=((N,) if batched else ()) + (D, D)) / 2 for _ in range(2)]
    x, *starts, A, B = inputs = [symbol(own.shape) for own in data]
    states = [{"initial": own, "taps": [-1, -2]} if has_taps else own for own in starts]
    traces = scanlib.scan(step, x, states, [A, B], return_updates=False)
    traces = traces if isinstance(traces, list) else [traces]
    cost = sum((own**2).sum() for own in traces)
    outputs = [*traces, *pytensor.grad(cost, inputs)]
    function = pytensor.function(inputs, outputs, mode=MODES[mode])
    at_once = pytensor.function(inputs, outputs, mode=AT_ONCE[mode])
    assert (kinds(function) != kinds(at_once)) == stay[0 if known else 1]
    found = function(*data)
    starts = data[1:-2]
    started = [{"initial": own, "taps": [-1, -2]} if has_taps else own for own in starts]
    expected = reference_scan(step, data[:1], started, data[-2:])
    for one, two in zip(found, expected, strict=False):
        np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)
    total = pytensor.function(inputs, cost, mode=MODES["py"])
    for k, gradient in enumerate(found[len(traces) :]):
        changed = [own.copy() for own in data]
        place = tuple(size // 2 for size in gradient.shape)
        values = []
        for shift in (1e-6, -1e-6):
            changed[k][place] = data[k][place] + shift
            values.append(total(*changed))
        np.testing.assert_allclose(
            gradient[place], (values[0] - values[1]) / 2e-6, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("function", [pt.exp, pt.neg])
@pytest.mark.parametrize("mode", ["numba", "c"])
def test_matrices_that_functions_make_are_made_step_by_step(mode, function):
    """All steps at once need all of them, and cheap ones are made at once by all."""
    x, w, h, B = pt.matrix("x"), pt.matrix("w"), pt.vector("h"), pt.matrix("B")

    def step(x, w, h, B):
        return function(w[:, None] * B) @ h + x

    trace = scanlib.scan(step, [x, w], h, B, return_updates=False)
    by_steps, at_once = (
        pytensor.function([x, w, h, B], trace, mode=modes[mode]) for modes in (MODES, AT_ONCE)
    )
    assert kinds(by_steps) == ([1, 0] if function is pt.exp else [0, 1])
    assert kinds(at_once) == [0, 1]
    compute, rng = np.exp if function is pt.exp else np.negative, np.random.default_rng(0)
    for size in (2, 7):
        rows = rng.normal(size=(T, size)), 0.5 * rng.normal(size=(T, size))
        given = [*rows, rng.normal(size=size), 0.3 * rng.normal(size=(size, size))]
        state, expected = given[2], []
        for row, weights in zip(*rows, strict=True):
            state = compute(weights[:, None] * given[3]) @ state + row
            expected.append(state)
        for compiled in (by_steps, at_once):
            np.testing.assert_allclose(compiled(*given), expected, rtol=1e-10)


@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.parametrize("order", [3, 12])
def test_taps_of_a_number_are_not_joined(order, mode):
    weights = pt.tensor("weights", shape=(order,), dtype="float64")
    x, start = pt.dvector("x"), pt.tensor("start", shape=(order,), dtype="float64")

    def step(x, *rest):
        *taps, weights = rest
        return pt.dot(weights, pt.stack(taps[::-1])) + x

    taps = {"initial": start, "taps": list(range(-order, 0))}
    y = scanlib.scan(step, x, taps, weights, return_updates=False)
    cost = (y**2).sum()
    outputs = [y, *pytensor.grad(cost, [weights, x, start])]
    f = pytensor.function([weights, x, start], outputs, mode=MODES[mode])
    assert kinds(f)[1] == 0
    rng = np.random.default_rng(2)
    values = [rng.normal(size=n) * scale for n, scale in ((order, 0.3), (T, 1), (order, 1))]
    found = f(*values)

    def rows(weights, x, start):
        rows = list(start)
        for item in x:
            rows.append(weights @ rows[: -order - 1 : -1] + item)
        return np.array(rows[order:])

    np.testing.assert_allclose(found[0], rows(*values))
    for k, gradient in enumerate(found[1:]):
        for i in range(len(gradient)):
            moved = [value.astype("complex128") for value in values]
            moved[k][i] += 1e-20j
            np.testing.assert_allclose(gradient[i], (rows(*moved) ** 2).sum().imag * 1e20)
