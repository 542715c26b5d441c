"""Functions that are compiled when they are first called (compiled code only).

What numba compiles includes everything that it may call. A loop with two schedules would take twice
as long to compile, to use one of them. A function made by `lazily` has the other compiled, or
loaded from numba's cache, when it is first called; until then it is a name.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.callconv import RETCODE_EXC
from numba.core.imputils import impl_ret_new_ref
from numba.extending import intrinsic
from pytensor.link.numba.dispatch.basic import numba_njit

_functions: dict[str, tuple[Callable[..., Any], bool]] = {}
_compiled: dict[bytes, tuple[Any, int]] = {}  # the dispatcher keeps the code alive
_WORD = ir.IntType(64)


def address(what: bytes) -> int:
    """Return the address of a function, called by compiled code; `what` is its key and types."""
    if what not in _compiled:
        key, signature = pickle.loads(what)
        function, cache = _functions[key]
        compiled = numba_njit(function, cache=cache)
        compiled.compile(signature)
        result = compiled.overloads[signature.args]
        name = result.fndesc.llvm_func_name
        _compiled[what] = compiled, result.library.get_pointer_to_function(name)
    return _compiled[what][1]


def lazily(
    function: Callable[..., Any], key: str, results: Sequence[tuple[str, int]], cache: bool
) -> Any:
    """Return a function, for compiled code, that takes a tuple of another's arguments.

    Parameters
    ----------
    function : callable
        The Python function, which must be registered like this in every process that runs code
        which calls it.
    key : str
        What identifies it between processes.
    results : sequence of (str, int)
        Dtype and number of dimensions of each array that it returns; all are contiguous.
    cache : bool
        Whether numba may keep the compiled function on disk, under its own key.
    """
    _functions[key] = function, cache
    arrays = [types.Array(numba.from_dtype(np.dtype(d)), ndim, "C") for d, ndim in results]
    returned = arrays[0] if len(arrays) == 1 else types.Tuple(arrays)

    @intrinsic
    def call(typingctx: Any, arguments: Any) -> Any:
        return returned(arguments), _codegen(key)

    return call


def _codegen(key: str) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own = signature.return_type(*signature.args[0])
        what = pickle.dumps((key, own))
        place = cgutils.add_global_variable(builder.module, _WORD, f"scanlib_lazy_{key}")
        place.linkage = "internal"
        place.initializer = ir.Constant(_WORD, 0)
        unknown = builder.icmp_unsigned("==", builder.load(place), ir.Constant(_WORD, 0))
        with cgutils.if_unlikely(builder, unknown):
            builder.store(_ask_for_address(context, builder, what), place)
        convention = context.call_conv
        pointer = convention.get_function_type(own.return_type, own.args).as_pointer()
        target = builder.inttoptr(builder.load(place), pointer)
        values = cgutils.unpack_tuple(builder, arguments[0])
        status, result = convention.call_function(
            builder, target, own.return_type, own.args, values
        )
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return impl_ret_new_ref(context, builder, own.return_type, result)

    return codegen


def _ask_for_address(context: Any, builder: Any, what: bytes) -> Any:
    """Write the call of `address`; if it raises, the exception goes to whoever called."""
    python = context.get_python_api(builder)
    lock = python.gil_ensure()
    name = context.insert_const_string(builder.module, __name__)
    module = python.import_module(name)
    function = python.object_getattr_string(module, address.__name__)
    text = context.insert_const_bytes(builder.module, what)
    key = python.bytes_from_string_and_size(text, ir.Constant(_WORD, len(what)))
    found = python.call_function_objargs(function, [key])
    for item in (key, function, module):
        python.decref(item)
    with cgutils.if_unlikely(builder, cgutils.is_null(builder, found)):
        python.gil_release(lock)
        context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
    number = python.long_as_longlong(found)
    python.decref(found)
    python.gil_release(lock)
    return number
