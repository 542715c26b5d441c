"""Associative scans and reductions against a plain loop over the elements: values and errors."""

from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytensor.compile.mode import Mode
from pytensor.graph.traversal import ancestors

import scanlib
from scanlib.ops.errors import SequenceLengthError, StepShapeError
from scanlib.ops.lowered.associative_scan import combines
from tests.checks import assert_same, evaluate
from tests.combine import (
    LENGTHS,
    affine,
    argmax,
    check,
    data,
    matrix_affine,
    normalized_product,
    running,
    running_one,
    variables,
)
from tests.modes import MODES


class TestValues:
    @pytest.mark.parametrize("reverse", [False, True])
    def test_every_length(self, mode, reverse):
        """One function for all lengths: products of matrices do not commute."""
        x, a, b = pt.tensor3("x"), pt.vector("a"), pt.matrix("b")
        matrices = scanlib.associative_scan(pt.dot, x, reverse=reverse)
        pairs = scanlib.associative_scan(affine, (pt.shape_padright(a), b), reverse=reverse)
        f = pytensor.function([x, a, b], [matrices, *pairs], mode=mode)
        for length in LENGTHS:
            arrays = data(length, 2, 2), data(length, seed=1), data(length, 3, seed=2)
            expected = running(affine, [arrays[1][:, None] * np.ones(3), arrays[2]], reverse)
            expected[0] = expected[0][:, :1]
            assert_same(f(*arrays), [running_one(np.dot, arrays[0], reverse), *expected])

    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("reverse", [False, True])
    def test_every_static_length(self, length, reverse, fast_mode):
        check(lambda a, b: a @ b, [data(length, 3, 3)], fast_mode, reverse, static=True)

    @pytest.mark.parametrize("dtype", ["float32", "complex128", "int8", "bool"])
    def test_dtypes(self, dtype, mode):
        x = data(6, 3, dtype="float64")
        x = x > 0 if dtype == "bool" else 2 * x * (1 + 1j if dtype == "complex128" else 1)
        x = x.astype(dtype)
        fn = (lambda a, b: a ^ b) if dtype == "bool" else (lambda a, b: a * b + b - b)
        check(fn, [x], mode, rtol=1e-5 if dtype == "float32" else 1e-9)

    def test_tuples_of_different_dtypes_and_ranks(self, mode):
        def fn(earlier, later, xp=None):
            count, total, outer = zip(earlier, later, strict=True)
            return count[0] + count[1], total[0] + total[1], outer[0] @ outer[1]

        arrays = [np.arange(5), data(5, 3, dtype="float32"), data(5, 2, 2)]
        check(fn, arrays, mode, rtol=1e-5)

    def test_argmax(self, mode):
        values = np.array([1.0, 3.0, 3.0, -1.0, 5.0, 5.0])
        check(argmax, [values, np.arange(6)], mode)
        check(argmax, [values, np.arange(6)], mode, reverse=True)

    def test_trees(self, mode):
        """Elements in named tuples and dicts; a function may return a tuple for a list."""

        class Line(NamedTuple):
            slope: Any
            rest: dict[str, Any]

        def compose(p, q):
            return Line(
                p.slope * q.slope, {"shift": [q.slope * p.rest["shift"][0] + q.rest["shift"][0]]}
            )

        a, b = pt.vectors("a", "b")
        found = scanlib.associative_scan(compose, Line(a, {"shift": [b]}))
        pair = scanlib.associative_reduce(lambda p, q: (p[0] + q[0], p[1] * q[1]), [a, b])
        assert isinstance(found, Line)
        assert isinstance(pair, list)
        values = {a: data(5), b: data(5, seed=1)}
        expected = [*running(affine, [*values.values()]), values[a].sum(), values[b].prod()]
        assert_same(evaluate([found.slope, *found.rest["shift"], *pair], values, mode), expected)

    def test_moebius(self, mode):
        check(normalized_product, [data(9, 2, 2)], mode)

    def test_matrix_affine(self, mode):
        check(matrix_affine, [data(5, 3, 3), data(5, 3, seed=1)], mode)

    def test_extreme_values(self, mode):
        x = np.array([-0.0, np.inf, 1.0, np.nan, -np.inf, 5e-324])
        x = np.stack([np.roll(x, k) for k in range(6)], axis=1)
        with np.errstate(invalid="ignore"):
            (signs,) = evaluate([scanlib.associative_scan(pt.add, pt.constant(x))], mode=mode)
            assert_same([signs], [running_one(np.add, x)])
        assert np.signbit(signs[0, 0])
        v = pt.dvector("v")
        (first,) = evaluate(
            [scanlib.associative_scan(pt.add, v)], {v: np.array([-0.0, -0.0])}, mode
        )
        assert np.signbit(first).all()

    def test_variables_from_outside(self, mode):
        """Captured variables are inputs; what depends on them alone is computed once."""
        x, w, k = pt.matrix("x"), pt.vector("w"), pytensor.shared(2.0, name="k")
        y = scanlib.associative_scan(lambda a, b: (a + b) + pt.exp(w) * k, x)
        values = {x: data(5, 3), w: data(3)}
        expected = running_one(lambda a, b: a + b + 2 * np.exp(values[w]), values[x])
        assert_same(evaluate([y], values, mode), [expected])
        (loop,) = {v.owner for v in ancestors([y]) if v.owner and combines(v.owner.op)}
        capture = loop.inputs[-1]
        assert capture.owner is not None  # exp(w) * k

    @pytest.mark.slow
    def test_inside_a_step(self, mode):
        """A scan in the body of a loop, and one that combines with the help of another."""
        x = pt.matrix("x")
        inside = scanlib.map(
            lambda row: scanlib.associative_scan(pt.maximum, row), x, return_updates=False
        )
        total = scanlib.associative_scan(
            lambda a, b: scanlib.associative_scan(pt.add, a + b) - pt.cumsum(a + b) + a + b, x
        )
        values = data(4, 5)
        expected = [np.maximum.accumulate(values, axis=1), np.cumsum(values, axis=0)]
        assert_same(evaluate([inside, total], {x: values}, mode), expected)

    @given(
        length=st.integers(0, 20),
        shape=st.lists(st.integers(1, 3), max_size=2),
        axis=st.integers(0, 2),
        reverse=st.booleans(),
        static=st.booleans(),
        fn=st.sampled_from(["add", "maximum", "minimum", "multiply"]),
    )
    def test_any_shape(self, length, shape, axis, reverse, static, fn):
        axis = min(axis, len(shape))
        values = np.moveaxis(data(length, *shape), 0, axis)
        (x,) = variables([values], static)
        name = {"add": "add", "multiply": "mul"}.get(fn, fn)
        outputs = [
            scanlib.associative_scan(getattr(pt, name), x, axis, reverse),
            scanlib.associative_scan(getattr(pt, name), x, axis - x.ndim, reverse),
        ]
        front = np.moveaxis(values, axis, 0)
        expected = np.moveaxis(running_one(getattr(np, fn), front, reverse), 0, axis)
        mode = Mode("py", "fast_compile")
        with pytensor.config.change_flags(scanlib__perform="python"):
            assert_same(evaluate(outputs, {x: values}, mode), [expected, expected])


