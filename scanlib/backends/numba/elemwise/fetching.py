"""Rows that are asked for some steps before they are read or written (compiled code only).

Processors guess which memory comes next, but no further than to the end of a page, and not at all
before the first rows of one: a loop whose steps read and write a row of many arrays waits for each
of its pages. A step that asks for rows some thousand bytes ahead spares 15 to 35 percent of the
time of `a h + b` for rows of 128 to 2,048 bytes. That does not pay where the arrays fit in a cache
(the requests are instructions as well), for rows shorter than what is fetched together, and for
rows of several pages, most of which the processor guesses.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scanlib.backends.numba.elemwise.vectors import LINE, fetch_line

DISTANCE = 4096  # how many bytes ahead
LONGEST_ROW = 8192  # bytes
LEAST_BYTES = 1 << 21  # of all arrays: fewer stay in a cache


@intrinsic
def rows_ahead(typingctx: Any, steps: Any, arrays: Any) -> Any:
    """Return how many rows ahead the arrays of a loop are asked for, 0 for not at all."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = arguments[0].type
        total = longest = ir.Constant(word, 0)
        for array_type, array in zip(
            signature.args[1], cgutils.unpack_tuple(builder, arguments[1]), strict=True
        ):
            size = _row_bytes(context, builder, array_type, array)
            total = builder.add(total, size)
            longer = builder.icmp_signed(">", size, longest)
            longest = builder.select(longer, size, longest)
        total = builder.mul(total, arguments[0])
        pays = builder.and_(
            builder.icmp_signed(">=", total, ir.Constant(word, LEAST_BYTES)),
            builder.and_(
                builder.icmp_signed(">=", longest, ir.Constant(word, LINE)),
                builder.icmp_signed("<=", longest, ir.Constant(word, LONGEST_ROW)),
            ),
        )
        size = builder.select(pays, longest, ir.Constant(word, DISTANCE))
        rows = builder.sdiv(ir.Constant(word, DISTANCE), size)
        few = builder.icmp_signed("<", rows, ir.Constant(word, 1))
        rows = builder.select(few, ir.Constant(word, 1), rows)
        return builder.select(pays, rows, ir.Constant(word, 0))

    return types.intp(types.intp, arrays), codegen


@intrinsic
def fetch_row(typingctx: Any, array: Any, row: Any, part: Any, parts: Any) -> Any:
    """Ask for one of `parts` of a row of a contiguous array; the row need not exist."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, row, part, parts = arguments
        word, byte = row.type, ir.IntType(8).as_pointer()
        data = context.make_array(array)(context, builder, value).data
        size = _row_bytes(context, builder, array, value)
        start = builder.udiv(builder.mul(size, part), parts)
        stop = builder.udiv(builder.mul(size, builder.add(part, ir.Constant(word, 1))), parts)
        long = builder.icmp_signed(">=", size, ir.Constant(word, LINE))
        stop = builder.select(long, stop, start)
        lines = builder.udiv(
            builder.add(builder.sub(stop, start), ir.Constant(word, LINE - 1)),
            ir.Constant(word, LINE),
        )
        place = builder.add(builder.mul(row, size), start)
        with cgutils.for_range(builder, lines, intp=word) as loop:
            offset = builder.add(place, builder.mul(loop.index, ir.Constant(word, LINE)))
            # No number is made of the pointer: compilers would think it known elsewhere.
            fetch_line(builder, builder.gep(builder.bitcast(data, byte), [offset]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp), codegen


def _row_bytes(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    fields = context.make_array(array_type)(context, builder, array)
    return builder.extract_value(fields.strides, 0)
