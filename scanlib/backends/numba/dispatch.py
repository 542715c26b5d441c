"""Makes loops known to PyTensor's numba linker and to `Scan.perform`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import (
    get_numba_type,
    numba_njit,
    register_funcify_and_cache_key,
)

from scanlib._compat.numba import NumbaError
from scanlib.backends.handler.programs import program_of
from scanlib.backends.handler.thunks import runner
from scanlib.backends.numba.disk import sealed
from scanlib.backends.numba.programs import call_program
from scanlib.backends.numba.source import may_cache
from scanlib.kernels.program import CarryShapeError
from scanlib.ops.execution import NotCompilableError, register_compiler
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan

_writers: list[Callable[[Scan], tuple[Callable[..., Any], str | None]]] = []


def register_writer(
    write: Callable[[Scan], tuple[Callable[..., Any], str | None]],
) -> Callable[[Scan], tuple[Callable[..., Any], str | None]]:
    """Register what writes the function of a loop that has no kernels.

    It writes the graph of a step, in which there may be loops.
    """
    _writers.append(write)
    return write


def write_loop(op: Scan | ElemwiseScan) -> tuple[Callable[..., Any], str | None]:
    """Return the Python source function of a loop, to be compiled by numba, and its key."""
    return _writers[-1](op.scan if isinstance(op, ElemwiseScan) else op)


@register_funcify_and_cache_key(Scan)
@register_funcify_and_cache_key(ElemwiseScan)
def funcify_loop(
    op: Scan | ElemwiseScan, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the function of a loop for code that numba compiles."""
    program = program_of(op)
    if program is not None and not program.unfit:
        return call_program(program)
    function, own = write_loop(op)
    if program is None:
        return numba_njit(function), own
    call, key = call_program(program, numba_njit(function))
    return call, None if own is None else f"{key} or {own}"


@register_compiler
def compile_for_perform(op: Scan | ElemwiseScan, node: Apply) -> Callable[..., Sequence[Any]]:
    """Return a function from values to values that runs the loop compiled."""
    try:
        for variable in [*node.inputs, *node.outputs]:
            get_numba_type(variable.type)
        program = program_of(op)
        if program is None:
            return _compiled_apart(op, node)
    except NotImplementedError as error:
        raise NotCompilableError(str(error)) from error
    return _run_or_apart(op, node, runner(program)) if program.unfit else runner(program)


def _run_or_apart(
    op: Scan | ElemwiseScan, node: Apply, run: Callable[..., Sequence[Any]]
) -> Callable[..., Sequence[Any]]:
    """Return a function that runs kernels, or where these are unfit what numba compiles."""

    def call(*inputs: Any) -> Sequence[Any]:
        try:
            return run(*inputs)
        except CarryShapeError:
            return _compiled_apart(op, node)(*inputs)

    return call


def _compiled_apart(op: Scan | ElemwiseScan, node: Apply) -> Callable[..., Sequence[Any]]:
    """Return a function from values to values that numba compiles whole."""
    function, key = write_loop(op)
    compiled = sealed(numba_njit(function, final_function=True, cache=may_cache(key)))
    single = len(node.outputs) == 1

    def run(*inputs: Any) -> Sequence[Any]:
        try:
            results = compiled(*inputs)
        except (NumbaError, NotImplementedError) as error:
            raise NotCompilableError(str(error)) from error
        return [results] if single else list(results)

    return run
