"""Gradients from checkpoints: values and derivatives of the plain loop, with less memory.

Wide sweeps run in plain Python, where nothing is compiled; every linker sees the main cases.
"""

from functools import lru_cache

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scanlib
from scanlib.ops.row_ops.generator_words import generator_from_words, generator_words
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from tests.checkpoint_loops import PLAIN, close, plain_step, tanh_loop, taps_loop
from tests.checks import assert_derivatives
from tests.reference import reference_scan

SCHEDULES = [1, (5, 2), "sqrt", scanlib.Levels(3), scanlib.Memory(700)]
rng = np.random.default_rng(20000301)


@pytest.fixture(autouse=True)
def _rewrites_raise():
    """A rewrite that fails is an error here; PyTensor would go on without it."""
    with pytensor.config.change_flags(on_opt_error="raise"):
        yield


COSTS = {
    "last rows": lambda xp, h, z: xp.sum(h[-1] ** 2) + xp.sum(h[-2] * h[-1]),
    "states": lambda xp, h, z: xp.sum(h**3),
    "outputs": lambda xp, h, z: xp.sum(z**2),
    "all": lambda xp, h, z: xp.sum(h**2) + xp.sum(z[1:] * h[:-1]) + xp.sum(h[-1]),
}


@pytest.mark.slow
def test_derivatives_of_a_loop_with_taps(mode):
    """To second order, with a tail of one step."""
    steps = 7
    inputs = {
        pt.dmatrix("x"): rng.normal(size=(steps + 1, 2)),
        pt.dmatrix("h"): rng.normal(size=(2, 2)),
        pt.dvector("w"): rng.normal(size=2),
    }

    def reference(x, h, w):
        traces = reference_scan(
            plain_step(np),
            [{"input": x, "taps": [-1, 0]}],
            [{"initial": h, "taps": [-1, -2]}, None],
            [w],
        )
        return COSTS["last rows"](np, *traces)

    cost = COSTS["last rows"](pt, *taps_loop(3, *inputs))
    assert_derivatives(cost, inputs, reference, mode)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("cost", COSTS)
def test_schedules_change_no_value(python_kernels, cost, schedule):
    x, h, w = pt.dmatrix("x"), pt.dmatrix("h"), pt.dvector("w")
    functions = []
    for checkpoint in (None, schedule):
        value = COSTS[cost](pt, *taps_loop(checkpoint, x, h, w))
        functions.append(
            pytensor.function([x, h, w], [value, *pytensor.grad(value, [x, h, w])], mode=PLAIN)
        )
    for steps in (2, 3, 5, 6, 11, 16):
        values = [rng.normal(size=s) for s in ((steps + 1, 2), (2, 2), 2)]
        expected, actual = (function(*values) for function in functions)
        close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [3, "sqrt", pytest.param((4, 2), marks=pytest.mark.slow)], ids=str
)
def test_second_derivatives_of_schedules(python_kernels, schedule):
    x, h, w = pt.dmatrix("x"), pt.dmatrix("h"), pt.dvector("w")
    results = []
    for checkpoint in (None, schedule):
        value = COSTS["all"](pt, *taps_loop(checkpoint, x, h, w))
        first = pytensor.grad(value, [x, h, w])
        results += pytensor.grad(sum(pt.sin(g).sum() for g in first), [x, h, w])
    function = pytensor.function([x, h, w], results, mode=PLAIN)
    for steps in (2, 3, 4, 8, 11):
        values = function(*(rng.normal(size=s) for s in ((steps + 1, 2), (2, 2), 2)))
        close(values[3:], values[:3], rtol=1e-9, atol=1e-11)


@lru_cache(maxsize=64)
def swept(taps, until, backwards, whole, schedule):
    """Compile the gradients of one kind of loop with and without checkpoints."""
    x, h, w, n = pt.dvector("x"), pt.dvector("h"), pt.dscalar("w"), pt.lscalar("n")

    def step(x, *rest):
        *past, w = rest
        value = pt.tanh(w * past[0] + 0.3 * sum(past) + x)
        return (value, scanlib.until(value > 0.9)) if until else value

    outputs = []
    for checkpoint in (None, schedule):
        trace = scanlib.scan(
            step,
            sequences=x,
            outputs_info={"initial": h, "taps": list(taps)} if taps != (-1,) else h[0],
            non_sequences=w,
            n_steps=n,
            go_backwards=backwards,
            return_updates=False,
            checkpoint=checkpoint,
        )
        cost = pt.sum(trace**2) + trace[-1] if whole else trace[-1] ** 2
        outputs += [cost, *pytensor.grad(cost, [x, h, w])]
    return pytensor.function([x, h, w, n], outputs, mode=PLAIN)


