"""`scanlib.explain`: what it says about loops, and that backends do what it says."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph

import scanlib
from scanlib.backends.c.printer import printer_for
from scanlib.explain.data import Bytes
from scanlib.explain.text import WIDTH
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.execution import python_loop
from tests.modes import MODES

BLOCKS = "blocks of steps"
CHANNELS = "time outside, channels inside"
BY_WIDTH = "blocks of steps for few channels, else time outside, channels inside"
STEPS = "step by step in registers"
GENERAL = "one function for the loop, operation by operation in each step"


def scan(*args, **kwargs):
    return scanlib.scan(*args, return_updates=False, **kwargs)


def ar1(name="ar1"):
    x, phi = pt.dvector("x"), pt.dscalar("phi")
    y = scan(
        lambda x, y, phi: phi * y + x,
        sequences=x,
        outputs_info=pt.dscalar("y"),
        non_sequences=phi,
        name=name,
    )
    return x, phi, y


def rnn():
    x, w, start = pt.dmatrix("x"), pt.dmatrix("W"), pt.dvector("h")
    h = scan(
        lambda x, h, w: pt.tanh(x + pt.dot(w, h)),
        sequences=x,
        outputs_info=start,
        non_sequences=w,
        name="rnn",
    )
    return h


def explain_one(graph, mode=None):
    (loop,) = scanlib.explain(graph, mode).loops
    return loop


def reasons(loop):
    return " | ".join(map(str, loop.obstacles))


def check_forms(explanation):
    """Check that text, HTML and data can be made, and that the text is no wider than it may be."""
    text = str(explanation)
    assert text == str(explanation)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert not re.search(r"0x[0-9a-f]{6}", text)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert [loop["name"] for loop in data["loops"]] == [loop.name for loop in explanation.loops]
    html = explanation._repr_html_()
    assert html.count("<table") == html.count("</table>")
    assert html.count("<details") == html.count("</details>")
    assert "src=" not in html
    assert "href=" not in html
    for loop in explanation.loops:
        assert loop.name in text
    return text


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_a_scalar_loop_and_its_gradient(linker):
    _, phi, y = ar1()
    inputs = [v for v in pytensor.graph.traversal.graph_inputs([y]) if v.name]
    f = pytensor.function(inputs, [y, pytensor.grad(y.sum(), phi)], mode=MODES[linker])
    explanation = scanlib.explain(f)
    text = check_forms(explanation)
    assert text.startswith("2 loops in the order of computation (compiled function, ")
    forward, gradient = explanation.loops
    assert (forward.name, forward.op, forward.schedule) == ("ar1", "ElemwiseScan", BLOCKS)
    assert (forward.steps, forward.reverse, forward.gradient) == (None, False, False)
    assert [(p.role, p.name) for p in forward.parts] == [
        ("sequence", "x"),
        ("state", "y"),
        ("non-sequence", "phi"),
    ]
    state = forward.part("y")
    assert (state.dtype, state.shape, state.taps) == ("float64", (), (-1,))
    assert (state.stored, state.family) == ("history", "affine")
    assert (forward.memory.read.value, forward.memory.written.value) == (8, 8)
    assert [(h.name, h.depth, h.row.value) for h in forward.memory.histories] == [("y", 1, 8)]
    assert not forward.obstacles
    assert (gradient.name, gradient.schedule) == ("ar1_gradient", BLOCKS)
    assert gradient.gradient
    assert gradient.reverse
    carries = [part.family for part in gradient.parts if part.role == "carry"]
    assert sorted(carries) == ["affine", "sum over time"]
    assert gradient.parts[0].name == "history of y of ar1[:-1]"
    numba = linker == "numba"
    assert explanation.linker == ("numba" if numba else "C")
    assert ("as a part of" in forward.runs) == numba


def test_the_gradient_alone_stores_no_more_than_it_reads():
    _, phi, y = ar1()
    forward, gradient = scanlib.explain(pytensor.grad(y[-1], phi)).loops
    assert [history.name for history in forward.memory.histories] == ["y"]
    assert gradient.memory.written.value == 0
    last = explain_one(y[-1])
    assert last.part("y").stored == "last rows"
    assert last.memory.histories == ()
    assert last.memory.written.value == 0


def test_more_taps():
    x = pt.dvector("x")
    y = scan(
        lambda x, y1, y2: 0.5 * y1 - 0.3 * y2 + x,
        sequences=x,
        outputs_info={"initial": pt.dvector("y"), "taps": [-1, -2]},
        name="ar2",
    )
    explanation = scanlib.explain(y)
    loop = explanation.loops[0]
    assert (loop.schedule, loop.part("y").taps) == (BLOCKS, (-2, -1))
    assert loop.part("y").family == "affine"
    assert loop.memory.histories[0].depth == 2
    assert "the history of y: (T + 2)·8 B" in check_forms(explanation)


def test_garch():
    shock, names = pt.dvector("shock"), ("omega", "alpha", "beta")
    omega, alpha, beta = map(pt.dscalar, names)
    variance = scan(
        lambda e, h, w, a, b: w + a * e**2 + b * h,
        sequences=shock,
        outputs_info=pt.dscalar("variance"),
        non_sequences=[omega, alpha, beta],
        name="garch",
    )
    cost = pt.log(variance).sum()
    explanation = scanlib.explain([cost, *pytensor.grad(cost, [omega, alpha, beta])])
    check_forms(explanation)
    assert len(explanation.loops) == 2
    for loop in explanation.loops:
        assert (loop.op, loop.schedule) == ("ElemwiseScan", BLOCKS)
    assert explanation.loops[0].part("variance").family == "affine"


def test_static_lengths_and_sizes():
    x = pt.tensor("x", dtype="float32", shape=(500, 3))
    y = scan(
        lambda x, y: pt.tanh(x + y), sequences=x, outputs_info=np.zeros(3, "float32"), name="wide"
    )
    explanation = scanlib.explain(y)
    (loop,) = explanation.loops
    assert (loop.steps, loop.schedule, loop.parts[0].shape) == (500, CHANNELS, (3,))
    assert loop.memory.read.value == 12
    text = check_forms(explanation)
    assert "T = 500" in text
    assert "6 kB and 6 kB in all" in text
    assert ": 6.01 kB" in text


def test_a_wide_nonlinear_loop():
    x, start = pt.dmatrix("x"), pt.dvector("h")
    h = scan(lambda x, h: pt.tanh(x + h), sequences=x, outputs_info=start, name="wide")
    explanation = scanlib.explain([h, pytensor.grad(h.sum(), start)])
    forward, gradient = explanation.loops
    assert [loop.schedule for loop in (forward, gradient)] == [CHANNELS, BY_WIDTH]
    assert (forward.part("x").shape, forward.part("h").shape) == (("c",), ("c",))
    assert str(forward.memory.read) == "8·c B"
    assert forward.part("h").family is None
    assert reasons(forward).lower() == "state 'h': tanh of 'h' is not affine"
    assert not gradient.obstacles
    assert "none" in check_forms(explanation)


def test_a_matrix_product_is_named():
    h = rnn()
    explanation = scanlib.explain(h)
    (loop,) = explanation.loops
    assert (loop.op, loop.schedule) == ("Scan", GENERAL)
    assert "the next value of state 'h': multiplies matrices (Dot of 'W' and 'h')" in reasons(loop)
    assert "no matrix recurrence" in reasons(loop)
    assert loop.memory.whole.terms
    text = check_forms(explanation)
    assert "whole" in text


def test_all_obstacles_of_a_body_are_named():
    x, table, start = pt.lvector("x"), pt.dmatrix("table"), pt.dvector("s")
    loop = explain_one(
        scan(
            lambda x, s, table: pt.sort(table[x] + pt.dot(table, s)),
            sequences=x,
            outputs_info=start,
            non_sequences=table,
        )
    )
    said = reasons(loop)
    for action, names in (
        ("computes what is no elementwise operation", ("'table'", "'x'", "'s'")),
        ("reads items by index", ("'table'", "'x'")),
        ("multiplies matrices", ("'table'", "'s'")),
    ):
        (reason,) = [str(o) for o in loop.obstacles if action in o.reason]
        assert "the next value of state 's'" in reason
        assert all(name in reason for name in names), said


def test_random_draws_are_named():
    rng = pytensor.shared(np.random.default_rng(1), name="rng")

    def step(y):
        new_rng, draw = pt.random.normal.make_node(rng, None, 0.0, 1.0).outputs
        return y + draw, {rng: new_rng}

    y, updates = scanlib.scan(step, outputs_info=pt.dscalar("y"), n_steps=10)
    loop = explain_one([y, *updates.values()])
    assert "draws random numbers" in reasons(loop)
    assert loop.part("rng").shape is None
    assert loop.steps == 10


def test_until():
    a, guess = pt.dscalar("a"), pt.dscalar("guess")
    root = scan(
        lambda x, a: ((x + a / x) / 2, scanlib.until(abs(x * x - a) < 1e-9)),
        outputs_info=guess,
        non_sequences=a,
        n_steps=100,
        name="newton",
    )
    explanation = scanlib.explain(root)
    (loop,) = explanation.loops
    assert (loop.until, loop.steps, loop.schedule) == (True, 100, STEPS)
    assert "`until`" in reasons(loop)
    assert "'guess'" in reasons(loop)
    assert "until" in loop.why
    text = check_forms(explanation)
    assert "at most 100" in text
    assert "at most 808 B" in text
    stored = explain_one(root[-1])
    assert stored.part("guess").stored == "last rows"


@pytest.mark.parametrize(
    "op, family", [(pt.maximum, "maximum"), (pt.minimum, "minimum"), (pt.mul, "affine")]
)
def test_running_extremes_and_products(op, family):
    x = pt.dvector("x")
    loop = explain_one(scan(op, sequences=x, outputs_info=pt.dscalar("y")))
    assert (loop.schedule, loop.part("y").family) == (BLOCKS, family)


def test_a_nonlinear_scalar_loop():
    x = pt.dvector("x")
    loop = explain_one(scan(lambda x, y: pt.sin(x * y), sequences=x, outputs_info=pt.dscalar("y")))
    assert loop.schedule == STEPS
    assert "family" in loop.why
    assert "'y' is not affine" in reasons(loop)


def test_a_family_that_is_not_worth_composing():
    bits = pt.lvector("bits")
    loop = explain_one(scan(lambda x, y: x & y, sequences=bits, outputs_info=pt.lscalar("y")))
    assert loop.schedule == STEPS
    assert loop.part("y").family in loop.why
    assert not loop.obstacles


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
    assert (loop.op, loop.name, loop.memory) == ("pytensor.scan", "old", None)
    assert (loop.parts[0].role, loop.parts[0].name) == ("sequence", "x")
    assert (-1,) in [p.taps for p in loop.parts if p.role == "state"]
    assert "not scanlib's" in loop.why
    assert "scanlib.scan" in check_forms(explanation)


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
    assert "runs an inner loop (Scan{inner}" in reasons(outer)
    assert (outer.op, inner.op, inner.schedule) == ("Scan", "ElemwiseScan", STEPS)
    text = check_forms(explanation)
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
    assert check_forms(explanation) == "no loops (graph, numba linker)"


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
                lambda x, y: x + y, sequences=x[:, None] * np.ones(2), outputs_info=np.zeros(2)
            ),
            BLOCKS,
        ),
        (
            lambda x: scan(
                lambda x, y: x + y,
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
        "no-kernel-in-C",
    ],
)
def test_the_backend_writes_the_schedule_that_is_shown(loop, schedule):
    printers = {
        "BlockPrinter": {BLOCKS},
        "NestPrinter": {STEPS, CHANNELS},
        "WidthPrinter": {BY_WIDTH},
    }
    f = pytensor.function([x := pt.dvector("x")], loop(x), mode=MODES["c"])
    (op,) = [n.op for n in f.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
    assert schedule in printers[type(printer_for(op)).__name__]
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


def test_a_loop_that_numba_gave_up():
    _, _, y = ar1()
    inputs = [v for v in pytensor.graph.traversal.graph_inputs([y]) if v.name]
    f = pytensor.function(inputs, y, mode=MODES["c"])
    (op,) = [n.op for n in f.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
    assert scanlib.explain(f).loops[0].runs == "as C code of its own"
    with pytensor.config.change_flags(scanlib__perform="numba"):
        assert "numba at the first call" in scanlib.explain(f).loops[0].runs
        op._runners["numba"] = SimpleNamespace(run=python_loop(op))
        (loop,) = scanlib.explain(f).loops
    assert loop.schedule == "one Python call per step"
    assert "numba could not compile it" in loop.runs


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
    assert "computes what is no elementwise operation (Opaque of 'x')" in reasons(explain_one(y))


def test_matrix_recurrences():
    a = pt.tensor("A", shape=(None, 3, 3))
    h = scanlib.linear_scan(a, pt.dmatrix("b"), matrix=True)
    explanation = scanlib.explain(h)
    (loop,) = explanation.loops
    assert loop.op == "LinearScan"
    assert loop.part("A").shape == (3, 3)
    (state,) = [part for part in loop.parts if part.role == "state"]
    assert (state.shape, state.family) == ((3,), "matrix affine")
    assert "a vector" in loop.why
    assert (loop.memory.read.value, loop.memory.written.value) == (96, 24)
    check_forms(explanation)


def test_an_associative_scan_that_is_kept():
    x = pt.dmatrix("x")
    y = scanlib.associative_scan(lambda a, b: a * b, x)
    mode = MODES["c"].excluding("scanlib_associative_to_loop")
    explanation = scanlib.explain(y, mode)
    (loop,) = explanation.loops
    assert loop.op == "AssociativeScan"
    assert "associative" in loop.why
    check_forms(explanation)


def test_html_is_escaped():
    _, _, y = ar1(name="<b>&")
    html = scanlib.explain(y)._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;" in html
    assert "<summary>parts (3)</summary>" in html


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


@pytest.mark.parametrize(
    "value, message",
    [
        (3, "got int$"),
        ("f", "got str$"),
        (lambda x: x, "got function; compile it with pytensor.function"),
        ([pt.dscalar(), 2.0], "entry 1 is of type float$"),
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


def test_bytes():
    size = Bytes.of(8, (2, "n")) + Bytes.of(4, ()) + Bytes.of(8, ("n",))
    assert str(size) == "(24·n + 4) B"
    assert size.value is None
    assert size.times(2) == Bytes(((48, ("n",)), (8, ())))
    assert str(Bytes.of(8, (0, "n"))) == "0 B"
    assert [str(Bytes.of(n, ())) for n in (999, 1000, 123_456, 10**12)] == [
        "999 B",
        "1 kB",
        "123 kB",
        "1000 GB",
    ]
