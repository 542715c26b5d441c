"""Vectors and single numbers in memory, made with little code (compiled code only).

``np.empty`` and ``np.asarray`` are functions that numba compiles for every combination of types,
with half a dozen others inside them; what is made here takes a few instructions.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import impl_ret_borrowed, impl_ret_new_ref
from numba.extending import intrinsic
from numba.np.arrayobj import _empty_nd_impl, populate_array

VERSION = "scanlib-vectors-1"


@intrinsic
def new_vector(typingctx: Any, n: Any, dtype: Any) -> Any:
    """Return a new vector of `n` items, which hold anything."""
    known = types.Array(dtype.dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = _empty_nd_impl(context, builder, known, (arguments[0],))
        return impl_ret_new_ref(context, builder, known, array._getvalue())

    return known(types.intp, dtype), codegen


@intrinsic
def row_buffer(typingctx: Any, rows: Any, n: Any, dtype: Any) -> Any:
    """Return a vector for copies of `n` rows, none where the type says that none are copied."""
    known = types.Array(dtype.dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not lies_side_by_side(rows):
            array = _empty_nd_impl(context, builder, known, (arguments[1],))
            return impl_ret_new_ref(context, builder, known, array._getvalue())
        array = context.make_array(known)(context, builder)
        nothing = ir.Constant(context.get_value_type(types.intp), 0)
        item = ir.Constant(nothing.type, context.get_abi_sizeof(context.get_data_type(dtype.dtype)))
        populate_array(
            array,
            data=ir.Constant(array.data.type, None),
            shape=[nothing],
            strides=[item],
            itemsize=item,
            meminfo=None,
        )
        return array._getvalue()

    return known(rows, types.intp, dtype), codegen


def lies_side_by_side(rows: types.Array) -> bool:
    """Whether the type of an array says that its rows are numbers without gaps between them."""
    return rows.ndim == 1 and rows.layout == "C"


@intrinsic
def as_array(typingctx: Any, value: Any) -> Any:
    """Return a new 0-d array that holds a scalar, or an array as it is."""
    if isinstance(value, types.Array):
        return value(value), _same
    known = types.Array(value, 0, "C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = _empty_nd_impl(context, builder, known, ())
        context.pack_value(builder, value, arguments[0], array.data)
        return impl_ret_new_ref(context, builder, known, array._getvalue())

    return known(value), codegen


def _same(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return impl_ret_borrowed(context, builder, signature.return_type, arguments[0])


@intrinsic
def as_words(typingctx: Any, start: Any) -> Any:
    """Return the address of real numbers as one of integers of the same size: of their bits."""
    word = {64: types.int64, 32: types.int32}[start.dtype.bitwidth]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(word)(start), codegen


def failing(error: type[Exception], message: str) -> Any:
    """Return a function of compiled code that raises if a condition holds.

    A `raise` statement releases all arrays of its function, which for a check is most of the code.
    What a check that fails holds is not released, as in the code of PyTensor's own operations.
    """

    @intrinsic
    def fail_if(typingctx: Any, condition: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with builder.if_then(arguments[0], likely=False):
                context.call_conv.return_user_exc(builder, error, (message,))
            return context.get_dummy_value()

        return types.void(types.boolean), codegen

    return fail_if
