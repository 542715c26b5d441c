"""`LinearScan`: values against a loop over items, derivatives, batches, errors."""

import itertools

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.errors import InitialRowsError, SequenceLengthError, StepCountError
from tests.checks import evaluate
from tests.linear import Recurrence
from tests.modes import MODES

LENGTHS = (0, 1, 2, 3, 7, 8, 9, 33, 130)
SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 16, 17)


def reduce_terms(semiring, matrix, vector):
    """One product of a matrix and a vector, term by term."""
    if semiring == "real":
        return np.array([sum(a * h for a, h in zip(row, vector, strict=True)) for row in matrix])
    result = []
    for row in matrix:
        terms = row + vector
        if semiring == "log":
            result.append(np.logaddexp.reduce(terms) if len(terms) else -np.inf)
        else:
            extreme = np.max if semiring == "max" else np.min
            result.append(extreme(terms, initial=-np.inf if semiring == "max" else np.inf))
    return np.array(result)


def reference(op, matrix, offset, initial, steps):
    """The history of a recurrence, one product of a vector at a time."""
    state = initial[0]
    rows = [state]
    batch = initial.ndim - (2 if op.vector else 3)
    for t in range(steps)[:: -1 if op.reverse else 1]:
        now = matrix[t] if op.coefficient == "steps" else matrix
        now = np.broadcast_to(now, (*state.shape[:batch], *now.shape[-2:]))
        new = np.empty_like(state)
        for place in np.ndindex(*state.shape[:batch]):
            a = now[place] if op.side == "left" else now[place].T
            h = state[place]
            if op.vector:
                new[place] = reduce_terms(op.semiring, a, h)
            elif op.side == "left":
                for c in range(h.shape[1]):
                    new[place][:, c] = reduce_terms(op.semiring, a, h[:, c])
            else:
                for c in range(h.shape[0]):
                    new[place][c] = reduce_terms(op.semiring, a, h[c])
        state = new if offset is None else new + offset[t]
        rows.append(state)
    if op.untraced:
        rows = rows[-1:]
    return np.stack(rows[::-1] if op.reverse else rows)


