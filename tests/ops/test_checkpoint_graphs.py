"""What the compiler makes of loops with checkpoints: graphs, batches, and the memory they take."""

import ctypes
import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import vectorize_graph

import scanlib
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from tests.checkpoint_loops import PLAIN, close, tanh_loop
from tests.checks import evaluate

rng = np.random.default_rng(20000302)


@pytest.fixture(autouse=True)
def _rewrites_raise():
    """A rewrite that fails is an error here; PyTensor would go on without it."""
    with pytensor.config.change_flags(on_opt_error="raise"):
        yield


def loops_of(function):
    return [n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, Scan | ElemwiseScan)]


def rows_in(function):
    """Return the first sizes of all arrays that a function computes, as far as they are known."""
    return {
        out.type.shape[0]
        for node in function.maker.fgraph.apply_nodes
        for out in node.outputs
        if getattr(out.type, "ndim", 0)
    }


def test_without_a_gradient_the_loop_is_the_plain_one():
    h, w = pt.dvector("h"), pt.dvector("w")
    plain, checkpointed = (
        pytensor.function([h, w], tanh_loop(checkpoint, h, w), mode="NUMBA")
        for checkpoint in (None, 7)
    )
    (mine,), (theirs,) = loops_of(checkpointed), loops_of(plain)
    assert mine.op == theirs.op
    assert len(checkpointed.maker.fgraph.apply_nodes) == len(plain.maker.fgraph.apply_nodes)


@pytest.mark.parametrize("order", [1, 2])
def test_nothing_in_the_graph_has_a_row_for_every_step(order):
    """Neither the forward loop's history nor a batch of all segments at once."""
    h, w = pt.dvector("h"), pt.dvector("w")
    for checkpoint, stores in ((None, True), (7, False), (10, False), ((20, 5), False)):
        cost = pt.sum(tanh_loop(checkpoint, h, w)[-1] ** 2)
        outputs = pytensor.grad(cost, [h, w])
        if order == 2:
            outputs = pytensor.grad(sum(pt.sin(g).sum() for g in outputs), [h, w])
        function = pytensor.function([h, w], outputs, mode=PLAIN)
        assert bool(rows_in(function) & {60, 61}) is stores


def test_forward_steps_run_once_outside_the_gradient():
    """One nest and one tail run forward: the user's loop is not there beside them."""
    h, w = pt.dvector("h"), pt.dvector("w")
    cost = pt.sum(tanh_loop(7, h, w)[-1] ** 2)
    function = pytensor.function([h, w], [cost, *pytensor.grad(cost, [h, w])], mode=PLAIN)
    directions = sorted((n.op.signature.reverse, str(n.op)) for n in loops_of(function))
    assert [reverse for reverse, _ in directions] == [False, False, True, True]
    assert sum("segments" in name for _, name in directions) == 2


def test_inner_loops_are_lowered():
    from scanlib.backends.numba.general_loop import prepare_body

    h, w = pt.dvector("h"), pt.dvector("w")
    cost = pt.sum(tanh_loop(10, h, w)[-1] ** 2)
    function = pytensor.function([h, w], pytensor.grad(cost, [h, w]), mode=PLAIN)
    outer = [n.op for n in loops_of(function) if "segments" in str(n.op)]
    assert len(outer) == 2
    for op in outer:
        nodes = prepare_body(op).fgraph.apply_nodes
        assert not any(isinstance(node.op, Scan) for node in nodes)
        kernels = [node.op for node in nodes if isinstance(node.op, ElemwiseScan)]
        assert [k.signature.reverse for k in kernels].count(True) == op.signature.reverse
        # Forward, a segment keeps its last row; backward, it stores all of its rows.
        untraced = [k.signature.untraced for k in kernels if not k.signature.reverse]
        assert untraced == [(not op.signature.reverse,)]


