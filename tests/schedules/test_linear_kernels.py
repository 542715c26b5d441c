"""Matrix recurrences as kernels: the interpreter and LLVM against the plain loop."""

import signal

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from scanlib.backends.handler.functions import function_address
from scanlib.kernels.python_driver import Runner, compiled_runner
from scanlib.ops.errors import SequenceLengthError
from scanlib.schedules.linear_steps import linear_program
from tests.kernel_runs import interpreted_entry
from tests.kernel_verifier import verify
from tests.linear import Recurrence

# A recurrence, the sizes of its states, its batch, its dtype.
CASES = {
    "fixed": (Recurrence("real", "fixed"), (2, 3, 4, 7), (), "float64"),
    "fixed, last": (Recurrence("real", "fixed", "right", untraced=True), (3, 9), (), "float32"),
    "fixed, batch": (Recurrence("real", "fixed", reverse=True), (1, 4, 19), (2,), "float32"),
    "steps": (Recurrence("real", "steps", reverse=True), (2, 3, 9, 35), (), "float64"),
    "steps, right": (Recurrence("real", "steps", "right"), (4, 6, 17), (), "float32"),
    "columns": (Recurrence("real", "steps", vector=False), (1, 5, 9), (2,), "float64"),
    "rows": (Recurrence("real", "fixed", "right", vector=False), (3, 8), (), "float64"),
    "complex": (Recurrence("real", "steps", "right", vector=False), (3,), (), "complex128"),
    "mask": (Recurrence("real", "fixed", has_mask=True), (3, 9), (), "float64"),
    "mask of steps": (
        Recurrence("real", "steps", "right", has_mask=True),
        (4, 5),
        (),
        "float64",
    ),
    "log": (Recurrence("log", "fixed"), (2, 3, 4, 11), (), "float64"),
    "log, batch": (Recurrence("log", "fixed", "right", reverse=True), (4, 9), (2,), "float32"),
    "log, steps": (Recurrence("log", "steps"), (3, 9), (), "float64"),
    "max": (Recurrence("max", "steps"), (2, 5, 9), (), "float64"),
    "min, columns": (Recurrence("min", "fixed", vector=False), (3, 9), (), "float32"),
}


def inputs_of(op, size, batch, dtype, steps=5):
    """Values for a recurrence, some of them not contiguous."""
    rng = np.random.default_rng(size)

    def draw(*shape):
        values = rng.normal(size=shape)
        if dtype.startswith("complex"):
            values = values + 1j * rng.normal(size=shape)
        return np.asfortranarray(values.astype(dtype))

    row = (size,) if op.vector else (2, size) if op.side == "right" else (size, 3)
    time = (steps,) if op.coefficient == "steps" else ()
    found = [draw(*time, *batch, size, size) / size]
    found += [draw(steps, *batch, *row), draw(1, *batch, *row)]
    if op.has_mask:
        found.append(rng.random((size, size)) < 0.7)
        found[0] = np.where(found[-1], found[0], 0)
        found[1][2, 0] = np.inf
    return found


def program_of(op, values, known):
    shapes = [value.shape if known else (None,) * value.ndim for value in values]
    kinds = zip(values, shapes, strict=True)
    inputs = [pt.tensor(dtype=value.dtype, shape=shape) for value, shape in kinds]
    return linear_program(op(*inputs).owner.op, op(*inputs).owner)


@pytest.mark.parametrize("known", [True, False], ids=["known sizes", "unknown sizes"])
@pytest.mark.parametrize("name", CASES)
def test_interpreter_and_llvm(name, known):
    """The same bits, and those of the plain loop but for rounding."""
    op, sizes, batch, dtype = CASES[name]
    programs = {}
    for size in sizes[:2] if known else sizes:
        values = inputs_of(op, size, batch, dtype)
        given = op.options.in_order(op.parts(values))
        key = size if known else None
        program = programs.setdefault(key, program_of(op, values, known))
        kernels = program.kernels
        whole = kernels.all
        for kernel in whole:
            verify(kernel)
        entries = (interpreted_entry(kernel, program.words) for kernel in whole)
        addresses = [function_address(routine) for routine in program.functions]
        interpreted = Runner(program, *entries)
        interpreted.functions = addresses
        (slow,) = interpreted(*given)
        (fast,) = compiled_runner(program, addresses)(*given)
        np.testing.assert_array_equal(slow.view(np.uint8), fast.view(np.uint8))
        expected = op.walked(values)
        tolerance = 1e-4 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(fast, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("coefficient", ["fixed", "steps"])
def test_offsets_of_several_blocks(coefficient):
    """Rows of a block that are not contiguous are copied, in the order of the steps."""
    op = Recurrence("real", coefficient, reverse=True)
    program = program_of(op, inputs_of(op, 3, (), "float64"), False)
    for steps in (63, 64, 65, 150):
        matrix, offset, initial = inputs_of(op, 3, (), "float64", steps=steps)
        offset = np.repeat(np.repeat(offset, 2, axis=0), 2, axis=1)
        for layout in (
            offset[::2, ::2],
            offset[::-2, ::-2],
            np.ascontiguousarray(offset[::2, ::2]),
        ):
            values = [matrix, layout, initial]
            (found,) = compiled_runner(program)(*op.options.in_order(op.parts(values)))
            np.testing.assert_allclose(found, op.walked(values), rtol=1e-9, atol=1e-12)


def test_a_failure_ends_the_call():
    op = Recurrence("real", "steps")
    matrix, offset, initial = inputs_of(op, 3, (), "float64")
    program = program_of(op, [matrix, offset, initial], False)
    message = "sequence `offset` gives 5 rows, but another sequence of the loop has 4 rows"
    with pytest.raises(SequenceLengthError, match=message):
        compiled_runner(program)(matrix[1:], offset, initial)


def test_states_and_products():
    """A program that also writes the products of states and other rows."""
    op = Recurrence("real", "steps", reverse=True)
    for size in (2, 3, 5):
        values = inputs_of(op, size, (), "float64", steps=4)
        inputs = [pt.tensor(dtype="float64", shape=(None,) * v.ndim) for v in values]
        node = op(*inputs).owner
        other = np.random.default_rng(1).normal(size=(5, 2 * size))[:, ::2]
        for outer in ("after", "before"):
            program = linear_program(node.op, node, outer)
            states, products = compiled_runner(program)(*values, other)
            left, right = (states, other) if outer == "after" else (other, states)
            np.testing.assert_allclose(products, left[:, :, None] * right[:, None, :])
            with pytest.raises(ValueError, match="incompatible shape in axis 0"):
                compiled_runner(program)(*values, other[1:])


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer")
@pytest.mark.parametrize("size", [4, 40])
def test_a_long_recurrence_can_be_interrupted(size):
    op = Recurrence("real", "fixed", has_offset=False, has_n_steps=True, untraced=True)
    n, matrix, initial = pt.lscalar(), pt.dmatrix(), pt.dmatrix()
    function = pytensor.function([n, matrix, initial], op(n, matrix, initial), mode="NUMBA")
    values = np.eye(size) / 2, np.ones((1, size))
    np.testing.assert_array_equal(function(3, *values), values[1] / 8)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            function(10**12, *values)  # would take hours
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    np.testing.assert_array_equal(function(3, *values), values[1] / 8)
