"""Products of a matrix and a vector, and of two vectors, inside a step.

PyTensor writes both as products of matrices, of which one has a single row or column. For the few
numbers of a small state, a call of the linear algebra library takes longer than the product; here
they are loops, with the vector read where it is, without a matrix made of it. Large matrices go to
the library as before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from pytensor.graph.basic import Apply, Variable

from scanlib.backends.numba.elementwise import ElementwiseLoops, Operand
from scanlib.backends.numba.source import Source

VERSION = 1
LARGE = 4096  # items of a matrix from which on the library is faster
FLOATS = {"float32", "float64", "complex64", "complex128"}
_OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz"}}


def matrix_vector(a: Any, v: Any, out: Any) -> None:
    """Write ``a @ v`` into `out` (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(matrix_vector, jit_options=_OPTIONS)
def _matrix_vector(a, v, out):
    if not isinstance(a, types.Array):
        return None
    large = LARGE
    if a.layout == "F":

        def by_columns(a, v, out):
            if a.size > large:
                np.dot(a, v, out)
                return
            for j in range(a.shape[0]):
                out[j] = 0
            for k in range(a.shape[1]):
                factor = v[k]
                for j in range(a.shape[0]):
                    out[j] += a[j, k] * factor

        return by_columns

    zero = a.dtype(0)

    def by_rows(a, v, out):
        if a.size > large:
            np.dot(a, v, out)
            return
        for j in range(a.shape[0]):
            total = zero
            for k in range(a.shape[1]):
                total += a[j, k] * v[k]
            out[j] = total

    return by_rows


def in_columns(a: Any) -> Any:
    """Return a copy of a matrix whose columns lie one after the other (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(in_columns)
def _in_columns(a):
    def copy(a):
        copied = np.empty((a.shape[1], a.shape[0]), a.dtype)
        for j in range(a.shape[0]):
            for k in range(a.shape[1]):
                copied[k, j] = a[j, k]
        return copied.T

    return copy


class VectorProducts(ElementwiseLoops):
    """Writes products with vectors."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.columns: dict[str, str] = {}

    def write_vector_product(self, node: Apply) -> bool:
        """Write a product of matrices of which one is a vector; return whether it is one."""
        out = node.outputs[0]
        if {variable.type.dtype for variable in [*node.inputs, out]} - {out.type.dtype}:
            return False
        if out.type.ndim != 2 or out.type.dtype not in FLOATS:
            return False
        left, right = node.inputs
        row, column = left.type.shape[0] == 1, right.type.shape[1] == 1
        if left.type.shape[1] == 1 and not (row or column):
            return self._write_outer(node)
        if row == column:
            return False
        matrix, vector = (right, left) if row else (left, right)
        a, v = self._operand(matrix, 2), self._operand(vector, 2)
        flat = self._as_vector(v, 1 if row else 0)
        if a.axes is None or None in a.axes or flat is None:
            return False
        transposed = (a.axes == (1, 0)) != row
        text = f"{a.text}.T" if transposed else a.text
        if a.text in self.whole:
            text = self._columns_of(text)
        size, inner = f"{text}.shape[0]", f"{text}.shape[1]"
        self._check_inner(f"{flat}.shape[0]", inner)
        name = self._product_memory(out, ["1", size] if row else [size, "1"])
        function = self.source.object("matrix_vector", matrix_vector)
        self.source.line(f"{function}({text}, {flat}, {name}.reshape({name}.size))")
        return True

    def _columns_of(self, text: str) -> str:
        """Return a copy of a matrix, made before the first step, whose columns are contiguous."""
        if text not in self.columns:
            function = self.source.object("in_columns", in_columns)
            self.columns[text] = self.source.name("m")
            self.source.before_loop(f"{self.columns[text]} = {function}({text})")
        return self.columns[text]

    def _write_outer(self, node: Apply) -> bool:
        left, right = node.inputs
        u = self._as_vector(self._operand(left, 2), 0)
        v = self._as_vector(self._operand(right, 2), 1)
        if u is None or v is None or right.type.shape[0] != 1:
            return False
        out = node.outputs[0]
        name = self._product_memory(out, [f"{u}.shape[0]", f"{v}.shape[0]"])
        j, k = self.source.name("j"), self.source.name("j")
        self._nest(
            [j, k], [f"{u}.shape[0]", f"{v}.shape[0]"], f"{name}[{j}, {k}] = {u}[{j}] * {v}[{k}]"
        )
        return True

    def _as_vector(self, operand: Operand, axis: int) -> str | None:
        """Return an operand that has no axis of a product but `axis` as a vector."""
        if operand.axes is None or [a for a in operand.axes if a is not None] != [axis]:
            return None
        if len(operand.axes) == 1:
            return operand.text
        name = self.source.name("u")
        inside = ", ".join("0" if a is None else ":" for a in operand.axes)
        self.source.line(f"{name} = {operand.text}[{inside}]")
        return name

    def _check_inner(self, size: str, expected: str) -> None:
        with self.source.block(f"if {size} != {expected}:"):
            self.source.line("raise ValueError('Incompatible shapes of a product inside a scan')")

    def _product_memory(self, out: Variable, sizes: list[str]) -> str:
        """Return the array that a product is written into."""
        name = self.destinations.get(out)
        reusable = self.escaping is not None and out not in self.escaping
        if name is None:
            name = self.source.name("a")
            if not reusable:
                self.source.line(f"{name} = np.empty(({', '.join(sizes)}), {self._dtype(out)})")
                self.bind_array(out, name)
                return name
            self.source.before_loop(f"{name} = np.empty((0, 0), {self._dtype(out)})")
        self._resize(name, out, sizes)
        self.bind_array(out, name)
        return name
