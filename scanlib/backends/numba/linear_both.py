r"""Kernels of products from both sides, ``h_t = A_t h_{t-1} R_t + b_t``.

With ``h`` of shape ``(d, m)``, a step is ``g = A h`` and then ``g R + b``, with `g` in memory that
all steps share. States of at most `WIDEST` rows and columns stay in registers, one vector for each
row: row `i` of `g` is ``Σ_j A[i, j] h[j]``, row `i` of the result ``b[i] + Σ_j g[i, j] R[j]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scanlib.backends.numba.linear_products import ProductsWriter
from scanlib.backends.numba.linear_vectors import VectorWriter

VERSION = "scanlib-linear-both-1"
WIDEST = 4


class BothSidesWriter(ProductsWriter):
    """Writes products from both sides."""

    def shape(self) -> tuple[int | None, int | None]:
        """Return the sizes of the state, where they are known."""
        parts = self.op.parts(self.node.inputs)
        state = parts.initial.type.shape[-2:]
        left, right = parts.matrix.type.shape[-1], parts.right.type.shape[-1]
        return (
            left if state[0] is None else state[0],
            right if state[1] is None else state[1],
        )

    def write_small_products(self) -> None:
        """Write all steps of small states, or of square ones that may turn out to be small."""
        if self.dtype.kind != "f" or self.op.untraced:
            return
        rows, columns = self.shape()
        if rows is None or columns is None:
            if self.batch:
                return
            sizes = [(n, n) for n in range(2, WIDEST + 1) if {rows, columns} <= {n, None}]
        else:
            sizes = [(rows, columns)] if max(rows, columns) <= WIDEST and min(rows, columns) else []
        for d, m in sizes:
            with self.block(f"if d == {d} and m == {m}:"):
                self.write_steps_of(d, m)

    def write_steps_of(self, d: int, m: int) -> None:
        has_offset = self.offset is not None
        function = both_sides(d, m, has_offset)
        name = self.source.function(function, f"{VERSION} {d} {m} {has_offset}", "both_sides")
        last = "(steps - 1) * " if self.op.reverse else "0 * "
        sign = "-" if self.op.reverse else ""

        def place(items: int, moves: bool = True) -> str:
            return f"{last}{items}, {sign}{items}" if moves else "0, 0"

        row = f"steps * {d * m}, -{d * m}" if self.op.reverse else f"0, {d * m}"
        arrays = f"h, {self.matrix}, {self.right}, {self.offset or 'h'}"
        places = [row, place(d * d, not self.fixed), place(m * m, not self.fixed), place(d * m)]
        self.line(f"{name}({arrays}, {', '.join(places)}, steps)")
        self.line("done = steps")

    def write_both_sides_step(self) -> None:
        line = self.line
        line("old_at, new_at, add_at = before * cells, after * cells, t * cells")
        line(
            "left_at, right_at = 0, 0" if self.fixed else "left_at, right_at = t * d * d, t * m * m"
        )
        if self.dtype.kind == "c":
            self.write_items()
            return
        self.write_lines(
            "d", f"{self.matrix}, left_at", "h, old_at, m, d, m", "m", "d", "half", "0"
        )
        self.write_lines("d", "half, 0", f"{self.right}, right_at, m, m, m", "m", "m")

    def write_items(self) -> None:
        """Write a step item by item: complex numbers."""
        line, time = self.line, "" if self.fixed else "t, "
        with self.block("for i in range(d):"), self.block("for c in range(m):"):
            line("total = number(0)")
            with self.block("for j in range(d):"):
                line(f"total += {self.matrix}[{time}i, j] * h[before, j, c]")
            line("half[i * m + c] = total")
        with self.block("for i in range(d):"), self.block("for c in range(m):"):
            added = "number(0)" if self.offset is None else f"{self.offset}[t, i, c]"
            line(f"total = {added}")
            with self.block("for j in range(m):"):
                line(f"total += half[i * m + j] * {self.right}[{time}j, c]")
            line("h[after, i, c] = total")


@cache
def both_sides(d: int, m: int, has_offset: bool) -> Callable[..., Any]:
    """Return the function that takes `n` steps with states of `d` rows and `m` columns.

    Its arguments are the history, the left and right matrices and the offset; then, for each of
    them, a position in items and a distance: of the row before the first step, of the first
    matrices, and of the first row of the offset; and `n`.
    """

    @intrinsic
    def steps(
        context,
        history,
        left,
        right,
        offset,
        row,
        row_step,
        at_left,
        left_step,
        at_right,
        right_step,
        add,
        add_step,
        n,
    ):
        signature = types.void(
            history,
            left,
            right,
            offset,
            row,
            row_step,
            at_left,
            left_step,
            at_right,
            right_step,
            add,
            add_step,
            n,
        )

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = signature.args[0].dtype
            writer = VectorWriter(builder, context.get_value_type(number), m, number.bitwidth // 8)
            data = [
                context.make_array(signature.args[i])(context, builder, arguments[i]).data
                for i in range(4)
            ]
            _write_steps(writer, d, data, arguments[4:], has_offset)
            return context.get_dummy_value()

        return signature, codegen

    return steps


def _write_steps(
    writer: VectorWriter, d: int, data: list[Any], places: Any, has_offset: bool
) -> None:
    history, left, right, offset = data
    builder, m = writer.builder, writer.size
    zero = ir.Constant(writer.type, [0.0] * m)
    index = ir.IntType(64)

    def at(start: Any, items: int) -> Any:
        return builder.add(start, ir.Constant(index, items))

    firsts = [places[2 * k] for k in range(4)]
    row, at_left, at_right, add = (cgutils.alloca_once_value(builder, first) for first in firsts)
    state = [
        cgutils.alloca_once_value(builder, writer.load(history, at(firsts[0], j * m)))
        for j in range(d)
    ]
    with cgutils.for_range(builder, places[8]):
        rows = [builder.load(part) for part in state]
        lefts, rights, adds = builder.load(at_left), builder.load(at_right), builder.load(add)
        target = builder.add(builder.load(row), places[1])
        across = [writer.load(right, at(rights, j * m)) for j in range(m)]
        for i in range(d):
            half = zero
            for j in range(d):
                factor = builder.load(builder.gep(left, [at(lefts, i * d + j)]))
                half = writer.fma(rows[j], writer.repeated(factor), half)
            start = writer.load(offset, at(adds, i * m)) if has_offset else zero
            new = writer.product(across, writer.copies(half), start)
            writer.store(new, history, at(target, i * m))
            builder.store(new, state[i])
        builder.store(target, row)
        for place, start, step in (
            (at_left, lefts, places[3]),
            (at_right, rights, places[5]),
            (add, adds, places[7]),
        ):
            builder.store(builder.add(start, step), place)
