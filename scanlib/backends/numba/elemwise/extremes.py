"""Maxima and minima in vector registers: running ones of sixteen steps, and those of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scanlib.backends.numba.elemwise.vectors import Vectors, fetch, lanes_of

EXTREMES = 16  # steps
SIDE_BY_SIDE = 4  # vectors, of which none waits for another


def _picking(builder: Any, dtype: Any, largest: bool) -> Callable[[Any, Any], Any]:
    """Return what writes the choice of one of two values, the second one where neither is."""
    sign = ">" if largest else "<"

    def pick(a: Any, b: Any) -> Any:
        if isinstance(dtype, types.Float):
            is_first = builder.fcmp_ordered(sign, a, b)
        elif getattr(dtype, "signed", False):
            is_first = builder.icmp_signed(sign, a, b)
        else:
            is_first = builder.icmp_unsigned(sign, a, b)
        return builder.select(is_first, a, b)

    return pick


def _extreme_codegen(largest: bool, reverse: bool) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        b_array, state, out, offset, place, ahead = arguments
        b_type, out_type, dtype = signature.args[0], signature.args[2], signature.args[0].dtype
        lanes = min(EXTREMES, lanes_of(context, dtype))
        v = Vectors(context, builder, dtype, reverse, lanes, lanes)

        pick = _picking(builder, dtype, largest)
        data, target = v.data(b_type, b_array), v.data(out_type, out)
        state = context.get_value_as_data(builder, dtype, state)
        fetch(builder, cgutils.unpack_tuple(builder, ahead), offset, EXTREMES, v.size)
        starts = range(0, EXTREMES, lanes)
        for first in reversed(starts) if reverse else starts:
            distance = ir.Constant(offset.type, first)
            values = v.load(data, builder.add(offset, distance))
            by = 1
            while by < lanes:  # lanes without an earlier one are compared with themselves
                values = pick(v.earlier_or_same(values, by), values)
                by *= 2
            v.store(pick(values, v.splat(state)), target, builder.add(place, distance))
            state = pick(v.last(values, 0), state)
        return context.data_model_manager[dtype].from_data(builder, state)

    return codegen


def _make_extreme(largest: bool, reverse: bool) -> Any:
    @intrinsic
    def sixteen_extremes(
        typingctx: Any, b: Any, state: Any, out: Any, offset: Any, place: Any, ahead: Any
    ) -> Any:
        signature = b.dtype(b, b.dtype, out, types.intp, types.intp, ahead)
        return signature, _extreme_codegen(largest, reverse)

    return sixteen_extremes


# Each takes `(b, state, out, offset, place, ahead)`, reads sixteen elements at `offset` and after,
# writes the new states to `place` and after, and returns the latest. By whether they look for the
# largest value, and whether they start at the end.
sixteen_extremes = {
    (largest, reverse): _make_extreme(largest, reverse)
    for largest in (True, False)
    for reverse in (False, True)
}


def _whole_codegen(largest: bool) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        b_array, n, value = arguments
        b_type, dtype = signature.args[0], signature.args[0].dtype
        lanes = lanes_of(context, dtype)
        v = Vectors(context, builder, dtype, False, lanes, lanes)
        pick, data, word = _picking(builder, dtype, largest), v.data(b_type, b_array), n.type
        size = ir.Constant(word, SIDE_BY_SIDE * lanes)
        count = builder.sdiv(n, size)
        found = [cgutils.alloca_once_value(builder, v.splat(value)) for _ in range(SIDE_BY_SIDE)]
        with cgutils.for_range(builder, count, intp=word) as loop:
            place = builder.mul(loop.index, size)
            for k, own in enumerate(found):
                values = v.load(data, builder.add(place, ir.Constant(word, k * lanes)))
                builder.store(pick(values, builder.load(own)), own)
        most = builder.load(found[0])
        for own in found[1:]:
            most = pick(builder.load(own), most)
        by = 1
        while by < lanes:
            most = pick(v.earlier(most, by), most)
            by *= 2
        results = [v.last(most, 0), builder.mul(count, size)]
        return context.make_tuple(builder, signature.return_type, results)

    return codegen


def _make_whole(largest: bool) -> Any:
    @intrinsic
    def extreme_of_all(typingctx: Any, b: Any, n: Any, value: Any) -> Any:
        results = types.Tuple((b.dtype, types.intp))
        return results(b, types.intp, b.dtype), _whole_codegen(largest)

    return extreme_of_all


# Each takes `(b, n, value)`, real numbers, and returns the extreme of the value and most of the
# first `n` elements, and how many these are. By whether they look for the largest value.
extreme_of_all = {largest: _make_whole(largest) for largest in (True, False)}
