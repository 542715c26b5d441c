"""What compiled code asks of Python: errors, and whether to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib._compat.numba import RETCODE_EXC, cgutils

WORD = ir.IntType(64)
BYTES = ir.IntType(8).as_pointer()
_failures: dict[str, Callable[..., Any]] = {}


def fail(key: bytes, numbers: bytes) -> None:
    """Raise a registered error; called by compiled code."""
    _failures[key.decode()](*np.frombuffer(numbers, np.int64).tolist())


def failing(key: str, raises: Callable[..., Any]) -> Any:
    """Return a function of compiled code that has Python raise if a condition holds.

    Its arguments are the condition and the integers that `raises` is given. Each process that runs
    code which calls it has to make it like this. What compiled code holds then is not released, as
    in PyTensor's own operations.
    """
    _failures[key] = raises

    @intrinsic
    def fail_if(typingctx: Any, condition: Any, *numbers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with cgutils.if_unlikely(builder, arguments[0]):
                words = cgutils.alloca_once(builder, ir.ArrayType(WORD, max(len(numbers), 1)))
                values = cgutils.unpack_tuple(builder, arguments[1])
                for place, (value, kind) in enumerate(zip(values, numbers, strict=True)):
                    word = context.cast(builder, value, kind, types.int64)
                    builder.store(word, cgutils.gep_inbounds(builder, words, 0, place))
                _raise_from(context, builder, key, words, len(numbers))
                context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
            return context.get_dummy_value()

        return types.void(types.boolean, types.StarArgTuple.from_types(numbers)), codegen

    return fail_if


def _raise_from(context: Any, builder: Any, key: str, words: Any, count: int) -> None:
    """Write that a registered error is raised, which is told some words in memory."""
    python = context.get_python_api(builder)
    lock = python.gil_ensure()
    size = ir.Constant(WORD, 8 * count)
    text = context.insert_const_bytes(builder.module, key.encode())
    known = python.bytes_from_string_and_size(text, ir.Constant(WORD, len(key.encode())))
    numbers = python.bytes_from_string_and_size(builder.bitcast(words, BYTES), size)
    module = python.import_module(context.insert_const_string(builder.module, __name__))
    found = python.object_getattr_string(module, fail.__name__)
    python.call_function_objargs(found, [known, numbers])
    for item in (known, numbers, found, module):
        python.decref(item)
    python.gil_release(lock)


@intrinsic
def poll(typingctx: Any) -> Any:
    """Raise, in compiled code, what a signal has raised."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        ask = cgutils.get_or_insert_function(builder.module, kind, "PyErr_CheckSignals")
        python = context.get_python_api(builder)
        lock = python.gil_ensure()  # code compiled with `nogil` may have given it up
        found = builder.call(ask, [])
        python.gil_release(lock)
        wanted = builder.icmp_signed("!=", found, ir.Constant(ir.IntType(32), 0))
        with cgutils.if_unlikely(builder, wanted):
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
        return context.get_dummy_value()

    return types.none(), codegen