def make_values(op, steps, size, batch=(), columns=3, dtype="float64", seed=0, shared=False):
    """Values for the matrix, the offset and the initial state of a recurrence."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        values = rng.normal(size=shape)
        if np.dtype(dtype).kind == "c":
            values = values + 1j * rng.normal(size=shape)
        return values.astype(dtype)

    row = (size,) if op.vector else (size, columns) if op.side == "left" else (columns, size)
    time = (steps,) if op.coefficient == "steps" else ()
    matrix = draw(*time, *(() if shared else batch), size, size)
    matrix = matrix * matrix.real.dtype.type(0.5 / np.sqrt(max(size, 1)))
    offset = draw(steps, *batch, *row) if op.has_offset else None
    return matrix, offset, draw(1, *batch, *row)


def arguments(op, values, steps):
    matrix, offset, initial = values
    given = [np.int64(steps)] if op.has_n_steps else []
    return [*given, matrix, *([] if offset is None else [offset]), initial]


def compile_op(op, values, mode, shapes=None):
    given = arguments(op, values, 1)
    shapes = shapes or [(None,) * np.ndim(value) for value in given]
    inputs = [
        pt.tensor(dtype=np.asarray(value).dtype, shape=shape)
        for value, shape in zip(given, shapes, strict=True)
    ]
    return pytensor.function(inputs, op(*inputs), mode=mode)


def check(op, function, steps, size, tolerance=1e-11, **options):
    values = make_values(op, steps, size, **options)
    given = arguments(op, values, steps)
    before = [np.array(value) for value in given]
    actual = function(*given)
    expected = reference(op, *values, steps)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(function(*given), actual)
    for value, original in zip(given, before, strict=True):
        np.testing.assert_array_equal(value, original)


OPTIONS = [
    Recurrence(
        semiring,
        coefficient,
        side,
        vector,
        reverse,
        has_offset=has_offset,
        has_n_steps=coefficient == "fixed" and not has_offset,
        untraced=untraced,
    )
    for semiring, coefficient, side, vector, reverse, has_offset, untraced in itertools.product(
        ("real", "log", "max", "min"),
        ("steps", "fixed"),
        ("left", "right"),
        (True, False),
        (False, True),
        (True, False),
        (False, True),
    )
]


@pytest.mark.parametrize("op", OPTIONS[::5], ids=str)
def test_python_loop(op):
    with pytensor.config.change_flags(scanlib__perform="python"):
        for batch, shared in (((), False), ((2, 1), True)):
            options = {"batch": batch, "shared": shared}
            function = compile_op(op, make_values(op, 1, 2, **options), MODES["py"])
            for steps, size in ((0, 2), (1, 3), (5, 2), (4, 1)):
                check(op, function, steps, size, **options)


KERNELS = {
    "fixed": (Recurrence("real", "fixed"), {}),
    "fixed, right, reverse": (Recurrence("real", "fixed", "right", reverse=True), {}),
    "fixed, no offset": (Recurrence("real", "fixed", has_offset=False, has_n_steps=True), {}),
    "fixed, last": (Recurrence("real", "fixed", untraced=True), {}),
    "fixed, float32": (Recurrence("real", "fixed"), {"dtype": "float32", "tolerance": 1e-4}),
    "fixed, complex": (Recurrence("real", "fixed", "right"), {"dtype": "complex128"}),
    "fixed, batch": (Recurrence("real", "fixed", reverse=True), {"batch": (2, 3)}),
    "fixed, shared by a batch": (Recurrence("real", "fixed"), {"batch": (3,), "shared": True}),
    "steps": (Recurrence("real", "steps"), {}),
    "steps, right, reverse": (
        Recurrence("real", "steps", "right", reverse=True),
        {"batch": (2,)},
    ),
    "columns": (Recurrence("real", "steps", vector=False), {"batch": (2,)}),
    "rows, last": (Recurrence("real", "fixed", "right", vector=False, untraced=True), {}),
    "rows, complex": (
        Recurrence("real", "steps", "right", vector=False),
        {"dtype": "complex128"},
    ),
    "steps, complex": (Recurrence("real", "steps", reverse=True), {"dtype": "complex128"}),
    "batch, complex": (
        Recurrence("real", "fixed", untraced=True),
        {"batch": (2,), "dtype": "complex64", "tolerance": 1e-4},
    ),
    "log": (Recurrence("log", "fixed", "right"), {"batch": (2,), "shared": True}),
    "log, float32": (Recurrence("log", "fixed"), {"dtype": "float32", "tolerance": 1e-4}),
    "log, steps": (Recurrence("log", "steps", reverse=True, has_offset=False), {}),
    "log, columns": (Recurrence("log", "fixed", vector=False), {}),
    "max": (Recurrence("max", "fixed", "right"), {"batch": (2,)}),
    "min": (Recurrence("min", "steps", reverse=True), {}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_the_c_linker_has_code_of_its_own(dtype):
    op = Recurrence("real", "steps")
    inputs = [pt.tensor(dtype=dtype, shape=(None,) * ndim) for ndim in (3, 2, 2)]
    function = pytensor.function(inputs, op(*inputs), mode=MODES["c"])
    (loop,) = scanlib.explain(function).loops
    assert loop.runs == "as a kernel, compiled by LLVM"


@pytest.mark.slow
@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name, linker):
    op, options = KERNELS[name]
    made = {key: value for key, value in options.items() if key != "tolerance"}
    function = compile_op(op, make_values(op, 1, 2, **made), MODES[linker])
    for steps, size in itertools.product(LENGTHS, SIZES):
        check(op, function, steps, size, **options)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("reverse", [False, True])
def test_known_sizes(size, reverse):
    op = Recurrence("real", "fixed", "right" if size == 3 else "left", reverse=reverse)
    shapes = [(size, size), (None, size), (None, size)]
    function = compile_op(op, make_values(op, 1, size), MODES["numba"], shapes)
    for steps in (*LENGTHS, 64, 65, 128):
        check(op, function, steps, size)
    matrix, offset, initial = make_values(op, 70, size)
    spread = np.asfortranarray(offset)
    np.testing.assert_array_equal(
        function(matrix, spread, initial), function(matrix, offset, initial)
    )


@pytest.mark.parametrize("size, side", [(5, "left"), (8, "left"), (7, "right")])
def test_known_sizes_with_a_matrix_per_step(size, side):
    op = Recurrence("real", "steps", side)
    shapes = [(None, size, size), (None, size), (None, size)]
    function = compile_op(op, make_values(op, 1, size), MODES["numba"], shapes)
    for steps in LENGTHS:
        check(op, function, steps, size)


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_composing_makes_no_infinity(linker):
    """Powers of the matrix overflow although no state does."""
    op = Recurrence("real", "fixed")
    function = compile_op(op, make_values(op, 1, 4), MODES[linker], [(4, 4), (None, 4), (None, 4)])
    matrix = np.zeros((4, 4))
    matrix[0, 1] = matrix[1, 2] = 1e200
    matrix[3, 3] = 0.5
    offset = np.full((200, 4), 1e-300)
    offset[:, 3] = 1.0
    offset[77, 3] = np.inf
    initial = np.array([[0.0, 0.0, 1e-250, 1.0]])
    with np.errstate(all="ignore"):
        expected = reference(op, matrix, offset, initial, 200)
    actual = function(matrix, offset, initial)
    assert np.isfinite(expected[:78]).all()
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("linker", ["numba", "c"])
def test_powers_of_small_items_lose_no_large_state(linker, size, dtype):
    """Some power of the matrix is zero where the state, after as many steps, is not."""
    small, large = (1e-100, 1e300) if dtype == "float64" else (1e-13, 1e37)
    A, b, h = pt.matrix("A", dtype=dtype), pt.matrix("b", dtype=dtype), pt.matrix("h", dtype=dtype)
    A = pt.specify_shape(A, (size, size))
    function = pytensor.function(
        [A, b, h], Recurrence(coefficient="fixed")(A, b, h), mode=MODES[linker]
    )
    matrix = small * np.eye(size, k=1, dtype=dtype) + small * np.eye(size, k=1 - size, dtype=dtype)
    offsets = np.zeros((130, size), dtype)
    offsets[3::8] = large  # with which the state before some composed steps begins
    state = np.full((1, size), large, dtype)
    expected = [state[0]]
    for offset in offsets:
        expected.append(matrix @ expected[-1] + offset)
    actual = function(matrix, offsets, state)
    np.testing.assert_allclose(actual, np.array(expected), rtol=1e-5)
    assert expected[8][0] > 0


@pytest.mark.parametrize("semiring", ["real", "log", "max", "min"])
@pytest.mark.parametrize("coefficient", ["fixed", "steps"])
@pytest.mark.parametrize("linker", ["numba", "c"])
def test_extreme_values(semiring, coefficient, linker):
    op = Recurrence(semiring, coefficient)
    function = compile_op(op, make_values(op, 1, 3), MODES[linker])
    for special in (0.0, 1e-310, 1e300, -1e300, np.inf, -np.inf, np.nan):
        matrix, offset, initial = make_values(op, 12, 3)
        for place in range(3):
            values = [matrix.copy(), offset.copy(), initial.copy()]
            values[place][..., 1] = special
            with np.errstate(all="ignore"):
                expected = reference(op, *values, 12)
                actual = function(*values)
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_log_of_far_apart_numbers(linker):
    """The exponential form underflows; the kernel must notice."""
    op = Recurrence("log", "fixed")
    function = compile_op(op, make_values(op, 1, 3), MODES[linker])
    matrix = np.array([[0.0, -900.0, -np.inf], [-np.inf, -2.0, -800.0], [-900.0, 3.0, -np.inf]])
    offset = np.random.default_rng(0).normal(size=(30, 3)) * 400
    initial = np.array([[0.0, -1000.0, -2000.0]])
    expected = reference(op, matrix, offset, initial, 30)
    np.testing.assert_allclose(function(matrix, offset, initial), expected, rtol=1e-12)


def test_no_initial_row_and_no_steps(mode):
    op = Recurrence("real", "steps")
    values = [np.ones((0, 3, 3)), np.ones((0, 3)), np.ones((0, 3))]
    inputs = [pt.tensor(dtype="float64", shape=(None,) * v.ndim) for v in values]
    out = op(*inputs)
    history, shape = evaluate([out, out.shape], dict(zip(inputs, values, strict=True)), mode)
    assert history.shape == tuple(shape) == (0, 3)


class TestErrors:
    def test_values(self, mode):
        op = Recurrence("real", "steps", has_n_steps=True, required_steps=2)
        n = pt.lscalar()
        inputs = [pt.tensor(dtype="float64", shape=(None,) * k) for k in (3, 2, 2)]
        function = pytensor.function([n, *inputs], op(n, *inputs), mode=mode)
        matrix, offset, initial = make_values(op, 3, 2)
        function(3, matrix, offset, initial)
        for given, error in (
            ((-1, matrix, offset, initial), StepCountError),
            ((3, matrix[1:], offset, initial), SequenceLengthError),
            ((3, matrix, offset[1:], initial), SequenceLengthError),
            ((3, matrix, offset, initial[:0]), InitialRowsError),
            ((3, matrix[:, :1], offset, initial), ValueError),
            ((3, matrix, offset[:, :1], initial), ValueError),
            ((1, matrix[:1], offset[:1], initial), IndexError),
        ):
            with pytest.raises(error):
                function(*given)

    def test_options(self):
        with pytest.raises(ValueError, match="needs its number of steps"):
            Recurrence("real", "fixed", has_offset=False)(pt.dmatrix(), pt.dmatrix())

    def test_types(self):
        op = Recurrence("real", "fixed")
        with pytest.raises(TypeError, match="Casting from complex"):
            op(pt.zmatrix(), pt.dmatrix(), pt.dmatrix())
