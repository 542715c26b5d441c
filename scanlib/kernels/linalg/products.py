r"""Products of matrices, ``C = A B``.

    C[i, j] = Σ_k A[i, k] B[k, j]

Products of known sizes up to `TINIEST` are unrolled, a row of `B` and of `C` in one vector. Others
are one function for each dtype, wherever they lie in memory and whatever their sizes:

=====================================  ==========================================================
`C` has one row                        a combination of contiguous rows of `B`
rows of `C` and `B` are contiguous     tiles of `C`, `ROWS` or `TALL` times `VECTORS` vectors:
                                       small ones if a row of `C` does not fill a large one
of `C` alone, or there are many        the same, from copies of `B` in panels as wide as a tile,
                                       made once where `B` is the same for all steps (`pack`)
`A`'s rows and `B`'s columns are       sums over vectors of both, for a few rows of `C`
columns of `C` are                     ``Cᵀ = Bᵀ Aᵀ`` in one of these ways
neither rows nor columns of `C` are    one number after the other
=====================================  ==========================================================

So are small integers. Products of more than `LARGEST` multiplications are left to BLAS if there is
an address of it, but those of vectors, which wait for memory. The form is chosen by the strides
that are known when a kernel is written.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

from scanlib.kernels.lanes import sum_of_lanes, vector_of
from scanlib.kernels.language import (
    BOOL,
    FLOATS,
    INT64,
    INTEGERS,
    POINTER,
    Function,
    Local,
    Type,
    Value,
    Writer,
    write_function,
)
from scanlib.kernels.linalg.matrices import Matrix, all_known, call_routine, known, shared, sized
from scanlib.kernels.linalg.semiring_products import Combination, SmallVectors, less
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.scalars import NoKernelError, Scalars, added, parts_of, times_plus
from scanlib.kernels.scipy_routines import Routine
from scanlib.kernels.spans import Cell, load_number, store_number

TINIEST = 4  # rows and columns of products that are unrolled
LARGEST = 256**3  # multiplications that are not left to BLAS
FEW = 4  # rows of `C` from which on it is computed in tiles of copies
MANY = 32  # rows of both factors from which on `B` is copied in any case
ROWS, VECTORS = 4, 2  # of a tile
TALL, LONG = 8, 64  # rows of tiles of vectors of so many bytes: there are 32 registers then
CHAINS = 4  # of sums, of one number or of several
SMALL_REGISTER = 16  # bytes
SHIFT = 7
PIECE = 1 << SHIFT  # rows of `B` that are copied at once

MATRIX = (POINTER, INT64, INT64)  # a pointer and both strides


def multiply(
    w: Writer, a: Matrix, b: Matrix, out: Matrix, library: Callable[[Routine], Value] | None = None
) -> None:
    """Write ``out = a b``, of one dtype, by routines of BLAS where `library` gives their addresses.

    Sizes must fit, and `out` shares no memory with the others. `NoKernelError` for truth values and
    complex numbers.
    """
    if out.dtype not in FLOATS + INTEGERS:
        raise NoKernelError(f"a product of matrices of {out.dtype} has no kernel")
    sizes = out.rows, a.columns, out.columns
    form, turns = _form(a, b, out)
    if a.itemsize < 4 or form == "plain":
        _plain_product(w, a, b, out)
        return
    static = all_known(sizes)
    if static is not None and out.dtype in FLOATS and 0 < min(static) <= max(static) <= TINIEST:
        _write_tiny(w, a, b, out)
        return
    is_small = static is not None and static[0] * static[1] * static[2] <= LARGEST
    is_vector = 1 in (known(out.rows), known(out.columns))
    if turns:
        a, b, out = b.turned, a.turned, out.turned
    if library is None or is_small or is_vector or out.dtype not in FLOATS:
        _product(w, a, b, out, form=form)
    else:
        gemm = library(Routine("sgemm" if out.dtype == "float32" else "dgemm"))
        _library_product(w, a, b, out, gemm, form=form)


def add_product(w: Writer, a: Matrix, b: Matrix, out: Matrix) -> None:
    """Write ``out += a b``, as `multiply` writes products."""
    is_complex = parts_of(out.dtype) is not None
    form, turns = ("plain", False) if is_complex else _form(a, b, out)
    if form == "plain" or out.itemsize < 4:
        write_product(w, a, b, out, add=out)
        return
    if turns:
        a, b, out = b.turned, a.turned, out.turned
    _product(w, a, b, out, form="tiles", adds=True)


@shared
def pack(w: Writer, b: Matrix, panels: Value) -> None:
    """Write the panels of `B`, with which `multiply_packed` multiplies again and again.

    They have as many numbers as `B` with columns that fill tiles
    (K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
    """
    _Product(w, register_bytes(), b, b, b).pack(panels)


def multiply_packed(w: Writer, a: Matrix, panels: Value, out: Matrix) -> None:
    """Write ``out = a b`` from the panels of `b`; rows of `out` are contiguous."""
    _product(w, a, Matrix(panels, a.dtype, a.columns, out.columns, 0, 0), out, form="packed")


def panel_columns(dtype: str) -> int:
    """Return how many columns a panel has."""
    return VECTORS * register_bytes() // Type(dtype).itemsize


# Tiny products


def _write_tiny(w: Writer, a: Matrix, b: Matrix, out: Matrix) -> None:
    if known(out.columns) == 1 and known(out.rows) != 1:
        a, b, out = b.turned, a.turned, out.turned
    sizes = all_known((out.rows, a.columns, out.columns))
    assert sizes is not None
    sides = "".join("c" if _has_rows(matrix) else "s" for matrix in (b, out))
    function = _tiny_product(out.dtype, (sizes[0], sizes[1], sizes[2]), sides)
    w.call(function, *(value for matrix in (a, b, out) for value in matrix.values(w)))


def _has_rows(matrix: Matrix) -> bool:
    """Whether the numbers of a row are known to lie side by side."""
    return known(matrix.column_stride) == matrix.itemsize or known(matrix.columns) == 1


@cache
def _tiny_product(dtype: str, sizes: tuple[int, int, int], sides: str) -> Function:
    """Return the function of a product of known sizes.

    `sides` says of `B` and `C` whether their rows are contiguous, ``"c"``, or strided, ``"s"``.
    """
    m, depth, n = sizes

    def write(w: Writer, *values: Value) -> tuple[Value, ...]:
        a, a_row, a_column, b, b_row, b_column, c, c_row, c_column = values
        vectors = SmallVectors(w, dtype, n)
        rows = []
        for k in range(depth):
            if sides[0] == "c":
                rows.append(vectors.load(b, b_row * k))
                continue
            items = [w.load(Type(dtype), b, b_row * k + b_column * j) for j in range(n)]
            rows.append(vector_of(w, [items[place] for place in vectors.places]))
        for i in range(m):
            total = None
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

    name = f"product_{dtype}_{m}_{depth}_{n}_{sides}"
    return write_function(name, MATRIX * 3, write, is_shared=True)


# Products one number after the other


def write_product(
    w: Writer,
    a: Matrix,
    b: Matrix,
    out: Matrix,
    add: Matrix | None = None,
    mask: Matrix | None = None,
) -> None:
    """Write ``out = a b + add``, number by number, of any dtypes.

    Terms are left out where an item of a `mask` is false that has the sizes of `a`.
    """
    scalars, sizes = Scalars(w), sized(w, out.rows, out.columns, a.columns)
    with w.loop(0, sizes[0]) as i, w.loop(0, sizes[1]) as j:
        total = Cell(w, scalars.constant(0, out.dtype))
        with w.loop(0, sizes[2]) as k, ExitStack() as stack:
            if mask is not None:
                stack.enter_context(w.when(mask.load(w, i, k)))
            places = (a, i, k), (b, k, j)
            pair = (load_number(w, m.dtype, m.pointer, m.place(w, *at)) for m, *at in places)
            x, y = (scalars.number_as(number, out.dtype) for number in pair)
            total.value = times_plus(w, x, y, total.value)
        found = total.value
        if add is not None:
            found = added(load_number(w, add.dtype, add.pointer, add.place(w, i, j)), found)
        store_number(w, out.pointer, out.place(w, i, j), found)


_plain_product = shared(write_product)


# Products of any size


@shared
def _product(
    w: Writer, a: Matrix, b: Matrix, out: Matrix, *, form: str, adds: bool = False
) -> None:
    """Write a product of numbers of one dtype in one form; tiles may add it to what is there."""
    if form == "tiles":
        _write_tiles(w, a, b, out, adds)
    elif form == "row":
        Combination(w, "real", out.pointer, a.pointer, b, None).write()
    elif form == "narrow":
        _Product(w, SMALL_REGISTER, a, b, out, adds).tiles()
    elif form == "wide":
        _Product(w, register_bytes(), a, b, out, adds).tiles()
    elif form == "packed":
        _Product(w, register_bytes(), a, b, out).packed_tiles()
    else:
        columns, chains = (1, CHAINS) if form == "sum" else (CHAINS, 1)
        _Product(w, register_bytes(), a, b, out).sums(columns, chains)


def _form(a: Matrix, b: Matrix, out: Matrix) -> tuple[str, bool]:
    """Return the form of a product, and whether it is transposed for it.

    Strides that are not known count as those of numbers that are not contiguous.
    """
    item = out.itemsize
    has_rows = known(out.column_stride) == item
    turns = known(out.row_stride) == item and (known(out.columns) == 1 or not has_rows)
    if turns:
        a, b, out = b.turned, a.turned, out.turned
    are_side_by_side = known(a.column_stride) == known(b.row_stride) == item
    rows = known(out.rows)
    if known(out.columns) == 1 and are_side_by_side:
        return "sum", turns
    if known(out.column_stride) != item:
        return "plain", turns
    is_short = rows is not None and rows < FEW and known(b.column_stride) != item
    return "sums" if is_short and are_side_by_side else "tiles", turns


def _write_tiles(w: Writer, a: Matrix, b: Matrix, out: Matrix, adds: bool) -> None:
    """Write the choice between one row, tiles of small vectors and of large ones."""
    (m, n), item = sized(w, out.rows, out.columns), out.itemsize
    side_by_side = [s.equals(item) for s in sized(w, a.column_stride, b.column_stride)]
    is_row = m.equals(1) & side_by_side[0] & side_by_side[1]
    is_narrow = (n >= SMALL_REGISTER // item) & (n < register_bytes() // item)
    forms = {"row": is_row} if out.dtype in FLOATS and not adds else {}
    with ExitStack() as stack:
        for form, fits in (forms | {"narrow": is_narrow}).items():
            with w.when(fits) as choice:
                _product(w, a, b, out, form=form, adds=adds)
            stack.enter_context(w.otherwise(choice))
        _product(w, a, b, out, form="wide", adds=adds)


class _Product:
    """Writes a product in one form, with vectors of some bytes."""

    def __init__(
        self, w: Writer, register: int, a: Matrix, b: Matrix, out: Matrix, adds: bool = False
    ) -> None:
        self.w, self.dtype, self.item, self.adds = w, out.dtype, out.itemsize, adds
        self.vector = Type(self.dtype, register // self.item)
        self.width, self.is_long = VECTORS * self.vector.lanes, register == LONG
        self.a, self.a_row, self.a_column = a.values(w)
        self.b, self.b_row, self.b_column = b.values(w)
        self.c, self.c_row, self.c_column = out.values(w)
        self.m, self.depth, self.n = sized(w, out.rows, b.rows, b.columns)

    # Sums over vectors of what lies side by side

    def sums(self, columns: int, chains: int) -> None:
        """Write numbers of several columns at once, each in several chains."""
        w, item, kind = self.w, self.item, self.vector
        step = chains * kind.lanes
        whole = self.depth & -step
        with w.loop(0, self.m) as i, w.loop(0, self.n, columns) as first:
            row = w.offset(self.a, i * self.a_row)
            # Past the end, the last column once more.
            numbers = [less(w, first + k, self.n - 1) if k else first for k in range(columns)]
            places = [w.offset(self.b, j * self.b_column) for j in numbers]
            parts = [[w.local(0, kind) for _ in range(chains)] for _ in places]
            with w.loop(0, whole, step) as k:
                for p in range(chains):
                    at = (k + p * kind.lanes) * item
                    x = w.load(kind, row, at)
                    for place, own in zip(places, parts, strict=True):
                        y = w.load(kind, place, at)
                        w.assign(own[p], times_plus(w, x, y, w.copy(own[p])))
            totals = []
            for own in parts:
                found: list[Value] = [w.copy(part) for part in own]
                while len(found) > 1:
                    found = [x + y for x, y in zip(found[::2], found[1::2], strict=True)]
                totals.append(w.local(sum_of_lanes(w, found[0])))
            self.add_rest(totals, whole, row, places)
            for j, total in zip(numbers, totals, strict=True):
                w.store(self.c, i * self.c_row + j * self.c_column, w.copy(total))

    def add_rest(
        self, totals: Sequence[Local], start: Value, row: Value, columns: Sequence[Value]
    ) -> None:
        """Write the terms that do not fill a vector."""
        w, kind = self.w, Type(self.dtype)
        with w.loop(start, self.depth) as k:
            x = w.load(kind, row, k * self.item)
            for column, total in zip(columns, totals, strict=True):
                y = w.load(kind, column, k * self.item)
                w.assign(total, times_plus(w, x, y, w.copy(total)))

    # Tiles

    def tiles(self) -> None:
        """Write panels of `C`, as wide as a tile, from rows of `B` or copies of pieces of them."""
        w, item, width = self.w, self.item, self.width
        panel, edge = w.scratch(self.dtype, PIECE * width), w.scratch(self.dtype, ROWS * width)
        has_rows = self.b_column.equals(item)
        is_copied = ~has_rows | (less(w, self.m, self.depth) >= MANY)
        with w.loop(0, self.n, width) as j:
            known, is_narrow, ends = self.columns_from(j)
            is_direct = ~(is_narrow | is_copied)
            pieces = w.select(is_direct | (self.depth < 1), 1, (self.depth + (PIECE - 1)) >> SHIFT)
            with w.loop(0, pieces) as q:
                k = q << SHIFT
                rest = less(w, self.depth - k, w.constant(PIECE, INT64))
                terms = w.select(is_direct, self.depth, rest)
                source = w.offset(self.b, k * self.b_row + j * self.b_column)
                with w.when(~is_direct):
                    self.copy_rows(panel, source, terms, known, ends)
                line = w.select(is_direct, self.b_row, width * item)
                rows = self.rows(w.select(is_direct, source, panel), line, terms)
                self.tiles_of_rows(rows, j, k, edge)

    def packed_tiles(self) -> None:
        """Write panels of `C` from those of `B`."""
        w, item, width = self.w, self.item, self.width
        edge = w.scratch(self.dtype, ROWS * width)
        pieces = w.select(self.depth < 1, 1, (self.depth + (PIECE - 1)) >> SHIFT)
        with w.loop(0, self.n, width) as j, w.loop(0, pieces) as q:
            k = q << SHIFT
            place = w.offset(self.b, (j * self.depth + k * width) * item)
            terms = less(w, self.depth - k, w.constant(PIECE, INT64))
            rows = self.rows(place, w.constant(width * item, INT64), terms)
            self.tiles_of_rows(rows, j, k, edge)

    def pack(self, panels: Value) -> None:
        """Write the panels of `B`, one behind the other."""
        w = self.w
        with w.loop(0, self.n, self.width) as j:
            known, _, ends = self.columns_from(j)
            place = w.offset(panels, j * self.depth * self.item)
            self.copy_rows(place, w.offset(self.b, j * self.b_column), self.depth, known, ends)

    def columns_from(self, j: Value) -> tuple[Value, Value, list[Value]]:
        """Return how many columns a panel has, whether they fill no vector, and its vectors.

        The last vector ends with the last column, wherever it begins.
        """
        w, lanes = self.w, self.vector.lanes
        known = less(w, self.n - j, w.constant(self.width, INT64))
        is_narrow = known < lanes
        last = w.select(is_narrow, 0, known - lanes) * self.item
        return known, is_narrow, [w.constant(0, INT64), last]

    def rows(self, pointer: Value, line: Value, count: Value) -> Matrix:
        """Return rows of `B` of the width of a tile."""
        return Matrix(pointer, self.dtype, count, self.width, line, self.item)

    def tiles_of_rows(self, rows: Matrix, j: Value, k: Value, edge: Value) -> None:
        """Write the tiles of `C` from column `j` on; the terms are from `k` on."""
        w, item, width = self.w, self.item, self.width
        known, is_narrow, ends = self.columns_from(j)
        more = w.constant(True, BOOL) if self.adds else k > 0
        start: Value = w.constant(0, INT64)
        if self.is_long:
            start = w.select(is_narrow, 0, self.m & -TALL)
            with w.loop(0, start, TALL) as i:
                a, c = self.places(i, j, k)
                factors = [w.offset(a, self.a_row * r) for r in range(TALL)]
                lines = [w.offset(c, self.c_row * r) for r in range(TALL)]
                self.tile(rows, factors, lines, ends, more)
        with w.loop(start, self.m, ROWS) as i:
            a, c = self.places(i, j, k)
            target = w.select(is_narrow, edge, c)
            c_line = w.select(is_narrow, width * item, self.c_row)
            # Past the end, the last row once more.
            last = self.m - 1 - i
            numbers = [less(w, last, w.constant(r, INT64)) if r else ends[0] for r in range(ROWS)]
            factors = [w.offset(a, number * self.a_row) for number in numbers]
            lines = [w.offset(target, number * c_line) for number in numbers]
            self.tile(rows, factors, lines, ends, more & ~is_narrow)
            with w.when(is_narrow):
                self.store_edge(edge, c, (less(w, last + 1, w.constant(ROWS, INT64)), known), more)

    def places(self, i: Value, j: Value, k: Value) -> tuple[Value, Value]:
        """Return where `A` from row `i` and column `k` on is, and `C` from row `i` and column `j`
        on."""
        a = self.w.offset(self.a, i * self.a_row + k * self.a_column)
        return a, self.w.offset(self.c, i * self.c_row + j * self.item)

    def copy_rows(
        self, panel: Value, source: Value, terms: Value, known: Value, ends: Sequence[Value]
    ) -> None:
        """Write rows of `B` one behind the other, filled up with copies of their last number."""
        w, kind, line = self.w, Type(self.dtype), self.width * self.item
        in_vectors = (known >= self.vector.lanes) & self.b_column.equals(self.item)
        count = w.select(known < self.vector.lanes, self.vector.lanes, known)
        with w.when(in_vectors) as choice, w.loop(0, terms) as k:
            for at in ends:
                value = w.load(self.vector, source, k * self.b_row + at)
                w.store(panel, k * line + at, value)
        with w.otherwise(choice), w.loop(0, count) as c:
            start = w.offset(source, less(w, c, known - 1) * self.b_column)
            place = w.offset(panel, c * self.item)
            with w.loop(0, terms) as k:
                w.store(place, k * line, w.load(kind, start, k * self.b_row))

    def store_edge(self, edge: Value, c: Value, sizes: tuple[Value, Value], more: Value) -> None:
        """Write the numbers of a narrow tile to where they belong."""
        w, kind, item = self.w, Type(self.dtype), self.item
        with w.loop(0, sizes[0]) as i, w.loop(0, sizes[1]) as j:
            place = i * self.c_row + j * item
            old = w.select(more, w.load(kind, c, place), 0)
            w.store(c, place, w.load(kind, edge, i * (self.width * item) + j * item) + old)

    def tile(
        self,
        rows: Matrix,
        factors: Sequence[Value],
        lines: Sequence[Value],
        ends: Sequence[Value],
        more: Value | bool = False,
    ) -> None:
        """Write the vectors at `ends` of lines of `C`, given where they and those of `A` begin.

        With `more`, what there is is added. Vectors may have numbers in common: all are read before
        the first is written.
        """
        w, kind, vectors = self.w, self.vector, len(ends)
        places = [(line, at) for line in lines for at in ends]
        firsts: list[Any] = [0] * len(places)
        if isinstance(more, Value):
            firsts = [w.select(more, w.load(kind, *place), 0) for place in places]
        totals = [w.local(first, kind) for first in firsts]
        with w.loop(0, rows.rows) as k:
            start = k * rows.row_stride
            items = [w.load(kind, rows.pointer, start + at) for at in ends]
            for r, pointer in enumerate(factors):
                factor = w.splat(w.load(Type(self.dtype), pointer, k * self.a_column), kind.lanes)
                for item, total in zip(items, totals[r * vectors :], strict=False):
                    w.assign(total, times_plus(w, factor, item, w.copy(total)))
        for place, total in zip(places, totals, strict=True):
            w.store(*place, w.copy(total))


# Products of any size, the large ones by BLAS


@shared
def _library_product(
    w: Writer, a: Matrix, b: Matrix, out: Matrix, routine: Value, *, form: str
) -> None:
    """Write a product that may be large, by BLAS's routine then.

    It takes matrices by columns, letters and numbers by their addresses: what it is asked for is
    ``Cᵀ = Bᵀ Aᵀ``.
    """
    m, depth, n = sized(w, out.rows, a.columns, out.columns)
    layouts = [_layout(w, matrix) for matrix in (a, b, out)]
    (a_by_rows, a_line, a_fits), (b_by_rows, b_line, b_fits), (by_rows, line, _) = layouts

    is_large = (m * depth * n > LARGEST) & (less(w, m, n) >= ROWS)
    with w.when(is_large & a_fits & b_fits & by_rows) as choice:
        letters = [
            w.select(flag, w.constant(ord("N"), Type("uint8")), ord("T"))
            for flag in (b_by_rows, a_by_rows)
        ]
        one, zero = w.constant(1, out.type), w.constant(0, out.type)
        factors = one, b.pointer, b_line, a.pointer, a_line
        call_routine(w, routine, *letters, n, m, depth, *factors, zero, out.pointer, line)
    with w.otherwise(choice):
        _product(w, a, b, out, form=form)


def _layout(w: Writer, matrix: Matrix) -> tuple[Value, Value, Value]:
    """Return how a routine reads a matrix: whether its rows are contiguous, how many items a row,
    or else a column, is from the next, and whether one of them is contiguous, so that it can be
    read at all."""
    row, column = sized(w, matrix.row_stride, matrix.column_stride)
    (rows, columns), item = sized(w, matrix.rows, matrix.columns), matrix.itemsize
    is_by_rows = column.equals(item) & (row >= columns * item)
    is_by_columns = row.equals(item) & (column >= rows * item)
    line = w.apply("quotient", w.select(is_by_rows, row, column), w.constant(item, INT64))
    return is_by_rows, line, is_by_rows | is_by_columns
