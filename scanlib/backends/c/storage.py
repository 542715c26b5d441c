"""Where a loop that runs in blocks keeps what: histories, buffers of one block, views.

A stored state of a loop of one channel is scanned where its history is; all else is in buffers of
one block, so that they stay in the first-level cache. Between blocks, the values of several
channels are in their histories, in rings of the last rows, or where the results are: so the blocks
of several channels can take turns.
"""

from __future__ import annotations

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib.backends.c.scans import BlockScans
from scanlib.backends.c.source import c_type
from scanlib.ops.elemwise_scan import Axes


class BlockStorage(BlockScans):
    """Writes the storage of an elementwise loop that runs in blocks, and what is read from it."""

    def needs_ring(self, i: int) -> bool:
        return self.layout.ndim > 0 and self.signature.untraced[i]

    def write_storage(self) -> None:
        line, n = self.source.line, self.signature.n_states
        for part, depth in self.depths.items():
            dtype = self.dtype_of(part)
            if part in self.sums_first:
                self.write_storage_of_sums(part)
                continue
            if self.is_direct(part):
                continue
            self.buffer(f"B{part}", dtype, self.block + depth)
            if self.layout.ndim:
                continue
            if part >= n:
                line(f"B{part}[0] = *(const {c_type(dtype)} *)data.c{part - n};")
                continue
            name = self.outer.initials[part]
            with self.source.block(f"for (npy_intp j = 0; j < {depth}; j++)"):
                line(
                    f"B{part}[j] = *(const {c_type(dtype)} *)(data.{name} + j * data.{name}_s[0]);"
                )
        for i, carry in enumerate(self.inner.carries):
            if n + i not in self.depths and self.is_local(i):
                item = c_type(carry.type.dtype)
                line(f"{item} c{i} = *(const {item} *)data.c{i};")
        for i, row in enumerate(self.inner.rows):
            self.buffer(f"R{i}", row.type.dtype, self.block)
        for number in range(len(self.op.recurrences)):
            self.write_buffers(number)

    def write_storage_of_sums(self, part: int) -> None:
        """Make the buffer of the sums of a part, and read the value before the first block."""
        if self.output_of_sums(part) is None:
            self.buffer(f"T{part}", self.dtype_of(part), self.block)
        if not self.layout.ndim:
            n, item = self.signature.n_states, c_type(self.dtype_of(part))
            name = self.outer.initials[part] if part < n else f"c{part - n}"
            self.source.line(f"{item} kept{part} = *(const {item} *)data.{name};")

    def is_local(self, i: int) -> bool:
        """Whether a carry is one number, for all channels."""
        return all(axis is None for axis in self.layout.carries[i])

    def write_buffers(self, number: int) -> None:
        """Make buffers for the elements that differ from step to step."""
        inputs, outputs, _ = self.elements_of(number)
        whole = set(inputs[len(inputs) - self.signature.n_non_sequences :])
        for k, out in enumerate(outputs):
            read = {v for v in ancestors([out]) if v.owner is None}
            varying = [v for v in read if not isinstance(v, Constant) and v not in whole]
            name = self.elements[number, k] = f"{'E' if varying else 'e'}{number}_{k}"
            if varying and out not in inputs:
                self.buffer(name, out.type.dtype, self.block)

    def write_constants(self) -> None:
        """Read what a channel keeps for all steps, and compute its elements that never change."""
        for variable in self.inner.non_sequences:
            array, axes = self.parts[variable]
            item = c_type(variable.type.dtype)
            self.scalars.bind_new(variable, f"*(const {item} *)({self.of_channel(array, axes, 0)})")
        for number in range(len(self.op.recurrences)):
            inputs, outputs, _ = self.elements_of(number)
            with self.scalars.scope():
                self.bind_same(inputs)
                for k, out in enumerate(outputs):
                    name = self.elements[number, k]
                    if name[0] == "e":
                        self.scalars.emit([out])
                        text = self.scalars.text(out)
                        self.source.line(f"const {c_type(out.type.dtype)} {name} = {text};")

    def of_channel(self, array: str, axes: Axes, lead: int) -> str:
        """Return where a channel's items of an array begin."""
        places = [
            f" + e{axis} * data.{array}_s[{own + lead}]"
            for own, axis in enumerate(axes)
            if axis is not None
        ]
        return f"data.{array}{''.join(places)}"

    def bind_same(self, inputs: list[Variable]) -> None:
        """Bind the non-sequences of a copy of the body's inputs."""
        for mine, other in zip(self.graph.inputs, inputs, strict=True):
            if mine in self.inner.non_sequences:
                self.scalars.bind(other, self.scalars.text(mine))

    def write_views(self) -> None:
        """Write the parts of rows, histories and outputs that belong to the block."""
        line = self.source.line
        self.write_views_of_rows()
        for part, depth in self.depths.items():
            item = c_type(self.dtype_of(part))
            if part in self.sums_first:
                if self.layout.ndim:
                    line(f"{item} kept{part} = {self.kept(part, '1', 'i')};")
                continue
            if self.is_direct(part):
                line(f"{item} *H{part} = {self.rows_of_history(part)};")
                continue
            line(f"{item} *H{part} = B{part};")
            if self.layout.ndim:
                self.load(part, depth)
            elif self.reverse:
                # The newest rows of the block before come first; they move behind this block.
                line(f"for (npy_intp j = {depth - 1}; j >= 0; j--) B{part}[n + j] = B{part}[j];")
        for i, out in enumerate(self.result.outputs):
            self.write_stored("Z", i, f"z{i}", self.layout.outputs[i], out.type.dtype, 0)
        for part in self.sums_first:
            output = self.output_of_sums(part)
            if output is not None:
                line(f"{c_type(self.dtype_of(part))} *T{part} = Z{output};")
        for i in range(self.signature.n_states if self.layout.ndim else 0):
            if not self.signature.untraced[i]:
                first = 0 if self.reverse else self.signature.depths[i]
                dtype = self.state_dtype(i)
                self.write_stored("S", i, f"h{i}", self.layout.states[i], dtype, first)
        for i, carry in enumerate(self.inner.carries):
            if self.layout.sums[i] and not self.is_local(i):
                item, place = c_type(carry.type.dtype), self.kept_carry(i)
                line(f"{item} c{i} = {place};")

    def write_views_of_rows(self) -> None:
        line = self.source.line
        for i, row in enumerate(self.inner.rows):
            name, item = self.outer.sequences[i], c_type(row.type.dtype)
            stride = f"data.{name}_s[0]"
            line(f"const char *x{i}_b = {self.of_channel(name, self.layout.sequences[i], 1)};")
            line(f"const {item} *X{i} = R{i};")
            with self.source.block(f"if ({stride} == sizeof({item}))"):
                line(f"X{i} = (const {item} *)x{i}_b + low;")
            line("else for (npy_intp j = 0; j < n; j++)")
            line(f"  R{i}[j] = *(const {item} *)(x{i}_b + (low + j) * {stride});")

    def rows_of_history(self, part: int) -> str:
        """Return where a block's values of a part are that is scanned in its history."""
        return f"({c_type(self.dtype_of(part))} *)data.h{part} + low"

    def write_stored(
        self, letter: str, i: int, array: str, axes: Axes, dtype: str, first: int
    ) -> None:
        """Write where a channel's rows of a result are, and how many items lie between them."""
        line, item = self.source.line, c_type(dtype)
        if not self.layout.ndim:
            line(f"{item} *{letter}{i} = ({item} *)data.{array} + low;")
            return
        place = f"{self.of_channel(array, axes, 1)} + (low + {first}) * data.{array}_s[0]"
        line(f"{item} *{letter}{i} = ({item} *)({place});")
        line(f"const npy_intp {letter}{i}_s = data.{array}_s[0] / (npy_intp)sizeof({item});")

    def stored(self, letter: str, i: int) -> str:
        """Return where a result of step `j` of the block goes."""
        return f"{letter}{i}[j{f' * {letter}{i}_s' if self.layout.ndim else ''}]"

    def kept_carry(self, i: int) -> str:
        """Return where a channel's carry is kept between blocks."""
        item = c_type(self.inner.carries[i].type.dtype)
        return f"*({item} *)({self.of_channel(f'c{i}', self.layout.carries[i], 0)})"

    def kept(self, part: int, back: str, taken: str) -> str:
        """Return where a channel's value is kept, `back` steps before the step `taken`."""
        n = self.signature.n_states
        if part >= n:
            return self.kept_carry(part - n)
        depth, item = self.depths[part], c_type(self.dtype_of(part))
        place = self.of_channel(f"h{part}", self.layout.states[part], 1)
        if self.in_ring[part]:
            row = f"({taken} + {depth} - {back}) % {depth + 1} * data.h{part}_row"
        else:
            row = f"low + n - 1 + {back}" if self.reverse else f"low + {depth} - {back}"
            row = f"({row}) * data.h{part}_s[0]"
        return f"*({item} *)({place} + {row})"

    def load(self, part: int, depth: int) -> None:
        """Write the values of one channel before the block into its buffer."""
        place = "n - 1 + k" if self.reverse else f"{depth} - k"
        self.source.line(
            f"for (npy_intp k = 1; k <= {depth}; k++) "
            f"B{part}[{place}] = {self.kept(part, 'k', 'i')};"
        )

    def move_on(self) -> None:
        """Write the newest values where the next block finds them."""
        n = self.signature.n_states
        for part, depth in self.depths.items():
            if self.is_direct(part):
                continue
            if part in self.sums_first:
                if self.layout.ndim:
                    self.source.line(f"{self.kept(part, '1', 'i + n')} = kept{part};")
                continue
            if not self.layout.ndim:
                if not self.reverse:
                    self.source.line(
                        f"for (npy_intp j = 0; j < {depth}; j++) B{part}[j] = B{part}[n + j];"
                    )
            elif part >= n or self.signature.untraced[part]:
                place = "k - 1" if self.reverse else f"n + {depth} - k"
                self.source.line(
                    f"for (npy_intp k = 1; k <= {depth}; k++) "
                    f"{self.kept(part, 'k', 'i + n')} = B{part}[{place}];"
                )
        for i, is_sum in enumerate(self.layout.sums):
            if is_sum and not self.is_local(i):
                self.source.line(f"{self.kept_carry(i)} = c{i};")

    # After the last step

    def write_last_values(self) -> None:
        """Write what is in buffers and local variables to where the results are."""
        line, n = self.source.line, self.signature.n_states
        for part, depth in self.depths.items():
            if not self.is_direct(part) and not self.layout.ndim:
                target = f"data.h{part}" if part < n else f"data.c{part - n}"
                if part in self.sums_first:
                    line(f"*({c_type(self.dtype_of(part))} *){target} = kept{part};")
                    continue
                line(f"memcpy({target}, B{part}, {depth} * sizeof({c_type(self.dtype_of(part))}));")
        for i, carry in enumerate(self.inner.carries):
            if n + i not in self.depths and self.is_local(i):
                line(f"*({c_type(carry.type.dtype)} *)data.c{i} = c{i};")
