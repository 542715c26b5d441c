"""Arrays and single numbers in memory, made with little code (compiled code only).

``np.empty`` and ``np.asarray`` are functions that numba compiles for every combination of types,
with half a dozen others inside them; what is made here takes a few instructions. So do views of an
array with its axes in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanlib._compat.numba import cgutils, impl_ret_borrowed, impl_ret_new_ref, populate_array
from scanlib.source_keys import source_key

VERSION = source_key(__name__)


@intrinsic
def new_array(typingctx: Any, dtype: Any, *sizes: Any) -> Any:
    """Return a new array of some sizes, which holds anything."""
    known = types.Array(dtype.dtype, len(sizes), "C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shape = _as_sizes(context, builder, sizes, arguments[1])
        array = fresh_array(context, builder, known, shape)
        return impl_ret_new_ref(context, builder, known, array._getvalue())

    return known(dtype, types.StarArgTuple.from_types(sizes)), codegen


def fresh_array(context: Any, builder: Any, known: types.Array, shape: Sequence[Any]) -> Any:
    """Write a new contiguous array; what numba has for this compiles three functions first.

    A size that no number of the machine can hold, or that is negative, fails like any other that
    memory is too small for.
    """
    word = context.get_value_type(types.intp)
    size = itemsize = ir.Constant(word, context.get_abi_sizeof(context.get_data_type(known.dtype)))
    strides: list[Any] = []
    too_large = ir.Constant(ir.IntType(1), 0)
    # More than there is, and no small number when numba has added what it keeps beside the items.
    most = ir.Constant(word, 1 << 62)
    for number in reversed(shape):
        strides.insert(0, size)
        both = builder.smul_with_overflow(size, number)
        size = builder.extract_value(both, 0)
        negative = builder.icmp_signed("<", number, ir.Constant(word, 0))
        for wrong in (builder.extract_value(both, 1), negative):
            too_large = builder.or_(too_large, wrong)
    size = builder.select(too_large, most, size)
    align = ir.Constant(ir.IntType(32), context.get_preferred_array_alignment(known.dtype))
    meminfo = context.nrt.meminfo_alloc_aligned(builder, size, align)
    array = context.make_array(known)(context, builder)
    populate_array(
        array,
        data=builder.bitcast(context.nrt.meminfo_data(builder, meminfo), array.data.type),
        shape=shape,
        strides=strides,
        itemsize=itemsize,
        meminfo=meminfo,
    )
    return array


@intrinsic
def least(typingctx: Any, *numbers: Any) -> Any:
    """Return the smallest of some integers (compiled code only)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, *others = _as_sizes(context, builder, numbers, arguments[0])
        for other in others:
            first = builder.select(builder.icmp_signed("<", other, first), other, first)
        return first

    return types.intp(types.StarArgTuple.from_types(numbers)), codegen


def _as_sizes(context: Any, builder: Any, kinds: Sequence[Any], packed: Any) -> list[Any]:
    """Return what a tuple of integers holds as words."""
    numbers = cgutils.unpack_tuple(builder, packed)
    return [
        context.cast(builder, number, kind, types.intp)
        for kind, number in zip(kinds, numbers, strict=True)
    ]


@cache
def shuffling(order: tuple[int | None, ...], static: tuple[int | None, ...]) -> Any:
    """Return a function of compiled code that gives an array's axes in another order, as a view.

    Parameters
    ----------
    order : tuple of (int or None)
        The axis of the array that is each axis of the view; None for a new axis of size one. Axes
        that it leaves out must have size one.
    static : tuple of (int or None)
        The sizes that the array is known to have.
    """

    @intrinsic
    def shuffled(typingctx: Any, array: Any) -> Any:
        axes = [axis for axis in order if axis is not None and static[axis] != 1]
        # Where an axis of size one stands makes no difference to what lies next to what.
        same = array.layout == "C" and axes == sorted(axes)
        known = array.copy(ndim=len(order), layout="C" if same else "A")

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            old = context.make_array(array)(context, builder, arguments[0])
            one = ir.Constant(context.get_value_type(types.intp), 1)
            shape, strides = (
                cgutils.unpack_tuple(builder, packed) for packed in (old.shape, old.strides)
            )
            sizes = [one if axis is None else shape[axis] for axis in order]
            steps = [old.itemsize if axis is None else strides[axis] for axis in order]
            return _view(context, builder, old, known, sizes, steps)

        return known(array), codegen

    return shuffled


def _view(
    context: Any, builder: Any, old: Any, known: types.Array, sizes: list[Any], steps: list[Any]
) -> Any:
    """Write a view of an array's memory."""
    array = context.make_array(known)(context, builder)
    populate_array(
        array,
        data=old.data,
        shape=sizes,
        strides=steps,
        itemsize=old.itemsize,
        meminfo=old.meminfo,
        parent=old.parent,
    )
    return impl_ret_borrowed(context, builder, known, array._getvalue())


@intrinsic
def as_array(typingctx: Any, value: Any) -> Any:
    """Return a new 0-d array that holds a scalar, or an array as it is."""
    if isinstance(value, types.Array):
        return value(value), _same
    known = types.Array(value, 0, "C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = fresh_array(context, builder, known, ())
        context.pack_value(builder, value, arguments[0], array.data)
        return impl_ret_new_ref(context, builder, known, array._getvalue())

    return known(value), codegen


@intrinsic
def as_scalar(typingctx: Any, value: Any) -> Any:
    """Return the item of a 0-d array, or a scalar as it is (compiled code only)."""
    if not isinstance(value, types.Array):
        return value(value), lambda context, builder, signature, arguments: arguments[0]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(value)(context, builder, arguments[0])
        return context.unpack_value(builder, value.dtype, array.data)

    return value.dtype(value), codegen


def _same(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return impl_ret_borrowed(context, builder, signature.return_type, arguments[0])


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
