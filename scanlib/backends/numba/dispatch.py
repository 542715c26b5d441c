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
from pytensor.tensor.random.type import RandomGeneratorType
from pytensor.tensor.type import DenseTensorType

from scanlib._compat.numba import NumbaError
from scanlib.backends.handler.programs import program_of
from scanlib.backends.handler.thunks import runner
from scanlib.backends.numba.bundles import as_arrays
from scanlib.backends.numba.disk import sealed
from scanlib.backends.numba.lazy import lazily, tuple_text
from scanlib.backends.numba.programs import Call, call_program
from scanlib.backends.numba.source import Source, may_cache
from scanlib.kernels.compiled import program_key
from scanlib.kernels.program import CarryShapeError
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.execution import NotCompilableError, register_compiler
from scanlib.ops.scan import Scan
from scanlib.source_keys import source_key

VERSION = source_key(__name__)
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
    """Return the compiled function of a loop for use inside numba mode.

    It calls the loop's, which is compiled for itself: what PyTensor compiles is optimized again
    with every function that it becomes part of, three times in all; for the code of a loop, that
    takes longer than compiling it.
    """
    called = loop_call(node)
    if called is None:
        function, key = write_loop(op)
        return numba_njit(function), key
    source = Source()
    name = source.function(called.function, called.key)
    arguments = [f"x{i}" for i in range(len(node.inputs))]
    result = f"{name}({tuple_text(arguments)})"
    if called.bundled:
        source.object("as_arrays", as_arrays)
        result = f"as_arrays({result})"
    source.line(f"return {result}")
    function, key = source.compile("scan_loop", arguments, VERSION)
    return numba_njit(function), key


def _called_apart(node: Apply, function: Callable[..., Any], key: str | None) -> Call | None:
    """Return what calls a loop's function.

    None where a result has a type that cannot be told before.
    """
    results: list[tuple[str, int] | numba.types.Type] = []
    for kind in (out.type for out in node.outputs):
        if isinstance(kind, DenseTensorType):
            results.append((kind.dtype, kind.ndim))
        elif isinstance(kind, RandomGeneratorType):
            results.append(get_numba_type(kind))
        else:
            return None
    call = lazily(function, key or f"function {id(function)}", results, key is not None)
    return Call(call, None if key is None else f"apart {key}")


def loop_call(node: Apply) -> Call | None:
    """Return what calls a loop with a tuple of its inputs, for code that is compiled itself.

    None where a function of the loop has more to do than that.
    """
    program = program_of(node.op)
    if program is None:
        return _called_apart(node, *write_loop(node.op))
    key, otherwise = f"program {program_key(program)}", None
    if program.unfit:
        other = _called_apart(node, *write_loop(node.op))
        assert other is not None
        key, otherwise = f"{key} or {other.key}", other.function
    call = call_program(program, key, otherwise)
    return Call(call, key, bundled=len(program.outputs) > 1)


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
