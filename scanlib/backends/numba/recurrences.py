"""Matrix recurrences in numba mode and in `perform`: calls of their kernels.

The kernels are those of `scanlib.schedules.linear_steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import register_funcify_and_cache_key

from scanlib.backends.handler.thunks import runner
from scanlib.backends.numba.programs import call_program
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.execution import NotCompilableError
from scanlib.ops.lowered.linear_scan import LinearScan, register_linear_compiler
from scanlib.schedules.linear_steps import linear_program


@register_funcify_and_cache_key(LinearScan)
def funcify_linear_scan(
    op: LinearScan, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the function of a matrix recurrence for code that numba compiles."""
    return call_program(linear_program(op, node))


@register_linear_compiler
def compile_for_perform(op: LinearScan, node: Apply) -> Callable[..., np.ndarray]:
    """Return a function from values to the value that runs the recurrence compiled."""
    try:
        run = runner(linear_program(op, node))
    except NoKernelError as error:
        raise NotCompilableError(str(error)) from error
    return lambda *inputs: run(*inputs)[0]
