"""Steps on arrays of a few numbers, which kernels take apart, against the plain loop."""

from functools import partial

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytensor.tensor.elemwise import Elemwise

import scanlib
from scanlib._compat import thaw_graph
from scanlib.kernels.arrays.decompositions import decompose
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from scanlib.ops.small_arrays import take_apart
from scanlib.schedules.array_loops import ArrayLoop
from tests.kernels.test_kernel_arrays import check, evaluated, runner, scan
from tests.modes import MODES

rng = np.random.default_rng(11)
DTYPES = ["float64", "float32", "int64", "int32", "complex128"]


# What a step may do to arrays: each makes one of two, the first of which is a vector.
WAYS = {
    "stack": lambda h, x, n: pt.stack(
        [part * x[k % 2] for k, part in enumerate(h[i] for i in range(n))]
    ),
    "turn": lambda h, x, n: h[::-1] - x[0],
    "roll": lambda h, x, n: pt.roll(h, 1) + x[-1],
    "join": lambda h, x, n: pt.concatenate([x[:1], h])[:n],
    "split": lambda h, x, n: pt.concatenate(pt.split(h, [1, n - 1], n_splits=2)[::-1]) * x[0],
    "set": lambda h, x, n: pt.set_subtensor(h[0], x[1]),
    "inc": lambda h, x, n: pt.inc_subtensor(h[-1:], x[:1]),
    "inc all": lambda h, x, n: pt.inc_subtensor(pt.zeros_like(h)[:], h + x[0]),
    "sum": lambda h, x, n: h + h.sum() * x.sum(),
    "largest": lambda h, x, n: pt.maximum(h, x.sum()) if h.dtype != "complex128" else h * x[0],
    "outer": lambda h, x, n: (h[:, None] * x[None, :]).sum(axis=1),
    "product": lambda h, x, n: pt.dot(pt.ones_like(h)[:, None] * x[None, :], x) + h,
    "dot": lambda h, x, n: pt.dot(h, h) + h * x[1],
    "shape": lambda h, x, n: (h.reshape((1, n)) + x[0])[0],
    "items": lambda h, x, n: pt.specify_shape(h, (n,)) * pt.alloc(x[1], n),
    "computed": lambda h, x, n: h + x[pt.cast(pt.ge(abs(h[0]), 1), "int64")],
    "own": lambda h, x, n: h * h[pt.cast(pt.ge(abs(x[0]), 1), "int64") % n],
    "choice": lambda h, x, n: pt.switch(pt.eq(h, h[0]), h, x[0] - h),
}


@st.composite
def programs(draw):
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "sizes": draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)),
        "ways": draw(st.lists(st.sampled_from(sorted(WAYS)), min_size=1, max_size=3)),
        "taps": draw(st.sampled_from([(-1,), (-1, -2), (-3, -1)])),
        "backwards": draw(st.booleans()),
        "steps": draw(st.sampled_from([0, 1, 2, 5])),
        "until": draw(st.booleans()),
        "kept": draw(st.booleans()),
    }


@given(programs())
def test_generated_steps(program):
    dtype, taps = program["dtype"], program["taps"]
    depth, swapped = -min(taps), len(program["sizes"]) == 2
    if swapped:
        program["sizes"] = program["sizes"][:1] * 2
    x = pt.tensor("x", dtype=dtype, shape=(None, 2))
    states = [
        pt.tensor(f"h{k}", dtype=dtype, shape=(size,) if taps == (-1,) else (depth, size))
        for k, size in enumerate(program["sizes"])
    ]

    def step(x, *values):
        rows = [values[k : k + len(taps)] for k in range(0, len(values), len(taps))]
        rows = rows[::-1] if swapped else rows  # states exchange their values
        found = []
        for row, n in zip(rows, program["sizes"], strict=True):
            value = row[0] if len(row) == 1 else row[0] + row[1]
            for way in program["ways"]:
                value = pt.cast(WAYS[way](value, x, n), dtype)
            # It stays small: integers that do not fit are an error in Python.
            value = value % 7 if dtype.startswith("int") else value / (1 + abs(value).sum())
            value = pt.cast(value, dtype)
            found.append(value)
        results = [*found, found[0][0] + x[1]]
        if program["until"]:
            return results, scanlib.until(abs(found[0]).sum() > 0.8)
        return results

    info = [{"initial": h, "taps": list(taps)} for h in states]
    outputs = scan(step, x, [*info, None], go_backwards=program["backwards"])
    outputs = outputs if program["kept"] else [out[-1:] for out in outputs]
    values = [np.resize([1, -2, 3, 0, 1], (program["steps"], 2))]
    values += [np.resize([2, -1, 1, 3], h.type.shape) for h in states]
    scale = 0.25 if dtype.startswith(("float", "complex")) else 1
    check([x, *states], outputs, [(v * scale).astype(dtype) for v in values], at_least=0)


