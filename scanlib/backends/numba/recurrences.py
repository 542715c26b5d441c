"""Matrix recurrences in numba mode and in `perform`: calls of their kernels.

The kernels are those of `scanlib.kernels.schedules.linear`. What stands for a loop that it may not
be (`scanlib.ops.checked_linear`) is checked here, and the loop called where it has to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.handler.thunks import runner
from scanlib.backends.numba.dispatch import loop_call
from scanlib.backends.numba.lazy import tuple_text
from scanlib.backends.numba.programs import call_program
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import as_scalar
from scanlib.kernels.compiled import program_key
from scanlib.kernels.scalars import NoKernelError
from scanlib.kernels.schedules.linear import linear_program
from scanlib.ops.checked_linear import CheckedLinearScan, limits
from scanlib.ops.execution import NotCompilableError
from scanlib.ops.linear_scan import LinearScan, register_linear_compiler
from scanlib.source_keys import source_key

VERSION = source_key(__name__)


def recurrence_call(node: Apply, outer: str = "") -> tuple[Callable[..., Any], str]:
    """Return what calls the kernels of a recurrence with a tuple of its inputs, and its key.

    Of a recurrence that is checked, these are the inputs that it has for itself; `outer` is that of
    `linear_program`.
    """
    op = node.op
    plain = op.plain(node) if isinstance(op, CheckedLinearScan) else node
    program = linear_program(plain.op, plain, outer)
    key = f"program {program_key(program)}"
    return call_program(program, key), key


@register_funcify_and_cache_key(LinearScan)
def funcify_linear_scan(
    op: LinearScan, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a matrix recurrence for use inside numba mode."""
    source = Source()
    name = source.function(*recurrence_call(node), "recurrence")
    arguments = [f"x{i}" for i in range(len(node.inputs))]
    own = op.n_own() if isinstance(op, CheckedLinearScan) else len(arguments)
    source.line(f"h = {name}({tuple_text(arguments[:own])})")
    if isinstance(op, CheckedLinearScan):
        _write_exact(source, op, node, arguments)
    source.line("return h")
    function, key = source.compile("linear_scan", arguments, VERSION)
    return numba_njit(function), key


def _write_exact(source: Source, op: CheckedLinearScan, node: Apply, arguments: list[str]) -> None:
    """Write the run of the loop itself where the recurrence may not be the same.

    Without a history, the last state tells whether any has overflowed: infinity and NaN stay.
    """
    factors, states = limits(node.outputs[0].type.dtype)
    source.object("all_between", all_between)
    tests = [f"all_between({name}, {1 / factors!r}, {factors!r})" for name in op.factors(arguments)]
    source.object("all_below", all_below)
    tests.append(f"all_below(h, {states!r})")
    found = loop_call(op.exact.make_node(*op.of_loop(node.inputs)))
    assert found is not None
    name = source.function(found.function, found.key)
    parts = op.parts(arguments)
    steps = f"{parts.offset or parts.matrix}.shape[0]"
    if parts.n_steps is not None:
        steps = f"{source.object('as_scalar', as_scalar)}({parts.n_steps})"
    with source.block(f"if {steps} > 0 and not ({' and '.join(tests)}):"):
        source.line(f"return {name}(({', '.join(op.of_loop(arguments))},))")


def all_between(values: Any, low: float, high: float) -> bool:
    """Whether all numbers are zero or of a size between two (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(all_between)
def _all_between(values, low, high):
    if not isinstance(values, types.Array):
        return lambda values, low, high: values == 0 or low <= abs(values) <= high

    def item_by_item(values, low, high):
        outside = 0
        for value in values.flat:
            size = abs(value)
            outside += not ((size == 0) | ((size >= low) & (size <= high)))
        return outside == 0

    def of_row(values, low, high):
        row, outside = values.reshape(values.size), 0
        for j in range(row.size):
            size = abs(row[j])
            outside += not ((size == 0) | ((size >= low) & (size <= high)))
        return outside == 0

    return of_row if values.layout == "C" and values.ndim else item_by_item


def all_below(values: Any, most: float) -> bool:
    """Whether the sizes of all numbers are at most that, and none is NaN (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(all_below)
def _all_below(values, most):
    def below(values, most):
        row, outside = values.reshape(values.size), 0
        for j in range(row.size):
            outside += not abs(row[j]) <= most
        return outside == 0

    return below


@register_linear_compiler
def compile_for_perform(op: LinearScan, node: Apply) -> Callable[..., np.ndarray]:
    """Return a function from values to the value that runs the recurrence compiled."""
    plain = op.plain(node) if isinstance(op, CheckedLinearScan) else node
    try:
        run = runner(linear_program(plain.op, plain))
    except NoKernelError as error:
        raise NotCompilableError(str(error)) from error
    if isinstance(op, CheckedLinearScan):
        return _checked(op, node, run)
    return lambda *inputs: run(*inputs)[0]


def _checked(
    op: CheckedLinearScan, node: Apply, run: Callable[..., list[np.ndarray]]
) -> Callable[..., np.ndarray]:
    """Return a function that runs a recurrence, or the loop that it stands for."""
    factors, states = limits(node.outputs[0].type.dtype)
    exact = op.exact.make_node(*op.of_loop(node.inputs))

    def call(*inputs: Any) -> np.ndarray:
        (history,) = run(*inputs[: op.n_own()])
        if _has_steps(op, inputs) and not _is_trusted(op, inputs, history, factors, states):
            storage: list[list[Any]] = [[None]]
            op.exact.perform(exact, op.of_loop(inputs), storage)
            return storage[0][0]
        return history

    return call


def _is_trusted(
    op: CheckedLinearScan, inputs: Any, history: np.ndarray, factors: float, states: float
) -> bool:
    sizes = [np.abs(value) for value in op.factors(inputs)]
    fits = all(np.all((size == 0) | ((size >= 1 / factors) & (size <= factors))) for size in sizes)
    return fits and bool(np.all(np.abs(history) <= states))


def _has_steps(op: CheckedLinearScan, inputs: Any) -> bool:
    parts = op.parts(inputs)
    if parts.n_steps is not None:
        return int(parts.n_steps) > 0
    return len(parts.matrix if parts.offset is None else parts.offset) > 0
