"""What compiled code asks of Python: addresses, errors, and whether to go on.

What numba keeps on disk has no addresses: the programs that it calls are compiled, or loaded, by
each process that runs it, when compiled code first asks for them by a key.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib._compat.numba import RETCODE_EXC, cgutils
from scanlib.kernels.python_driver import poll_address

WORD = ir.IntType(64)
BYTES = ir.IntType(8).as_pointer()
_addresses: dict[str, Callable[[], int]] = {"poll": poll_address}
_failures: dict[str, Callable[..., Any]] = {}


def register_address(key: str, find: Callable[[], int]) -> None:
    """Let compiled code find an address by a key; `find` is called when it is first needed."""
    _addresses[key] = find


def register_failure(key: str, raises: Callable[..., Any]) -> None:
    """Let compiled code raise an error by a key; `raises` is called with integers."""
    _failures[key] = raises


def address(key: bytes) -> int:
    """Return a registered address; called by compiled code."""
    return _addresses[key.decode()]()


def fail(key: bytes, numbers: bytes) -> None:
    """Raise a registered error; called by compiled code."""
    _failures[key.decode()](*np.frombuffer(numbers, np.int64).tolist())


def address_of(context: Any, builder: Any, key: str) -> Any:
    """Write the number that is a registered address."""
    digest = sha256(key.encode()).hexdigest()[:16]
    place = cgutils.add_global_variable(builder.module, WORD, f"scanlib_address_{digest}")
    place.linkage = "internal"
    place.initializer = ir.Constant(WORD, 0)
    unknown = builder.icmp_unsigned("==", builder.load(place), ir.Constant(WORD, 0))
    with cgutils.if_unlikely(builder, unknown):
        name = f"scanlib_ask_{digest}"
        ask = builder.module.globals.get(name)
        if ask is None:
            # Once per module, however many calls there are: this is code that runs once.
            ask = ir.Function(builder.module, ir.FunctionType(WORD, []), name)
            ask.linkage = "internal"
            ask.attributes.add("noinline")
            _write_asking(context, ir.IRBuilder(ask.append_basic_block("entry")), key)
        number = builder.call(ask, [])
        missing = builder.icmp_unsigned("==", number, ir.Constant(WORD, 0))
        with cgutils.if_unlikely(builder, missing):
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
        builder.store(number, place)
    return builder.load(place)


def _write_asking(context: Any, builder: Any, key: str) -> None:
    """Write a function that calls `address` and returns zero where that raises."""
    python = context.get_python_api(builder)
    lock = python.gil_ensure()
    found = _call_python(context, builder, address, key)
    with cgutils.if_unlikely(builder, cgutils.is_null(builder, found)):
        python.gil_release(lock)
        builder.ret(ir.Constant(WORD, 0))
    number = python.long_as_longlong(found)
    python.decref(found)
    python.gil_release(lock)
    builder.ret(number)


def raise_from(context: Any, builder: Any, key: str, words: Any, count: int) -> None:
    """Write that a registered error is raised, which is told some words in memory."""
    python = context.get_python_api(builder)
    lock = python.gil_ensure()
    size = ir.Constant(WORD, 8 * count)
    numbers = python.bytes_from_string_and_size(builder.bitcast(words, BYTES), size)
    _call_python(context, builder, fail, key, numbers)
    python.gil_release(lock)


def _call_python(context: Any, builder: Any, function: Any, key: str, *arguments: Any) -> Any:
    """Write the call of a function of this module; the arguments are given up."""
    python = context.get_python_api(builder)
    text = context.insert_const_bytes(builder.module, key.encode())
    known = python.bytes_from_string_and_size(text, ir.Constant(WORD, len(key.encode())))
    module = python.import_module(context.insert_const_string(builder.module, __name__))
    found = python.object_getattr_string(module, function.__name__)
    result = python.call_function_objargs(found, [known, *arguments])
    for item in (known, *arguments, found, module):
        python.decref(item)
    return result


def failing(key: str, raises: Callable[..., Any]) -> Any:
    """Return a function of compiled code that has Python raise if a condition holds.

    Its arguments are the condition and the integers that `raises` is given. Each process that runs
    code which calls it has to make it like this. What compiled code holds then is not released, as
    in PyTensor's own operations.
    """
    register_failure(key, raises)

    @intrinsic
    def fail_if(typingctx: Any, condition: Any, *numbers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with cgutils.if_unlikely(builder, arguments[0]):
                words = cgutils.alloca_once(builder, ir.ArrayType(WORD, max(len(numbers), 1)))
                values = cgutils.unpack_tuple(builder, arguments[1])
                for place, (value, kind) in enumerate(zip(values, numbers, strict=True)):
                    word = context.cast(builder, value, kind, types.int64)
                    builder.store(word, cgutils.gep_inbounds(builder, words, 0, place))
                raise_from(context, builder, key, words, len(numbers))
                context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
            return context.get_dummy_value()

        return types.void(types.boolean, types.StarArgTuple.from_types(numbers)), codegen

    return fail_if


@intrinsic
def poll(typingctx: Any) -> Any:
    """Raise, in compiled code, what a signal has raised."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
        ask = builder.inttoptr(address_of(context, builder, "poll"), kind)
        wanted = builder.icmp_signed("!=", builder.call(ask, []), ir.Constant(ir.IntType(32), 0))
        with cgutils.if_unlikely(builder, wanted):
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
        return context.get_dummy_value()

    return types.none(), codegen