def lorenz(h, a):
    u, v, w = h[0], h[1], h[2]
    return h + 0.01 * pt.stack([a[0] * (v - u), u * (a[1] - w) - v, u * v - a[2] * w])


def plain_lorenz(h, a, steps):
    rows = []
    for _ in range(steps):
        u, v, w = h
        h = h + 0.01 * np.array([a[0] * (v - u), u * (a[1] - w) - v, u * v - a[2] * w])
        rows.append(h)
    return np.array(rows).reshape(steps, 3)


START, RATES = np.array([1.0, -0.5, 2.0]), np.array([10.0, 28.0, 2.6])


@pytest.mark.parametrize("size", [3, None])
def test_right_hand_side_of_a_system(size, mode):
    h, a, n = pt.tensor("h", shape=(size,)), pt.dvector("a"), pt.lscalar("n")
    y = scan(lorenz, None, [h], non_sequences=[a], n_steps=n)
    derivatives = pytensor.grad((y**2).sum(), [h, a])
    f = pytensor.function([h, a, n], [y, y[-1], *derivatives], mode=mode)
    for steps in (1, 2, 70):
        found = f(START, RATES, steps)
        rows = plain_lorenz(START, RATES, steps)
        np.testing.assert_allclose(found[0], rows, rtol=1e-10)
        np.testing.assert_allclose(found[1], rows[-1], rtol=1e-10)
        for k, own in enumerate(found[2:]):
            for i in range(3):
                moved = [START.astype(complex), RATES.astype(complex)]
                moved[k][i] += 1e-30j
                wanted = (plain_lorenz(*moved, steps) ** 2).sum().imag / 1e-30
                np.testing.assert_allclose(own[i], wanted, rtol=1e-8)


MATRIX_STEPS = {
    "products": lambda P, x, F: F @ P @ F.T / (1 + (P**2).sum()) + x[0],
    "diagonals": lambda P, x, F: pt.diag(pt.diag(P)) * x[0] + 0.5 * P.T,
    "turned": lambda P, x, F: P[::-1, ::-1] * x[1] + pt.diag(x)[0, 0],
    "written": lambda P, x, F: pt.set_subtensor(P[0, :1], x[:1])[:, ::-1],
    "added": lambda P, x, F: pt.inc_subtensor(P[-1, 0], x[0] * P[0, -1]) * 0.5,
    "columns": lambda P, x, F: P[:, :1] * x[0] - 0.5 * P,
    "joined": lambda P, x, F: pt.concatenate([P[1:], P[:1] + x[1]]),
    "stacked": lambda P, x, F: pt.stack([P[k] * x[0] for k in range(P.type.shape[0])], axis=1),
    "reduced": lambda P, x, F: P * 0.3 + P.sum(axis=0) - P.max(axis=1, keepdims=True),
    "shape": lambda P, x, F: pt.reshape(P.T, P.shape) + x[0] / P.shape[0],
    "vector": lambda P, x, F: 0.5 * P + pt.outer(F[0], F @ P[0]) * x[0],
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MATRIX_STEPS)
def test_matrices(name, size):
    P, F = (pt.tensor(k, shape=(size, size)) for k in "PF")
    x = pt.tensor("x", shape=(None, 2))
    y, first = scan(
        lambda x, P, F: (MATRIX_STEPS[name](P, x, F), P[0]), x, [P, None], non_sequences=[F]
    )
    values = [rng.normal(size=v.type.shape) for v in (P, F)]
    steps = np.linspace(-1, 1, 8).reshape(4, 2)
    check([P, F, x], [y, first], [*values, steps], at_least=0)
    gradients = pytensor.grad((y**2).sum(), [P, F, x], disconnected_inputs="ignore")
    check([P, F, x], gradients, [*values, steps], at_least=0)
    last = scan(
        lambda x, a, b, F: MATRIX_STEPS[name](a, x, F) + b.T,
        x,
        [{"initial": pt.stack([P, F]), "taps": [-1, -2]}],
        non_sequences=[F],
    )[-1]
    check([P, F, x], [last], [*values, steps], at_least=0)