def test_two_checkpointed_loops_merge_and_stay_nests():
    """Merging loops of one length happens before it is decided what is stored."""
    h, w = pt.dvector("h"), pt.dvector("w")
    cost = pt.sum(tanh_loop(6, h, w)[-1] * tanh_loop(6, pt.sin(h), w)[-1])
    function = pytensor.function([h, w], [cost, *pytensor.grad(cost, [h, w])], mode=PLAIN)
    assert len([n for n in loops_of(function) if not n.op.signature.reverse]) == 1
    assert not rows_in(function) & {60, 61}
    plain = pt.sum(tanh_loop(None, h, w)[-1] * tanh_loop(None, pt.sin(h), w)[-1])
    values = {h: rng.normal(size=3), w: rng.normal(size=3)}
    with pytensor.config.change_flags(scanlib__perform="python"):
        expected = evaluate([plain, *pytensor.grad(plain, [h, w])], values, PLAIN)
        close(function(*values.values()), expected)


def test_simplification_off(python_kernels):
    """Everything is stored then, and right."""
    h, w = pt.dvector("h"), pt.dvector("w")
    values = {h: rng.normal(size=3), w: rng.normal(size=3)}
    plain, cost = (pt.sum(tanh_loop(c, h, w)[-1] ** 2) for c in (None, 7))
    with pytensor.config.change_flags(scanlib__simplify=False):
        actual = evaluate(pytensor.grad(cost, [h, w]), values, PLAIN)
    close(actual, evaluate(pytensor.grad(plain, [h, w]), values, PLAIN))


@pytest.mark.parametrize("checkpoint", [3, (4, 2), scanlib.Levels(3)], ids=str)
def test_batches_of_sequences(checkpoint, python_kernels):
    """Numbers of segments follow from the lengths of sequences, which a batch has in common."""
    x, h = pt.vector("x"), pt.scalar("h")
    trace, _ = scanlib.scan(lambda x, h: pt.tanh(0.5 * h + x), x, h, checkpoint=checkpoint)
    gradients = pytensor.grad(pt.sum(trace**2), [x, h])
    batch = pt.matrix("batch")
    together = pytensor.function([batch, h], vectorize_graph(gradients, {x: batch}), mode=PLAIN)
    one = pytensor.function([x, h], gradients, mode=PLAIN)
    for steps in (1, 8, 11):
        values = rng.normal(size=(3, steps))
        rows = zip(values, *together(values, 0.3), strict=True)
        for value, *batched in rows:
            close(batched, one(value, 0.3))


def test_batches_of_batches(python_kernels):
    """Lengths of a batch are filled with one number, and so are those of a batch of batches."""
    x, h = pt.vector("x"), pt.scalar("h")
    trace, _ = scanlib.scan(lambda x, h: pt.tanh(0.5 * h + x), x, h, checkpoint=3)
    gradients = pytensor.grad(pt.sum(trace**2), [x, h])
    batch, starts = pt.matrix("batch"), pt.vector("starts")
    once = vectorize_graph(gradients, {x: batch})
    together = pytensor.function([batch, starts], vectorize_graph(once, {h: starts}), mode=PLAIN)
    one = pytensor.function([x, h], gradients, mode=PLAIN)
    values, firsts = rng.normal(size=(3, 8)), rng.normal(size=2)
    for first, *rows in zip(firsts, *together(values, firsts), strict=True):
        for value, *batched in zip(values, *rows, strict=True):
            close(batched, one(value, first))


def test_batches_that_end_early_are_refused():
    start, starts = pt.scalar("start"), pt.vector("starts")
    trace, _ = scanlib.scan(
        lambda h: (h * h, scanlib.until(h > 9)), outputs_info=start, n_steps=20, checkpoint=3
    )
    with pytest.raises(NotImplementedError, match="the same number for every loop of a batch"):
        vectorize_graph(pytensor.grad(trace[-1], start), {start: starts})


