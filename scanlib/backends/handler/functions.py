"""Functions outside kernels: scalar operations that no kernel has, as numba compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache

_scalar_functions: dict[Any, Any] = {}


def function_address(node: Apply) -> int:
    """Return the address of PyTensor's own function for a scalar node, from numbers to one."""
    dtypes = tuple(variable.type.dtype for variable in (*node.inputs, *node.outputs))
    known = node.op, dtypes
    if known not in _scalar_functions:
        function, _ = numba_funcify_ensure_cache(node.op, node=node)
        kinds = [numba.from_dtype(np.dtype(dtype)) for dtype in dtypes]
        _scalar_functions[known] = numba.cfunc(kinds[-1](*kinds[:-1]))(
            _plain(function, len(node.inputs))
        )
    return _scalar_functions[known].address


def has_compiled_function(node: Apply) -> bool:
    """Whether PyTensor's function for a scalar node is compiled, and does not call Python."""
    return numba_funcify_ensure_cache(node.op, node=node)[1] is not None


def _plain(function: Any, count: int) -> Callable[..., Any]:
    names = ", ".join(f"x{i}" for i in range(count))
    scope = {"function": function}
    exec(f"def plain({names}):\n    return function({names})", scope)
    return scope["plain"]
