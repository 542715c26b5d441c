"""`scanlib.explain` of graphs: loops in loops, what runs them, and the forms of what it says."""

from types import SimpleNamespace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.explained_loops import (
    BLOCKS,
    BY_WIDTH,
    CHANNELS,
    GENERAL,
    STEPS,
    ar1,
    check_forms,
    explain_one,
    reasons,
    scan,
)
from tests.modes import MODES


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_loop_of_pytensor():
    x = pt.dvector("x")
    y = pytensor.scan(
        lambda x, y: 0.5 * y + x,
        sequences=x,
        outputs_info=pt.zeros(()),
        name="old",
        return_updates=False,
    )
    explanation = scanlib.explain(y, "FAST_COMPILE")
    (loop,) = explanation.loops
    assert (loop.op, loop.name, loop.parts) == ("pytensor.scan", "old", ())
    assert "pytensor.scan made the loop" in loop.because
    assert "scanlib.enable()" in check_forms(explanation)


def test_loops_inside_a_step():
    x = pt.dmatrix("x")

    def step(row, total):
        inner = scan(lambda v, a: pt.tanh(v + a), sequences=row, outputs_info=total, name="inner")
        return total + inner[-1]

    explanation = scanlib.explain(
        scan(step, sequences=x, outputs_info=pt.dscalar("total"), name="outer")
    )
    (outer,) = explanation.loops
    (inner,) = outer.inner
    assert "runs an inner loop (total[t-1] of inner)" in reasons(outer)
    assert (outer.op, inner.op, inner.schedule) == ("Scan", "ElemwiseScan", STEPS)
    check_forms(explanation)
    text = explanation.details()
    assert "every step runs:" in text
    assert "     1.1. inner: ElemwiseScan" in text
    assert explanation.to_dict()["loops"][0]["inner"][0]["name"] == "inner"


def test_loops_inside_another_op():
    x, phi, y = ar1()
    start = next(v for v in pytensor.graph.traversal.graph_inputs([y]) if v.name == "y")
    wrapped = OpFromGraph([x, phi, start], [y])(pt.dvector("a"), pt.dscalar("b"), pt.dscalar("c"))
    loop = explain_one(wrapped, pytensor.compile.mode.Mode(linker="py", optimizer=None))
    assert (loop.name, loop.inside) == ("ar1", "OpFromGraph")


def test_nothing_to_explain():
    explanation = scanlib.explain(pt.dvector("x") * 2)
    assert explanation.loops == []
    assert check_forms(explanation) == "no loops; graph, numba linker"


def test_the_graph_stays_as_it_is():
    _, phi, y = ar1()
    cost = pytensor.grad(y.sum(), phi)
    before = pytensor.dprint([y, cost], file="str", print_type=True)
    scanlib.explain([y, cost])
    assert pytensor.dprint([y, cost], file="str", print_type=True) == before


def test_a_graph_is_explained_as_it_is_compiled():
    _, phi, y = ar1()
    inputs = [v for v in pytensor.graph.traversal.graph_inputs([y]) if v.name]
    outputs = [y, pytensor.grad(y.sum(), phi)]
    compiled = scanlib.explain(pytensor.function(inputs, outputs, mode=MODES["c"]))
    assert compiled.loops == scanlib.explain(outputs, MODES["c"]).loops


