"""Where a loop that runs in blocks keeps what: histories, buffers of one block, views.

A traced state of one channel is scanned where its history is stored; other parts have a buffer of
one block with the values before it in front (behind, where the loop walks backwards). Between
blocks, the values before the next one are in the history, or in the array that is the part's
result: so the blocks of several channels can take turns.

Of a part whose sum comes first (`scanlib.ops.sums_first`), the sums are scanned: where they are an
output of one channel, in the output, else in a buffer. Its own value is a number, ``kept0``.
"""

from __future__ import annotations

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib.backends.numba.contiguous import rows_of_block
from scanlib.backends.numba.elemwise.base import ElemwiseWriter
from scanlib.backends.numba.vectors import as_array, row_buffer
from scanlib.ops.elemwise_scan import BLOCK, ElemwiseScan, Recurrence
from scanlib.ops.sums_first import elements_with_addend, sums_first

REALS = {"float32", "float64"}


class BlockStorage(ElemwiseWriter):
    """Writes the storage of an elementwise loop that runs in blocks, and what is read from it."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        n = self.signature.n_states
        recurrent = [part for r in op.recurrences for part in r.parts]
        self.nexts: dict[int, Variable] = {
            part: self.result.states[part] if part < n else self.result.carries[part - n]
            for part in recurrent
        }
        self.taps: dict[Variable, tuple[int, int]] = {}
        for i, taps in enumerate(self.inner.taps):
            for offset, tap in zip(self.signature.taps[i], taps, strict=True):
                self.taps[tap] = (i, offset)
        for i, carry in enumerate(self.inner.carries):
            if n + i in self.nexts:
                self.taps[carry] = (n + i, -1)
        self.depths = {part: self.signature.depths[part] if part < n else 1 for part in recurrent}
        self.block = max([BLOCK, *self.depths.values()])
        self.elements: dict[tuple[int, int], str] = {}
        self.indices = [f"e{axis}" for axis in range(self.layout.ndim)]
        for function in (as_array, row_buffer, rows_of_block):
            self.source.object(function.__name__, function)
        self.sums_first = sums_first(op, self.graph)

    def elements_of(
        self, number: int
    ) -> tuple[list[Variable], list[Variable], dict[Variable, int]]:
        """Return what the scan of a recurrence needs: see `ElemwiseScan.elements_of`."""
        first = self.lowered.recurrences[number].parts[0] in self.sums_first
        return (
            elements_with_addend(self.lowered, number)
            if first
            else self.lowered.elements_of(number)
        )

    def output_of_sums(self, part: int) -> int | None:
        """Return the output that is the sums of a part, if these can be scanned there."""
        total = self.sums_first[part].total
        outputs = self.result.outputs if not self.indices else []
        return next((k for k, value in enumerate(outputs) if value is total), None)

    def is_direct(self, part: int) -> bool:
        """Whether a part is scanned in its history; others are in a buffer of one block."""
        n = self.signature.n_states
        return part < n and not self.signature.untraced[part] and not self.layout.states[part]

    def write_storage(self) -> None:
        line, n = self.source.line, self.signature.n_states
        line("capacity = steps")
        line(f"longest = least({self.block}, steps)")  # of all blocks: short loops need little
        self.write_sizes(self.plan.targets, 0)
        for i in range(n):
            self.write_state_storage(i)
        for i, carry in enumerate(self.inner.carries):
            dtype = self.emitter._dtype(carry)
            if n + i in self.depths:
                self.own_values(n + i, 1, dtype)
            outer, axes = self.outer.carries[i], self.layout.carries[i]
            line(f"c{i} = numba_deepcopy({outer})" if axes else f"c{i} = as_scalar({outer})")
        for target in self.plan.targets:
            if target.kind == "output":
                row = ["1" if a is None else self.sizes[id(target), a] for a in target.axes]
                dtype = self.emitter._dtype(target.value)
                line(f"{target.array} = new_array({', '.join([dtype, 'steps', *row])})")
                line(f"advise({target.array})")
        for i, row in enumerate(self.inner.rows):
            sequence, dtype = self.outer.sequences[i], self.emitter._dtype(row)
            self.own(f"R{i} = row_buffer({sequence}, longest, {dtype})")
        for number, recurrence in enumerate(self.lowered.recurrences):
            self.write_buffers(number, recurrence)

    def own(self, text: str) -> None:
        """Write a line that makes a buffer."""
        self.source.line(text)

    def own_values(self, part: int, depth: int, dtype: str) -> None:
        """Make the buffer in which a part is scanned, or the sums that come first."""
        if part not in self.sums_first:
            self.own(f"B{part} = new_array({dtype}, longest + {depth})")
        elif self.output_of_sums(part) is None:
            self.own(f"T{part} = new_array({dtype}, longest)")

    def write_state_storage(self, i: int) -> None:
        line, initial, depth = self.source.line, self.outer.initials[i], self.signature.depths[i]
        dtype, axes = self.emitter._dtype(self.inner.taps[i][0]), self.layout.states[i]
        if not self.is_direct(i):
            self.own_values(i, depth, dtype)
        if self.signature.untraced[i]:
            line(f"h{i} = numba_deepcopy({initial})")
            return
        rest = [f"{initial}.shape[{axis + 1}]" for axis in range(len(axes))]
        line(f"h{i} = new_array({', '.join([dtype, f'steps + {depth}', *rest])})")
        line(f"advise(h{i})")
        with self.source.block(f"for j in range({depth}):"):
            row = "steps + j" if self.reverse else "j"
            self.copy_array(f"h{i}", (row,), initial, ("j",), len(axes))

    def write_buffers(self, number: int, recurrence: Recurrence) -> None:
        """Make buffers for the elements that differ from step to step."""
        inputs, outputs, _ = self.elements_of(number)
        whole = set(inputs[len(inputs) - self.signature.n_non_sequences :])
        for k, out in enumerate(outputs):
            read = {v for v in ancestors([out]) if v.owner is None}
            varying = [v for v in read if not isinstance(v, Constant) and v not in whole]
            if varying and out not in inputs:
                dtype = self.emitter._dtype(out)
                self.own(f"E{number}_{k} = new_array({dtype}, longest)")
            self.elements[number, k] = f"{'E' if varying else 'e'}{number}_{k}"

    def write_constants(self) -> None:
        """Read what a channel keeps for all steps, and compute its elements that never change."""
        for variable in self.inner.non_sequences:
            array, axes = self.parts[variable]
            name = self.source.name("w")
            item = self.item(array, axes, self.indices) if axes else f"as_scalar({array})"
            self.source.line(f"{name} = {item}")
            self.emitter.bind_scalar(variable, name)
        for number in range(len(self.lowered.recurrences)):
            inputs, outputs, _ = self.elements_of(number)
            with self.scope():
                self.bind_same(inputs)
                for k, out in enumerate(outputs):
                    name = self.elements[number, k]
                    if name[0] == "e":
                        self.emit([out])
                        dtype = self.emitter._dtype(out)
                        self.source.line(f"{name} = {dtype}({self.emitter.scalar(out)})")

    def bind_same(self, inputs: list[Variable]) -> None:
        """Bind the non-sequences of a copy of the body's inputs."""
        for mine, other in zip(self.graph.inputs, inputs, strict=True):
            if mine in self.inner.non_sequences:
                self.emitter.bind_scalar(other, self.emitter.scalar(mine))

    def write_views(self) -> None:
        """Write the parts of rows, histories and outputs that belong to the block."""
        line = self.source.line
        self.write_views_of_rows()
        for part, depth in self.depths.items():
            if part in self.sums_first:
                line(f"kept{part} = {self.kept(part, '').replace('[j', '[0')}")
                continue
            if self.is_direct(part):
                self.write_view_of_history(part)
                continue
            line(f"H{part} = B{part}")
            with self.source.block(f"for j in range({depth}):"):
                item = self.kept(part, "low + n + j" if self.reverse else "low + j")
                line(f"B{part}[{'n + j' if self.reverse else 'j'}] = {item}")
        for i, axes in enumerate(self.layout.outputs):
            line(f"Z{i} = {self.item(f'z{i}', axes, self.indices, 'low:low + n')}")
        for i, axes in enumerate(self.layout.states):
            if not self.signature.untraced[i] and not self.is_direct(i):
                first = "low" if self.reverse else f"low + {self.signature.depths[i]}"
                rows = self.item(f"h{i}", axes, self.indices, f"{first}:{first} + n")
                line(f"S{i} = {rows}")
        for i, is_sum in enumerate(self.layout.sums):
            if is_sum and self.layout.carries[i]:
                line(f"t{i} = {self.item(f'c{i}', self.layout.carries[i], self.indices)}")
        for part in self.sums_first:
            output = self.output_of_sums(part)
            if output is not None:
                line(f"T{part} = Z{output}")

    def write_views_of_rows(self) -> None:
        for i, axes in enumerate(self.layout.sequences):
            places = ["0" if axis is None else self.indices[axis] for axis in axes]
            inside = f"({', '.join(places)},)" if places else "()"
            rows = f"rows_of_block({self.outer.sequences[i]}, low, n, {inside}, R{i})"
            self.source.line(f"X{i} = {rows}")

    def write_view_of_history(self, part: int) -> None:
        self.source.line(f"H{part} = h{part}[low:low + n + {self.depths[part]}]")

    def kept(self, part: int, row: str) -> str:
        """Return where a part's values outside of the block are: those before it, and after.

        `row` is a row of its history; other parts have their latest values, at `j`.
        """
        n = self.signature.n_states
        if part >= n:
            axes = self.layout.carries[part - n]
            return self.item(f"c{part - n}", axes, self.indices) if axes else f"c{part - n}"
        row = "j" if self.signature.untraced[part] else row
        return self.item(f"h{part}", self.layout.states[part], self.indices, row)

    def value(self, part: int, offset: int) -> str:
        """Return where the value of a part is, `offset` steps after step `j`."""
        if part in self.sums_first:
            return f"kept{part}"
        place = -offset if self.reverse else self.depths[part] + offset
        return f"H{part}[j + {place}]"

    def view(self, own: Variable) -> str:
        """Return the values of a row or a past value during the block, as an array."""
        if own in self.inner.rows:
            return f"X{self.inner.rows.index(own)}"
        part, offset = self.taps[own]
        place = -offset if self.reverse else self.depths[part] + offset
        return f"H{part}[{place}:{place} + n]"

    def move_on(self) -> None:
        """Write where the next block finds them, and the results in the end, the latest values."""
        for part, depth in self.depths.items():
            if part < self.signature.n_states and not self.signature.untraced[part]:
                continue
            with self.source.block(f"for j in range({depth}):"):
                row = "j" if self.reverse else "n + j"
                value = f"kept{part}" if part in self.sums_first else f"B{part}[{row}]"
                self.source.line(f"{self.kept(part, '')} = {value}")
        for i, is_sum in enumerate(self.layout.sums):
            if is_sum and self.layout.carries[i]:
                item = self.item(f"c{i}", self.layout.carries[i], self.indices)
                self.source.line(f"{item} = t{i}")

    def history(self, i: int) -> str:
        return f"h{i}"

    def final_carry(self, i: int) -> str:
        return f"c{i}" if self.layout.carries[i] else f"as_array(c{i})"