@pytest.mark.slow
@given(
    taps=st.sampled_from([(-1,), (-3, -1)]),
    until=st.booleans(),
    backwards=st.booleans(),
    whole=st.booleans(),
    schedule=st.sampled_from([2, 3]),
    steps=st.integers(1, 20),
    more=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_any_loop_any_schedule(taps, until, backwards, whole, schedule, steps, more, seed):
    """Lengths, taps, `until`, `go_backwards`, and fewer steps than the sequence has rows."""
    draw = np.random.default_rng(seed)
    with pytensor.config.change_flags(scanlib__perform="python", on_opt_error="raise"):
        values = swept(taps, until, backwards, whole, schedule)(
            draw.normal(size=steps + more), draw.normal(size=3)[: -min(taps)], 0.7, steps
        )
    half = len(values) // 2
    close(values[half:], values[:half], rtol=1e-10)


@pytest.mark.slow
def test_no_step_at_all(python_kernels):
    """A loop of zero steps has gradients of the right shapes."""
    x, h, w = pt.dmatrix("x"), pt.dmatrix("h"), pt.dvector("w")
    for schedule in (3, "sqrt", (4, 2)):
        trace, _ = taps_loop(schedule, x, h, w)
        cost = pt.sum(trace**2) + pt.sum(h**2)
        gradient = pytensor.function([x, h, w], pytensor.grad(cost, [x, h, w]), mode=PLAIN)
        start = rng.normal(size=(2, 2))
        close(
            gradient(np.ones((1, 2)), start, np.ones(2)), [np.zeros((1, 2)), 2 * start, np.zeros(2)]
        )


@pytest.mark.slow
def test_reading_the_last_of_no_rows_is_an_error(mode):
    h, n = pt.dvector("h"), pt.lscalar("n")
    trace = scanlib.scan(pt.tanh, outputs_info=h, n_steps=n, checkpoint=2, return_updates=False)
    last = trace[-1]
    function = pytensor.function([h, n], [last, pytensor.grad(last.sum(), h)], mode=mode)
    assert [value.shape for value in function([0.5], 3)] == [(1,), (1,)]
    with pytest.raises(IndexError, match=r"^scan: a row was read .* fewer than 1 step"):
        function([0.5], 0)


@pytest.mark.slow
def test_scan_checkpoints_has_none_of_the_classic_limits(mode):
    """No non-sequences, lengths that differ, taps, steps that 4 does not divide, all rows read."""
    x, z, h = pt.dvector("x"), pt.dvector("z"), pt.dvector("h")
    inputs = {x: rng.normal(size=9), z: rng.normal(size=12), h: rng.normal(size=2)}
    trace, updates = scanlib.scan_checkpoints(
        lambda x, z, before, h: pt.tanh(x * h - z * before),
        sequences=[x, {"input": z, "taps": [1]}],
        outputs_info={"initial": h, "taps": [-2, -1]},
        n_steps=7,
        save_every_N=4,
        padding=True,
    )
    assert updates == {}

    def reference(x, z, h):
        (rows,) = reference_scan(
            lambda x, z, before, h: [np.tanh(x * h - z * before)],
            [x, {"input": z, "taps": [1]}],
            [{"initial": h, "taps": [-2, -1]}],
            n_steps=7,
        )
        return np.sum(rows**2) + rows[-1]

    assert_derivatives(pt.sum(trace**2) + trace[-1], inputs, reference, mode, order=1)


def test_truncated_gradients_have_no_checkpoints():
    x, h, w = pt.dmatrix("x"), pt.dmatrix("h"), pt.dvector("w")
    with pytest.raises(ValueError, match=r"^scan: a gradient of the last 4 steps has no checkp"):
        taps_loop(3, x, h, w, truncate_gradient=4)


@pytest.mark.slow
def test_inputs_that_depend_on_one_another(python_kernels):
    """One variable in two roles, and one that is computed from it."""
    x, w = pt.dmatrix("x"), pt.dvector("w")
    results = []
    for checkpoint in (None, 3, "sqrt"):
        traces = taps_loop(checkpoint, x, pt.stack([w, w * w]), w)
        results.append(pytensor.grad(COSTS["all"](pt, *traces), [x, w]))
    expected, *actual = results
    function = pytensor.function([x, w], [*expected, *actual[0], *actual[1]], mode=PLAIN)
    for steps in (2, 7, 9):
        values = function(rng.normal(size=(steps + 1, 2)), rng.normal(size=2))
        close(values[2:4], values[:2])
        close(values[4:], values[:2])


# Random numbers


def random_loop(checkpoint, h, w, n, seed=3):
    generator = pytensor.shared(np.random.default_rng(seed))

    def step(h, w):
        after, noise = pt.random.normal(size=(2,), rng=generator).owner.outputs
        return pt.tanh(w * h) + noise * h, {generator: after}

    trace, updates = scanlib.scan(
        step, outputs_info=h, non_sequences=w, n_steps=n, checkpoint=checkpoint
    )
    return trace, updates[generator]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_recomputed_steps_see_the_same_draws(mode, whole):
    h, w, n = pt.dvector("h"), pt.dvector("w"), pt.lscalar("n")
    results = []
    for checkpoint in (None, 3):
        trace, after = random_loop(checkpoint, h, w, n)
        cost = pt.sum(trace**2) if whole else pt.sum(trace[-1] ** 2)
        after = pt.random.normal(size=(3,), rng=after)
        results += [cost, after, *pytensor.grad(cost, [h, w])]
    function = pytensor.function([h, w, n], results, mode=mode)
    for steps in (1, 3, 7):
        values = function(rng.normal(size=2), rng.normal(size=2), steps)
        close(values[4:], values[:4])


@pytest.mark.all_forms
@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_words_restore_a_generator(kind):
    generator = np.random.Generator(getattr(np.random, kind)(5))
    generator.random(3, dtype="float32")  # leaves half of a 64-bit draw behind, where there is one
    copy = generator_from_words(generator_words(generator))
    for _ in range(3):
        np.testing.assert_array_equal(copy.random(7, "float32"), generator.random(7, "float32"))
        np.testing.assert_array_equal(copy.normal(size=700), generator.normal(size=700))


# Errors


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "checkpoint, error",
    [
        (0, ValueError),
        (-3, ValueError),
        (True, TypeError),
        (2.5, TypeError),
        (np.array([4, 2]), TypeError),
        ("cube", ValueError),
        ((), ValueError),
        ((3, 3), ValueError),
        ((3, 0), ValueError),
    ],
)
def test_checkpoints_that_make_no_sense(checkpoint, error):
    with pytest.raises(error, match=r"checkpoint|segment"):
        tanh_loop(checkpoint, pt.dvector("h"), 0.5)


