r"""Matrix products inside a loop: ``C = A B`` of matrices that stay in the cache.

    C[i, j] = Σ_k A[i, k] B[k, j],   i < m, j < n, k < depth

The kernel holds a tile of `C`, 4 rows by 4 vectors, in registers and walks `k`; each step of it
reads 4 numbers of `A` and 4 vectors of `B` for 16 fused multiplications. `B` is read from *panels*:
its columns in groups as wide as a tile, each group contiguous, the last ones filled up with zeros
(K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication", 2008). What
libraries do at every call, packing `B`, is done once before the loop if all steps use the same
`B`, as with the weights of a recurrent network. Blocking for the larger caches is left out: a
matrix of a step that outgrows the second-level cache is read from the third.

Very small products are plain loops, and so are those of integers, which wrap around. Vectors are
matrices with one row or column.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from scanlib._compat.numba import cgutils
from scanlib.backends.numba import lazy
from scanlib.backends.numba.pointers import load, pointer, shift, store
from scanlib.backends.numba.vectors import multiply_add
from scanlib.source_keys import source_key

VERSION = source_key(__name__)
TINY = 512  # multiplications up to which plain loops are used
ROWS = 4  # of a tile
OPTIONS: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
SUMS: Any = OPTIONS | {"fastmath": {"contract", "reassoc", "nsz"}}


@cache
def vector_bytes() -> int:
    """Return the width of the machine's vectors."""
    features = llvm.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32


def lanes(itemsize: int) -> int:
    """Return how many numbers a vector holds."""
    return vector_bytes() // itemsize


def vectors() -> int:
    """Return how many vectors wide a tile is: what the registers hold."""
    return 4 if vector_bytes() == 64 else 2


