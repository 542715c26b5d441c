"""Addresses that compiled code asks for by a key when it first needs them (compiled code only).

What numba keeps on disk has no addresses: the programs that it calls are compiled, or loaded, by
each process that runs it.
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

_WORD = ir.IntType(64)
_addresses: dict[str, Callable[[], int]] = {}
_failures: dict[str, Callable[..., Any]] = {}


def register_address(key: str, find: Callable[[], int]) -> None:
    """Let compiled code find an address by a key; `find` is called when it is first needed."""
    _addresses[key] = find


def address(key: bytes) -> int:
    """Return a registered address; called by compiled code."""
    return _addresses[key.decode()]()


def address_of(context: Any, builder: Any, key: str) -> Any:
    """Write the number that is a registered address."""
    digest = sha256(key.encode()).hexdigest()[:16]
    place = cgutils.add_global_variable(builder.module, _WORD, f"scanlib_address_{digest}")
    place.linkage = "internal"
    place.initializer = ir.Constant(_WORD, 0)
    unknown = builder.icmp_unsigned("==", builder.load(place), ir.Constant(_WORD, 0))
    with cgutils.if_unlikely(builder, unknown):
        name = f"scanlib_ask_{digest}"
        ask = builder.module.globals.get(name)
        if ask is None:
            # Once per module, however many calls there are: this is code that runs once.
            ask = ir.Function(builder.module, ir.FunctionType(_WORD, []), name)
            ask.linkage = "internal"
            ask.attributes.add("noinline")
            _write_asking(context, ir.IRBuilder(ask.append_basic_block("entry")), key.encode())
        number = builder.call(ask, [])
        missing = builder.icmp_unsigned("==", number, ir.Constant(_WORD, 0))
        with cgutils.if_unlikely(builder, missing):
            context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
        builder.store(number, place)
    return builder.load(place)


def _write_asking(context: Any, builder: Any, key: bytes) -> None:
    """Write a function that calls `address` and returns zero where that raises."""
    python = context.get_python_api(builder)
    lock = python.gil_ensure()
    found = call_python(context, builder, address, [bytes_object(context, builder, key)])
    with cgutils.if_unlikely(builder, cgutils.is_null(builder, found)):
        python.gil_release(lock)
        builder.ret(ir.Constant(_WORD, 0))
    number = python.long_as_longlong(found)
    python.decref(found)
    python.gil_release(lock)
    builder.ret(number)


def bytes_object(context: Any, builder: Any, text: bytes) -> Any:
    """Write a new object of Python's that holds some bytes."""
    constant = context.insert_const_bytes(builder.module, text)
    python = context.get_python_api(builder)
    return python.bytes_from_string_and_size(constant, ir.Constant(_WORD, len(text)))


def call_python(context: Any, builder: Any, function: Any, arguments: list[Any]) -> Any:
    """Write the call of a function of a module; the arguments are given up."""
    python = context.get_python_api(builder)
    name = context.insert_const_string(builder.module, function.__module__)
    module = python.import_module(name)
    found = python.object_getattr_string(module, function.__name__)
    result = python.call_function_objargs(found, arguments)
    for item in (*arguments, found, module):
        python.decref(item)
    return result


def fail(key: bytes, numbers: bytes) -> None:
    """Raise what is registered for a key; called by compiled code."""
    _failures[key.decode()](*np.frombuffer(numbers, np.int64).tolist())


def failing(key: str, raises: Callable[..., Any]) -> Any:
    """Return a function of compiled code that has Python raise if a condition holds.

    Its arguments are the condition and the numbers that `raises` is given. Each process that runs
    code which calls it has to make it like this. What compiled code holds then is not released, as
    in PyTensor's own operations.
    """
    _failures[key] = raises

    @intrinsic
    def fail_if(typingctx: Any, condition: Any, *numbers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with cgutils.if_unlikely(builder, arguments[0]):
                memory = cgutils.alloca_once(builder, ir.ArrayType(_WORD, max(len(numbers), 1)))
                values = cgutils.unpack_tuple(builder, arguments[1])
                for place, (value, kind) in enumerate(zip(values, numbers, strict=True)):
                    word = context.cast(builder, value, kind, types.int64)
                    builder.store(word, cgutils.gep_inbounds(builder, memory, 0, place))
                raise_from(context, builder, key, memory, len(numbers))
            return context.get_dummy_value()

        return types.void(types.boolean, types.StarArgTuple.from_types(numbers)), codegen

    return fail_if


def raise_from(context: Any, builder: Any, key: str, memory: Any, count: int) -> None:
    """Write that Python raises what is registered for a key, with the words in some memory."""
    python = context.get_python_api(builder)
    lock = python.gil_ensure()
    words = builder.bitcast(memory, ir.IntType(8).as_pointer())
    numbers = python.bytes_from_string_and_size(words, ir.Constant(_WORD, 8 * count))
    items = [bytes_object(context, builder, key.encode()), numbers]
    call_python(context, builder, fail, items)
    python.gil_release(lock)
    context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