def test_matrix_of_unknown_size(mode):
    P, F = pt.dmatrix("P"), pt.tensor("F", shape=(2, 2))
    y = scan(lambda P, F: pt.stack([F[0] - P[1], P[0] * F[1]]), None, [P], [F], n_steps=3)
    f = pytensor.function([P, F], [y, pytensor.grad((y**2).sum(), F)], mode=mode)
    P, F = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.5, -1.0], [0.2, 0.1]])

    def plain(F):
        row, rows = P, []
        for _ in range(3):
            row = np.stack([F[0] - row[1], row[0] * F[1]])
            rows.append(row)
        return np.array(rows)

    found, derivative = f(P, F)
    np.testing.assert_allclose(found, plain(F), rtol=1e-13)
    for place in np.ndindex(2, 2):
        moved = F.astype(complex)
        moved[place] += 1e-30j
        np.testing.assert_allclose(derivative[place], (plain(moved) ** 2).sum().imag / 1e-30)
    with pytest.raises(ValueError, match=r"changed its shape|broadcast|shape"):
        f(np.ones((2, 3)), F)


@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (1, 2)])
def test_diagonals_of_batches(axes):
    h = pt.dmatrix("h")

    def step(h):
        whole = pt.basic.alloc_diag(h, axis1=axes[0], axis2=axes[1])
        return whole.sum(axis=axes[0]) * 0.5 + whole.max(axis=axes[1])

    shape = (2, 2)  # of each sum, whichever the axes
    check([h], [scan(step, None, [h], n_steps=3)], [rng.normal(size=shape)])


def test_derivatives_are_no_matrices_of_all_steps():
    h, a = pt.tensor("h", shape=(3,)), pt.dvector("a")
    y = scan(lorenz, None, [h], non_sequences=[a], n_steps=50)
    f = pytensor.function([h, a], pytensor.grad((y**2).sum(), [h, a]))
    loops = [node.op for node in f.maker.fgraph.toposort() if isinstance(node.op, Scan)]
    assert len(loops) == 2
    for op in loops:
        loop = ArrayLoop(op, may_be_empty=False)
        assert loop.lengths_in_locals
        assert not any(
            isinstance(n.op, Elemwise) and n.outputs[0].type.ndim for n in loop.order.nodes
        )


def test_batches_are_no_matrices_of_all_steps():
    H, a = pt.tensor("H", shape=(None, 3)), pt.dvector("a")

    def step(H):
        u, v, w = (H[:, k] for k in range(3))
        rates = [a[0] * (v - u), u * (a[1] - w) - v, u * v - a[2] * w]
        return H + 0.01 * pt.stack(rates, axis=1)

    y = scan(step, None, [H], n_steps=20)
    f = pytensor.function([H, a], [y, *pytensor.grad((y**2).sum(), [H, a])])
    assert not any(isinstance(node.op, LinearScan) for node in f.maker.fgraph.apply_nodes)
    starts = np.stack([START, START[::-1]])
    found, by_start, by_rate = f(starts, RATES)
    for k, start in enumerate(starts):
        np.testing.assert_allclose(found[:, k], plain_lorenz(start, RATES, 20), rtol=1e-10)
        for i in range(3):
            moved = start.astype(complex)
            moved[i] += 1e-30j
            wanted = (plain_lorenz(moved, RATES, 20) ** 2).sum().imag / 1e-30
            np.testing.assert_allclose(by_start[k, i], wanted, rtol=1e-8)
    for i in range(3):
        moved = RATES.astype(complex)
        moved[i] += 1e-30j
        wanted = sum((plain_lorenz(k, moved, 20) ** 2).sum().imag / 1e-30 for k in starts)
        np.testing.assert_allclose(by_rate[i], wanted, rtol=1e-8)