class TileWriter:
    """Writes the code of one tile as LLVM's intermediate representation."""

    def __init__(self, builder: Any, number: Any, rows: int, columns: int, width: int) -> None:
        self.builder = builder
        self.rows, self.columns, self.width = rows, columns, width
        self.word = ir.IntType(64)
        self.vector = ir.VectorType(number, width)
        self.itemsize = 4 if isinstance(number, ir.FloatType) else 8
        name = f"llvm.fma.v{width}f{8 * self.itemsize}"
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, name)

    def address(self, start: Any, vector: int) -> Any:
        moved = self.builder.gep(start, [ir.Constant(self.word, vector * self.width)])
        return self.builder.bitcast(moved, self.vector.as_pointer())

    def repeated(self, number: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return self.builder.shuffle_vector(first, undefined, mask)

    def write(self, a: Any, a_row: Any, a_step: Any, b: Any, c: Any, c_row: Any, depth: Any,
              more: Any) -> None:  # fmt: skip
        """Write ``C = A B``, or ``C += A B`` where `more` is not zero."""
        builder, word = self.builder, self.word
        numbers = [ir.Constant(word, row) for row in range(self.rows)]
        a_rows = [builder.gep(a, [builder.mul(a_row, number)]) for number in numbers]
        c_rows = [builder.gep(c, [builder.mul(c_row, number)]) for number in numbers]
        places = [self.address(row, v) for row in c_rows for v in range(self.columns)]
        zero, nothing = ir.Constant(self.vector, None), ir.Constant(word, 0)
        before = builder.block
        names = ("read", "start", "walk", "done")
        read, start, walk, done = (builder.append_basic_block(name) for name in names)
        builder.cbranch(builder.icmp_signed("!=", more, nothing), read, start)
        builder.position_at_end(read)
        old = [builder.load(place, align=self.itemsize) for place in places]
        builder.branch(start)
        builder.position_at_end(start)
        first = [self.choice((zero, before), (value, read)) for value in old]
        builder.cbranch(builder.icmp_signed(">", depth, nothing), walk, done)
        builder.position_at_end(walk)
        k = builder.phi(word)
        k.add_incoming(nothing, start)
        sums = [self.choice((value, start)) for value in first]
        b_row = builder.gep(b, [builder.mul(k, ir.Constant(word, self.columns * self.width))])
        values = [
            builder.load(self.address(b_row, v), align=self.itemsize) for v in range(self.columns)
        ]
        offset = builder.mul(k, a_step)
        new = []
        for row in range(self.rows):
            factor = self.repeated(builder.load(builder.gep(a_rows[row], [offset])))
            for v, value in enumerate(values):
                total = sums[row * self.columns + v]
                new.append(builder.call(self.fma, [factor, value, total]))
        following = builder.add(k, ir.Constant(word, 1))
        k.add_incoming(following, walk)
        for total, value in zip(sums, new, strict=True):
            total.add_incoming(value, walk)
        builder.cbranch(builder.icmp_signed("<", following, depth), walk, done)
        builder.position_at_end(done)
        # Phi nodes come before all else: the stores follow when all are there.
        pairs = zip(first, new, strict=True)
        results = [self.choice((without, start), (value, walk)) for without, value in pairs]
        for place, result in zip(places, results, strict=True):
            builder.store(result, place, align=self.itemsize)

    def choice(self, *values: tuple[Any, Any]) -> Any:
        chosen = self.builder.phi(self.vector)
        for value, block in values:
            chosen.add_incoming(value, block)
        return chosen


@cache
def tile(rows: int, columns: int) -> Any:
    """Return an intrinsic that computes a tile of `rows` rows and `columns` vectors."""

    @intrinsic
    def run(typingctx, a, a_row, a_step, b, c, c_row, depth, more):
        word = types.intp

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = arguments[0].type.pointee
            width = lanes(4 if isinstance(number, ir.FloatType) else 8)
            TileWriter(builder, number, rows, columns, width).write(*arguments)
            return context.get_dummy_value()

        return types.void(a, word, word, b, c, word, word, word), codegen

    return run


def lanes_of(start: Any) -> int:
    """Return how many numbers at this address fill a vector (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(lanes_of)
def _lanes_of(start):
    count = lanes(start.dtype.bitwidth // 8)
    return lambda start: count


def zero_of(start: Any) -> Any:
    """Return a zero of the type found at an address (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(zero_of)
def _zero_of(start):
    kind = start.dtype
    return lambda start: kind(0)


def item_for(start: Any, value: Any) -> Any:
    """Return a number in the type found at an address (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(item_for)
def _item_for(start, value):
    kind = start.dtype
    return lambda start, value: kind(value)


VECTORS = vectors()
_full, _narrow = tile(ROWS, VECTORS), tile(ROWS, 1)
_full_row, _narrow_row = tile(1, VECTORS), tile(1, 1)


@njit(**OPTIONS)
def padded(start: Any, columns: int) -> int:
    """Return how many columns the panels have in all."""
    width = lanes_of(start)
    return (columns + width - 1) // width * width


@njit(**OPTIONS)
def pack(b: Any, b_row: int, b_step: int, depth: int, n: int, panels: Any) -> None:
    """Write the panels of a matrix."""
    width = lanes_of(b)
    j, at = 0, 0
    while j < n:
        wide = VECTORS * width if n - j > (VECTORS - 1) * width else width
        known = min(wide, n - j)
        for k in range(depth):
            for i in range(known):
                store(panels, at + i, load(b, k * b_row + (j + i) * b_step))
            for i in range(known, wide):
                store(panels, at + i, zero_of(b))
            at += wide
        j += wide


@njit(**OPTIONS)
def _rows(a: Any, a_row: int, a_step: int, panel: Any, wide: bool, c: Any, c_row: int, m: int,
          depth: int, more: int) -> None:  # fmt: skip
    """Compute the rows of one panel."""
    i = 0
    while i + ROWS <= m:
        here, there = shift(a, i * a_row), shift(c, i * c_row)
        if wide:
            _full(here, a_row, a_step, panel, there, c_row, depth, more)
        else:
            _narrow(here, a_row, a_step, panel, there, c_row, depth, more)
        i += ROWS
    while i < m:
        here, there = shift(a, i * a_row), shift(c, i * c_row)
        if wide:
            _full_row(here, a_row, a_step, panel, there, c_row, depth, more)
        else:
            _narrow_row(here, a_row, a_step, panel, there, c_row, depth, more)
        i += 1


@njit(**OPTIONS)
def _copy(source: Any, row: int, target: Any, target_row: int, m: int, n: int) -> None:
    for i in range(m):
        for j in range(n):
            store(target, i * target_row + j, load(source, i * row + j))


@njit(**OPTIONS)
def packed_product(a: Any, a_row: int, a_step: int, panels: Any, c: Any, c_row: int, m: int,
                   depth: int, n: int, spare: Any, more: int) -> None:  # fmt: skip
    """Compute ``C = A B`` (``C += A B`` if `more` is one) with the panels of B.

    `spare` has room for a tile of one row and all columns times m.
    """
    width = lanes_of(a)
    j, at = 0, 0
    while j < n:
        is_wide = n - j > (VECTORS - 1) * width
        wide = VECTORS * width if is_wide else width
        known = min(wide, n - j)
        panel, there = shift(panels, at), shift(c, j)
        if known == wide:
            _rows(a, a_row, a_step, panel, is_wide, there, c_row, m, depth, more)
        else:
            if more != 0:
                _copy(there, c_row, spare, wide, m, known)
            _rows(a, a_row, a_step, panel, is_wide, spare, wide, m, depth, more)
            _copy(spare, wide, there, c_row, m, known)
        at += depth * wide
        j += wide


@njit(**OPTIONS)
def packing_product(a: Any, a_row: int, a_step: int, b: Any, b_row: int, b_step: int, c: Any,
                    c_row: int, m: int, depth: int, n: int, spare: Any,
                    more: int) -> None:  # fmt: skip
    """Compute ``C = A B`` (``C += A B`` if `more` is one); `spare` is as in `product`."""
    pack(b, b_row, b_step, depth, n, spare)
    rest = shift(spare, depth * padded(b, n))
    packed_product(a, a_row, a_step, spare, c, c_row, m, depth, n, rest, more)


# Compiled when a product is not a tiny one: in many loops none ever is.
_pack, _ = lazy.kernel(pack, VERSION)
_packed_product, _ = lazy.kernel(packed_product, VERSION)
_packing_product, _ = lazy.kernel(packing_product, VERSION)


# Sums of a few terms are not worth vectors, nor the tests that would have to choose them.
@njit(**OPTIONS | {"fastmath": {"contract"}})
def plain_product(a: Any, a_row: int, a_step: int, b: Any, b_row: int, b_step: int, c: Any,
                  c_row: int, m: int, depth: int, n: int, more: int) -> None:  # fmt: skip
    """Compute ``C = A B`` by plain loops."""
    for i in range(m):
        for j in range(n):
            total = zero_of(a) if more == 0 else load(c, i * c_row + j)
            for k in range(depth):
                total += load(a, i * a_row + k * a_step) * load(b, k * b_row + j * b_step)
            store(c, i * c_row + j, total)


@njit(**OPTIONS)
def integer_product(a: Any, a_row: int, a_step: int, b: Any, b_row: int, b_step: int, c: Any,
                    m: int, depth: int, n: int) -> None:  # fmt: skip
    """Compute ``C = A B`` of integers exactly, in the dtype of a contiguous matrix C."""
    for i in range(m):
        row = shift(c, i * n)
        if n == 1:
            total = zero_of(c)
            for k in range(depth):
                factor = item_for(c, load(a, i * a_row + k * a_step))
                total = multiply_add(factor, item_for(c, load(b, k * b_row)), total)
            store(row, 0, total)
            continue
        for j in range(n):
            store(row, j, zero_of(c))
        for k in range(depth):
            factor, line = item_for(c, load(a, i * a_row + k * a_step)), shift(b, k * b_row)
            for j in range(n):
                item = item_for(c, load(line, j * b_step))
                store(row, j, multiply_add(factor, item, load(row, j)))


@njit(**SUMS)
def row_product(a: Any, a_step: int, b: Any, b_row: int, b_step: int, c: Any, depth: int,
                n: int, more: int) -> None:  # fmt: skip
    """Compute one row, of a matrix B as it lies in memory."""
    if b_step != 1 and b_row == 1 and a_step == 1:
        for j in range(n):
            column = shift(b, j * b_step)
            total = zero_of(a)
            for k in range(depth):
                total += load(a, k) * load(column, k)
            store(c, j, total if more == 0 else total + load(c, j))
        return
    if more == 0:
        for j in range(n):
            store(c, j, zero_of(a))
    for k in range(depth):
        factor, row = load(a, k * a_step), shift(b, k * b_row)
        if b_step == 1:
            for j in range(n):
                store(c, j, load(c, j) + factor * load(row, j))
        else:
            for j in range(n):
                store(c, j, load(c, j) + factor * load(row, j * b_step))


@njit(**OPTIONS)
def product(a: Any, a_row: int, a_step: int, b: Any, b_row: int, b_step: int, c: Any,
            c_row: int, m: int, depth: int, n: int, spare: Any, more: int) -> None:  # fmt: skip
    """Compute ``C = A B`` (``C += A B`` if `more` is one).

    `spare` has room for the panels of B, and for m rows of a tile.
    """
    if m == 1:
        row_product(a, a_step, b, b_row, b_step, c, depth, n, more)
    elif m * depth * n <= TINY:
        plain_product(a, a_row, a_step, b, b_row, b_step, c, c_row, m, depth, n, more)
    else:
        _packing_product((a, a_row, a_step, b, b_row, b_step, c, c_row, m, depth, n, spare, more))


def new_array(start: Any, items: int) -> Any:
    """Return an array for items as at an address (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(new_array)
def _new_array(start, items):
    kind = start.dtype
    return lambda start, items: np.empty(items, kind)


@njit(**OPTIONS)
def panels(b: Any, b_row: int, b_step: int, depth: int, n: int, m: int) -> Any:
    """Return the panels of a matrix as an array, empty if no product with `m` rows reads them."""
    if m * depth * n <= TINY:
        return new_array(b, 0)
    array = new_array(b, depth * padded(b, n))
    _pack((b, b_row, b_step, depth, n, pointer(array)))
    return array


@njit(**OPTIONS)
def fixed_product(a: Any, a_row: int, a_step: int, b: Any, b_row: int, b_step: int, packed: Any,
                  c: Any, c_row: int, m: int, depth: int, n: int, spare: Any,
                  more: int) -> None:  # fmt: skip
    """Compute ``C = A B`` (``C += A B`` if `more` is one) of a matrix B and its panels."""
    if m * depth * n <= TINY:
        plain_product(a, a_row, a_step, b, b_row, b_step, c, c_row, m, depth, n, more)
    else:
        _packed_product((a, a_row, a_step, packed, c, c_row, m, depth, n, spare, more))
