"""Recurrences that are read where their sum comes first, ``h ← a (h + g)``, as gradients are."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib._compat import thaw_graph
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.sums_first import sum_first
from tests.families import assert_close, kernels, loops
from tests.modes import MODES

LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 100, 512)
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
STEPS = (1, 2, 33, 511, 513, 1025)


def lowered(step, sequences, dtype="float64"):
    """Compile a loop of which the last state and one output are read; return it with its Op."""
    last, out = scanlib.scan(
        step,
        sequences=sequences,
        outputs_info=[np.zeros((), dtype), None],
        return_updates=False,
    )
    function = pytensor.function(sequences, [last[-1], out], mode=MODES["c"])
    (op,) = loops(function)
    assert isinstance(op, ElemwiseScan)
    return function, op


def found(op):
    return sum_first(op, 0, thaw_graph(op.body))


FOUND = {
    "a product": lambda a, g, h: [a * (h + g), h + g],
    "the readers of a sum": lambda a, g, h: [a * (h + g), pt.sqr(h + g) * g],
    "a quotient": lambda a, g, h: [(h + g) * a / (2 + a * a), h + g],
    "several factors": lambda a, g, h: [a * a * (h + g), (h + g) * a],
    "more addends": lambda a, g, h: [a * (h + g + a), h + g + a],
}
LEFT = {
    "a reader of the state": lambda a, g, h: [a * (h + g), h * g],
    "a reader of both": lambda a, g, h: [a * (h + g), h * (h + g)],
    "a constant behind the product": lambda a, g, h: [a * (h + g) + g, h + g],
    "no coefficient": lambda a, g, h: [h + g, h + g],
    "the product first": lambda a, g, h: [a * h + g, a * h],
}


class TestRecognition:
    @pytest.mark.parametrize("name", FOUND)
    def test_found(self, name):
        _, op = lowered(FOUND[name], [pt.dvector("a"), pt.dvector("g")])
        body = thaw_graph(op.body)
        first = sum_first(op, 0, body)
        assert first is not None
        if name == "a product":
            rows = op.signature.split_body_inputs(body.inputs).rows
            coefficient = op.recurrences[0].terms[0][0].coefficient
            assert {op.elements_of(0, body.inputs)[0][coefficient], first.addend} == set(rows)

    @pytest.mark.parametrize("name", LEFT)
    def test_left_alone(self, name):
        _, op = lowered(LEFT[name], [pt.dvector("a"), pt.dvector("g")])
        assert found(op) is None

    def test_stored_states_are_left_alone(self):
        a, g = pt.dvectors("a", "g")
        trace = scanlib.scan(
            lambda a, g, h: a * (h + g), [a, g], np.float64(0.0), return_updates=False
        )
        (op,) = loops(pytensor.function([a, g], trace, mode=MODES["c"]))
        assert found(op) is None

    @pytest.mark.parametrize("combine", [lambda a, h: a * h, pt.maximum])
    def test_gradients(self, combine):
        x = pt.dvector("x")
        trace = scanlib.scan(lambda x, h: combine(x, h), [x], np.float64(1.0), return_updates=False)
        gradient = pytensor.grad(pt.sum(pt.sqr(trace)), x)
        ops = loops(pytensor.function([x], gradient, mode=MODES["c"]))
        assert any(op.signature.reverse and found(op) is not None for op in ops)


def in_python(step, a, g):
    """The loop of NumPy's scalars."""
    h, outs = g.dtype.type(0), []
    with np.errstate(all="ignore"):
        for row in zip(a, g, strict=True):
            h, out = (np.asarray(v, g.dtype)[()] for v in step(*row, h))
            outs.append(out)
    return np.asarray(h), np.array(outs)


NUMPY = {
    "a product": lambda a, g, h: (a * (h + g), h + g),
    "the readers of a sum": lambda a, g, h: (a * (h + g), np.square(h + g) * g),
    "a quotient": lambda a, g, h: ((h + g) * a / (2 + a * a), h + g),
    "several factors": lambda a, g, h: (a * a * (h + g), (h + g) * a),
    "more addends": lambda a, g, h: (a * (h + g + a), h + g + a),
}