class TestReduce:
    @pytest.mark.parametrize("reverse", [False, True])
    def test_every_length(self, mode, reverse):
        x = pt.tensor3("x")
        total = scanlib.associative_reduce(pt.dot, x, reverse=reverse)
        f = pytensor.function([x], total, mode=mode)
        for length in LENGTHS[1:]:
            values = data(length, 2, 2)
            expected = running_one(np.dot, values, reverse)[0 if reverse else -1]
            assert_same([f(values)], [expected])
        with pytest.raises(IndexError):
            f(np.zeros((0, 2, 2)))

    def test_last_axis_of_a_list(self, mode):
        a, b = pt.matrices("a", "b")
        totals = scanlib.associative_reduce(affine, [a, b], axis=-1)
        assert isinstance(totals, list)
        values = {a: data(3, 4), b: data(3, 4, seed=1)}
        expected = running(affine, [x.T for x in values.values()])
        assert_same(evaluate(totals, values, mode), [y[-1] for y in expected])

    def test_no_history(self):
        """Only the last combination is stored, for known and for unknown lengths."""
        for length in (None, 1000):
            x = pt.tensor("x", dtype="float64", shape=(length, 3))
            f = pytensor.function([x], scanlib.associative_reduce(pt.maximum, x), mode="CVM")
            (loop,) = [n for n in f.maker.fgraph.apply_nodes if hasattr(n.op, "signature")]
            assert loop.op.signature.untraced == (True,)
            values = data(1000, 3)
            np.testing.assert_array_equal(f(values), values.max(axis=0))

    def test_known_to_be_empty(self):
        x = pt.tensor("x", dtype="float64", shape=(3, 0))
        with pytest.raises(ValueError, match=r"x has length 0 along axis=-1; there is nothing"):
            scanlib.associative_reduce(pt.add, x, axis=-1)


