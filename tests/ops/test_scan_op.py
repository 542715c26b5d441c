"""The Op itself: signature, types, equality, printing, shapes, direction, fall-backs."""

import pickle

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.debug.debugmode import DebugMode
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors

import scanlib
from scanlib._compat import freeze_graph
from scanlib.ops.loop import Loop, NonSequence, Output, Sequence, State
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from scanlib.ops.shapes import output_row_shapes
from scanlib.ops.signature import Signature

rng = np.random.default_rng(3)


def affine_loop(reverse=False, names=(None, None)):
    """Return a loop over ``h ← a h + x`` with the tap two steps back added."""
    x, h0, a = pt.vector("x"), pt.vector("h0"), pt.scalar("a")
    row, h1, h2, inner = pt.scalar(), pt.scalar(), pt.scalar(), pt.scalar()
    loop = Loop(
        sequences=[Sequence(x, row, names[0])],
        states=[State(h0, {-1: h1, -2: h2}, inner * h1 + row + h2, name=names[1])],
        non_sequences=[NonSequence(a, inner)],
        outputs=[Output(h1 * 2)],
        reverse=reverse,
    )
    return loop, [x, h0, a]


def loop(step, sequence, initial):
    """Return the history of a loop with one sequence and one state."""
    return scanlib.scan(step, sequence, initial, return_updates=False)


class TestSignature:
    def test_groups_and_back(self):
        signature = Signature(
            n_sequences=2,
            taps=((-1,), (-3, -1)),
            untraced=(False, True),
            n_carries=1,
            n_non_sequences=1,
            n_outputs=1,
            has_n_steps=True,
            has_stop=True,
        )
        flat = list(range(7))
        groups = signature.split_inputs(flat)
        assert groups == (0, [1, 2], [3, 4], [5], [6])
        assert signature.join_inputs(groups) == flat
        assert signature.split_body_inputs(list("xyabcdw")).taps == [["a"], ["b", "c"]]
        assert signature.split_body_outputs(list("abczs")).stop == "s"
        assert signature.depths == (1, 3)
        assert [signature.describe_input(i) for i in (0, 2, 6)] == [
            "n_steps",
            "sequence 1",
            "non-sequence 0",
        ]

    @pytest.mark.parametrize("taps", [(), (0,), (1,), (-1, -1)])
    def test_taps_must_be_negative_and_distinct(self, taps):
        with pytest.raises(ValueError, match="taps"):
            Signature(taps=(taps,), untraced=(False,), has_n_steps=True)

    def test_something_must_give_the_length(self):
        with pytest.raises(ValueError, match="number of steps"):
            Signature(n_outputs=1)

    def test_wrong_number_of_variables(self):
        with pytest.raises(ValueError, match="expected 1"):
            Signature(n_sequences=1).split_inputs([1, 2])


class TestEquality:
    def test_equal_loops_are_one_node_after_merging(self):
        (first, inputs), (second, _) = affine_loop(), affine_loop(names=("x", "level"))
        a, b = first.apply(), second.apply()
        assert a.node.op == b.node.op
        assert hash(a.node.op) == hash(b.node.op)
        again = b.node.op(*inputs, return_list=True)
        f = pytensor.function(inputs, [a.histories[0], again[0]], mode=get_mode("CVM"))
        nodes = f.maker.fgraph.apply_nodes
        assert sum(isinstance(node.op, Scan | ElemwiseScan) for node in nodes) == 1

    def test_direction_and_truncation_count(self):
        op = affine_loop()[0].apply().node.op
        assert op != affine_loop(reverse=True)[0].apply().node.op
        truncated = affine_loop()[0]
        truncated.truncate_gradient = 3
        assert op != truncated.apply().node.op

    def test_pickling(self):
        loop, inputs = affine_loop(names=("x", "level"))
        results = loop.apply()
        op = pickle.loads(pickle.dumps(results.node.op))
        assert op == results.node.op
        assert op.labels == results.node.op.labels
        data = [rng.normal(size=5), rng.normal(size=2), 0.5]
        f = pytensor.function(inputs, [results.histories[0], op(*inputs)[0]])
        np.testing.assert_array_equal(*f(*data))


