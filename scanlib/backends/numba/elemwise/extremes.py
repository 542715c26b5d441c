"""Running maxima and minima of sixteen steps in vector registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scanlib.backends.numba.elemwise.vectors import Vectors, fetch, lanes_of

EXTREMES = 16  # steps


def _extreme_codegen(largest: bool, reverse: bool) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        b_array, state, out, offset, place, ahead = arguments
        b_type, out_type, dtype = signature.args[0], signature.args[2], signature.args[0].dtype
        lanes = min(EXTREMES, lanes_of(context, dtype))
        v = Vectors(context, builder, dtype, reverse, lanes, lanes)

        def pick(a: Any, b: Any) -> Any:
            sign = ">" if largest else "<"
            if isinstance(dtype, types.Float):
                is_first = builder.fcmp_ordered(sign, a, b)
            elif getattr(dtype, "signed", False):
                is_first = builder.icmp_signed(sign, a, b)
            else:
                is_first = builder.icmp_unsigned(sign, a, b)
            return builder.select(is_first, a, b)

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
