"""Kernels of real and complex products."""

from __future__ import annotations

from contextlib import ExitStack

from scanlib.backends.numba import linear_combine, linear_vectors
from scanlib.backends.numba.linear_base import LinearBase

GUESSED_SIZES = (2, 3, 4)  # compiled for by vectors where the size is not known


class ProductsWriter(LinearBase):
    """Writes products of matrices."""

    # By vectors

    def by_vectors(self) -> bool:
        return (
            self.op.semiring == "real"
            and self.op.vector
            and not self.op.untraced
            and not self.batch
            and self.dtype.kind == "f"
            and (self.size is None or 2 <= self.size <= linear_vectors.WIDEST)
        )

    def vector_sizes(self) -> tuple[int, ...]:
        """Return the sizes of vectors that code by vectors is written for."""
        return GUESSED_SIZES if self.size is None else (self.size,)

    def write_by_vectors(self) -> None:
        """Write all steps by vectors, for one size or for each of some."""
        self.write_offset_place()
        row = "steps * d" if self.op.reverse else "0"
        self.line(f"row, row_step = {row}, {'-d' if self.op.reverse else 'd'}")
        for size in self.vector_sizes():
            with self.block(f"if d == {size}:"):
                if self.fixed:
                    self.write_blocks(size)
                else:
                    self.write_matrix_steps(size)

    def write_matrix_steps(self, size: int) -> None:
        """Write all steps with a matrix for each."""
        has_offset, checked = self.offset is not None, self.mask is not None
        outer, other_arrays = self.outer_products()
        kind = linear_vectors.StepKind(self.op.side == "left", has_offset, checked, outer)
        function = linear_vectors.matrix_steps(size, kind)
        identity = f"{linear_vectors.VERSION} steps {size} {kind}"
        name = self.source.function(function, identity, "steps_by")
        items = size * size
        offset = self.offset or "h"
        call = f"{name}(h, {self.matrix}, {offset}, {other_arrays}, row, row_step, "
        call += "{}, offset_row, offset_step, {})"
        if not checked:
            place = f"(steps - 1) * {items}, -{items}" if self.op.reverse else f"0, {items}"
            self.line(call.format(place, "steps"))
            self.line("done = steps")
            return
        with self.block("while done < steps:"):
            self.line(f"count = min({linear_vectors.BLOCK}, steps - done)")
            first = "(steps - 1 - done)" if self.op.reverse else "done"
            sign = "-" if self.op.reverse else ""
            with self.block(f"if not {call.format(f'{first} * {items}, {sign}{items}', 'count')}:"):
                self.write_masked_steps()
            self.write_next_block()

    def outer_products(self) -> tuple[str, str]:
        """Return what else steps write (see `linear_vectors.StepKind`), and the arrays for it."""
        return "", "h, h"

    def write_next_block(self) -> None:
        self.line("done += count")
        self.line("row += count * row_step")
        self.line("offset_row += count * offset_step")

    def write_offset_place(self) -> None:
        """Write where the offset's rows are, counted in items."""
        line = self.line
        if self.offset is None:
            line("offset_row, offset_step = 0, 0")
            return
        line(f"offset_row, offset_step = {'(steps - 1) * d, -d' if self.op.reverse else '0, d'}")

    def write_blocks(self, size: int) -> None:
        line = self.line
        ahead = linear_vectors.look_ahead(size)
        line(f"powers = np.empty(({ahead}, {size}, {size}), number)")
        with self.block(f"for i in range({size}):"), self.block(f"for j in range({size}):"):
            line("powers[0, j, i] = columns[j, i]")
        low, high = (
            self.source.constant(self.dtype.type(x))
            for x in linear_vectors.powers_range(self.dtype)
        )
        line("outside = 0")
        with self.block(f"for i in range({size}):"), self.block(f"for j in range({size}):"):
            line("item = abs(columns[j, i])")
            line(f"outside += not ((item == 0) | ((item >= {low}) & (item <= {high})))")
        with (
            self.block(f"for q in range(1, {ahead}):"),
            self.block(f"for i in range({size}):"),
            self.block(f"for j in range({size}):"),
        ):
            line("total = number(0)")
            with self.block(f"for k in range({size}):"):
                line("total += powers[q - 1, k, i] * columns[j, k]")
            line("powers[q, j, i] = total")
        functions = {}
        for count in (ahead, 1):
            steps = linear_vectors.vector_steps(size, count, self.op.has_offset)
            identity = f"{linear_vectors.VERSION} {size} {count} {self.op.has_offset}"
            functions[count] = self.source.function(steps, identity, "steps_by")
        offset = self.offset or "powers"
        places = "row, row_step, offset_row, offset_step"
        call = f"(h, powers, {offset}, {places}, {{}})"
        block = linear_vectors.BLOCK
        with self.block("while done < steps:"):
            line(f"count = min({block}, steps - done)")
            line(f"whole = count // {ahead} if count == {block} and outside == 0 else 0")
            with self.block(f"if whole == 0 or not {functions[ahead]}{call.format('whole')}:"):
                step_by_step = f"{functions[1]}{call.format('count')}"
                if self.mask is None:
                    line(step_by_step)
                else:
                    with self.block(f"if not {step_by_step}:"):
                        self.write_masked_steps()
            self.write_next_block()

    # Masks

    def write_places(self) -> None:
        """Write where step `n` is, and the rows before and after it."""
        op, line = self.op, self.line
        line("t = steps - 1 - n" if op.reverse else "t = n")
        if op.untraced:
            line("before, after = n % 2, (n + 1) % 2")
        else:
            line("before, after = t + 1, t" if op.reverse else "before, after = t, t + 1")

    def write_masked_steps(self) -> None:
        """Write the steps of a block again, without the items that are missing."""
        with self.block("for n in range(done, done + count):"):
            self.write_places()
            with ExitStack() as stack:
                self.write_views(stack)
                self.write_item_by_item(masked=True)

    def write_check(self) -> None:
        """Write what is done about a step whose results are not finite."""
        with ExitStack() as stack:
            self.write_views(stack)
            self.line("check = number(0)")
            with ExitStack() as inner:
                names = ["i"] if self.op.vector else ["i", "j"]
                for axis, name in enumerate(names):
                    inner.enter_context(self.block(f"for {name} in range(new.shape[{axis}]):"))
                self.line(f"check += new[{', '.join(names)}] * number(0)")
            with self.block("if check != check:"):
                self.write_item_by_item(masked=True)

    # One step

    def write_both_sides_step(self) -> None:
        raise NotImplementedError

    def write_product_step(self) -> None:
        if self.op.side == "both":
            self.write_both_sides_step()
            return
        if self.dtype.kind == "c" or self.sums_along_rows():
            with ExitStack() as stack:
                self.write_views(stack)
                self.write_item_by_item()
            return
        line = self.line
        with self.block("for k in range(batches):"):
            line("old_at, new_at = (before * batches + k) * cells, (after * batches + k) * cells")
            line("add_at = (t * batches + k) * cells")
            one = "k" if self.matrix_batched else "0"
            several = "batches" if self.matrix_batched else "1"
            first = one if self.fixed else f"t * {several} + {one}"
            line(f"matrix_at = ({first}) * d * d")
            if self.op.vector:
                self.write_combination("new_at", "h, old_at", f"{self.rows()}, matrix_at, d, d, d")
            elif self.op.side == "left":
                self.write_lines("d", f"{self.rows()}, matrix_at", "h, old_at, m, d, m", "m")
            else:
                rows = f"{self.rows()}, matrix_at, d, d, d"
                self.write_lines("m", "h, old_at", rows, "d")

    def write_lines(
        self,
        count: str,
        factors: str,
        rows: str,
        width: str,
        terms: str = "d",
        array: str = "h",
        start: str = "new_at",
    ) -> None:
        """Write the lines of a matrix, several at a time; each has `terms` factors."""
        several = linear_combine.LINES
        for lines, places in (
            (several, f"0, {count} // {several} * {several}, {several}"),
            (1, f"{count} // {several} * {several}, {count}"),
        ):
            with self.block(f"for i in range({places}):"):
                line = f"i * {width}"
                self.write_combination(
                    f"{start} + {line}", f"{factors} + i * {terms}", rows, line, lines, array
                )

    def rows(self) -> str:
        return "columns" if self.uses_columns() else self.matrix

    def sums_along_rows(self) -> bool:
        """Whether the contiguous axis of the matrix is the one that is summed over."""
        return self.op.vector and self.op.side == "left" and not self.fixed

    def write_combination(
        self,
        target: str,
        factors: str,
        rows: str,
        add_at: str = "0",
        lines: int = 1,
        array: str = "h",
    ) -> None:
        """Write ``target = addend + Σ_j factors[j] rows[j]``; only the history has an addend."""
        has_offset = self.offset is not None and array == "h"
        function = linear_combine.combine(lines, has_offset)
        name = self.source.function(
            function, f"{linear_combine.VERSION} combine {lines} {has_offset}", "combine"
        )
        addend = f"{self.offset}, add_at + {add_at}" if has_offset else "h, 0"
        self.line(f"{name}({array}, {target}, {factors}, {rows}, {addend})")

    def write_item_by_item(self, masked: bool = False) -> None:
        d, left = "d", self.op.side == "left"  # compilers do worse with sizes they know
        outer = [] if self.op.vector else ["c"]
        place = ["i", *outer] if left else [*outer, "i"]
        inner = ["j", *outer] if left else [*outer, "j"]
        with ExitStack() as stack:
            stack.enter_context(self.block(f"for i in range({d}):"))
            if outer:
                stack.enter_context(self.block("for c in range(m):"))
            self.line("total = number(0)")
            with self.block(f"for j in range({d}):"), ExitStack() as kept:
                if masked:
                    kept.enter_context(self.block(f"if {self.mask_item('i', 'j')}:"))
                self.line(f"total += {self.matrix_item('i', 'j')} * old[{', '.join(inner)}]")
            index = ", ".join(place)
            self.line(f"new[{index}] = total + {self.added(index)}")