def test_derivatives_of_large_steps_are_no_matrices_of_all_steps():
    h, a = pt.tensor("h", shape=(3,)), pt.dvector("a")

    def step(h, a):
        for _ in range(13):  # more numbers than kernels take apart
            h = lorenz(h, a)
        return h

    y = scan(step, None, [h], non_sequences=[a], n_steps=4)
    f = pytensor.function([h, a], pytensor.grad((y**2).sum(), a))
    assert not any(isinstance(node.op, LinearScan) for node in f.maker.fgraph.apply_nodes)
    for i, found in enumerate(f(START, RATES)):
        moved = RATES.astype(complex)
        moved[i] += 1e-30j
        wanted = (plain_lorenz(START, moved, 52)[12::13] ** 2).sum().imag / 1e-30
        np.testing.assert_allclose(found, wanted, rtol=1e-8)


@pytest.mark.parametrize("size", [2, 4])
def test_initial_value_of_another_size(size, mode):
    h, a = pt.dvector("h"), pt.dvector("a")
    y = scan(lorenz, None, [h], non_sequences=[a], n_steps=5)
    f = pytensor.function([h, a], y, mode=mode)
    kind, text = (IndexError, "index 2 is out of bounds") if size == 2 else (ValueError, None)
    with pytest.raises(kind, match=text):
        f(np.ones(size), RATES)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_rows_of_unknown_width(width, mode):
    x, h, a = pt.dmatrix("x"), pt.tensor("h", shape=(3,)), pt.dvector("a")
    y = scan(lambda x, h, a: lorenz(h, a) * 0.9 + x, x, [h], non_sequences=[a])
    f = pytensor.function([x, h, a], y, mode=mode)
    rows = np.arange(2.0 * width).reshape(2, width)
    if width == 3:
        one = 0.9 * plain_lorenz(START, RATES, 1)[0] + rows[0]
        two = 0.9 * plain_lorenz(one, RATES, 1)[0] + rows[1]
        np.testing.assert_allclose(f(rows, START, RATES), [one, two], rtol=1e-12)
        return
    assert not len(f(rows[:0], START, RATES))
    with pytest.raises(ValueError, match=r"Incompatible Elemwise input shapes|broadcast"):
        f(rows, START, RATES)


def dcc(m, e, h, Q, p):
    """Two variances and their correlation; the width of `e` is that of `h`."""
    h = p[0] + p[1] * e**2 + p[2] * h
    u = e / m.sqrt(h)
    Q = (1 - p[3]) * np.eye(2) + p[3] * m.outer(u, u) + 0.5 * Q**3
    d = 1 / m.sqrt(m.diag(Q))
    R = Q * d[:, None] * d[None, :]
    return h, Q, R[0, 1] * u[0] * u[1] + m.diag(R * h).sum()


@pytest.mark.parametrize("width", [2, 3])
def test_sizes_follow_from_one_another(width, mode):
    """Rows of unknown width get that of the state, by way of arrays of unknown size."""
    e, p = pt.dmatrix("e"), pt.dvector("p")
    states = [pt.ones(2), pt.eye(2)]
    out = scan(partial(dcc, pt), e, [*states, None], non_sequences=[p])[2]
    loops = pytensor.grad(out.sum(), [e, p])
    f = pytensor.function([e, p], [out, *loops], mode=mode)
    rows, weights = rng.normal(size=(4, width)), np.array([0.1, 0.1, 0.8, 0.3])
    if width == 3:
        with pytest.raises(ValueError, match=r"[Ii]ncompatible|broadcast|shape"):
            f(rows, weights)
        return

    def plain(rows, weights):
        h, Q, found = np.ones(2), np.eye(2), []
        for row in rows:
            h, Q, out = dcc(np, row, h, Q, weights)
            found.append(out)
        return np.array(found)

    found, *derivatives = f(rows, weights)
    np.testing.assert_allclose(found, plain(rows, weights), rtol=1e-12)
    for k, array in enumerate((rows, weights)):
        for place in np.ndindex(*array.shape):
            moved = [rows.astype(complex), weights.astype(complex)]
            moved[k][place] += 1e-30j
            wanted = plain(*moved).sum().imag / 1e-30
            np.testing.assert_allclose(derivatives[k][place], wanted, rtol=1e-9, atol=1e-12)


def test_derivatives_of_diagonals_are_taken_apart():
    e, p = pt.dmatrix("e"), pt.dvector("p")
    cost = scan(partial(dcc, pt), e, [pt.ones(2), pt.eye(2), None], non_sequences=[p])[2].sum()
    fgraph = pytensor.function([e, p], pytensor.grad(cost, p)).maker.fgraph
    loops = [node.op for node in fgraph.apply_nodes if isinstance(node.op, Scan)]
    assert loops
    for op in loops:
        body = thaw_graph(op.body)
        decompose(body)
        assert take_apart(body, op.signature) is not None


