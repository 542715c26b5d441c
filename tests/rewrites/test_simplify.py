"""The simplify rewrites: what is left of a loop, and that its values stay the same."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import get_mode
from pytensor.graph.traversal import ancestors
from pytensor.ifelse import ifelse
from pytensor.scalar.basic import Exp

import scanlib
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from tests.checks import assert_same
from tests.modes import MODES
from tests.split_cases import nodes_of

rng = np.random.default_rng(11)
CHECKED = get_mode("CVM")


def loops(function):
    """Return the loops of a compiled function, lowered ones included."""
    nodes = function.maker.fgraph.toposort()
    return [node for node in nodes if isinstance(node.op, Scan | ElemwiseScan)]


def compile_both(inputs, outputs, **kwargs):
    """Compile with and without simplification; return both functions."""
    simplified = pytensor.function(inputs, outputs, mode=CHECKED, **kwargs)
    with pytensor.config.change_flags(scanlib__simplify=False):
        plain = pytensor.function(inputs, outputs, mode=CHECKED, **kwargs)
    return simplified, plain


def check(inputs, outputs, data, **kwargs):
    """Compare the simplified function with the plain one; return the former's loops."""
    simplified, plain = compile_both(inputs, outputs, **kwargs)
    for actual, expected in zip(simplified(*data), plain(*data), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
    return loops(simplified)


def computes_exponentials(node):
    """Whether the body of a loop computes an exponential."""
    operations = [getattr(inner.op, "scalar_op", None) for inner in node.op.body.toposort()]
    return any(isinstance(operation, Exp) for operation in operations)


class TestUnused:
    def test_results_nobody_reads(self):
        x, y = pt.vector("x"), pt.vector("y")
        a, _b, _c = scanlib.scan(
            lambda x, y, a, b: [a + x, b * y, a * b],
            sequences=[x, y],
            outputs_info=[0.0, 1.0, None],
            return_updates=False,
        )
        (node,) = check([x, y], [a], [rng.normal(size=5)] * 2, on_unused_input="ignore")
        signature = node.op.signature
        assert (signature.n_states, signature.n_outputs, signature.n_sequences) == (1, 0, 1)

    def test_a_state_that_a_read_one_needs_stays(self):
        x = pt.vector("x")
        _a, b = scanlib.scan(lambda x, a, b: [a + x, a * b], x, [0.0, 1.0], return_updates=False)
        (node,) = check([x], [b], [rng.normal(size=5)])
        assert node.op.signature.n_states == 2

    def test_a_sequence_that_gives_only_the_length(self):
        x = pt.vector("x")
        h = scanlib.scan(lambda x, h: h * 2, x, 1.0, return_updates=False)
        (node,) = check([x], [h], [rng.normal(size=5)])
        assert node.outputs[0].type.ndim == 1

    def test_an_unread_sequence_of_the_only_known_length_is_checked(self, fast_mode):
        x = pt.dvector("x")
        last, ys = scanlib.loop(lambda h, row: (pt.tanh(h + row[0]), h), 0.0, (x, np.ones(4)))
        for result in (last, ys):
            f = pytensor.function([x], result, mode=fast_mode)
            assert f(np.ones(4)).shape in [(), (4,)]
            for length in (3, 5):
                with pytest.raises(SequenceLengthError, match="cut what is longer, as in x"):
                    f(np.ones(length))

    def test_taps_nobody_reads(self):
        h0 = pt.vector("h0")
        h = scanlib.scan(
            lambda h1, h2, h3: h1 + h3,
            outputs_info={"initial": h0, "taps": [-1, -2, -3]},
            n_steps=6,
            return_updates=False,
        )
        (node,) = check([h0], [h], [rng.normal(size=3)])
        assert sorted(node.op.signature.taps[0]) == [-3, -1]


class TestDuplicates:
    def test_states_that_are_always_equal(self):
        x = pt.vector("x")
        a, b = scanlib.scan(
            lambda x, a, b: [pt.tanh(a + x), pt.tanh(b + x)], x, [0.5, 0.5], return_updates=False
        )
        (node,) = check([x], [a, b], [rng.normal(size=5)])
        assert node.op.signature.n_states == 1

    def test_states_that_start_equal_and_part(self):
        x = pt.vector("x")
        a, b = scanlib.scan(
            lambda x, a, b: [pt.tanh(a + x), pt.tanh(b - x)], x, [0.5, 0.5], return_updates=False
        )
        (node,) = check([x], [a, b], [rng.normal(size=5)])
        assert node.op.signature.n_states == 2

    def test_states_that_swap(self):
        x = pt.vector("x")
        a, b = scanlib.scan(lambda x, a, b: [b + x, a + x], x, [0.5, 0.5], return_updates=False)
        (node,) = check([x], [a, b], [rng.normal(size=5)])
        assert node.op.signature.n_states == 1

    def test_inputs_outputs_and_constants(self):
        x, w = pt.vector("x"), pt.scalar("w")
        a, b, c, d = scanlib.scan(
            lambda x, y, a, w, v, two: [a * w + v * x * two, x + y, x + y, y],
            sequences=[x, x],
            outputs_info=[0.0, None, None, None],
            non_sequences=[w, w, pt.constant(2.0)],
            return_updates=False,
        )
        (node,) = check([x, w], [a, b, c, d], [rng.normal(size=5), 0.3])
        signature = node.op.signature
        assert (signature.n_sequences, signature.n_non_sequences, signature.n_outputs) == (1, 1, 1)

    def test_an_output_that_is_a_state(self):
        x = pt.vector("x")

        def step(x, a):
            new = a * x
            return [new, new]

        a, b = scanlib.scan(step, x, [1.0, None], return_updates=False)
        (node,) = check([x], [a, b], [rng.normal(size=5)])
        assert node.op.signature.n_outputs == 0

    def test_an_output_that_is_a_sequence(self, fast_mode):
        x, n = pt.vector("x"), pt.lscalar("n")
        alone = scanlib.scan(lambda x: x, x, n_steps=n, return_updates=False)
        beside = scanlib.scan(
            lambda x, a: [x, a + 1], x, [None, 0.0], n_steps=n, return_updates=False
        )
        for outputs in ([alone], beside):
            f = pytensor.function([x, n], outputs, mode=fast_mode)
            np.testing.assert_allclose(f([1.0, 2.0, 3.0], 2)[0], [1.0, 2.0])
            assert f([], 0)[0].shape == (0,)
            with pytest.raises(SequenceLengthError):
                f([1.0, 2.0], 3)


class TestHoisting:
    def test_matrix_work_leaves_the_loop(self):
        x, w = pt.matrix("x"), pt.matrix("w")
        h = scanlib.scan(lambda x, h, w: h + x @ pt.exp(w), x, pt.zeros(3), w, return_updates=False)
        values = [rng.normal(size=(4, 3)), rng.normal(size=(3, 3))]
        simplified, plain = compile_both([x, w], [h])
        np.testing.assert_allclose(simplified(*values)[0], plain(*values)[0], rtol=1e-12)
        outside = [
            getattr(node.op, "scalar_op", None) for node in nodes_of(simplified.maker.fgraph)
        ]
        assert any(isinstance(operation, Exp) for operation in outside)
        assert not any(computes_exponentials(node) for node in loops(simplified))

    def test_gradient_bodies_hold_no_invariant_exponentials(self):
        x, w = pt.vector("x"), pt.scalar("w")
        h = scanlib.scan(lambda x, h, w: h * pt.exp(w) + x, x, 0.0, w, return_updates=False)
        gradient = pytensor.grad(h.sum(), w)
        for node in check([x, w], [h, gradient], [rng.normal(size=4), 0.2]):
            assert not computes_exponentials(node)

    @pytest.mark.all_forms
    @pytest.mark.parametrize("made_of", ["numbers", "a_join", "a_part_that_is_set", "a_vector"])
    def test_reshapes_have_kernels(self, made_of):
        """Whatever computes the shape: its numbers are known before the first step."""
        x, h, sizes = pt.matrix("x"), pt.matrix("h"), pt.lvector("sizes", shape=(2,))
        shape = {
            "numbers": (h.shape[0], h.shape[1]),
            "a_join": pt.concatenate([h.shape[:1], [2]]),
            "a_part_that_is_set": h.shape[:2][1].set(2),
            "a_vector": sizes,
        }[made_of]
        rows = scanlib.scan(
            lambda x, h: h @ h + x.reshape(shape, ndim=2), x, h, return_updates=False
        )
        function = pytensor.function([x, h, sizes], rows, on_unused_input="ignore")
        (loop,) = scanlib.explain(function).loops
        assert loop.runs == "as a kernel, compiled by LLVM"
        xs, state = rng.normal(size=(3, 4)), rng.normal(size=(2, 2))
        found = function(xs, state, [2, 2])
        for row, result in zip(xs, found, strict=True):
            state = state @ state + row.reshape(2, 2)
            np.testing.assert_allclose(result, state, rtol=1e-12)

    def test_a_shape_of_another_length(self):
        x, sizes = pt.matrix("x"), pt.lvector("sizes")
        rows = scanlib.scan(lambda x: x.reshape(sizes, ndim=2).sum(axis=0), x, return_updates=False)
        function = pytensor.function([x, sizes], rows)
        np.testing.assert_array_equal(function(np.ones((3, 4)), [2, 2]), np.full((3, 2), 2.0))
        with pytest.raises(AssertionError, match="expected 2"):
            function(np.ones((3, 4)), [2, 2, 1])

    def test_shapes_are_made_in_the_step(self):
        """Kernels know sizes one by one; the products of all steps leave the loop, shaped anew."""
        x, h, B = pt.matrix("x"), pt.vector("h"), pt.tensor3("B")

        def step(x, h, B):
            weights = pt.exp(B @ x)
            return h @ (weights / weights.sum(axis=1, keepdims=True))

        p = scanlib.scan(step, x, h, B, return_updates=False)
        function = pytensor.function([x, h, B], [p, pytensor.grad(p[-1, 0], B)])
        explanation = scanlib.explain(function)
        assert all(loop.runs.startswith("as a kernel") for loop in explanation.loops)
        assert "make_vector" not in " ".join(map(str, explanation.loops[0].obstacles))
        xs, state, matrices = [rng.normal(size=s) for s in ((5, 2), 3, (3, 3, 2))]

        def last(matrices):
            own = state
            for row in xs:
                weights = np.exp(matrices @ row)
                own = own @ (weights / weights.sum(axis=1, keepdims=True))
            return own

        rows, slope = function(xs, state, matrices)
        np.testing.assert_allclose(rows[-1], last(matrices), rtol=1e-12)
        by = 1e-6 * rng.normal(size=matrices.shape)
        change = last(matrices + by)[0] - last(matrices - by)[0]
        np.testing.assert_allclose(2 * (slope * by).sum(), change, rtol=1e-6)


class TestLastRows:
    def test_history_is_not_stored(self):
        a, k = pt.vector("a"), pt.iscalar("k")
        powers = scanlib.scan(
            lambda p, a: p * a, outputs_info=pt.ones_like(a), non_sequences=a, n_steps=k,
            return_updates=False,
        )  # fmt: skip
        (node,) = check([a, k], [powers[-1]], [rng.normal(size=3), 4])
        assert node.op.signature.untraced == (True,)

    @pytest.mark.parametrize("back", [1, 2, 3])
    def test_rows_further_back(self, back, mode):
        x = pt.vector("x")
        sums = scanlib.scan(lambda x, s: s + x, x, 0.0, return_updates=False)
        f = pytensor.function([x], sums[-back], mode=mode)
        np.testing.assert_allclose(f([1, 2, 3, 4]), np.cumsum([1.0, 2, 3, 4])[-back])
        np.testing.assert_allclose(f(np.ones(back)), 1.0)
        with pytest.raises(IndexError):
            f(np.ones(back - 1))

    def test_last_row_of_a_trace_that_is_read_too(self, mode):
        x = pt.vector("x")
        sums = scanlib.scan(lambda x, s: s + x, x, 0.0, return_updates=False)
        f = pytensor.function([x], [sums, sums[-1]], mode=mode)
        assert f([1, 2])[1] == 3
        with pytest.raises(IndexError):
            f([])

    @pytest.mark.parametrize("name", ["numba", "c", "py", "jax"])
    @pytest.mark.parametrize("shape", [(), (2,)])
    def test_last_row_of_a_loop_in_a_step(self, name, shape):
        """It may have no step where the outer loop has."""
        if name == "jax":
            pytest.importorskip("jax")
        x, counts = pt.vector("x"), pt.lvector("counts")

        def step(count, h):
            return scanlib.foldl(lambda v, h: pt.tanh(h) + v, x[:count], h, return_updates=False)

        states = scanlib.scan(step, counts, pt.zeros(shape), return_updates=False)
        mode = "JAX" if name == "jax" else MODES[name]
        f, values = pytensor.function([x, counts], states, mode=mode), np.ones(3)
        np.testing.assert_allclose(f(values, [1, 2])[..., 0] if shape else f(values, [1, 2]),
                                   [1.0, np.tanh(np.tanh(1) + 1) + 1])  # fmt: skip
        error = ValueError if name == "jax" else IndexError  # XLA's
        text = r"a row was read .* fewer than 1 step|at step 1: index -1 is out of bounds"
        with pytest.raises(error, match=text):
            f(values, [1, 0])

    def test_rows_of_the_initial_state_may_be_read(self, fast_mode):
        x = pt.vector("x")
        sums = scanlib.scan(lambda x, s: s + x, x, 5.0, return_updates=False)
        history = sums.owner.inputs[0]
        f = pytensor.function([x], history[-1], mode=fast_mode)
        assert f([]) == 5
        assert f([1.0]) == 6

    def test_deep_state(self, mode):
        h0 = pt.vector("h0")
        fibonacci = scanlib.scan(
            lambda a, b: a + b,
            outputs_info={"initial": h0, "taps": [-1, -2]},
            n_steps=10,
            return_updates=False,
        )
        f = pytensor.function([h0], [fibonacci[-1], fibonacci[-2]], mode=mode)
        np.testing.assert_allclose(f([0.0, 1.0]), [89, 55])

    def test_until(self, mode):
        limit = pt.scalar("limit")
        powers = scanlib.scan(
            lambda p, limit: (2 * p, scanlib.until(2 * p > limit)),
            outputs_info=1.0,
            non_sequences=limit,
            n_steps=1024,
            return_updates=False,
        )
        assert pytensor.function([limit], powers[-1], mode=mode)(45) == 64

    @pytest.mark.parametrize("taps", [1, 2])
    def test_the_number_of_steps_of_a_loop_that_stops(self, taps, mode):
        """Of arrays, none is stored to count how many there would be."""
        limit, start = pt.scalar("limit"), pt.matrix("start")
        rows = scanlib.scan(
            lambda *h: (h[0] + 0.5 * h[-2], scanlib.until(h[0].sum() > limit)),
            outputs_info={"initial": start, "taps": [-1, -2][:taps]} if taps > 1 else start[1],
            non_sequences=limit,
            n_steps=100,
            return_updates=False,
        )
        f = pytensor.function([limit, start], [rows.shape[0], rows[-1]], mode=mode)
        (node,) = loops(f)
        assert node.op.signature.untraced == (True,) or mode is MODES["py"]
        for most in (-1.0, 5.0, 500.0):
            h, steps = list(np.arange(6.0).reshape(2, 3)), 0
            while steps < 100:
                h.append(h[-1] + 0.5 * h[-taps])
                steps += 1
                if h[-2].sum() > most:
                    break
            assert_same(f(most, np.arange(6.0).reshape(2, 3)), [np.array(steps), h[-1]])

    @pytest.mark.parametrize("merged", [False, True])
    def test_a_row_that_a_branch_does_not_read(self, merged):
        """The C linker evaluates one branch: the loop must not raise for the other's sake."""
        x = pt.vector("x")
        sums = scanlib.scan(lambda x, s: s + x, x, 0.0, return_updates=False)
        products = scanlib.scan(lambda x, p: p * x, x, 1.0, return_updates=False)
        last = ifelse(x.shape[0] > 0, sums[-1], pt.constant(7.0, dtype=sums.dtype))
        f = pytensor.function([x], [last, *([products] if merged else [])], mode=CHECKED)
        assert f([])[0] == 7
        assert f([2.0, 3.0])[0] == 5
        (node,) = loops(f)
        assert sorted(node.op.signature.untraced) == [False, True][not merged :]


class TestMerging:
    def test_loops_over_the_same_data(self):
        x = pt.vector("x")
        a = scanlib.scan(lambda x, s: s + x, x, 0.0, return_updates=False)
        b = scanlib.scan(lambda x, p: p * x, x, 1.0, return_updates=False)
        (node,) = check([x], [a, b], [rng.normal(size=5)])
        assert node.op.signature.n_states == 2

    def test_loops_over_other_data_stay_apart(self):
        x, y = pt.vector("x"), pt.vector("y")
        a = scanlib.scan(lambda x, s: s + x, x, 0.0, return_updates=False)
        b = scanlib.scan(lambda x, p: p * x, y, 1.0, return_updates=False)
        assert len(check([x, y], [a, b], [rng.normal(size=5), rng.normal(size=3)])) == 2

    def test_a_loop_that_reads_another_stays_apart(self):
        x = pt.vector("x")
        a = scanlib.scan(lambda x, s: s + x, x, 0.0, return_updates=False)
        b = scanlib.scan(lambda x, p, last: p * x + last, x, 1.0, a[-1], return_updates=False)
        assert len(check([x], [a, b], [rng.normal(size=5)])) == 2

    def test_loops_that_may_end_early_stay_apart(self):
        x = pt.vector("x")

        def until(limit):
            return scanlib.scan(
                lambda x, s: (s + x, scanlib.until(s + x > limit)), x, 0.0, return_updates=False
            )

        assert len(check([x], [until(1.0), until(2.0)], [np.ones(5)])) == 2

    def test_forward_loop_of_a_gradient_that_stores_draws(self):
        generator, a = pytensor.shared(np.random.default_rng(5)), pt.scalar("a")

        def step(state, h, a):
            new_state, draw = pt.random.normal(0, 1, rng=state).owner.outputs
            return [new_state, pt.tanh(a * h * draw)]

        _, trace = scanlib.scan(
            step,
            outputs_info=[generator, pt.constant(0.5)],
            non_sequences=a,
            n_steps=5,
            return_updates=False,
        )
        gradient = pytensor.grad(trace.sum(), a)
        nodes = check([a], [trace, gradient], [0.7])
        assert len([node for node in nodes if not node.op.signature.reverse]) == 1


def test_switched_off():
    x = pt.vector("x")
    a, _b = scanlib.scan(lambda x, a, b: [a + x, b * x], x, [0.0, 1.0], return_updates=False)
    with pytensor.config.change_flags(scanlib__simplify=False):
        (node,) = loops(pytensor.function([x], a, mode=CHECKED))
    assert node.op.signature.n_states == 2


def test_the_users_graph_is_left_alone():
    x = pt.vector("x")
    a, _b = scanlib.scan(lambda x, a, b: [a + x, b * x], x, [0.0, 1.0], return_updates=False)
    before = [v.owner.op for v in ancestors([a]) if v.owner]
    pytensor.function([x], a, mode=CHECKED)
    assert [v.owner.op for v in ancestors([a]) if v.owner] == before