class TestValues:
    @pytest.mark.parametrize("reverse", [False, True])
    def test_direction_and_place_of_the_initial_rows(self, reverse, mode):
        loop, inputs = affine_loop(reverse=reverse)
        results = loop.apply()
        f = pytensor.function(inputs, [results.histories[0], results.outputs[0]], mode=mode)
        x, h0, a = rng.normal(size=5), rng.normal(size=2), 0.5
        history, doubled = f(x, h0, a)
        walk = x[::-1] if reverse else x
        rows = list(h0[::-1] if reverse else h0)
        outputs = []
        for value in walk:
            outputs.append(2 * rows[-1])
            rows.append(a * rows[-1] + value + rows[-2])
        np.testing.assert_allclose(history, rows[::-1] if reverse else rows)
        np.testing.assert_allclose(doubled, outputs[::-1] if reverse else outputs)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_stop_keeps_the_rows_that_ran(self, reverse, mode):
        x, row, total = pt.vector("x"), pt.scalar(), pt.scalar()
        loop = Loop(
            sequences=[Sequence(x, row)],
            states=[State(pt.zeros(1), {-1: total}, total + row)],
            outputs=[Output(row * 10)],
            stop=total + row > 2.5,
            reverse=reverse,
        )
        results = loop.apply()
        f = pytensor.function([x], [results.histories[0], results.outputs[0]], mode=mode)
        history, tens = f(np.arange(1.0, 6.0))
        if reverse:
            np.testing.assert_allclose(history, [5, 0])
            np.testing.assert_allclose(tens, [50])
        else:
            np.testing.assert_allclose(history, [0, 1, 3])
            np.testing.assert_allclose(tens, [10, 20])

    def test_storage_grows_with_until(self, mode):
        n = pt.lscalar("n")
        squares, rows = scanlib.scan(
            lambda k, n: ([k + 1, pt.stack([k, k * k])], scanlib.until(pt.ge(k, n))),
            outputs_info=[0, None],
            non_sequences=n,
            n_steps=10**6,
            return_updates=False,
        )
        f = pytensor.function([n], [squares, rows], mode=mode)
        counts, pairs = f(300)
        np.testing.assert_array_equal(counts, np.arange(1, 302))
        np.testing.assert_array_equal(pairs[:, 1], np.arange(301) ** 2)

    def test_deep_states_are_read_from_memory(self, mode):
        h0 = pt.vector("h0")
        h = scanlib.scan(
            lambda far, near: 0.5 * far + 0.1 * near,
            outputs_info={"initial": h0, "taps": [-12, -1]},
            n_steps=20,
            return_updates=False,
        )
        rows = list(rng.normal(size=12))
        f = pytensor.function([h0], [h, h[-1]], mode=mode)
        trace, last = f(np.array(rows))
        for _ in range(20):
            rows.append(0.5 * rows[-12] + 0.1 * rows[-1])
        np.testing.assert_allclose(trace, rows[12:])
        np.testing.assert_allclose(last, rows[-1])


class TestShapes:
    def test_shapes_need_no_loop(self):
        x, w, k = pt.matrix("x"), pt.matrix("w"), pt.lscalar("k")
        h, z = scanlib.scan(
            lambda x, h, w: [pt.tanh(h + x), (x @ w)[None]],
            x[:k],
            [pt.zeros(x.shape[1]), None],
            w,
            return_updates=False,
        )
        f = pytensor.function([x, w, k], [*h.shape, *z.shape], mode=get_mode("CVM"))
        nodes = f.maker.fgraph.apply_nodes
        assert not any(isinstance(node.op, Scan | ElemwiseScan) for node in nodes)
        sizes = f(np.zeros((7, 3)), np.zeros((3, 2)), 5)
        assert [int(size) for size in sizes] == [5, 3, 5, 1, 2]

    def test_static_lengths(self):
        x = pt.TensorType("float64", shape=(6, 3))("x")
        h, z = scanlib.scan(lambda x, h: [h + x, x[0]], x, [pt.zeros(3), None],
                            return_updates=False)  # fmt: skip
        assert h.type.shape == (6, 3)
        assert z.type.shape == (6,)

    def test_sizes_are_those_of_another_frozen_graph(self):
        """All frozen graphs have the same inputs, as steps of PyTensor's loops around ours have."""
        x, y = pt.vectors("x", "y")
        body = freeze_graph([x, y], [pt.exp(x)])
        size = body.inputs[1].shape[0]
        ((found,),) = output_row_shapes(body.inputs, body.outputs, [[size]] * 2, [None] * 2)
        assert found is not None
        assert body.inputs[1] in ancestors([found])

    def test_wrong_types_are_refused_by_name(self):
        op = affine_loop()[0].apply().node.op
        with pytest.raises(TypeError, match="sequence 0"):
            op(pt.matrix(), pt.vector(), pt.scalar())
        with pytest.raises(TypeError, match="non-sequence 0"):
            op(pt.vector(), pt.vector(), pt.vector())


