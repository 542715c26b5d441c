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

from scanlib.backends.numba.disk import sealed
from scanlib.backends.numba.elemwise import only_call, write_elemwise
from scanlib.backends.numba.elemwise.apart import program_of
from scanlib.backends.numba.lazy import lazily, tuple_text
from scanlib.backends.numba.loop import write_loop
from scanlib.backends.numba.programs import runner
from scanlib.backends.numba.source import Source, may_cache
from scanlib.ops.elemwise_scan import ElemwiseScan, schedule
from scanlib.ops.execution import NotCompilableError, register_compiler
from scanlib.ops.scan import Scan

VERSION = "scanlib-apart-1"


@register_funcify_and_cache_key(Scan)
def funcify_scan(op: Scan, node: Apply, **kwargs: Any) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a loop for use inside numba mode."""
    function, key = _apart(node, *write_loop(op))
    return numba_njit(function), key


def _apart(
    node: Apply, function: Callable[..., Any], key: str | None
) -> tuple[Callable[..., Any], str | None]:
    """Return a function that calls a loop's, which is compiled for itself.

    What PyTensor compiles is optimized again with every function that it becomes part of, three
    times in all; for the code of a loop, that takes longer than compiling it.
    """
    called = _called_apart(node, function, key)
    if called is None:
        return function, key
    source = Source()
    name = source.function(*called)
    arguments = [f"x{i}" for i in range(len(node.inputs))]
    source.line(f"return {name}({tuple_text(arguments)})")
    return source.compile("scan_loop", arguments, VERSION)


def _called_apart(
    node: Apply, function: Callable[..., Any], key: str | None
) -> tuple[Callable[..., Any], str | None] | None:
    """Return what calls a loop's function with a tuple of arguments, and its key.

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
    return call, None if key is None else f"apart {key}"


def loop_call(node: Apply) -> tuple[Callable[..., Any], str | None] | None:
    """Return what calls a loop with a tuple of its inputs, for code that is compiled itself.

    None where a function of the loop has more to do than that.
    """
    if isinstance(node.op, ElemwiseScan):
        return only_call(node.op)
    return _called_apart(node, *write_loop(node.op))


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
        if isinstance(op, ElemwiseScan) and schedule(op) in ("channels", "steps"):
            program = program_of(op)
            if program is not None:
                return runner(program)
        write = write_elemwise if isinstance(op, ElemwiseScan) else write_loop
        function, key = write(op)
    except NotImplementedError as error:
        raise NotCompilableError(str(error)) from error
    compiled = sealed(numba_njit(function, final_function=True, cache=may_cache(key)))
    single = len(node.outputs) == 1

    def run(*inputs: Any) -> Sequence[Any]:
        try:
            results = compiled(*inputs)
        except (numba.core.errors.NumbaError, NotImplementedError) as error:
            raise NotCompilableError(str(error)) from error
        return [results] if single else list(results)

    return run
