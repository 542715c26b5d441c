"""Matrix recurrences in numba mode and in `perform`: calls of their kernels.

The kernels are those of `scanlib.schedules.linear_steps`. What stands for a loop that it may not
be (`ops.lowered.checked_linear`) is checked here, and the loop called where it has to be; code that
numba compiles always has the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import (
    numba_funcify_and_cache_key,
    numba_njit,
    register_funcify_and_cache_key,
)

from scanlib.backends.handler.thunks import runner
from scanlib.backends.numba.programs import call_program
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.execution import NotCompilableError
from scanlib.ops.lowered.checked_linear import CheckedLinearScan, limits
from scanlib.ops.lowered.linear_scan import LinearScan, register_linear_compiler
from scanlib.schedules.linear_steps import linear_program


@register_funcify_and_cache_key(LinearScan)
def funcify_linear_scan(
    op: LinearScan, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the function of a matrix recurrence for code that numba compiles."""
    return call_program(linear_program(op, node))


@register_funcify_and_cache_key(CheckedLinearScan)
def funcify_checked(
    op: CheckedLinearScan, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the function of the loop that a recurrence stands for."""
    first = len(node.inputs) - len(op.of_loop(node.inputs))
    exact = op.exact.make_node(*op.of_loop(node.inputs))
    loop, key = numba_funcify_and_cache_key(op.exact, node=exact)

    @numba_njit
    def checked(*inputs):
        return loop(*inputs[first:])

    return checked, None if key is None else f"from {first} {key}"


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