def test_a_table_stays_in_memory():
    """What is read at a computed place is read there; the rest of the step has numbers only."""
    table, h = pt.dmatrix("table"), pt.tensor("h", shape=(2,))

    def step(h, table):
        place = pt.cast(abs(h[0]), "int64") % 3
        return pt.stack([h[1] + table[place, 1], h[0] - 0.5 * table[place, 0]])

    y = scan(step, None, [h], non_sequences=[table], n_steps=9)
    values = [rng.normal(size=(3, 2)), rng.normal(size=2)]
    check([table, h], [y], values)
    ((op, arguments, _),) = evaluated([table, h], [y], values)
    assert ArrayLoop(op, may_be_empty=False).lengths_in_locals == {"h0": 2}
    assert len(runner(op)(*arguments)[0]) == 10


def test_draws():
    """A generator is no array, and what one draw leaves is what the next one starts from."""
    rng, h = pytensor.shared(np.random.default_rng(3)), pt.tensor("h", shape=(2,))

    def step(h):
        later, one = pt.random.normal.make_node(rng, None, 0.0, 1.0).outputs
        last, two = pt.random.normal.make_node(later, None, h[0], 1.0).outputs
        return pt.stack([h[1] + one, two]), {rng: last}

    y, updates = scanlib.scan(step, None, [h], n_steps=4)
    found = pytensor.function([h], y, updates=updates)(START[:2])
    generator, row = np.random.default_rng(3), START[:2]
    for own in found:
        one, two = generator.normal(), generator.normal(row[0])
        row = np.array([row[1] + one, two])
        np.testing.assert_allclose(own, row)


@pytest.mark.parametrize(
    "step, size",
    [
        (lambda h: pt.exp(-h[::-1]), 4),  # several logarithms or the like at a time are faster
        (lambda h: h[::-1] * 0.5 + pt.roll(h, 1), 40),
        (lambda h: pt.stack([pt.sort(h)[0], h[1], h[0] * h[2]]), 3),
        (lambda h: (h[0] + h)[pt.cast(h[1], "int64") % 3] + h, 3),  # the place is computed
    ],
)
def test_what_is_not_taken_apart(step, size):
    h = pt.tensor("h", shape=(size,))
    node = scanlib.scan(step, None, [h], n_steps=3, return_updates=False).owner.inputs[0].owner
    assert take_apart(thaw_graph(node.op.body), node.op.signature) is None


@pytest.mark.parametrize("optimized", [True, False])
def test_results_that_are_states(optimized):
    h, g = (pt.tensor(k, shape=(3,)) for k in "hg")
    swapped = scan(lambda h, g: [g, h], None, [h, g], n_steps=3)
    kept, other, row = scan(lambda h, g: [h, g + h[0], h], None, [h, g, None], n_steps=3)
    f = pytensor.function(
        [h, g], [*swapped, kept, other, row], mode=None if optimized else "FAST_COMPILE"
    )
    h, g = START, RATES
    wanted = [[g, h, g], [h, g, h], [h] * 3, [g + k * h[0] for k in (1, 2, 3)], [h] * 3]
    for found, rows in zip(f(h, g), wanted, strict=True):
        np.testing.assert_allclose(found, rows)


@pytest.mark.parametrize(
    "wrong",
    [lambda h, x: h + x, lambda h, x: h.reshape((2, 2)), lambda h, x: pt.alloc(h, 2, 2)],
)
@pytest.mark.parametrize("name", ["numba", "c"])
def test_sizes_that_do_not_fit(name, wrong):
    """Only the state's next value tells its size: that is no error before the first step."""
    h, x, n = pt.dvector("h"), pt.tensor("x", shape=(2,)), pt.lscalar("n")
    y, first = scan(
        lambda h, x: [pt.stack([h[1], h[0], h[2]]), wrong(h, x)], None, [h, None], [x], n_steps=n
    )
    f = pytensor.function([h, x, n], [y, first], mode=MODES[name])
    assert f(START, np.ones(2), 0)[0].shape == (0, 3)
    with pytest.raises(ValueError, match=r"scan: .* at step 0"):
        f(START, np.ones(2), 2)
