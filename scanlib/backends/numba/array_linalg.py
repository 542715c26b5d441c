"""Matrix products and small linear algebra of a step, as calls of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.inverse import MatrixInverse
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.math import Dot

from scanlib.backends.numba import lazy, products, small_linalg
from scanlib.backends.numba.array_joins import ArrayJoins
from scanlib.backends.numba.places import Place
from scanlib.backends.numba.source import Source

REAL = {"float32", "float64"}
SQUARE = "raise np.linalg.LinAlgError('Last 2 dimensions of A must be square')"


class ArrayLinalg(ArrayJoins):
    """Writes products of matrices and vectors, factorizations and solves."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._packed: dict[tuple[str, tuple[str, ...], str], str] = {}
        self._numbers: dict[str, str] = {}

    def call(self, op: Op, node: Apply) -> None:
        raise NotImplementedError

    def write_dot(self, op: Dot, node: Apply) -> None:
        """Write a product of matrices or vectors."""
        left, right = node.inputs
        out = node.outputs[0]
        dtypes = {variable.type.dtype for variable in [left, right, out]}
        if len(dtypes) > 1 or out.type.dtype not in REAL:
            self.call(op, node)
            return
        a, b = self.place(left), self.place(right)
        if a.ndim == 1:
            a = replace(a, sizes=("1", *a.sizes), strides=("0", *a.strides))
        if b.ndim == 1:
            b = replace(b, sizes=(*b.sizes, "1"), strides=(*b.strides, "0"))
        failure = "raise ValueError('incompatible array sizes for a matrix product inside a scan')"
        depth = self.sizes.require_equal(a.sizes[1], b.sizes[0], failure)
        rows, columns = self.sizes.same(a.sizes[0]), self.sizes.same(b.sizes[1])
        sizes = [
            *([rows] if left.type.ndim == 2 else []),
            *([columns] if right.type.ndim == 2 else []),
        ]
        target = self.target(out, sizes) if sizes else self.fresh(self._dtype(out), ["1"])
        strides = self._matrix_strides(target, left, right)
        self.write_product(out, a, b, target.start, strides, (rows, depth, columns))
        if sizes:
            self.bind_place(out, target)
            return
        name = self.source.name("s")
        self.source.line(f"{name} = load({target.start}, 0)")
        self.bind_scalar(out, name)

    def _matrix_strides(self, target: Place, left: Variable, right: Variable) -> tuple[str, str]:
        strides = list(target.strides)
        row = strides.pop(0) if left.type.ndim == 2 else "0"
        column = strides.pop(0) if right.type.ndim == 2 else "0"
        return row, column

    def write_product(
        self,
        out: Variable,
        a: Place,
        b: Place,
        start: str,
        strides: tuple[str, str],
        sizes: tuple[str, str, str],
    ) -> None:
        """Write ``C = A B``, turned around where `C` is a column."""
        rows, depth, columns = sizes
        row = strides[0]
        if columns == "1" and rows != "1":
            if row not in ("1", "0") and self.sizes.same(row) != "1":
                # A column inside a larger array: its rows do not lie one after the other.
                self._call_product(out, a, b, start, row, sizes)
                return
            a, b = _transposed(b), _transposed(a)
            rows, columns, row = columns, rows, "0"
        self._call_product(out, a, b, start, row, (rows, depth, columns))

    def _call_product(
        self, out: Variable, a: Place, b: Place, start: str, row: str, sizes: tuple[str, str, str]
    ) -> None:
        rows, depth, columns = sizes
        dtype = self._dtype(out)
        where = self._strided(a)
        number = self.number("1" if rows == "1" else row)
        tail = ", ".join(map(self.number, (rows, depth, columns)))
        lanes = products.lanes(4 if out.type.dtype == "float32" else 8)
        tile = lanes * products.VECTORS
        if b.fixed:
            panels = self._panels(b, dtype, sizes)
            spare = self.fresh(dtype, [rows, str(tile)])
            name = self.kernel(products.fixed_product, products.VERSION)
            self.source.line(
                f"{name}(({where}, {self._strided(b)}, {panels}, "
                f"{start}, {number}, {tail}, {spare.start}, {self.number('0')}))"
            )
            return
        wide = self.sizes.define(f"{columns} + {tile}", columns)
        room = self.sizes.product(depth, wide)
        edge = self.sizes.product(rows, str(tile))
        spare = self.fresh(dtype, [self.sizes.define(f"{room} + {edge}", room, edge)])
        name = self.kernel(products.product, products.VERSION)
        self.source.line(
            f"{name}(({where}, {self._strided(b)}, {start}, {number}, "
            f"{tail}, {spare.start}, {self.number('0')}))"
        )

    def number(self, size: str) -> str:
        """Return a size as an integer variable: kernels are compiled anew for each literal."""
        if not size.isdigit():
            return size
        if size not in self._numbers:
            self._numbers[size] = self.source.name("n")
            self.source.before_loop(f"{self._numbers[size]} = np.int64({size})")
        return self._numbers[size]

    def _strided(self, place: Place) -> str:
        return ", ".join([place.start, *map(self.number, place.strides)])

    def _panels(self, b: Place, dtype: str, sizes: tuple[str, str, str]) -> str:
        """Return the panels of a matrix that is the same at all steps."""
        rows, depth, columns = sizes
        if not self.sizes.is_static(rows):
            rows = str(products.TINY + 1)  # which no product is tiny with
        key = (b.start, b.strides, rows)
        if key not in self._packed:
            kind = self.source.globals[dtype]
            name = self.kernel(products.panels, products.VERSION, (np.dtype(kind).name, 1))
            array, start = self.source.name("w"), self.source.name("p")
            places = self._strided(b)
            rows, depth, columns = map(self.number, (rows, depth, columns))
            before = self.source.after_checks
            read = f"{depth} if steps > 0 else {self.number('0')}"
            before(f"{array} = {name}(({places}, {read}, {columns}, {rows}))")
            before(f"{start} = pointer({array})")
            self.memory.arrays.append(array)
            self._packed[key] = start
        return self._packed[key]

    # Factorizations and solves

    def kernel(self, function: Any, version: str, *results: tuple[str, int]) -> str:
        """Return the name of a kernel, which is compiled apart from the loops that call it."""
        call, key = lazy.kernel(function, version, *results)
        return self.source.function(call, key, function.py_func.__name__)

    def write_call(self, name: str, *arguments: str) -> None:
        """Write the call of a kernel for small matrices."""
        function = self.kernel(getattr(small_linalg, name), small_linalg.VERSION)
        self.source.line(f"{function}(({', '.join(arguments)},))")

    def are_real(self, node: Apply) -> bool:
        """Whether all matrices of a node have the same real dtype."""
        dtypes = {variable.type.dtype for variable in [*node.inputs, *node.outputs]}
        return len(dtypes) == 1 and dtypes <= REAL

    def square(self, variable: Variable) -> tuple[Place, str]:
        """Return a square matrix and its size."""
        place = self.place(variable)
        return place, self.sizes.require_equal(place.sizes[0], place.sizes[1], SQUARE)

    def write_cholesky(self, op: Cholesky, node: Apply) -> None:
        a, size = self.square(node.inputs[0])
        out = node.outputs[0]
        target = self._contiguous_target(out, [size, size])
        spare = self.fresh(self._dtype(out), [size, size])
        flags = (self.number(size), self.number(str(int(op.lower))))
        self.write_call("cholesky", self._strided(a), *flags, target.start, spare.start)
        self.bind_place(out, target)

    def write_inverse(self, op: MatrixInverse, node: Apply) -> None:
        a, size = self.square(node.inputs[0])
        out = node.outputs[0]
        target = self._contiguous_target(out, [size, size])
        spare = self.fresh(self._dtype(out), [size, size])
        self.write_call("inverse", self._strided(a), self.number(size), target.start, spare.start)
        self.bind_place(out, target)

    def write_solve(self, op: Solve | SolveTriangular | CholeskySolve, node: Apply) -> None:
        """Write a solve; the kernel's name and flags depend on what is known of the matrix."""
        a, size = self.square(node.inputs[0])
        b, out = self.place(node.inputs[1]), node.outputs[0]
        failure = "raise np.linalg.LinAlgError('Dimensions of A and B do not conform')"
        self.sizes.require_equal(b.sizes[0], size, failure)
        target = self._contiguous_target(out, [size, *b.sizes[1:]])
        if b.ndim == 1:
            b = Place(b.start, (*b.sizes, "1"), (*b.strides, "0"))
        right = f"{self._strided(b)}, {self.number(self.sizes.same(b.sizes[1]))}"
        lower = self.number(str(int(op.lower)))
        matrix = f"{self._strided(a)}, {self.number(size)}"
        if isinstance(op, CholeskySolve):
            self.write_call("cholesky_solve", matrix, lower, right, target.start)
        elif isinstance(op, SolveTriangular):
            unit = self.number(str(int(op.unit_diagonal)))
            self.write_call("triangular_solve", matrix, lower, unit, right, target.start)
        else:
            spare = self.fresh(self._dtype(out), [size, size]).start
            if op.assume_a == "pos":
                self.write_call("positive_solve", matrix, lower, right, target.start, spare)
            else:
                self.write_call("general_solve", matrix, right, target.start, spare)
        self.bind_place(out, target)

    def _contiguous_target(self, out: Variable, sizes: list[str]) -> Place:
        place = self.target(out, sizes)
        return place if self.sizes.is_contiguous(place) else self.fresh(self._dtype(out), sizes)


def _transposed(place: Place) -> Place:
    return replace(place, sizes=place.sizes[::-1], strides=place.strides[::-1])
