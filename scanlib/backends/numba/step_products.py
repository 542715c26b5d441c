r"""Numba code of `StepProducts`: products of the matrices of all steps, as few of them as possible.

    Z_t = X_t Y_t,    X_t (m, d),  Y_t (d, n),  t < T        or        Z = Σ_t X_t Y_t

Matrices that lie in memory one behind the other are one matrix of more rows:

==========================  =========================================  ========================
what                        one product if                             of the sizes
==========================  =========================================  ========================
``X_t Y``                   the rows of all `X_t` are equally far      (T m, d) and (d, n)
``X Y_t``, columns          always: ``Z_tᵀ = Y_tᵀ Xᵀ``                 (T, d) and (d, m)
``Σ_t X_t Y_t``             columns of `X` and rows of `Y` are,        (m, T d) and (T d, n)
                            as in ``Σ_t λ_t h_tᵀ = Λᵀ H``
==========================  =========================================  ========================

One large product is a call of the linear algebra library, with factors read where they are; they
are copied if neither their rows nor their columns are contiguous. Small products are computed by
the kernel that loops use (`products`), for which no array need be contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.linalg import check_blas_return, ensure_blas
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.numba import lazy, products
from scanlib.backends.numba.contiguous import any_layout
from scanlib.backends.numba.pointers import keep, load, pointer, shift, store
from scanlib.backends.numba.products import OPTIONS, TINY, VECTORS, lanes_of, new_array, zero_of
from scanlib.backends.numba.small_batches import integer_products
from scanlib.backends.numba.source import Source
from scanlib.ops import reductions
from scanlib.ops.reductions import StepProducts

VERSION = "scanlib-step-products-1"
LARGEST = 64**3  # multiplications of one of many products up to which loops' kernel computes it

_product, _ = lazy.kernel(products.product, products.VERSION)


@intrinsic
def gemm(typingctx, a, a_turned, a_row, b, b_turned, b_row, c, c_row, m, depth, n, more):
    """Compute ``C = A B``, or ``C += A B`` where `more` is not zero, by the library.

    The rows of a matrix are contiguous, or its columns if it is `turned`; `a_row` and `b_row` say
    how far they are from one another.
    """
    word = types.intp
    ensure_blas()

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_turned, a_row, b, b_turned, b_row, c, c_row, m, depth, n, more = arguments
        number = a.type.pointee
        letter, size, address = ir.IntType(8), ir.IntType(64), ir.IntType(8).as_pointer()
        kinds = [letter] * 3 + [size] * 3 + [address] * 2 + [size, address, size]
        kind = ir.FunctionType(ir.IntType(32), [*kinds, address, address, size])
        function = cgutils.get_or_insert_function(builder.module, kind, "numba_xxgemm")
        one, zero = ir.Constant(number, 1.0), ir.Constant(number, 0.0)
        nothing = ir.Constant(size, 0)

        def is_true(flag: Any) -> Any:
            return builder.icmp_signed("!=", flag, nothing)

        def turned(flag: Any) -> Any:
            letters = [ir.Constant(letter, ord(text)) for text in "tn"]
            return builder.select(is_true(flag), *letters)

        def place(value: Any) -> Any:
            return builder.bitcast(cgutils.alloca_once_value(builder, value), address)

        name = ir.Constant(letter, ord("s" if isinstance(number, ir.FloatType) else "d"))
        # The library stores matrices by columns: for it, these are Cᵀ = Bᵀ Aᵀ.
        status = builder.call(
            function,
            [
                *(name, turned(b_turned), turned(a_turned), n, m, depth, place(one)),
                *(builder.bitcast(b, address), b_row, builder.bitcast(a, address), a_row),
                *(place(builder.select(is_true(more), one, zero)),),
                *(builder.bitcast(c, address), c_row),
            ],
        )
        check_blas_return(context, builder, status)
        return context.get_dummy_value()

    words = [word] * 4
    return types.void(a, word, word, b, word, word, c, word, *words), codegen


@njit(**OPTIONS)
def _has_rows(row: int, step: int, rows: int, columns: int) -> bool:
    """Whether a matrix has contiguous rows, which do not overlap."""
    return (step == 1 or columns == 1) and (row >= columns or rows == 1)


@njit(**OPTIONS)
def _by_rows(a: Any, a_row: int, a_step: int, rows: int, columns: int) -> Any:
    """Return a copy of a matrix."""
    array = new_array(a, rows * columns)
    target = pointer(array)
    for i in range(rows):
        for j in range(columns):
            store(target, i * columns + j, load(a, i * a_row + j * a_step))
    return array


@njit(**OPTIONS)
def library_products(a: Any, a0: int, a1: int, a2: int, b: Any, b0: int, b1: int, b2: int,
                     c: Any, c0: int, steps: int, m: int, d: int, n: int,
                     total: int) -> None:  # fmt: skip
    """Compute products of large matrices, all of them laid out as the first is."""
    a_plain, b_plain = _has_rows(a1, a2, m, d), _has_rows(b1, b2, d, n)
    a_turned, b_turned = _has_rows(a2, a1, d, m), _has_rows(b2, b1, n, d)
    a_copied, b_copied = not (a_plain or a_turned), not (b_plain or b_turned)
    a_flag = 1 if a_turned and not a_plain else 0
    b_flag = 1 if b_turned and not b_plain else 0
    a_row = d if a_copied else max(a1, d) if a_plain else max(a2, m)
    b_row = n if b_copied else max(b1, n) if b_plain else max(b2, d)
    for t in range(steps):
        more = 1 if total != 0 and t > 0 else 0
        x, y, z = shift(a, t * a0), shift(b, t * b0), shift(c, t * c0)
        x_copy = _by_rows(x, a1, a2, m if a_copied else 0, d)
        y_copy = _by_rows(y, b1, b2, d if b_copied else 0, n)
        if a_copied:
            x = pointer(x_copy)
        if b_copied:
            y = pointer(y_copy)
        gemm(x, a_flag, a_row, y, b_flag, b_row, z, n, m, d, n, more)
        keep(x_copy)
        keep(y_copy)


_library_products, _ = lazy.kernel(library_products, VERSION)


@njit(**OPTIONS)
def many_products(a: Any, a0: int, a1: int, a2: int, b: Any, b0: int, b1: int, b2: int,
                  c: Any, steps: int, m: int, d: int, n: int, total: int) -> None:  # fmt: skip
    """Compute ``C_t = A_t B_t`` or their sum, of matrices at distances `a0` and `b0`."""
    if total != 0:
        for i in range(m * n):
            store(c, i, zero_of(c))
        if d == 1:
            a2, b1, d, steps = a0, b0, steps, 1
        elif a0 == d * a2 and b0 == d * b1:
            d, steps = d * steps, 1
    elif b0 == 0 and m == 1:
        a1, m, steps = a0, steps, 1
    elif b0 == 0 and a0 == m * a1:
        m, steps = m * steps, 1
    elif a0 == 0 and n == 1:
        a, b = b, a
        a1, a2, b1, b2 = b0, b1, a2, a1
        n, m, steps = m, steps, 1
    if m * n * steps == 0:
        return
    c0 = 0 if total != 0 else m * n
    work = m * d * n
    if work > (LARGEST if steps > 1 else TINY):
        _library_products((a, a0, a1, a2, b, b0, b1, b2, c, c0, steps, m, d, n, total))
        return
    spare = new_array(c, (d + m + 1) * (n + VECTORS * lanes_of(c)))
    for t in range(steps):
        x, y, z = shift(a, t * a0), shift(b, t * b0), shift(c, t * c0)
        _product((x, a1, a2, y, b1, b2, z, n, m, d, n, pointer(spare), total))
    keep(spare)


@register_funcify_and_cache_key(StepProducts)
def funcify_step_products(
    op: StepProducts, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a `StepProducts`."""
    out = node.outputs[0].type
    if np.dtype(out.dtype).kind in "iu":
        found = integer_products(node)
        assert found is not None
        return found
    ranks = [variable.type.ndim for variable in node.inputs]
    products_of, products_key = _products(np.dtype(out.dtype), ranks, op.total)
    call = lazy.lazily(products_of, products_key, [(out.dtype, out.ndim)], True)
    source = Source()
    source.object("any_layout", any_layout)
    name = source.function(call, products_key)
    source.line(f"return {name}((any_layout(x), any_layout(y)))")
    function, key = source.compile("step_products", ["x", "y"], VERSION)
    return numba_njit(function), key