class TestMatrices:
    def test_leading_dimensions_stay(self, mode):
        """The scanned axis is the third from the end."""
        x = pt.tensor4("x")
        values = data(5, 2, 3, 3).swapaxes(0, 1)
        outputs = [
            scanlib.associative_scan(pt.matmul, x, axis=-3),
            scanlib.associative_reduce(pt.matmul, x, axis=-3),
        ]
        expected = running_one(np.matmul, values.swapaxes(0, 1)).swapaxes(0, 1)
        assert_same(evaluate(outputs, {x: values}, mode), [expected, expected[:, -1]])

    def test_non_diagonal_recurrence(self, mode):
        """``x_t = x_{t-1} W_t + b_t`` by products of augmented matrices."""
        n, d = 7, 3
        x0, W, b = pt.vector("x0"), pt.tensor3("W"), pt.matrix("b")
        zeros = pt.zeros((W.shape[0], d + 1, 1))
        rows = pt.concatenate([W, b[:, None, :]], axis=1)
        augmented = pt.concatenate([rows, pt.set_subtensor(zeros[:, -1], 1.0)], axis=2)
        products = scanlib.associative_scan(pt.matmul, augmented)
        states = (pt.concatenate([x0, pt.ones(1)]) @ products)[:, :-1]
        values = {x0: data(d), W: data(n, d, d, seed=1), b: data(n, d, seed=2)}
        expected, state = [], values[x0]
        for w_t, b_t in zip(values[W], values[b], strict=True):
            state = state @ w_t + b_t
            expected.append(state)
        assert_same(evaluate([states], values, mode), [np.stack(expected)])