@pytest.mark.parametrize("kind, value", [(scanlib.Levels, 0), (scanlib.Memory, 0)])
def test_schedules_that_make_no_sense(kind, value):
    with pytest.raises(ValueError, match=kind.__name__):
        kind(value)
    with pytest.raises(TypeError, match=kind.__name__):
        kind(1.5)


def test_scan_checkpoints_checks_its_segments():
    h = pt.dvector("h")
    with pytest.raises(ValueError, match="save_every_N"):
        scanlib.scan_checkpoints(pt.tanh, outputs_info=h, n_steps=3, save_every_N=0)
    with pytest.raises(TypeError, match="save_every_N"):
        scanlib.scan_checkpoints(pt.tanh, outputs_info=h, n_steps=3, save_every_N=1.5)


@pytest.mark.filterwarnings("ignore:.*cannot be stacked over time")
def test_a_carry_that_cannot_be_stored():
    from pytensor.typed_list import TypedListType

    carried = TypedListType(pt.dvector().type)("list")
    with pytest.raises(TypeError, match=r"checkpoints store tensors .* leave out `checkpoint`"):
        scanlib.scan(
            lambda h, carried: [pt.tanh(h), carried],
            outputs_info=[pt.dvector("h"), carried],
            n_steps=4,
            checkpoint=2,
        )


# The Ops


def test_rows_cut_and_merged(mode):
    """Also of a view, with what is left over, and back."""
    x, n, s = pt.dmatrix("x"), pt.lscalar("n"), pt.lscalar("s")
    cut, flipped = SplitRows()(x, n, s), SplitRows()(x[::-1], n, s)
    back = pytensor.grad(pt.sum(cut**2), x)
    function = pytensor.function([x, n, s], [cut, flipped, MergeRows()(cut), back], mode=mode)
    rows = rng.normal(size=(11, 2))
    for count, length in ((3, 3), (1, 11), (0, 4), (11, 1)):
        whole = count * length
        shape = (count, length, 2)
        expected = [rows[:whole].reshape(shape), rows[::-1][:whole].reshape(shape), rows[:whole]]
        twice = np.zeros_like(rows)
        twice[:whole] = 2 * rows[:whole]
        close(function(rows, count, length), [*expected, twice])
    with pytest.raises(ValueError, match="a sequence has 11 rows, but the loop takes 12 steps"):
        function(rows, 3, 4)


@pytest.mark.parametrize("schedule", [3, (4, 2), "sqrt"], ids=str)
def test_under_jax(schedule):
    pytest.importorskip("jax")
    x, h, w = pt.dmatrix("x"), pt.dmatrix("h"), pt.dvector("w")
    functions = []
    for checkpoint, mode in ((None, PLAIN), (schedule, "JAX")):
        cost = COSTS["last rows"](pt, *taps_loop(checkpoint, x, h, w))
        functions.append(pytensor.function([x, h, w], pytensor.grad(cost, [x, h, w]), mode=mode))
    values = [rng.normal(size=s) for s in ((12, 2), (2, 2), 2)]
    with pytensor.config.change_flags(scanlib__perform="python"):
        expected = functions[0](*values)
    close([np.asarray(value) for value in functions[1](*values)], expected)
