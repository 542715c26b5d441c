"""`scanlib.explain`: what it says about loops, and that backends do what it says."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.explained_loops import (
    BLOCKS,
    CHANNELS,
    GENERAL,
    STEPS,
    ar1,
    check_forms,
    explain_one,
    reasons,
    rnn,
    scan,
)
from tests.modes import MODES


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_a_scalar_loop_and_its_gradient(linker):
    _, phi, y = ar1()
    inputs = [v for v in pytensor.graph.traversal.graph_inputs([y]) if v.name]
    f = pytensor.function(inputs, [y, pytensor.grad(y.sum(), phi)], mode=MODES[linker])
    explanation = scanlib.explain(f)
    text = check_forms(explanation)
    assert text.startswith("What runs (2 loops in the order of computation; compiled function, ")
    assert "gradient of 'ar1': the same, from the last step to the first" in text
    assert text.count("fully parallel") == text.count("nothing: this is as fast as it gets") == 1
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
    assert (state.stored, state.recurrence) == ("history", "affine")
    assert (forward.bytes_read(), forward.bytes_written()) == (8, 8)
    assert not forward.obstacles
    assert (gradient.name, gradient.schedule) == ("ar1_gradient", BLOCKS)
    assert gradient.gradient
    assert gradient.reverse
    states = [part.recurrence for part in gradient.parts if part.role == "state"]
    assert sorted(states) == ["affine", "sum over time"]
    assert gradient.parts[0].name == "y of ar1[:-1]"
    assert explanation.linker == {"numba": "numba", "c": "C"}[linker]
    assert forward.runs == gradient.runs == "as a kernel, compiled by LLVM"


def test_the_gradient_alone_stores_no_more_than_it_reads():
    _, phi, y = ar1()
    forward, gradient = scanlib.explain(pytensor.grad(y[-1], phi)).loops
    assert forward.part("y").stored == "history"
    assert gradient.bytes_written() == 0
    last = explain_one(y[-1])
    assert last.part("y").stored == "last rows"
    assert last.bytes_written() == 0


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
    assert loop.part("y").recurrence == "affine"
    check_forms(explanation)


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
    assert explanation.loops[0].part("variance").recurrence == "affine"


def test_static_lengths_and_sizes():
    x = pt.tensor("x", dtype="float32", shape=(500, 3))
    y = scan(
        lambda x, y: pt.tanh(x + y), sequences=x, outputs_info=np.zeros(3, "float32"), name="wide"
    )
    explanation = scanlib.explain(y)
    (loop,) = explanation.loops
    assert (loop.steps, loop.schedule, loop.parts[0].shape) == (500, CHANNELS, (3,))
    assert (loop.bytes_read(), loop.bytes_written()) == (12, 12)
    assert "500 steps of elementwise arithmetic" in check_forms(explanation)
    assert "T = 500" in explanation.details()


def test_a_wide_nonlinear_loop():
    x, start = pt.dmatrix("x"), pt.dvector("h")
    h = scan(lambda x, h: pt.tanh(x + h), sequences=x, outputs_info=start, name="wide")
    explanation = scanlib.explain([h, pytensor.grad(h.sum(), start)])
    forward, gradient = explanation.loops
    assert [loop.schedule for loop in (forward, gradient)] == [CHANNELS, CHANNELS]
    assert (forward.part("x").shape, forward.part("h").shape) == ((None,), (None,))
    assert forward.bytes_read() is None
    assert forward.part("h").recurrence is None
    assert (forward.grade, gradient.grade) == ("one fused pass", "one fused pass")
    assert reasons(forward).lower() == "state 'h': tanh of 'h' is not affine"
    assert not gradient.obstacles
    check_forms(explanation)
    assert "none" in explanation.details()


def test_a_matrix_product_is_named():
    h = rnn()
    explanation = scanlib.explain(h)
    (loop,) = explanation.loops
    assert (loop.op, loop.schedule) == ("Scan", GENERAL)
    assert "next value of state 'h': multiplies matrices (W @ h)" in reasons(loop)
    assert "no matrix recurrence" in reasons(loop)
    assert loop.because == "each step does matrix products with the result of the step before"
    assert "steps of matrix products" in check_forms(explanation)


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
    for action, operation in (
        ("computes what is no elementwise operation", "(sort_op(table[x] + (table @ s)"),
        ("reads items by index", "(table[x])"),
        ("multiplies matrices", "(table @ s)"),
    ):
        (reason,) = [str(o) for o in loop.obstacles if action in o.reason]
        assert "next value of state 's'" in reason
        assert operation in reason


@pytest.mark.all_forms
@pytest.mark.parametrize("size, is_told", [(None, True), (3, False)])
def test_sizes_that_may_be_known(size, is_told):
    x, p = pt.matrix("x", shape=(None, size)), pt.matrix("p", shape=(size, size))
    h = scanlib.scan(lambda x, h, p: pt.tanh(h @ p) + x, x, x[0], p, return_updates=False)
    (loop,) = scanlib.explain(h).loops
    assert ("shape=(None, 3)" in loop.action) == is_told


@pytest.mark.parametrize("factor, is_told", [(0.1, True), (np.float32(0.1), False)])
def test_loops_that_a_number_makes_double_are_named(factor, is_told):
    x, h = pt.fvector("x"), pt.fscalar("h")
    trace = scanlib.scan(
        lambda x, h: factor * h + x, sequences=[x], outputs_info=[h], return_updates=False
    )
    (loop,) = scanlib.explain(trace).loops
    assert ("np.float32(0.1)" in loop.action) == is_told


def test_random_draws_are_named():
    rng = pytensor.shared(np.random.default_rng(1), name="rng")

    def step(y):
        new_rng, draw = pt.random.normal.make_node(rng, None, 0.0, 1.0).outputs
        return y + draw, {rng: new_rng}

    y, updates = scanlib.scan(step, outputs_info=pt.dscalar("y"), n_steps=10)
    loop = explain_one([y, *updates.values()])
    assert "draws random numbers" in reasons(loop)
    assert loop.part("rng").shape is None
    assert (loop.steps, loop.work) == (10, "random draws")
    assert "before the loop" in loop.action


def test_draws_before_the_loop_leave_an_elementwise_step():
    """What `explain` recommends to the author of a Metropolis sampler."""
    normal, uniform, scale = pt.dvector("normal"), pt.dvector("uniform"), pt.dscalar("scale")

    def step(z, u, x, scale):
        proposed = x + scale * z
        return pt.where(pt.log(u) < (x**2 - proposed**2) / 2, proposed, x)

    loop = explain_one(scan(step, [normal, uniform], pt.dscalar("start"), scale, name="metropolis"))
    assert (loop.op, loop.grade) == ("ElemwiseScan", "one fused pass")


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
    assert "until" in loop.because
    assert "at most 100 steps" in check_forms(explanation)
    stored = explain_one(root[-1])
    assert stored.part("guess").stored == "last rows"


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "op, family", [(pt.maximum, "maximum"), (pt.minimum, "minimum"), (pt.mul, "affine")]
)
def test_running_extremes_and_products(op, family):
    x = pt.dvector("x")
    loop = explain_one(scan(op, sequences=x, outputs_info=pt.dscalar("y")))
    assert (loop.schedule, loop.part("y").recurrence) == (BLOCKS, family)


def test_a_nonlinear_scalar_loop():
    x = pt.dvector("x")
    loop = explain_one(scan(lambda x, y: pt.sin(x * y), sequences=x, outputs_info=pt.dscalar("y")))
    assert loop.schedule == STEPS
    assert "cannot be combined" in loop.because
    assert "'y' is not affine" in reasons(loop)


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "step, because",
    [
        (lambda row, y: pt.sin(row[0] * y) + row[1], "steps of state 'y' cannot be combined"),
        (lambda row, y: (row[0] * y, scanlib.until(row[1] > 0)), "`until` may end the loop"),
    ],
)
def test_items_of_rows_are_no_obstacle(step, because):
    """A loop that is read row by row says what one of two sequences would."""
    loop = explain_one(scan(step, pt.dmatrix("rows"), pt.dscalar("y")))
    assert (loop.op, loop.grade, loop.schedule) == ("Scan", "one fused pass", GENERAL)
    assert loop.because.startswith(because)
    assert "index" not in f"{loop.work} {reasons(loop)}"


def test_items_of_rows_beside_other_work():
    weights = pt.dmatrix("weights")
    step = scan(lambda row, y: pt.tanh(weights @ y + row[0]), pt.dmatrix("rows"), pt.dvector("y"))
    loop = explain_one(step)
    assert loop.work == "matrix products"
    assert "index" not in reasons(loop)


def test_items_of_rows_that_stay():
    rows = pt.dmatrix("rows")
    loop = explain_one(scan(lambda row, y: y * row[0] + sum(row[k] for k in range(9)), rows, 0.0))
    assert "more than 8 single items" in loop.because
    few = scan(lambda row, y: y * row[0] + row[1], rows, 0.0)
    (loop,) = scanlib.explain(pytensor.function([rows], few, mode="FAST_COMPILE")).loops
    assert "leaves out the rewrite scanlib_items" in loop.because
    assert explain_one(few).part("rows[:, 1]").shape == ()


def test_a_loop_that_becomes_linear_late():
    """Its step held a loop, which had nothing to compute: no mode has left the rewrite out."""
    X = pt.dmatrix("X")

    def row_sum(total, row):
        total, _ = scanlib.loop(lambda c, v: (c + v, None), total, row)
        return total, total

    _, totals = scanlib.loop(row_sum, 0.0, X)
    gradient = pytensor.grad(totals.sum(), X)
    loop = explain_one(gradient)
    assert "the loop was of another form when the rewrite scanlib_linear ran" in loop.because
    assert "leaves out" not in loop.because
    assert "compile" not in loop.action
    with pytensor.config.change_flags(scanlib__linear=False):
        loop = explain_one(gradient)
    assert loop.action == "set the flag scanlib__linear to True"


@pytest.mark.parametrize(
    "write, is_row",
    [
        (lambda out, t, k: out[t].set(0.9 * out[t - 1]), True),
        (lambda out, t, k: out[t + 1].set(pt.sin(out[t])), True),
        (lambda out, t, k: out[k].set(pt.sin(out[t])), False),
        (lambda out, t, k: out[t].inc(pt.sin(out[0])), False),
    ],
    ids=["row", "row_ahead", "place_in_data", "sum"],
)
def test_rows_that_are_written_into_a_state(write, is_row):
    """They are outputs; a table is none."""
    out, k = pt.dvector("out"), pt.lvector("k")
    rows = pt.arange(1, out.shape[0] - 1)
    last, _ = scanlib.loop(lambda out, v: (write(out, *v), None), out, (rows, k))
    action = explain_one(last).action
    assert action.startswith("return what each step writes, as the y") == is_row
    if not is_row:
        assert action.startswith("nothing")


@pytest.mark.parametrize(
    "read, may_end",
    [
        (lambda k, h: h[k : k + 3], True),
        (lambda k, h: pt.specify_shape(h[k : k + 3], 3), False),
        (lambda k, h: h[1:4], False),
        (lambda k, h: h[k:], False),
    ],
    ids=["open", "specified", "constant", "to_the_end"],
)
def test_slices_that_may_end_early(read, may_end):
    k = pt.lvector("k")
    last, _ = scanlib.loop(lambda h, k: (h[k].set(pt.tanh(read(k, h)).sum()), None), pt.ones(9), k)
    assert explain_one(last).action.startswith("say how long the slice is") == may_end


def test_a_map_reads_no_step_before():
    series = pt.dmatrix("series")
    loop = explain_one(
        scanlib.map(lambda row: scan(lambda v, h: pt.sin(h) + v, row, 0.0), series)[0]
    )
    assert loop.because == "each step does indexing and an inner loop by itself"
