"""What users call: arguments in all their forms, both return conventions, and the helpers."""

import copy
import inspect
import pickle

import numpy as np
import pytensor
import pytensor.sparse
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Variable
from pytensor.scan import views

import scanlib
from tests.checks import evaluate
from tests.reference import reference_scan


def parameters(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


class TestSignatures:
    def test_scan(self):
        classic = parameters(pytensor.scan)
        assert parameters(scanlib.scan)[: len(classic)] == classic
        added = [name for name, *_ in parameters(scanlib.scan)[len(classic) :]]
        assert added == ["checkpoint", "method"]

    @pytest.mark.parametrize("name", ["map", "reduce", "foldl", "foldr"])
    def test_helpers(self, name):
        classic = parameters(getattr(views, name))
        assert parameters(getattr(scanlib, name))[: len(classic)] == classic

    def test_public_names(self):
        expected = {"scan", "map", "reduce", "filter", "foldl", "foldr", "until"}
        assert expected <= set(scanlib.__all__)
        assert all(hasattr(scanlib, name) for name in scanlib.__all__)


class TestReturnConventions:
    def build(self, outputs=1, **options):
        def step(h):
            return [h + k for k in range(1, outputs + 1)]

        info = [pt.as_tensor(1.0)] + [None] * (outputs - 1)
        return scanlib.scan(step, outputs_info=info, n_steps=3, **options)

    def test_outputs_and_updates(self):
        output, updates = self.build()
        assert isinstance(output, Variable)
        assert dict(updates) == {}
        outputs, updates = self.build(outputs=2)
        assert len(outputs) == 2

    def test_who_takes_the_pair_for_the_outputs_is_told(self):
        pair = self.build()
        assert isinstance(pair, tuple)
        assert isinstance(pickle.loads(pickle.dumps(pair)).outputs, Variable)
        for value in (pair, pair[-1], copy.deepcopy(pair)):
            with pytest.raises(AttributeError, match="return_updates=False"):
                value.sum()
        total = scanlib.reduce(lambda x, total: x + total, pt.vector(), 0.0)
        with pytest.raises(AttributeError, match="return_updates=False"):
            total.eval()
        with pytest.raises(TypeError, match="OutputsAndUpdates"):
            pair**2
        with pytest.raises(NotImplementedError, match="updates of shared variables"):
            pt.sum(pair)

    def test_outputs_only(self):
        assert isinstance(self.build(return_updates=False), Variable)
        assert len(self.build(outputs=2, return_updates=False)) == 2

    def test_list_of_one(self):
        (output,), _ = self.build(return_list=True)
        assert output.ndim == 1
        (output,) = self.build(return_list=True, return_updates=False)
        assert output.ndim == 1

    def test_updates_may_not_get_lost(self):
        a = pytensor.shared(1)
        with pytest.raises(ValueError, match="return_updates"):
            scanlib.scan(lambda: {a: a + 1}, n_steps=3, return_updates=False)

    def test_helpers_without_updates(self, fast_mode):
        x = pt.vector("x")
        outputs = [
            scanlib.map(lambda x: x + 1, x, return_updates=False)[-1],
            scanlib.reduce(lambda x, s: s + x, x, pt.as_tensor(0.0), return_updates=False),
            scanlib.foldl(lambda x, s: 2 * s + x, x, pt.as_tensor(0.0), return_updates=False),
            scanlib.foldr(lambda x, s: 2 * s + x, x, pt.as_tensor(0.0), return_updates=False),
        ]
        results = evaluate(outputs, {x: [1.0, 2.0, 4.0]}, fast_mode)
        assert [float(r) for r in results] == [5.0, 7.0, 12.0, 21.0]


class TestHelpers:
    def test_map(self, mode):
        x, k, w = pt.vector("x"), pt.lvector("k"), pt.scalar("w")
        (scaled, shifted), updates = scanlib.map(
            lambda x, k, w: [x * w, k + 1], sequences=[x, k], non_sequences=w, go_backwards=True
        )
        assert not updates
        values = {x: [1.0, 2.0, 3.0], k: [4, 5, 6], w: 0.5}
        first, second = evaluate([scaled, shifted], values, mode)
        assert first.tolist() == [1.5, 1.0, 0.5]
        assert second.tolist() == [7, 6, 5]

    def test_reduce_to_updates_alone(self, fast_mode):
        total = pytensor.shared(np.float64(0.0))
        x = pt.vector("x")
        result, updates = scanlib.reduce(lambda x: {total: total + x}, x, None)
        assert result is None
        pytensor.function([x], [], updates=updates, mode=fast_mode)([1.0, 2.0])
        assert total.get_value() == 3.0

    def test_reduce_to_one_and_to_several(self, mode):
        x = pt.vector("x")
        total, _ = scanlib.reduce(lambda x, s: s + x, x, outputs_info=[pt.as_tensor(0.0)])
        (low, high), _ = scanlib.reduce(
            lambda x, low, high: [pt.minimum(low, x), pt.maximum(high, x)],
            sequences=x,
            outputs_info=[pt.as_tensor(np.inf), pt.as_tensor(-np.inf)],
        )
        results = evaluate([total, low, high], {x: [3.0, -1.0, 7.0]}, mode)
        assert [float(r) for r in results] == [9.0, -1.0, 7.0]

    def test_folds_differ_in_direction(self, mode):
        x, w = pt.vector("x"), pt.scalar("w")
        left, _ = scanlib.foldl(lambda x, s, w: w * s + x, x, pt.as_tensor(0.0), w)
        right, _ = scanlib.foldr(lambda x, s, w: w * s + x, x, pt.as_tensor(0.0), w)
        results = evaluate([left, right], {x: [1.0, 2.0, 3.0], w: 10.0}, mode)
        assert [float(r) for r in results] == [123.0, 321.0]


class TestPythonInputs:
    def test_arrays_lists_and_numbers(self, mode):
        h, _ = scanlib.scan(
            lambda x, k, h, w: h * w + x * k,
            sequences=[np.array([1.0, 2.0, 3.0]), [1, 2, 3]],
            outputs_info=0.5,
            non_sequences=2.0,
        )
        assert evaluate(h, mode=mode).tolist() == [2.0, 8.0, 25.0]

    def test_arrays_in_dictionaries(self, fast_mode):
        y, _ = scanlib.scan(
            lambda x_last, x, y_2: y_2 + x * x_last,
            sequences={"input": np.arange(4.0), "taps": (-1, 0)},
            outputs_info={"initial": [1.0, 2.0], "taps": (-2,)},
        )
        assert evaluate(y, mode=fast_mode).tolist() == [1.0, 4.0, 7.0]

    def test_one_tap_as_a_number(self, fast_mode):
        for tap in (2, np.int8(2), np.array(2)):
            y, _ = scanlib.scan(lambda x: x, sequences={"input": np.arange(4.0), "taps": tap})
            assert evaluate(y, mode=fast_mode).tolist() == [2.0, 3.0]

    @pytest.mark.parametrize("n_steps", [3, np.int64(3), np.array(3, "int8"), pt.constant(3)])
    def test_number_of_steps(self, n_steps, fast_mode):
        h, _ = scanlib.scan(lambda h: h + 1, outputs_info=pt.as_tensor(0), n_steps=n_steps)
        assert evaluate(h, mode=fast_mode).tolist() == [1, 2, 3]

    def test_defaults_of_dictionaries_are_left_alone(self):
        sequence, info = {"input": pt.vector("x")}, {"initial": pt.scalar("h0")}
        scanlib.scan(lambda x, h: h + x, sequences=[sequence], outputs_info=[info])
        assert list(sequence) == ["input"]
        assert list(info) == ["initial"]


class TestTypesOfStates:
    def test_initial_zero_of_a_float_state(self, mode):
        x = pt.vector("x")
        h, _ = scanlib.scan(lambda x, h: h + x, x, outputs_info=0)
        assert h.dtype == "float64"
        assert evaluate(h, {x: [0.5, 1.0]}, mode).tolist() == [0.5, 1.5]

    def test_python_numbers_have_the_dtype_of_what_they_meet(self):
        single, double = pt.fvector("single"), pt.dvector("double")

        def dtype(initial, sequences=None):
            h, _ = scanlib.scan(
                lambda *rows: rows[-1] / 2 if initial != 0 else rows[-1] + 1,
                sequences=sequences,
                outputs_info=initial,
                n_steps=None if sequences is not None else 3,
            )
            return h.dtype

        assert dtype(1.0) == pytensor.config.floatX
        assert dtype(1.0, single) == "float32"
        assert dtype(1.0, [single, double]) == "float64"
        assert dtype(0) == "int64"

    @pytest.mark.parametrize("initial", [0, pt.constant(0), 0.0])
    def test_a_number_becomes_a_float_of_the_width_of_the_data(self, initial):
        single, double, whole = pt.fvector("single"), pt.dscalar("double"), pt.lvector("whole")

        def dtype(rows, step):
            return scanlib.loop(lambda h, x: (step(h, x), None), initial, rows)[0].dtype

        assert dtype(single, lambda h, x: h + x) == "float32"
        assert dtype(single, lambda h, x: double * h + x) == "float64"
        assert dtype(whole, lambda h, x: (h + x) / 2) == "float64"
        assert dtype(pt.cvector(), lambda h, x: h * x) in ("complex64", "complex128")
        with pytensor.config.change_flags(floatX="float32"):
            assert dtype(pt.cvector(), lambda h, x: h * x) == "complex64"
            assert dtype(whole, lambda h, x: (h + x) / np.float64(2)) == "float64"

    def test_a_counter_does_not_overflow(self, fast_mode):
        count, _ = scanlib.scan(lambda n: n + 1, outputs_info=0, n_steps=300)
        assert evaluate(count[-1], {}, fast_mode) == 300

    def test_promotion_reaches_other_states(self, mode):
        x = pt.vector("x")
        (u, v, k), _ = scanlib.scan(lambda x, u, v, k: [v, u + x, k + 1], x, outputs_info=[0, 0, 0])
        assert (u.dtype, v.dtype) == ("float64", "float64")
        assert k.dtype.startswith("int")
        results = evaluate([u, v, k], {x: [0.5, 1.0, 2.0]}, mode)
        assert [r.tolist() for r in results] == [[0.0, 0.5, 1.0], [0.5, 1.0, 2.5], [1, 2, 3]]

    def test_promotion_of_rows_with_taps(self, fast_mode):
        x = pt.vector("x")
        info = {"initial": np.array([1, 2], "int8"), "taps": [-2, -1]}
        h, _ = scanlib.scan(lambda x, h_2, h_1: h_2 + h_1 * x, x, outputs_info=info)
        assert evaluate(h, {x: [0.5, 0.5]}, fast_mode).tolist() == [2.0, 3.0]

    def test_promotion_to_complex(self, fast_mode):
        z = pt.zscalar("z")
        h, _ = scanlib.scan(lambda h, z: h * z, outputs_info=1.0, non_sequences=z, n_steps=2)
        assert evaluate(h, {z: 1j}, fast_mode).tolist() == [1j, -1.0]

    def test_one_element_is_widened(self, mode):
        x = pt.matrix("x")
        h, _ = scanlib.scan(lambda x, h: h * 0.5 + x, x, outputs_info=pt.zeros((1,)))
        assert h.type.shape == (None, None)
        value = np.arange(6.0).reshape(3, 2)
        expected = [[0.0, 1.0], [2.0, 3.5], [5.0, 6.75]]
        assert evaluate(h, {x: value}, mode).tolist() == expected
        assert evaluate(h, {x: value[:, :1]}, mode).tolist() == [[row[0]] for row in expected]

    def test_static_shapes_survive(self):
        x = pt.tensor("x", shape=(5, 3), dtype="float64")
        h, _ = scanlib.scan(lambda x, h: h * 0.5 + x, x, outputs_info=pt.zeros((3,)))
        y, _ = scanlib.scan(lambda x: x.sum(), x, n_steps=4)
        assert h.type.shape == (5, 3)
        assert y.type.shape == (4,)

    def test_history_is_the_input_of_the_trace(self, mode):
        y0 = pt.matrix("y0")
        y, _ = scanlib.scan(
            lambda a, b: a + b, outputs_info={"initial": y0, "taps": [-1, -2]}, n_steps=2
        )
        history = y.owner.inputs[0]
        value = evaluate(history, {y0: [[1.0], [2.0]]}, mode)
        assert value.tolist() == [[1.0], [2.0], [3.0], [5.0]]


class TestLengths:
    def test_uneven_sequences(self, mode):
        x, y, z = pt.vector("x"), pt.vector("y"), pt.vector("z")
        out, _ = scanlib.scan(
            lambda x, y, z_next: x + y * z_next, [x, y, {"input": z, "taps": [1]}]
        )
        f = pytensor.function([x, y, z], out, mode=mode)
        assert f(np.ones(5), np.ones(3), np.ones(9)).tolist() == [2.0] * 3
        assert f(np.ones(5), np.ones(7), np.ones(3)).tolist() == [2.0] * 2
        assert f(np.ones(5), np.ones(0), np.ones(3)).shape == (0,)

    def test_uneven_sequences_backwards(self, mode):
        """Every sequence starts from its own end."""
        x, y = pt.vector("x"), pt.vector("y")
        out, _ = scanlib.scan(lambda x, y: x + y, [x, y], go_backwards=True)
        values = {x: np.array([1.0, 2.0, 3.0]), y: np.array([10.0, 20.0])}
        assert evaluate(out, values, mode).tolist() == [23.0, 12.0]

    def test_one_step_backwards(self, mode):
        """It has the last row, also where that row's axis is dropped."""
        x = pt.vector("x", shape=(3,))
        out = scanlib.scan(lambda x: x, x, n_steps=1, go_backwards=True, return_updates=False)
        assert evaluate([out.sum(), out[0]], {x: np.array([1.0, 2.0, 4.0])}, mode) == [4.0, 4.0]

    def test_zero_steps(self, mode):
        n, x, h0, k = pt.lscalar("n"), pt.matrix("x"), pt.vector("h0"), pt.imatrix("k")
        outputs, _ = scanlib.scan(
            lambda x, h, taps, w: [h + x, taps * 2, x.sum(), pt.outer(x, h), w],
            sequences=x,
            outputs_info=[h0, {"initial": k, "taps": [-2]}, None, None, None],
            non_sequences=pt.constant(np.zeros((2, 1), "int8")),
            n_steps=n,
        )
        values = {n: 0, x: np.ones((4, 3)), h0: np.ones(3), k: np.ones((2, 5), "int32")}
        results = evaluate(outputs, values, mode)
        assert [r.shape for r in results] == [(0, 3), (0, 5), (0,), (0, 3, 3), (0, 2, 1)]
        assert [str(r.dtype) for r in results] == ["float64", "int32", "float64", "float64", "int8"]

    @pytest.mark.slow
    def test_rows_as_long_as_an_array_of_the_step(self, mode):
        """Of zero steps as well: only the array's shape is read, which needs no step."""
        n, x, y = pt.lscalar("n"), pt.matrix("x"), pt.matrix("y")
        rows = scanlib.scan(
            lambda x, y: pt.zeros((0.4 + 4 * x).shape[0] + pt.concatenate([x, y]).shape[0]),
            sequences=[x, y],
            n_steps=n,
            return_updates=False,
        )
        f = pytensor.function([n, x, y], rows, mode=mode)
        for steps in (0, 1, 2):
            assert f(steps, np.ones((2, 3)), np.ones((2, 2))).shape == (steps, 8)

    def test_a_state_as_wide_as_an_array_around_the_loop(self, fast_mode):
        """Its first value has a known number of columns, the next one that of the array."""
        x, other = pt.dmatrix("x"), pt.dmatrix("other")
        history = scanlib.scan(
            lambda g: pt.broadcast_to(x.sum(), (other.shape[1], g.shape[0])) + 0.5,
            outputs_info=pt.ones((x.shape[0], 4)),
            n_steps=2,
            return_updates=False,
        )
        values = {x: np.full((4, 2), 0.25), other: np.ones((3, 4))}
        assert evaluate(history, values, fast_mode).tolist() == np.full((2, 4, 4), 2.5).tolist()

    @pytest.mark.parametrize("empty", ["n_steps", "sequence"])
    def test_last_row_of_zero_steps(self, mode, empty):
        x, h0, n = pt.vector("x"), pt.scalar("h0"), pt.lscalar("n")
        if empty == "sequence":
            h, _ = scanlib.scan(lambda x, h: h + x, x, h0)
        else:
            h, _ = scanlib.scan(lambda h: h + 1.0, outputs_info=h0, n_steps=n)
        f = pytensor.function([x, h0, n], h[-1], mode=mode, on_unused_input="ignore")
        assert f([1.0], 3.0, 1) == 4.0
        with pytest.raises(IndexError):
            f([], 3.0, 0)

    @pytest.mark.parametrize("rows", [slice(-2, None), slice(-1, None), slice(None, 2)], ids=str)
    def test_slices_of_few_steps(self, mode, rows):
        h0, n = pt.scalar("h0"), pt.lscalar("n")
        h, _ = scanlib.scan(lambda h: h + 1.0, outputs_info=h0, n_steps=n)
        f = pytensor.function([h0, n], h[rows], mode=mode)
        for steps in range(4):
            assert f(0.0, steps).tolist() == np.arange(1.0, steps + 1)[rows].tolist()


def test_arguments_without_a_meaning(fast_mode):
    x = pt.vector("x")
    h, _ = scanlib.scan(
        lambda x, h: h + x,
        x,
        pt.as_tensor(0.0),
        mode="FAST_RUN",
        name="running_sum",
        profile=True,
        allow_gc=False,
    )
    assert evaluate(h, {x: [1.0, 2.0]}, fast_mode).tolist() == [1.0, 3.0]
    mapped, _ = scanlib.map(lambda x: 2 * x, x, mode="FAST_COMPILE", name="double")
    assert evaluate(mapped, {x: [1.0, 2.0]}, fast_mode).tolist() == [2.0, 4.0]


def test_order_of_arguments_with_taps(mode):
    """The example of the classic documentation, with every argument told apart."""
    s1, s2, s3 = pt.vector("s1"), pt.vector("s2"), pt.vector("s3")
    o1, o3 = pt.vector("o1"), pt.scalar("o3")

    def step(*arguments):
        assert len(arguments) == 10
        weights = [10.0**-k for k in range(10)]
        mixed = sum(w * a for w, a in zip(weights, arguments, strict=True))
        return [mixed, mixed * 2, mixed / 3]

    sequences = [({"input": s1, "taps": [-3, 2, -1]}), s2, {"input": s3, "taps": 3}]
    info = [{"initial": o1, "taps": [-3, -5]}, {}, o3]
    outputs, _ = scanlib.scan(step, sequences, info, [pt.constant(0.3), 7], n_steps=4)
    generator = np.random.default_rng(3)
    values = {v: generator.normal(size=n) for v, n in ((s1, 9), (s2, 9), (s3, 9), (o1, 5))}
    values[o3] = np.array(0.25)
    expected = reference_scan(
        step,
        [{"input": values[s1], "taps": [-3, 2, -1]}, values[s2], {"input": values[s3], "taps": 3}],
        [{"initial": values[o1], "taps": [-3, -5]}, None, values[o3]],
        [0.3, 7],
        n_steps=4,
    )
    for got, wanted in zip(evaluate(outputs, values, mode), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_non_sequences_that_no_step_reads(fast_mode):
    """A function takes them, and they cost nothing."""
    x, unread = pt.dvector("x"), pt.dmatrix("unread")
    shared = pytensor.shared(np.random.default_rng(3))
    given = [unread, 3.0, unread, shared]
    sums, _ = scanlib.scan(lambda x, h, *_: h + x, x, np.float64(0), given)
    f = pytensor.function([x, unread], sums, mode=fast_mode)
    np.testing.assert_array_equal(f([1.0, 2.0], np.ones((1, 1))), [1.0, 3.0])
    assert all(
        unread_input not in node.inputs
        for node in f.maker.fgraph.toposort()
        for unread_input in f.maker.fgraph.inputs[1:]
    )
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pytensor.grad(sums.sum(), unread)


def test_non_sequences_of_shared_variables_that_change(mode):
    """What was given stays as it was before the first step; what is captured changes."""
    shared = pytensor.shared(np.float64(1.0), name="shared")
    double = shared * 2
    given, updates = scanlib.scan(
        lambda double: (double + shared, {shared: shared + 1}), non_sequences=[double], n_steps=4
    )
    captured, _ = scanlib.scan(lambda: (double + shared, {shared: shared + 1}), n_steps=4)
    f = pytensor.function([], [given, captured], updates=updates, mode=mode)
    np.testing.assert_array_equal(f(), [[3, 4, 5, 6], [3, 6, 9, 12]])
    assert shared.get_value() == 5