def test_batches_and_forward_mode(python_kernels):
    h, w = pt.dvector("h"), pt.dvector("w")
    batch = pt.dmatrix("batch")
    results = []
    for checkpoint in (None, 7):
        cost = pt.sum(tanh_loop(checkpoint, h, w, 17)[-1] ** 2)
        gradient = pytensor.grad(cost, h)
        results.append(vectorize_graph(gradient, {h: batch}))
        results.append(pytensor.gradient.pushforward(gradient, h, pt.ones_like(h)))
    values = {batch: rng.normal(size=(4, 3)), h: rng.normal(size=3), w: rng.normal(size=3)}
    batched, moved, *rest = evaluate(results, values, PLAIN)
    close(rest, [batched, moved])


# Memory


def peak_rows(checkpoint, steps, width):
    """Return the peak of a gradient's call, in rows, measured in a process of its own."""
    code = f"""
import pytensor, pytensor.tensor as pt, scanlib
from benchmarks.memory import peak_of_call
h, w, m, n = pt.dvector(), pt.dvector(), pt.dmatrix(), pt.lscalar()
trace = scanlib.scan(lambda h, w: pt.tanh(w * h), outputs_info=h, non_sequences=w, n_steps=n,
                     return_updates=False, checkpoint={checkpoint})
gradient = pytensor.grad(trace[-1].sum(), [h, w])
f = pytensor.function([h, w, m, n], gradient, mode="NUMBA", on_unused_input="ignore")
print(peak_of_call(f, {steps}, "elementwise", {width}))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    return int(output.stdout.splitlines()[-1]) / (8 * width)


on_linux = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="memory is read from /proc",
)


@pytest.mark.slow
@on_linux
def test_memory_of_schedules():
    """Rows of the state, above the baseline: about what the schedules promise."""
    steps, width = 4_096, 1_000
    stored = peak_rows(None, steps, width)
    assert stored > 0.9 * steps
    assert peak_rows("'sqrt'", steps, width) < 2 * 64 + 60
    assert peak_rows("scanlib.Levels(3)", steps, width) < 3 * 16 + 60
    assert peak_rows("scanlib.Levels(3)", 8 * steps, width) < 3 * 32 + 60


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("rows, width", [(5_000, 1_000), (500, 1_000), (150, 10_000)])
def test_a_budget_is_respected(rows, width):
    """Within ten percent, also where sizes are known at run time only.

    A call allocates some hundred kilobytes of its own, so budgets are several megabytes.
    """
    budget = rows * 8 * width
    assert peak_rows(f"scanlib.Memory({budget})", 4_096, width) <= 1.1 * rows


def test_a_budget_takes_the_fewest_levels():
    h = pt.vector("h", shape=(100,), dtype="float64")
    row = 800

    def levels(budget):
        trace = tanh_loop(scanlib.Memory(budget), h, h, 10_000)
        loop = scanlib.ops.loop.Loop.from_node(trace.owner.inputs[0].owner)
        length, rest = loop.checkpoint.first(loop)
        return int(length.data), rest

    assert levels(10_010 * row) == (10_001, None)
    assert levels(210 * row) == (100, None)
    length, rest = levels(100 * row)
    assert 300 < length < 350  # a third of the rows are starts
    assert rest is not None


def test_too_small_a_budget(python_kernels):
    h, n = pt.dvector("h"), pt.lscalar("n")
    known = pt.vector("known", shape=(3,))
    for start in (known, h):
        with pytest.raises(ValueError, match=r"scan: checkpoint=Memory\(9\) is too little"):
            tanh_loop(scanlib.Memory(9), start, 0.5)
    trace = tanh_loop(scanlib.Memory(2_000), h, 0.5, n)
    function = pytensor.function([h, n], pytensor.grad(trace[-1].sum(), h), mode=PLAIN)
    assert function(np.ones(2), 1000).shape == (2,)
    with pytest.raises(ValueError, match=r"Memory\(2000\) is too little"):
        function(np.ones(20), 1000)