class TestErrors:
    X, Y = pt.dmatrix("x"), pt.dvector("y")

    @pytest.mark.all_forms
    @pytest.mark.parametrize(
        "fn, elems, error, message",
        [
            (None, X, TypeError, "function must be callable, got NoneType"),
            (pt.add, (), ValueError, "nothing to scan, elems is an empty tuple"),
            (pt.add, {"a": [X, "no"]}, TypeError, r"elems\[\"a\"\]\[1\] must be .*, got 'no'"),
            (
                affine,
                (X, "no"),
                TypeError,
                r"elems\[1\] must be a PyTensor variable or .*, got 'no'",
            ),
            (lambda a, b: None, X, TypeError, r"for x the function must return a tensor .* NoneTy"),
            (lambda a, b: (a, b), X, TypeError, "for x the function must return a tensor"),
            (lambda a, b: a[0], (X, Y), TypeError, r"returns an element of .* than elems:\n- exp"),
            (lambda a, b: {"y": a["x"]}, {"x": X}, TypeError, r"of another(.|\n)*\+ {'y': \*}"),
            (lambda a, b: (a[0], 1.0), (X, Y), TypeError, "for y the function must .* got 1.0"),
            (
                lambda a, b: a.astype("float32"),
                X,
                TypeError,
                r"an element of x is .* float64, but the function returned .* float32 for it",
            ),
            (
                lambda a, b: (a * b).sum(),
                X,
                TypeError,
                r"x is \(.*,\) .* returned scalar float64",
            ),
        ],
    )
    def test_when_it_is_built(self, fn, elems, error, message):
        with pytest.raises(error, match=f"^associative_scan: .*{message}"):
            scanlib.associative_scan(fn, elems)

    def test_known_shapes(self):
        x = pt.tensor("x", dtype="float64", shape=(5, 2))
        with pytest.raises(ValueError, match=r"an element of x is \(2,\) float64, .* \(4,\)"):
            scanlib.associative_scan(lambda a, b: pt.concatenate([a, b]), x)
        y = pt.tensor("y", dtype="float64", shape=(4, 2))
        with pytest.raises(ValueError, match=r"same length along axis=0, but x has 5, y has 4"):
            scanlib.associative_scan(affine, (x, y))

    @pytest.mark.parametrize("axis", [2, -3])
    def test_axis_out_of_range(self, axis):
        message = rf"axis={axis} is out of range for x with 2 dimension\(s\)"
        with pytest.raises(np.exceptions.AxisError, match=message):
            scanlib.associative_reduce(pt.add, self.X, axis=axis)

    def test_tensors_without_names(self):
        unnamed = [pt.dvector(), pt.dvector()]
        with pytest.raises(np.exceptions.AxisError, match=r"for elems\[0\] with 1"):
            scanlib.associative_scan(affine, unnamed, axis=1)
        with pytest.raises(np.exceptions.AxisError, match="for elems with 1"):
            scanlib.associative_scan(pt.add, pt.dvector(), 1)
        with pytest.raises(ValueError, match=r"_reduce: elems\[0\] has length 0 along axis=0"):
            scanlib.associative_reduce(pt.add, [np.zeros(0)], 0)

    def test_axis_of_the_others(self):
        """A negative axis counts from the end of the first tensor."""
        x, y = pt.dmatrix("x"), pt.dtensor3("y")
        with pytest.raises(np.exceptions.AxisError, match="axis=2 is out of range for x"):
            scanlib.associative_scan(affine, (y, x), axis=-1)
        a, b = scanlib.associative_scan(lambda p, q: (p[0] + q[0], p[1] + q[1]), (x, y), axis=-2)
        values = {x: data(3, 2), y: data(3, 2, 2)}
        expected = [np.cumsum(v, axis=0) for v in values.values()]
        assert_same(evaluate([a, b], values, MODES["c"]), expected)

    @pytest.mark.all_forms
    @pytest.mark.parametrize("axis", [1.0, "0", None, True])
    def test_axis_is_no_integer(self, axis):
        with pytest.raises(TypeError, match="axis must be an integer, got"):
            scanlib.associative_scan(pt.add, self.X, axis=axis)

    def test_reverse_is_no_flag(self):
        with pytest.raises(TypeError, match="reverse must be True or False, got 1"):
            scanlib.associative_scan(pt.add, self.X, reverse=1)

    @pytest.mark.slow
    def test_when_it_runs(self, mode):
        x, y = pt.dmatrix("x"), pt.dmatrix("y")
        outputs = scanlib.associative_scan(affine, (x, y))
        f = pytensor.function([x, y], outputs, mode=mode)
        for lengths in [(3, 4), (1, 0), (0, 1)]:
            with pytest.raises(SequenceLengthError, match="`y` and `x` have not"):
                f(*(data(n, 2) for n in lengths))
        grown = scanlib.associative_scan(lambda a, b: pt.concatenate([a, b]), x)
        g = pytensor.function([x], grown, mode=mode)
        with pytest.raises(
            StepShapeError, match=r"`x` changed its shape at step 0: .* size 2, .* 4"
        ):
            g(data(3, 2))
        assert_same([g(data(1, 2))], [data(1, 2)])
