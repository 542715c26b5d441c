"""Where a loop that runs in blocks keeps what: histories, buffers of one block, views.

A traced state is scanned where its history is stored; other parts have a buffer of one block with
the values before it in front (behind, where the loop walks backwards).
"""

from __future__ import annotations

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib._compat import thaw_graph
from scanlib.backends.numba.contiguous import contiguous_rows
from scanlib.backends.numba.elemwise.base import ElemwiseWriter
from scanlib.ops.elemwise_scan import ElemwiseScan, Recurrence

BLOCK = 1024  # steps: a few buffers fit the first-level cache, and a block is worth starting
REALS = {"float32", "float64"}


class BlockStorage(ElemwiseWriter):
    """Writes the storage of an elementwise loop of one channel, and what is read from it."""

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
        self.source.object("contiguous_rows", contiguous_rows)

    def is_direct(self, part: int) -> bool:
        """Whether a part is scanned in its history; others are in a buffer of one block."""
        n = self.signature.n_states
        return part < n and not self.signature.untraced[part] and not self.layout.states[part]

    def write_storage(self) -> None:
        line, n = self.source.line, self.signature.n_states
        line("capacity = steps")
        for i in range(n):
            self.write_state_storage(i)
        for i, carry in enumerate(self.inner.carries):
            outer, axes = self.outer.carries[i], self.layout.carries[i]
            dtype = self.emitter._dtype(carry)
            item = self.item(outer, axes, []) if axes else f"as_scalar({outer})"
            if n + i in self.depths:
                line(f"B{n + i} = np.empty({self.block + 1}, {dtype})")
                line(f"B{n + i}[0] = {item}")
            else:
                line(f"c{i} = {item}")
        for i, (out, axes) in enumerate(zip(self.result.outputs, self.layout.outputs, strict=True)):
            sizes = ", ".join(["steps", *("1" for _ in axes)])
            line(f"z{i} = np.empty(({sizes},), {self.emitter._dtype(out)})")
            line(f"advise(z{i})")
        for variable in self.inner.non_sequences:
            array, axes = self.parts[variable]
            name = self.source.name("w")
            item = self.item(array, axes, []) if axes else f"as_scalar({array})"
            line(f"{name} = {item}")
            self.emitter.bind_scalar(variable, name)
        for i, row in enumerate(self.inner.rows):
            line(f"R{i} = np.empty({self.block}, {self.emitter._dtype(row)})")
        for number, recurrence in enumerate(self.lowered.recurrences):
            self.write_buffers(number, recurrence)

    def write_state_storage(self, i: int) -> None:
        line, initial, depth = self.source.line, self.outer.initials[i], self.signature.depths[i]
        dtype, axes = self.emitter._dtype(self.inner.taps[i][0]), self.layout.states[i]
        item = self.item(initial, axes, [], "j")
        if not self.is_direct(i):
            line(f"B{i} = np.empty({self.block + depth}, {dtype})")
            with self.source.block(f"for j in range({depth}):"):
                line(f"B{i}[j] = {item}")
        if not self.signature.untraced[i]:
            line(f"h{i} = np.empty((steps + {depth},) + {initial}.shape[1:], {dtype})")
            line(f"advise(h{i})")
            row = "steps + j" if self.reverse else "j"
            with self.source.block(f"for j in range({depth}):"):
                line(f"{self.item(f'h{i}', axes, [], row)} = {item}")

    def write_buffers(self, number: int, recurrence: Recurrence) -> None:
        """Compute elements that are the same at every step; make buffers for the others."""
        graph = thaw_graph(recurrence.elements)
        whole = set(graph.inputs[len(graph.inputs) - self.signature.n_non_sequences :])
        with self.scope():
            self.bind_same(graph.inputs)
            for k, out in enumerate(graph.outputs):
                inputs = {v for v in ancestors([out]) if v.owner is None}
                varying = [v for v in inputs if not isinstance(v, Constant) and v not in whole]
                name, dtype = f"E{number}_{k}", self.emitter._dtype(out)
                if not varying:
                    self.emit([out])
                    name = f"e{number}_{k}"
                    self.source.line(f"{name} = {dtype}({self.emitter.scalar(out)})")
                elif out not in graph.inputs:
                    self.source.line(f"{name} = np.empty({self.block}, {dtype})")
                self.elements[number, k] = name

    def bind_same(self, inputs: list[Variable]) -> None:
        """Bind the non-sequences of a copy of the body's inputs."""
        for mine, other in zip(self.graph.inputs, inputs, strict=True):
            if mine in self.inner.non_sequences:
                self.emitter.bind_scalar(other, self.emitter.scalar(mine))

    def write_views(self) -> None:
        """Write the parts of rows, histories and outputs that belong to the block."""
        line = self.source.line
        for i, axes in enumerate(self.layout.sequences):
            name = self.outer.sequences[i]
            if axes:
                with self.source.block("for j in range(n):"):
                    line(f"R{i}[j] = {self.item(name, axes, [], 'low + j')}")
                line(f"X{i} = R{i}")
            else:
                line(f"X{i} = contiguous_rows({name}[low:low + n], R{i})")
        for part, depth in self.depths.items():
            if self.is_direct(part):
                line(f"H{part} = h{part}[low:low + n + {depth}]")
                continue
            line(f"H{part} = B{part}")
            if self.reverse:
                # The newest rows of the block before come first; they move behind this block.
                with self.source.block(f"for j in range({depth}):"):
                    line(f"B{part}[n + {depth - 1} - j] = B{part}[{depth - 1} - j]")
        for i, axes in enumerate(self.layout.outputs):
            if not axes:
                line(f"Z{i} = z{i}[low:low + n]")

    def value(self, part: int, offset: int) -> str:
        """Return where the value of a part is, `offset` steps after step `j`."""
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
        """Move the newest rows of the block in front of the next one."""
        for part, depth in self.depths.items():
            if not self.is_direct(part):
                with self.source.block(f"for j in range({depth}):"):
                    self.source.line(f"B{part}[j] = B{part}[n + j]")

    def history(self, i: int) -> str:
        if not self.signature.untraced[i]:
            return f"h{i}"
        initial = self.outer.initials[i]
        self.source.line(f"o{i} = np.empty({initial}.shape, {initial}.dtype)")
        with self.source.block(f"for j in range({self.signature.depths[i]}):"):
            item = self.item(f"o{i}", self.layout.states[i], [], "j")
            self.source.line(f"{item} = B{i}[j]")
        return f"o{i}"

    def final_carry(self, i: int) -> str:
        n, axes, outer = self.signature.n_states, self.layout.carries[i], self.outer.carries[i]
        value = f"B{n + i}[0]" if n + i in self.depths else f"c{i}"
        if not axes:
            return f"np.asarray({value})"
        self.source.line(f"o{n + i} = np.empty({outer}.shape, {outer}.dtype)")
        self.source.line(f"{self.item(f'o{n + i}', axes, [])} = {value}")
        return f"o{n + i}"