@pytest.mark.parametrize(
    "loop, schedule",
    [
        (lambda x: scan(lambda x, y: x + y, sequences=x, outputs_info=0.0), BLOCKS),
        (lambda x: scan(lambda x, y: pt.tanh(x + y), sequences=x, outputs_info=0.0), STEPS),
        (
            lambda x: scan(
                lambda x, y: x + y, sequences=x[:, None] * np.ones(5), outputs_info=np.zeros(5)
            ),
            CHANNELS,
        ),
        (
            lambda x: scan(
                lambda x, y: pt.logaddexp(x, y),
                sequences=x[:, None] * np.ones(2),
                outputs_info=np.zeros(2),
            ),
            BLOCKS,
        ),
        (
            lambda x: scan(
                lambda x, y: pt.logaddexp(x, y),
                sequences=pt.outer(x, x),
                outputs_info=pt.zeros_like(x),
            ),
            BY_WIDTH,
        ),
        (scanlib.cumlogsumexp, BLOCKS),
        (
            lambda x: scan(lambda x, y: 0.5j * y + x, sequences=x, outputs_info=np.complex128(0)),
            STEPS,
        ),
    ],
    ids=[
        "blocks",
        "steps",
        "channels",
        "few-channels",
        "unknown-width",
        "logarithms",
        "complex",
    ],
)
def test_the_backend_writes_the_schedule_that_is_shown(loop, schedule):
    f = pytensor.function([x := pt.dvector("x")], loop(x), mode=MODES["c"])
    (op,) = [n.op for n in f.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
    names = [kernel.name for kernel in program_of(op).kernels.run]
    if names == ["channels"]:
        assert schedule in (STEPS, CHANNELS)
    else:
        assert schedule == (BLOCKS if names == ["blocks"] else BY_WIDTH)
    assert scanlib.explain(f).loops[0].schedule == schedule


def test_why_an_elementwise_loop_was_not_lowered():
    _, _, y = ar1()
    loop = explain_one(y, "FAST_COMPILE")
    assert (loop.op, loop.schedule) == ("Scan", GENERAL)
    assert "scanlib_elementwise" in reasons(loop)
    with pytensor.config.change_flags(scanlib__lower=False):
        assert "scanlib__lower is False" in reasons(explain_one(y))


def test_a_gradient_that_adds_to_a_part_of_a_row():
    x, start = pt.dvector("x"), pt.dvector("start")

    def step(x, h):
        return pt.tanh(h + x + pt.concatenate([pt.zeros(1), h[:-1]]))

    h = scan(step, x, start)
    f = pytensor.function([x, start], pytensor.grad(h[-1].sum(), start), mode=MODES["numba"])
    (_, gradient) = scanlib.explain(f).loops
    assert any("writes items by index" in str(obstacle) for obstacle in gradient.obstacles)


def test_what_runs_a_loop():
    _, _, y = ar1()
    with pytensor.config.change_flags(scanlib__perform="python"):
        loop = explain_one(y, MODES["c"])
    assert loop.schedule == "one Python call per step"
    assert "scanlib__perform" in loop.runs


def test_a_loop_that_python_walks():
    _, _, y = ar1()
    inputs = [v for v in pytensor.graph.traversal.graph_inputs([y]) if v.name]
    f = pytensor.function(inputs, y, mode=MODES["c"])
    (op,) = [n.op for n in f.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
    assert scanlib.explain(f).loops[0].runs == "as a kernel, compiled by LLVM"
    with pytensor.config.change_flags(scanlib__perform="numba"):
        assert "numba at the first call" in scanlib.explain(f).loops[0].runs
        op._runners["numba"] = SimpleNamespace(run=op.python_loop())
        (loop,) = scanlib.explain(f).loops
    assert loop.schedule == "one Python call per step"
    assert "step by step in Python" in loop.runs


def test_an_unknown_op_is_named():
    x = pt.dvector("x")

    class Opaque(pytensor.graph.op.Op):
        __props__ = ()

        def make_node(self, value):
            return pytensor.graph.basic.Apply(self, [value], [value.type()])

        def perform(self, node, inputs, output_storage):
            output_storage[0][0] = np.asarray(inputs[0])

        def infer_shape(self, *arguments):
            return arguments[-1]

    y = scan(lambda x: pt.as_tensor(Opaque()(x)), sequences=x)
    loop = explain_one(y)
    assert "computes what scanlib does not know (opaque(x))" in reasons(loop)
    assert loop.action.startswith("write the operation with functions of pytensor.tensor")


def test_matrix_recurrences():
    a = pt.tensor("A", shape=(None, 3, 3))
    h = scanlib.linear_scan(a, pt.tensor("b", shape=(None, 3)), matrix=True)
    explanation = scanlib.explain(h)
    (loop,) = explanation.loops
    assert loop.op == "LinearScan"
    assert loop.part("A").shape == (3, 3)
    (state,) = [part for part in loop.parts if part.role == "state"]
    assert (state.shape, state.recurrence) == ((3,), "matrix affine")
    assert "a vector" in loop.work
    assert (loop.bytes_read(), loop.bytes_written()) == (96, 24)
    check_forms(explanation)


def test_an_associative_scan_in_a_tree(monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr("scanlib.backends.jax.combines_in_trees", lambda: True)
    x = pt.dmatrix("x")
    y = scanlib.associative_scan(lambda a, b: a * b, x)
    explanation = scanlib.explain(y, "JAX")
    (loop,) = explanation.loops
    assert loop.op == "AssociativeScan"
    assert "associative" in loop.because
    check_forms(explanation)


def test_direct_functions_give_their_loops_a_name():
    x = pt.dvector("x")
    values = [
        scanlib.linear_scan(0.5, x),
        scanlib.cummax(x),
        scanlib.lfilter([0.5], [1.0, -0.5], x),
        scanlib.lfilter(pt.dvector("b"), [1.0], x),
    ]
    names = [explain_one(value).name for value in values]
    assert names == ["linear_scan", "cummax", "lfilter", "lfilter"]


def test_html_is_escaped():
    _, _, y = ar1(name="<b>&")
    html = scanlib.explain(y)._repr_html_()
    assert "<b>&" not in html
    assert "&lt;b&gt;&amp;" in html
    assert "<summary>details</summary>" in html


def test_names_that_are_long_or_equal():
    x = pt.dvector("x" * 60)
    loop = scan(
        lambda now, before: pt.tanh(now - before),
        sequences={"input": x, "taps": [0, -1]},
        name="n" * 40,
    )
    explanation = scanlib.explain(loop)
    check_forms(explanation)
    names = [part.name for part in explanation.loops[0].parts]
    assert len(names) == len(set(names)) == 3
    with pytest.raises(KeyError, match="no part 'y'"):
        explanation.loops[0].part("y")


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "value, message",
    [
        (3, "got int$"),
        ("f", "got str$"),
        (lambda x: x, "got function; compile it with pytensor.function"),
        ([pt.dscalar(), 2.0], "list that holds a value of type float$"),
        (SimpleNamespace(maker=None), "got SimpleNamespace$"),
    ],
)
def test_wrong_arguments(value, message):
    with pytest.raises(TypeError, match=message):
        scanlib.explain(value)


def test_a_mode_for_a_compiled_function():
    f = pytensor.function([], pt.constant(1.0), mode=MODES["py"])
    with pytest.raises(TypeError, match="mode is for graphs"):
        scanlib.explain(f, "NUMBA")


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_times_of_a_profiled_function(linker):
    x, _, y = ar1()
    inputs = [v for v in pytensor.graph.traversal.graph_inputs([y]) if v.name]
    f = pytensor.function(inputs, y, mode=MODES[linker], profile=True)
    assert scanlib.explain(f).loops[0].seconds is None
    values = [np.ones(1000) if v is x else np.array(0.5) for v in inputs]
    f(*values)
    (loop,) = scanlib.explain(f).loops
    assert loop.seconds > 0
    assert 0 < loop.share <= 1
    assert "% of the call)" in check_forms(scanlib.explain(f))


def test_the_formulas_of_a_step():
    _, phi, y = ar1()
    forward, gradient = scanlib.explain([y, pytensor.grad(y.sum(), phi)]).loops
    assert forward.step == ("next y = (phi * y) + x",)
    assert gradient.step[0] == "next state 0 = (1.0 + state 0) * phi"
    assert "step        next y = (phi * y) + x" in scanlib.explain(y).details()


def test_formulas_of_long_steps_are_left_out():
    def step(x, h):
        for _ in range(200):
            h = h * pt.sin(h + x)
        return h, h + 1.0

    loop = explain_one(scan(step, pt.dvector("x"), [0.0, None])[0])
    assert loop.step == ()
