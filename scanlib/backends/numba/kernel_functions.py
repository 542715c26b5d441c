"""Functions of kernels, for code that numba compiles."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from scanlib._compat.numba import cgutils
from scanlib.kernels.elementary import vector_function
from scanlib.kernels.printers.llvm import print_function
from scanlib.kernels.processor import has_fused_multiply_add


@cache
def vector_intrinsic(name: str, dtype: str) -> tuple[Any, str]:
    """Return one of `scanlib.kernels.elementary.NAMES` for compiled code, and its key."""
    text = print_function(vector_function(name, dtype), fused=has_fused_multiply_add())
    number = numba.from_dtype(np.dtype(dtype))
    whole = f"scanlib_{name}_{dtype}"

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes = context.codegen()
        module = llvm.parse_assembly(text)
        module.triple = codes._create_empty_module("scanlib").triple
        module.data_layout = codes._data_layout
        library = codes.create_library(whole)
        library.add_llvm_module(module)
        library.finalize()
        context.active_code_library.add_linking_library(library)
        kinds = [value.type for value in arguments]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kinds[0], kinds), whole
        )
        return builder.call(function, arguments)

    def one(typingctx: Any, x: Any) -> Any:
        return (number(number), codegen) if x == number else None

    def two(typingctx: Any, x: Any, y: Any) -> Any:
        return (number(number, number), codegen) if (x, y) == (number, number) else None

    key = f"scanlib {name} {dtype} {sha256(text.encode()).hexdigest()[:16]}"
    return intrinsic(two if name == "logaddexp" else one), key
