"""Functions outside kernels: scalar operations that no kernel has, as numba compiles them, routines
of BLAS, and what Python computes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numba
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache
from pytensor.tensor.type import DenseTensorType

from scanlib.kernels.compiled import ProgramEntry
from scanlib.kernels.scipy_routines import Routine

Function: TypeAlias = Apply | Routine | ProgramEntry
_scalar_functions: dict[Any, Any] = {}


def function_address(node: Function) -> int:
    """Return the address of a function, for a scalar node that of PyTensor's own."""
    if not isinstance(node, Apply):
        return node.address()
    dtypes = tuple(variable.type.dtype for variable in (*node.inputs, *node.outputs))
    known = node.op, dtypes
    if known not in _scalar_functions:
        function, _ = numba_funcify_ensure_cache(node.op, node=node)
        kinds = [numba.from_dtype(np.dtype(dtype)) for dtype in dtypes]
        _scalar_functions[known] = numba.cfunc(kinds[-1](*kinds[:-1]))(
            plain(function, len(node.inputs))
        )
    return _scalar_functions[known].address


def has_compiled_function(node: Function) -> bool:
    """Whether a function is compiled, and does not call Python."""
    if isinstance(node, ProgramEntry):
        return all(map(has_compiled_function, node.program.functions))
    if isinstance(node, Routine):
        return True
    return numba_funcify_ensure_cache(node.op, node=node)[1] is not None


def plain(function: Any, count: int) -> Callable[..., Any]:
    """Return a function for numba to compile that calls one which it knows by another's code."""
    names = ", ".join(f"x{i}" for i in range(count))
    scope = {"function": function}
    exec(f"def plain({names}):\n    return function({names})", scope)
    return scope["plain"]


def performed(node: Apply) -> Callable[..., Any]:
    """Return a function that lets an Op compute its results in Python."""
    compute = node.op.perform
    dense = [isinstance(out.type, DenseTensorType) for out in node.outputs]

    def perform(*inputs: Any) -> Any:
        cell: list[Any] = [None]
        compute(node, list(inputs), [cell])
        found = cell[0]
        return np.asarray(found) if is_dense and type(found) is not np.ndarray else found

    def perform_several(*inputs: Any) -> list[Any]:
        cells: list[list[Any]] = [[None] for _ in dense]
        compute(node, list(inputs), cells)
        return [
            np.asarray(cell[0]) if is_dense else cell[0]
            for cell, is_dense in zip(cells, dense, strict=True)
        ]

    is_dense = dense[0]
    return perform if len(dense) == 1 else perform_several