def _products(
    dtype: np.dtype[Any], ranks: list[int], total: bool
) -> tuple[Callable[..., Any], str]:
    """Return the function for two arrays that may lie in memory in any way, and its key."""
    source = Source()
    line, block = source.line, source.block
    for function in (keep, pointer):
        source.object(function.__name__, function)
    many = source.function(*lazy.kernel(many_products, VERSION), "many")
    number = source.object(f"np_{dtype.name}", dtype.type)
    in_time = [name for name, rank in zip("xy", ranks, strict=True) if rank == 3]
    line("m, d, n = x.shape[-2], x.shape[-1], y.shape[-1]")
    line(f"steps = {f'{in_time[0]}.shape[0]' if in_time else 'np.int64(1)'}")
    if len(in_time) == 2:
        with block("if y.shape[0] != steps:"):
            line(f"raise ValueError({reductions.LENGTHS!r})")
    with block("if y.shape[-2] != d:"):
        line(f"raise ValueError({reductions.SIZES!r})")
    has_time = in_time and not total
    line(f"z = np.empty(({'steps, ' if has_time else ''}m, n), {number})")
    for name in "xy":
        start = f"{name}.strides[0] // {name}.itemsize" if name in in_time else "np.int64(0)"
        line(f"{name}0 = {start}")
        for axis in (1, 2):
            line(f"{name}{axis} = {name}.strides[{axis - 3}] // {name}.itemsize")
    line(f"total = np.int64({int(total)})")
    places = "pointer(x), x0, x1, x2, pointer(y), y0, y1, y2, pointer(z)"
    line(f"{many}(({places}, steps, m, d, n, total))")
    for name in "xyz":
        line(f"keep({name})")
    line("return z")
    function, key = source.compile("products", ["x", "y"], VERSION)
    assert key is not None
    return function, key
