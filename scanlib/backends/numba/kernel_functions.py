"""Scalar functions of kernels, for code that numba compiles."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from pytensor.graph.basic import Apply

from scanlib._compat.numba import cgutils
from scanlib.kernels.language import Function, Type, Value, Writer, write_function
from scanlib.kernels.printers.llvm import print_function
from scanlib.kernels.processor import has_fused_multiply_add
from scanlib.kernels.scalars import NoKernelError, Scalars, parts_of


def scalar_function(node: Apply) -> Function:
    """Return what a scalar node means as a function.

    Raises
    ------
    NoKernelError
        If the node has no kernel, or a number of it has two parts.
    """

    if any(parts_of(variable.type.dtype) for variable in (*node.inputs, *node.outputs)):
        raise NoKernelError(f"{node.op} of complex numbers is no function of numbers")

    def write(w: Writer, *values: Value) -> tuple[Value, ...]:
        scalars = Scalars(w)
        results = scalars.apply(node, list(values))
        found = []
        for result, out in zip(results, node.outputs, strict=True):
            assert isinstance(result, Value)
            found.append(scalars.convert(result, out.type.dtype))
        return tuple(found)

    return write_function("scanlib_scalar", [Type(inp.type.dtype) for inp in node.inputs], write)


def numba_intrinsic(function: Function) -> tuple[Any, str]:
    """Return a function of numbers for compiled code, and its key.

    Several results are a tuple.
    """
    text = print_function(function, fused=has_fused_multiply_add())
    digest = sha256(text.encode()).hexdigest()[:16]
    symbol = f"{function.name}_{digest}"
    text = text.replace(f"@{function.name}(", f"@{symbol}(")
    given = [_numba_type(value.type) for value in function.parameters]
    made = [_numba_type(value.type) for value in function.results]
    returned = made[0] if len(made) == 1 else types.Tuple(made)

    def codegen(context: Any, builder: Any, signature: Any, packed: Any) -> Any:
        codes = context.codegen()
        module = llvm.parse_assembly(text)
        module.triple = codes._create_empty_module("scanlib").triple
        module.data_layout = codes._data_layout
        library = codes.create_library(symbol)
        library.add_llvm_module(module)
        library.finalize()
        context.active_code_library.add_linking_library(library)
        (own,) = signature.args
        numbers = [
            context.cast(builder, value, kind, wanted)
            for value, kind, wanted in zip(
                cgutils.unpack_tuple(builder, packed[0]), own, given, strict=True
            )
        ]
        kinds = [context.get_value_type(kind) for kind in made]
        result = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
        kind = ir.FunctionType(result, [number.type for number in numbers])
        value = builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), numbers)
        if len(made) == 1:
            return value
        parts = [builder.extract_value(value, place) for place in range(len(made))]
        return context.make_tuple(builder, returned, parts)

    def call(typingctx: Any, *numbers: Any) -> Any:
        return returned(types.StarArgTuple.from_types(numbers)), codegen

    return intrinsic(call), digest


def _numba_type(type: Type) -> Any:
    return numba.from_dtype(np.dtype(type.dtype))