class TestPrinting:
    def test_dprint_shows_the_body(self):
        x = pt.vector("x")
        h = scanlib.scan(lambda x, h: (pt.tanh(h + x), scanlib.until(h > 3)), x, 0.0,
                         name="squash", return_updates=False)  # fmt: skip
        text = h.dprint(file="str")
        assert "Scan{squash, until}" in text
        assert "Inner graphs" in text
        assert "Tanh" in text


class TestPerform:
    def test_ops_without_numba_code(self):
        twice = _Twice()
        x = pt.vector("x")
        h = scanlib.scan(lambda x, h: twice(h) + x, x, 1.0, return_updates=False)
        f = pytensor.function([x], h, mode=get_mode("CVM"))
        np.testing.assert_allclose(f([1.0, 2.0]), [3, 8])

    def test_half_precision_runs_in_python(self):
        x = pt.TensorType("float16", shape=(None,))("x")
        h = scanlib.scan(lambda x, h: h + x, x, pt.constant(np.float16(1)), return_updates=False)
        f = pytensor.function([x], h, mode=get_mode("CVM"))
        result = f(np.array([1, 2], dtype="float16"))
        assert result.dtype == "float16"
        np.testing.assert_allclose(result, [2, 4])

    def test_insisting_on_the_compiled_loop(self):
        from scanlib.ops.execution import NotCompilableError

        x = pt.TensorType("float16", shape=(None,))("x")
        h = scanlib.scan(lambda x, h: h + x, x, pt.constant(np.float16(1)), return_updates=False)
        f = pytensor.function([x], h, mode=get_mode("CVM"))
        with (
            pytensor.config.change_flags(scanlib__perform="numba"),
            pytest.raises(NotCompilableError),
        ):
            f(np.array([1, 2], dtype="float16"))


class TestCompiledFunctions:
    @pytest.mark.slow
    def test_debug_mode(self):
        """PyTensor's own checker: values agree with and without rewrites, nothing is aliased."""
        x, a = pt.vector("x"), pt.scalar("a")
        h = scanlib.scan(lambda x, h, a: pt.tanh(a * h + x), x, 0.1, a, return_updates=False)
        cost = (h**2).sum()
        checked = DebugMode(check_c_code=False, check_py_code=True)
        outputs = [cost, *pytensor.grad(cost, [x, a])]
        results = pytensor.function([x, a], outputs, mode=checked)(np.ones(3), 0.5)
        expected = pytensor.function([x, a], outputs, mode=get_mode("CVM"))(np.ones(3), 0.5)
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, wanted)

    @pytest.mark.parametrize(
        "graph",
        [
            lambda x: loop(lambda x, h: 0.5 * h + x, x, np.float64(0)),
            lambda x: loop(lambda x, h: pt.sort(h) + x, x, np.zeros(2)),
            lambda x: scanlib.linear_scan(np.eye(2), x[:, None] + np.ones(2), matrix=True),
            lambda x: scanlib.associative_scan(pt.maximum, x),
        ],
        ids=["elementwise", "general", "matrix", "associative"],
    )
    def test_loops_of_constants_are_compiled(self, graph):
        result = graph(pt.constant(rng.normal(size=5)))
        compiled = pytensor.function([], result, mode=get_mode("FAST_RUN").excluding("fusion"))
        assert any("Scan" in str(node.op) for node in compiled.maker.fgraph.apply_nodes)

    def test_freeing_and_copying(self):
        x = pt.vector("x")
        h = scanlib.scan(lambda x, h: h + x, x, 0.0, return_updates=False)
        f = pytensor.function([x], h, mode=get_mode("CVM"))
        f.free()
        np.testing.assert_allclose(f.copy()([1.0, 2.0]), [1, 3])


class _Twice(Op):
    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = np.asarray(2 * inputs[0])