class TestValues:
    @pytest.mark.parametrize("backend", ["numba", "C"])
    @pytest.mark.parametrize("name", NUMPY)
    def test_against_numpy(self, name, backend):
        with kernels(backend):
            function, _ = lowered(FOUND[name], [pt.dvector("a"), pt.dvector("g")])
            for steps in STEPS:
                rng = np.random.default_rng(steps)
                a, g = rng.uniform(-1, 1, steps), rng.standard_normal(steps)
                for actual, expected in zip(
                    function(a, g), in_python(NUMPY[name], a, g), strict=True
                ):
                    assert_close(actual, expected, f"{name}, {steps} steps")

    @pytest.mark.parametrize("backend", ["numba", "C"])
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_what_is_not_finite_stays_where_it_is(self, dtype, backend):
        """Nor do huge and tiny numbers, or coefficients of zero, show that steps are composed."""
        with kernels(backend):
            step = FOUND["a product"]
            function, _ = lowered(
                step, [pt.vector("a", dtype=dtype), pt.vector("g", dtype=dtype)], dtype
            )
            huge, tiny = np.finfo(dtype).max, 4 * np.finfo(dtype).smallest_subnormal
            for value in (np.nan, np.inf, -np.inf, huge, np.finfo(dtype).smallest_subnormal):
                for place in (0, 5, 300, 511, 512, 600):
                    a = np.full(700, 1.0, dtype)
                    g = np.zeros(700, dtype)
                    a[:: 2 if value == huge else 1] = 0.5
                    a[450], g[place], g[place // 2] = 0, value, 1
                    expected = in_python(NUMPY["a product"], a, g)
                    for actual, wanted in zip(function(a, g), expected, strict=True):
                        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=tiny)

    def test_a_few_channels(self):
        x, seed = pt.dmatrix("x"), pt.dmatrix("seed")
        trace = scanlib.scan(
            lambda x, h: x * h + 1, [x], pt.ones((x.shape[1],)), return_updates=False
        )
        gradient = pytensor.grad(None, x, known_grads={trace: seed})
        function = pytensor.function([x, seed], gradient, mode=MODES["numba"])
        rng = np.random.default_rng(0)
        values, cotangents = rng.uniform(-1, 1, (600, 2)), rng.standard_normal((600, 2))
        history = np.ones((601, 2))
        for t in range(600):
            history[t + 1] = values[t] * history[t] + 1
        expected, owed = np.empty((600, 2)), np.zeros(2)
        for t in reversed(range(600)):
            owed = owed + cotangents[t]
            expected[t] = owed * history[t]
            owed = owed * values[t]
        np.testing.assert_allclose(function(values, cotangents), expected, rtol=1e-11)

    @pytest.mark.parametrize("mode", ["numba", "c"])
    def test_in_two_threads(self, mode):
        """Chunks compose ``h ← a (h + g)`` as it is."""
        flags = {"scanlib__parallel_steps": 1, "scanlib__parallel_channels": 1}
        a, g = np.random.default_rng(1).uniform(-0.9, 0.9, (2, 9000))
        results = {}
        for count in (1, 2):
            with pytensor.config.change_flags(scanlib__threads=count, **flags):
                inputs = [pt.dvector("a"), pt.dvector("g")]
                last, out = scanlib.scan(
                    FOUND["a product"], inputs, [np.float64(0), None], return_updates=False
                )
                outputs = [last[-1], out]
                function = pytensor.function(inputs, outputs, mode=MODES[mode])
                results[count] = function(a, g)
                for one, other in zip(results[count], function(a, g), strict=True):
                    assert one.tobytes() == other.tobytes()
        for one, two in zip(results[1], results[2], strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-12, atol=1e-14)
