"""Lines of C, and how Python values are written in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from scanlib.ops.c_code import NoCCodeError

_INTEGER_SUFFIX = {"i": "LL", "u": "ULL"}


class Source:
    """Collects lines of C."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.count = 0

    def line(self, text: str) -> None:
        # Directives start the line.
        indent = "" if text.startswith("#") else "  " * self.depth
        self.lines.append(indent + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Put what follows into braces after `head`."""
        self.line(f"{head} {{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def name(self, prefix: str) -> str:
        """Return a name that was not used before."""
        self.count += 1
        return f"{prefix}{self.count}"

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def c_type(dtype: str) -> str:
    """Return the C type of a dtype, as PyTensor names it.

    Raises
    ------
    NoCCodeError
        For float16, which C cannot compute with.
    """
    if dtype == "float16":
        raise NoCCodeError("float16 has no C code")
    return f"pytensor_{dtype}" if dtype.startswith("complex") else f"npy_{dtype}"


def literal(value: Any, dtype: str) -> str:
    """Return a number, exactly."""
    kind = np.dtype(dtype).kind
    if kind == "c":
        half = "float32" if dtype == "complex64" else "float64"
        return f"{c_type(dtype)}({literal(value.real, half)}, {literal(value.imag, half)})"
    if kind == "b":
        return "((npy_bool)1)" if value else "((npy_bool)0)"
    if kind in _INTEGER_SUFFIX:
        number, suffix = int(value), _INTEGER_SUFFIX[kind]
        text = f"({number + 1}LL - 1)" if number == -(2**63) else f"{number}{suffix}"
        return f"(({c_type(dtype)}){text})"
    real = float(value)
    if np.isnan(real):
        return f"(({c_type(dtype)})NPY_NAN)"
    if np.isinf(real):
        return f"(({c_type(dtype)}){'-' if real < 0 else ''}NPY_INFINITY)"
    return f"(({c_type(dtype)}){real!r})"
