r"""Products of matrices, ``C = A B`` and ``C += A B``.

    C[i, j] = Σ_k A[i, k] B[k, j]

Products of known sizes up to `TINIEST` are unrolled, a row of `B` and of `C` in one vector. Others
are one function for each dtype, wherever they lie in memory and whatever their sizes:

=====================================  ==========================================================
rows of `C` and `B` are contiguous     tiles of `C`, see `kernels.products.Combination`
columns of `C` and `A` are             the same for ``Cᵀ = Bᵀ Aᵀ``
`A`'s rows and `B`'s columns are       sums over vectors of both, for a few rows of `C`
of `C` alone                           tiles, from copies of pieces of `B`
neither rows nor columns of `C` are    one number after the other
=====================================  ==========================================================

So are numbers of several dtypes, and small integers. Products of more than `LARGEST`
multiplications are left to BLAS if there is an address of it, but those of vectors, which wait for
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from scanlib.kernels.language import (
    BOOL,
    FLOATS,
    INT64,
    INTEGERS,
    POINTER,
    Function,
    Type,
    Value,
    Writer,
    write_function,
)
from scanlib.kernels.linalg.library import Library, call_library, layout, routine_of
from scanlib.kernels.linalg.matrices import Matrix, all_known, known, sized
from scanlib.kernels.products import Combination, Lines, SmallVectors, less, multiply_add
from scanlib.kernels.scalars import NoKernelError
from scanlib.kernels.spans import sum_of_lanes

TINIEST = 4  # rows and columns of products that are unrolled
LARGEST = 48**3  # multiplications that are not left to BLAS
FEW = 4  # rows of `C` from which on pieces of `B` are copied
PIECE = 64, 128  # rows of `B`, and bytes of each, that are copied at once
VECTOR = 32  # bytes of the vectors that sums are taken of

MATRIX = (POINTER, INT64, INT64)  # a pointer and both strides


def multiply(
    w: Writer, a: Matrix, b: Matrix, out: Matrix, more: bool = False, library: Library | None = None
) -> None:
    """Write ``out = a b``, or ``out += a b`` with `more`; sizes must fit.

    Parameters
    ----------
    w : Writer
    a, b, out : Matrix
        `out` shares no memory with the others.
    more : bool, optional
    library : callable, optional
        Gives the addresses of BLAS routines; without it, none is called.

    Raises
    ------
    NoKernelError
        For truth values and complex numbers.
    """
    dtypes = (a.dtype, b.dtype, out.dtype)
    for dtype in dtypes:
        if dtype not in FLOATS + INTEGERS:
            raise NoKernelError(f"a product of matrices of {dtype} has no kernel")
    sizes = out.rows, a.columns, out.columns
    operands = [value for matrix in (a, b, out) for value in matrix.values(w)]
    counts = [*sized(w, *sizes), w.constant(more, BOOL)]
    if len(set(dtypes)) > 1 or a.itemsize < 4:
        w.call(_plain_product(dtypes), *operands, *counts)
        return
    static = all_known(sizes)
    if static is not None and out.dtype in FLOATS and 0 < min(static) <= max(static) <= TINIEST:
        _write_tiny(w, a, b, out, more)
        return
    is_small = static is not None and static[0] * static[1] * static[2] <= LARGEST
    is_vector = 1 in (known(out.rows), known(out.columns))
    if library is None or is_small or is_vector or out.dtype not in FLOATS:
        w.call(_product(out.dtype), *operands, *counts)
        return
    address = library(routine_of("gemm", out.dtype))
    w.call(_any_product(out.dtype), *operands, *counts, address)


# Tiny products


def _write_tiny(w: Writer, a: Matrix, b: Matrix, out: Matrix, more: bool) -> None:
    if known(out.columns) == 1 and known(out.rows) != 1:
        a, b, out = b.turned, a.turned, out.turned
    sizes = all_known((out.rows, a.columns, out.columns))
    assert sizes is not None
    sides = "".join("c" if _has_rows(matrix) else "s" for matrix in (b, out))
    function = _tiny_product(out.dtype, (sizes[0], sizes[1], sizes[2]), sides, more)
    w.call(function, *(value for matrix in (a, b, out) for value in matrix.values(w)))


def _has_rows(matrix: Matrix) -> bool:
    """Whether the numbers of a row are known to lie side by side."""
    return known(matrix.column_stride) == matrix.itemsize or known(matrix.columns) == 1


@cache
def _tiny_product(dtype: str, sizes: tuple[int, int, int], sides: str, more: bool) -> Function:
    """Return the function of a product of known sizes.

    `sides` says of `B` and `C` whether their rows are contiguous, ``"c"``, or strided, ``"s"``.
    """
    m, depth, n = sizes

    def write(w: Writer, *values: Value) -> tuple[Value, ...]:
        a, a_row, a_column, b, b_row, b_column, c, c_row, c_column = values
        vectors = SmallVectors(w, dtype, n)
        if sides[0] == "c":
            rows = [vectors.load(b, b_row * k) for k in range(depth)]
        else:
            rows = [_gathered(w, vectors, b, b_row * k, b_column) for k in range(depth)]
        for i in range(m):
            total = None
            if more and sides[1] == "c":
                total = vectors.load(c, c_row * i)
            elif more:
                total = _gathered(w, vectors, c, c_row * i, c_column)
            for k, own in enumerate(rows):
                factor = w.load(Type(dtype), a, a_row * i + a_column * k)
                factor = factor if n == 1 else w.splat(factor, own.type.lanes)
                total = factor * own if total is None else w.fma(factor, own, total)
            assert total is not None
            if sides[1] == "c":
                vectors.store(c, c_row * i, total)
                continue
            for j in range(n):
                item = total if n == 1 else w.lane(total, j)
                w.store(c, c_row * i + c_column * j, item)
        return ()

    name = f"product_{dtype}_{m}_{depth}_{n}_{sides}{'_more' if more else ''}"
    return write_function(name, MATRIX * 3, write, is_shared=True)


def _gathered(w: Writer, vectors: SmallVectors, pointer: Value, start: Value, step: Value) -> Value:
    """Return numbers that do not lie side by side as a vector."""
    kind = Type(vectors.type.dtype)
    items = [w.load(kind, pointer, start + step * j) for j in range(vectors.size)]
    found, have = [items[min(j, len(items) - 1)] for j in range(vectors.lanes)], 1
    while have < vectors.lanes:
        # Pairs of vectors, each twice as long.
        pairs = list(zip(found[::2], found[1::2], strict=True))
        if have == 1:
            pairs = [(w.splat(x, 2), w.splat(y, 2)) for x, y in pairs]
            found = [w.shuffle(x, y, (0, 2)) for x, y in pairs]
        else:
            found = [w.shuffle(x, y, range(2 * have)) for x, y in pairs]
        have *= 2
    return found[0]


# Products one number after the other


@cache
def _plain_product(dtypes: tuple[str, str, str]) -> Function:
    """Return the function of products of numbers of any dtypes."""
    kinds = [Type(dtype) for dtype in dtypes]

    def write(w: Writer, *values: Value) -> tuple[Value, ...]:
        a, a_row, a_column, b, b_row, b_column, c, c_row, c_column, m, depth, n, more = values
        with w.loop(0, m) as i, w.loop(0, n) as j:
            place = i * c_row + j * c_column
            total = w.local(w.select(more, w.load(kinds[2], c, place), 0))
            with w.loop(0, depth) as k:
                x = w.cast(w.load(kinds[0], a, i * a_row + k * a_column), dtypes[2])
                y = w.cast(w.load(kinds[1], b, k * b_row + j * b_column), dtypes[2])
                w.assign(total, multiply_add(w, x, y, w.copy(total)))
            w.store(c, place, w.copy(total))
        return ()

    name = f"plain_product_{'_'.join(dtypes)}"
    return write_function(name, [*MATRIX * 3, INT64, INT64, INT64, BOOL], write, is_shared=True)


# Products of any size


@cache
def _product(dtype: str) -> Function:
    """Return the function of products of numbers of one dtype."""

    def write(w: Writer, *values: Value) -> tuple[Value, ...]:
        _Product(w, dtype, values[:12], values[12]).write()
        return ()

    types = [*MATRIX * 3, INT64, INT64, INT64, BOOL]
    return write_function(f"product_{dtype}", types, write, is_shared=True)


class _Product:
    """Writes a product, or that of the transposed matrices in the other order."""

    def __init__(self, w: Writer, dtype: str, operands: Sequence[Value], more: Value) -> None:
        self.w, self.dtype, self.item, self.more = w, dtype, Type(dtype).itemsize, more
        _, _, _, _, _, _, _, c_row, c_column, m, _, n = operands
        rows, columns = c_column.equals(self.item), c_row.equals(self.item)
        turns = w.select(n.equals(1), (m > 1) & columns, ~rows & (columns | m.equals(1)))
        self.operands = [
            w.select(turns, operands[other], operand) if other != place else operand
            for place, (operand, other) in enumerate(zip(operands, _TURNED, strict=True))
        ]
        self.a, self.a_row, self.a_column, self.b, self.b_row, self.b_column = self.operands[:6]
        self.c, self.c_row, self.c_column, self.m, self.depth, self.n = self.operands[6:]

    def write(self) -> None:
        w, item = self.w, self.item
        is_column = self.n.equals(1)
        has_rows = is_column | self.b_column.equals(item)
        are_side_by_side = self.a_column.equals(item) & self.b_row.equals(item)
        with w.when(~is_column & self.c_column.differs(item)) as choice:
            w.call(_plain_product((self.dtype,) * 3), *self.operands, self.more)
        with w.otherwise(choice):
            takes_sums = are_side_by_side & (is_column | (~has_rows & (self.m < FEW)))
            with w.when(takes_sums) as choice:
                self.sums()
            with w.otherwise(choice):
                self.tiles(has_rows)

    def sums(self) -> None:
        """Write each number as a sum over vectors of a row and a column."""
        w, several = self.w, 4
        whole = self.n & -several
        with w.loop(0, self.m) as i:
            row, place = w.offset(self.a, i * self.a_row), i * self.c_row
            with w.loop(0, whole, several) as j:
                self.sums_of_columns(row, place, [j + k for k in range(several)])
            with w.loop(whole, self.n) as j:
                self.sums_of_columns(row, place, [j])

    def sums_of_columns(self, row: Value, place: Value, numbers: list[Value]) -> None:
        w, item = self.w, self.item
        kind = Type(self.dtype, VECTOR // item)
        columns = [w.offset(self.b, j * self.b_column) for j in numbers]
        totals = [w.local(0, kind) for _ in columns]
        whole = self.depth & -kind.lanes
        with w.loop(0, whole, kind.lanes) as k:
            factor = w.load(kind, row, k * item)
            for column, total in zip(columns, totals, strict=True):
                other = w.load(kind, column, k * item)
                w.assign(total, multiply_add(w, factor, other, w.copy(total)))
        results = [w.local(sum_of_lanes(w, w.copy(total))) for total in totals]
        single = Type(self.dtype)
        with w.loop(whole, self.depth) as k:
            factor = w.load(single, row, k * item)
            for column, result in zip(columns, results, strict=True):
                other = w.load(single, column, k * item)
                w.assign(result, multiply_add(w, factor, other, w.copy(result)))
        for j, result in zip(numbers, results, strict=True):
            at = place + j * self.c_column
            old = w.select(self.more, w.load(single, self.c, at), 0)
            w.store(self.c, at, w.copy(result) + old)

    def tiles(self, has_rows: Value) -> None:
        """Write tiles, from the rows of `B` or from copies of pieces of them."""
        w, item = self.w, self.item
        lines, width = PIECE[0], PIECE[1] // item
        piece = w.scratch(self.dtype, lines * width)
        rows = w.select(has_rows, self.b, piece)
        line = w.select(has_rows, self.b_row, PIECE[1])

        def pieces(size: Value, most: int) -> Value:
            count = w.apply("quotient", size + (most - 1), w.constant(most, INT64))
            return w.select(has_rows | (count < 1), 1, count)

        def part(size: Value, most: int, start: Value) -> Value:
            return w.select(has_rows, size, less(w, size - start, w.constant(most, INT64)))

        with w.loop(0, pieces(self.n, width)) as p, w.loop(0, pieces(self.depth, lines)) as q:
            j, k = p * width, q * lines
            columns, terms = part(self.n, width, j), part(self.depth, lines, k)
            with w.when(~has_rows):
                source = w.offset(self.b, k * self.b_row + j * self.b_column)
                strides = self.b_row, self.b_column
                target = piece, *_strides(w, PIECE[1], item)
                copy_matrix(w, self.dtype, (source, *strides), target, (terms, columns))
            out = Lines(w.offset(self.c, j * item), self.c_row)
            factors = Lines(w.offset(self.a, k * self.a_column), self.a_row, self.a_column)
            sizes = self.m, terms, columns
            more = self.more | (q > 0)
            Combination(
                w, "real", self.dtype, out, factors, Lines(rows, line), None, *sizes, more
            ).write()


def _strides(w: Writer, row: int, column: int) -> tuple[Value, Value]:
    return w.as_value(row, INT64), w.as_value(column, INT64)


# Which operand takes the place of which if matrices are transposed.
_TURNED = (3, 5, 4, 0, 2, 1, 6, 8, 7, 11, 10, 9)


def copy_matrix(
    w: Writer,
    dtype: str,
    source: tuple[Value, Value, Value],
    target: tuple[Value, Value, Value],
    sizes: tuple[Value, Value],
) -> None:
    """Write the numbers of a matrix into another one; both are pointers and strides."""
    kind = Type(dtype)
    with w.loop(0, sizes[0]) as i, w.loop(0, sizes[1]) as j:
        value = w.load(kind, source[0], i * source[1] + j * source[2])
        w.store(target[0], i * target[1] + j * target[2], value)


# Products of any size, the large ones by BLAS


@cache
def _any_product(dtype: str) -> Function:
    """Return the function of products that may be large: its last operand is BLAS's routine.

    BLAS stores matrices by columns: what it is asked for is ``Cᵀ = Bᵀ Aᵀ``.
    """

    def write(w: Writer, *values: Value) -> tuple[Value, ...]:
        own, routine = values[:13], values[13]
        a, a_row, a_column, b, b_row, b_column, c, c_row, c_column, m, depth, n, more = own
        kind = Type(dtype)
        a_by_rows, a_line, a_fits = layout(w, (a_row, a_column), (m, depth), kind.itemsize)
        b_by_rows, b_line, b_fits = layout(w, (b_row, b_column), (depth, n), kind.itemsize)
        c_by_rows, c_line, _ = layout(w, (c_row, c_column), (m, n), kind.itemsize)
        is_large = (m * depth * n > LARGEST) & (less(w, m, n) >= FEW)
        with w.when(is_large & a_fits & b_fits & c_by_rows) as choice:
            letters = [
                w.select(flag, w.constant(ord("N"), Type("uint8")), ord("T"))
                for flag in (b_by_rows, a_by_rows)
            ]
            one = w.constant(1, kind)
            sizes = n, m, depth
            last = w.select(more, one, 0), c, c_line
            call_library(w, routine, *letters, *sizes, one, b, b_line, a, a_line, *last)
        with w.otherwise(choice):
            w.call(_product(dtype), *own)
        return ()

    types = [*MATRIX * 3, INT64, INT64, INT64, BOOL, POINTER]
    return write_function(f"any_product_{dtype}", types, write, is_shared=True)
