"""The elementary functions of `scanlib.kernels.vectors`, for the C code of loops."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from scanlib.kernels.printers.c import item_text, print_functions
from scanlib.kernels.vectors import NAMES, vector_function


@cache
def vector_functions(dtype: str) -> str:
    """Return the C++ code of all functions of a dtype, also as the static ones of a struct."""
    functions = [vector_function(name, dtype) for name in sorted(NAMES)]
    struct, item = f"scanlib_vector_{dtype}", item_text(dtype)
    suffix = "f" if dtype == "float32" else ""
    size = f"static inline {item} size_of({item} x) {{ return __builtin_fabs{suffix}(x); }}"
    forwards = [f"  {size}"]
    for name, function in zip(sorted(NAMES), functions, strict=True):
        given = [value.name for value in function.parameters]
        head = f"static inline {item} {name}({', '.join(f'{item} {value}' for value in given)})"
        forwards.append(f"  {head} {{ return {function.name}({', '.join(given)}); }}")
    guard = struct.upper()
    return "\n".join(
        [
            f"#ifndef {guard}\n#define {guard}\n#include <stdint.h>\n#include <string.h>",
            print_functions(functions),
            f"struct {struct} {{",
            *forwards,
            "};\n#endif",
        ]
    )


def vector_call(name: str, dtype: str, arguments: list[str]) -> str:
    """Return the call of a function in the code of `vector_functions`."""
    return f"scanlib_vector_{dtype}::{name}({', '.join(arguments)})"


@cache
def vector_version(dtype: str) -> str:
    """Return what changes with the code of `vector_functions`."""
    return sha256(vector_functions(dtype).encode()).hexdigest()[:16]
