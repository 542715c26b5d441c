"""Programs of kernels, as functions for code that numba compiles.

What numba compiles of a program is one call of the handler in C++ (``compiled.h``), which gets the
addresses of the inputs and of the results. The kernels are no part of numba's module; they are
compiled, or loaded from disk, when the program first runs, and asked for by their key.
"""

from hashlib import sha256
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib._compat.numba import RETCODE_EXC, cgutils, impl_ret_new_ref, new_array_of
from scanlib.backends.handler.programs import registered
from scanlib.backends.handler.thunks import COMPILED
from scanlib.kernels.program import LoopProgram
from scanlib.source_keys import source_key

BYTES = ir.IntType(8).as_pointer()


def call_program(program: LoopProgram, numbers: bool = False) -> tuple[Any, str]:
    """Return a function for compiled code from a program's inputs to its outputs, of no axes as
    arrays or as `numbers`, and its key. Each process that runs such code has to make it."""
    key = registered(program)
    inputs, items = (
        [numba.from_dtype(np.dtype(own.dtype)) for own in some]
        for some in (program.inputs, [output.type for output in program.outputs])
    )
    results = [
        item if numbers and output.type.ndim == 0 else types.Array(item, output.type.ndim, "C")
        for item, output in zip(items, program.outputs, strict=True)
    ]
    several = len(results) > 1
    returned = types.Tuple(results) if several else results[0]

    @intrinsic
    def call(typingctx: Any, *arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            given = cgutils.unpack_tuple(builder, values[0])
            places = [_place(context, builder, *one) for one in zip(results, items, strict=True)]
            read = [
                _address(context, builder, *one)
                for one in zip(arguments, given, inputs, strict=True)
            ]
            code = _call_handler(context, builder, key, read, places)
            with cgutils.if_unlikely(builder, builder.icmp_signed("<", code, code.type(0))):
                context.call_conv._return_errcode_raw(builder, RETCODE_EXC)
            made = [
                _result(context, builder, *one) for one in zip(results, items, places, strict=True)
            ]
            whole = context.make_tuple(builder, returned, made) if several else made[0]
            return impl_ret_new_ref(context, builder, returned, whole)

        return returned(types.StarArgTuple.from_types(arguments)), codegen

    identity = f"{__name__} {source_key()} {key} {numbers}"
    return call, sha256(identity.encode()).hexdigest()  # part of the names of files


def _place(context: Any, builder: Any, kind: Any, item: Any) -> Any:
    """Return where the handler puts a result: an array as numba has it, or a number."""
    is_array = isinstance(kind, types.Array) and kind.ndim
    return cgutils.alloca_once(
        builder, context.get_value_type(kind) if is_array else context.get_data_type(item)
    )


def _address(context: Any, builder: Any, kind: Any, value: Any, wanted: Any) -> Any:
    """Return where the handler finds an input; a number is converted to the `wanted` type."""
    if isinstance(kind, types.Array) and kind.ndim:
        return cgutils.alloca_once_value(builder, value)
    if isinstance(kind, types.Array):
        memory = context.make_array(kind)(context, builder, value).data
        if kind.dtype == wanted:
            return memory
        kind, value = kind.dtype, context.unpack_value(builder, kind.dtype, memory)
    memory = cgutils.alloca_once(builder, context.get_data_type(wanted))
    context.pack_value(builder, wanted, context.cast(builder, value, kind, wanted), memory)
    return memory


def _call_handler(context: Any, builder: Any, key: str, read: list[Any], made: list[Any]) -> Any:
    """Write the call of the handler, which keeps where the program is in a word of the module."""
    name = f"scanlib_program_{sha256(key.encode()).hexdigest()[:16]}"
    known = builder.module.globals.get(name)
    if known is None:
        known = cgutils.add_global_variable(builder.module, BYTES, name)
        known.linkage, known.initializer = "internal", ir.Constant(BYTES, None)
    text = context.insert_const_string(builder.module, key)
    tables = []
    for addresses in (read, made):
        table = cgutils.alloca_once(builder, ir.ArrayType(BYTES, max(len(addresses), 1)))
        for number, address in enumerate(addresses):
            slot = cgutils.gep_inbounds(builder, table, 0, number)
            builder.store(builder.bitcast(address, BYTES), slot)
        tables.append(builder.bitcast(table, BYTES))
    kind = ir.FunctionType(ir.IntType(32), [BYTES] * 4)
    handler = cgutils.get_or_insert_function(builder.module, kind, COMPILED)
    place = builder.bitcast(known, BYTES)
    return builder.call(handler, [place, text, *tables])


def _result(context: Any, builder: Any, kind: Any, item: Any, place: Any) -> Any:
    if isinstance(kind, types.Array) and kind.ndim:
        return builder.load(place)
    if not isinstance(kind, types.Array):
        return context.unpack_value(builder, item, place)
    array = new_array_of(context, builder, kind, ())
    builder.store(builder.load(place), array.data)
    return array._getvalue()
