"""Makes loops known to PyTensor's numba linker and to `Scan.perform`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import (
    get_numba_type,
    numba_njit,
    register_funcify_and_cache_key,
)

from scanlib.backends.numba.elemwise import write_elemwise
from scanlib.backends.numba.loop import write_loop
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.execution import NotCompilableError, register_compiler
from scanlib.ops.scan import Scan


@register_funcify_and_cache_key(Scan)
def funcify_scan(op: Scan, node: Apply, **kwargs: Any) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a loop for use inside numba mode."""
    function, key = write_loop(op)
    return numba_njit(function), key


@register_funcify_and_cache_key(ElemwiseScan)
def funcify_elemwise_scan(
    op: ElemwiseScan, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of an elementwise loop for use inside numba mode."""
    function, key = write_elemwise(op)
    return numba_njit(function), key


@register_compiler
def compile_for_perform(op: Scan | ElemwiseScan, node: Apply) -> Callable[..., Sequence[Any]]:
    """Return a function from values to values that runs the loop compiled."""
    try:
        for variable in [*node.inputs, *node.outputs]:
            get_numba_type(variable.type)
        write = write_elemwise if isinstance(op, ElemwiseScan) else write_loop
        function, key = write(op)
    except NotImplementedError as error:
        raise NotCompilableError(str(error)) from error
    compiled = numba_njit(function, final_function=True, cache=key is not None)
    single = len(node.outputs) == 1

    def run(*inputs: Any) -> Sequence[Any]:
        try:
            results = compiled(*inputs)
        except (numba.core.errors.NumbaError, NotImplementedError) as error:
            raise NotCompilableError(str(error)) from error
        return [results] if single else list(results)

    return run
