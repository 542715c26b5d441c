"""Time outside, channels inside: one pass over memory, no temporaries.

A step is a nest of loops over the channels' axes. Every value is computed as far outside as the
axes it depends on allow; states are read from the row before and written to the next one, and
carries are updated where they are. What is summed over inner axes is collected in a local
variable, what is summed over outer ones in memory. Results that share no array have loops of
their own; see `channels`.
"""

from __future__ import annotations

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib.backends.numba.contiguous import contiguous
from scanlib.backends.numba.elemwise.base import ElemwiseWriter
from scanlib.backends.numba.elemwise.fetching import fetch_row, rows_ahead
from scanlib.backends.numba.elemwise.positions import PositionalCode
from scanlib.backends.numba.loop import FIRST_CAPACITY
from scanlib.ops.channels import Target
from scanlib.ops.elemwise_scan import Axes, ElemwiseScan
from scanlib.ops.positions import loaded, only_place


class NestWriter(ElemwiseWriter):
    """Writes an elementwise loop with channels."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        self.source.object("contiguous", contiguous)
        self.positional = PositionalCode(self.source, self.emitter, self.messages, self.source_of)
        self.indices: list[str] = []
        self.streams: list[str] = []  # arrays that are walked a row at each step

    # Storage

    def write_storage(self) -> None:
        line = self.source.line
        line(f"capacity = least(steps, {FIRST_CAPACITY})" if self.grows else "capacity = steps")
        self.write_sizes(self.plan.targets, 0)
        # Compilers vectorize loops over arrays that they know to be contiguous.
        for variable, (array, axes) in self.parts.items():
            name = self.source.name("a")
            line(f"{name} = contiguous({array})")
            self.parts[variable] = (name, axes)
        for i, (name, axes) in enumerate(zip(self.outer.carries, self.layout.carries, strict=True)):
            if axes:
                line(f"c{i} = numba_deepcopy({name})")
            else:
                line(f"c{i} = as_scalar({name})")
        for i in range(self.signature.n_states):
            self.write_state_storage(i)
        for target in self.plan.targets:
            if target.kind != "output":
                continue
            i, key = target.number, id(target)
            row = ["1" if axis is None else self.sizes[key, axis] for axis in target.axes]
            sizes = ", ".join(["capacity", *row])
            line(f"z{i} = new_array({self.emitter._dtype(target.value)}, {sizes})")
            line(f"advise(z{i})")
        self.write_rows_ahead()

    def write_rows_ahead(self) -> None:
        """Write how many rows ahead the arrays are asked for that have one for each step."""
        ends = [name for row, (name, axes) in self.parts.items() if row in self.inner.rows and axes]
        ends += [f"h{i}" for i in range(self.signature.n_states) if self.has_latest_row(i)]
        ends += [f"z{t.number}" for t in self.plan.targets if t.kind == "output" and t.axes]
        self.streams = list(dict.fromkeys(ends))
        if self.streams:
            self.source.object("rows_ahead", rows_ahead)
            self.source.object("fetch_row", fetch_row)
            self.source.line(f"ahead = rows_ahead(steps, ({', '.join(self.streams)},))")

    def write_fetches(self, part: str = "0", parts: str = "1") -> None:
        """Ask for the rows that later steps read and write."""
        if not self.streams:
            return
        place = "t - ahead" if self.reverse else "t + ahead"
        with self.source.block("if ahead > 0:"):
            for name in self.streams:
                self.source.line(f"fetch_row({name}, {place}, {part}, {parts})")

    def write_state_storage(self, i: int) -> None:
        line, initial = self.source.line, self.outer.initials[i]
        depth, untraced = self.signature.depths[i], self.signature.untraced[i]
        rows = f"capacity + {depth}"
        if untraced:
            rows = "1" if depth == 1 else f"{depth + 1}"
        self.new_like(f"h{i}", initial, range(1, len(self.layout.states[i]) + 1), rows)
        line(f"advise(h{i})")
        # A ring holds rows in the order of iteration, the latest one last.
        row = self.source.name("row")
        place = f"steps + {row}" if self.reverse else row
        if self.reverse and untraced:
            place = f"{depth - 1} - {row}"
        with self.source.block(f"for {row} in range({depth}):"):
            self.copy_array(f"h{i}", (place,), initial, (row,), len(self.layout.states[i]))

        if self.has_latest_row(i):
            self.write_latest_row(i)

    def write_latest_row(self, i: int) -> None:
        """Write the row that holds a state's latest values."""
        initial = self.outer.initials[i]
        ndim = len(self.layout.states[i])
        self.new_like(f"r{i}", initial, range(1, ndim + 1))
        self.copy_array(f"r{i}", (), initial, ("0",), ndim)

    def has_latest_row(self, i: int) -> bool:
        """Whether a state's latest row is kept apart from its history.

        One row that every step reads and writes stays in the first-level cache, where a read
        need not wait for the write to the history.
        """
        traced = not self.signature.untraced[i]
        return traced and self.signature.depths[i] == 1 and bool(self.layout.states[i])

    def tap_row(self, i: int, offset: int) -> str:
        return "0" if self.is_in_place(i) else super().tap_row(i, offset)

    def written_row(self, i: int) -> str:
        return "0" if self.is_in_place(i) else super().written_row(i)

    def is_in_place(self, i: int) -> bool:
        """Whether a state is one row that every step replaces.

        Each channel's value is read before it is written, so nothing is lost.
        """
        return self.signature.untraced[i] and self.signature.depths[i] == 1

    # One step

    def write_step(self) -> None:
        line = self.source.line
        line("t = steps - 1 - i" if self.reverse else "t = i")
        self.write_fetches()
        with self.scope():
            self.place_targets()
            self.write_level(0, [], self.plan.targets)
            if self.result.stop is not None:
                line(f"stopped = {self.emitter.scalar(self.result.stop)} != 0")

    def place_targets(self) -> None:
        """Name the sums that are collected in local variables, clear those in memory."""
        for target in self.plan.targets:
            target.total = self.source.name("total") if target.collected else None
            if target.reduced and not target.collected and target.kind == "output":
                self.clear(target)

    def clear(self, target: Target) -> None:
        """Write zeros where a sum over outer axes will be collected."""
        indices = [f"e{axis}" for axis in range(self.layout.ndim)]
        zero = f"{self.emitter._dtype(target.value)}(0)"
        text = f"{self.place(target, indices)} = {zero}"
        sizes = [self.extent(target, axis) for axis in target.kept]
        self.emitter._nest([indices[axis] for axis in target.kept], sizes, text)

    def extent(self, target: Target, axis: int) -> str:
        """Return what a loop over one axis of a result runs through."""
        return self.sizes[id(target), axis]

    def lead_of(self, target: Target) -> list[str]:
        """Return the indices of the array that keeps a result, before the channels'."""
        if target.kind == "state":
            return [self.written_row(target.number)]
        return ["t"] if target.kind == "output" else []

    def place(self, target: Target, indices: list[str]) -> str:
        """Return where a result is kept."""
        whole = target.array[0] == "c" and not target.axes
        if whole:
            return target.array
        return self.item(target.array, target.axes, indices, *self.lead_of(target))

    def write_level(self, level: int, indices: list[str], targets: list[Target]) -> None:
        """Write what `level` loops enclose, and the loops inside."""
        line = self.source.line
        here = [target for target in targets if target.inner == level]
        self.compute(level, indices, targets)
        for target in targets:
            if target.total is not None and target.level == level:
                line(f"{target.total} = {self.wide(target)}(0)")
        values = {id(target): self.emitter.scalar(target.value) for target in here}
        for group in self.plan.groups(targets, level):
            index, size = self.source.name("j"), self.extent(group[0], level)
            passes = self.passes(group, level, size)
            with self.source.block(f"for {index} in {passes}:"), self.scope():
                self.write_level(level + 1, [*indices, index], group)
        assigned = []
        for target in here:
            value = values[id(target)]
            if target.total is not None:
                line(f"{target.total} = {self.wide(target)}({target.total} + {value})")
            elif target.kind == "sum" or target.reduced:
                place, dtype = self.place(target, indices), self.emitter._dtype(target.value)
                line(f"{place} = {dtype}({place} + {value})")
            else:
                assigned.append((self.place(target, indices), value))
                if target.kind == "state" and self.has_latest_row(target.number):
                    latest = self.item(f"r{target.number}", target.axes, indices)
                    assigned.append((latest, value))
        for place, value in assigned:
            line(f"{place} = {value}")
        for target in targets:
            if target.total is not None and target.level == level:
                place, dtype = self.place(target, indices), self.emitter._dtype(target.value)
                before = f"{place} + " if target.kind == "sum" else ""
                line(f"{place} = {dtype}({before}{dtype}({target.total}))")

    def passes(self, group: list[Target], level: int, size: str) -> str:
        """Return what the loop over one axis runs through: one place, if nothing else changes."""
        places = {only_place(target.value, self.kept(target), level) for target in group}
        place = places.pop()
        if places or place is None or place not in self.emitter.values:
            return f"range({size})"
        only = self.emitter.scalar(place)
        return f"range({only}, {only} + 1)"

    def kept(self, target: Target) -> Variable | int | None:
        """Return what a result is where a step does not change it, None if it must be written."""
        if target.kind == "carry":
            return self.inner.carries[target.number]
        if target.kind == "state" and self.is_in_place(target.number):
            return self.inner.taps[target.number][0]
        return 0 if target.kind == "sum" else None

    def wide(self, target: Target) -> str:
        """Return the type in which a sum over channels is collected, as PyTensor's sums are."""
        single = target.value.type.dtype == "float32"
        return "np.float64" if single else self.emitter._dtype(target.value)

    def compute(self, level: int, indices: list[str], targets: list[Target]) -> None:
        """Write the reads and the values that `level` loops enclose."""
        wanted = [target.value for target in targets]
        if self.result.stop is not None and level == 0:
            wanted.append(self.result.stop)
        for variable in self._read(wanted):
            if self.plan.levels[variable] == level and variable not in self.emitter.values:
                self.read(variable, indices)
        ready = [
            out
            for node in self.graph.toposort()
            for out in node.outputs
            if self.plan.levels[out] == level
        ]
        above = set(ancestors(wanted))
        self.indices = indices
        self.emit([out for out in ready if out in above])

    def write_positional(self, node: Apply) -> None:
        self.positional.write(node, self.indices)

    def _read(self, wanted: list[Variable]) -> list[Variable]:
        above = loaded(wanted)
        inputs = [v for v in self.graph.inputs if v in above]
        return [v for v in inputs if not isinstance(v, Constant)]

    def source_of(self, variable: Variable) -> tuple[str, Axes, list[str]]:
        """Return the array that holds an input of the body, its axes, and the indices before."""
        if variable in self.parts:
            array, axes = self.parts[variable]
            return array, axes, ["t"] if variable in self.inner.rows else []
        for i, taps in enumerate(self.inner.taps):
            for offset, tap in zip(self.signature.taps[i], taps, strict=True):
                if tap is variable and self.has_latest_row(i):
                    return f"r{i}", self.layout.states[i], []
                if tap is variable:
                    return f"h{i}", self.layout.states[i], [self.tap_row(i, offset)]
        i = self.inner.carries.index(variable)
        return f"c{i}", self.layout.carries[i], []

    def read(self, variable: Variable, indices: list[str]) -> None:
        """Write the read of one input of the body."""
        array, axes, lead = self.source_of(variable)
        name = self.source.name("s")
        whole = array[0] == "c" and not axes
        item = array if whole else self.item(array, axes, indices, *lead)
        self.source.line(f"{name} = {item}")
        self.emitter.bind_scalar(variable, name)

    # After the last step

    def write_growth(self) -> None:
        with self.source.block("if i == capacity:"):
            self.source.line("capacity = least(steps, 2 * capacity)")
            for i, depth in enumerate(self.signature.depths):
                if not self.signature.untraced[i]:
                    ndim = len(self.layout.states[i])
                    self._grow(f"h{i}", f"capacity + {depth}", f"i + {depth}", ndim)
            for i, axes in enumerate(self.layout.outputs):
                self._grow(f"z{i}", "capacity", "i", len(axes))

    def history(self, i: int) -> str:
        depth = self.signature.depths[i]
        if not self.signature.untraced[i]:
            return super().history(i)
        if self.is_in_place(i):
            return f"h{i}"
        initial = self.outer.initials[i]
        ndim = len(self.layout.states[i])
        self.new_like(f"o{i}", initial, range(ndim + 1))
        back = self.source.name("back")
        row = f"{back} - 1" if self.reverse else f"{depth} - {back}"
        ring = f"(i + {depth} - {back}) % {depth + 1}"
        with self.source.block(f"for {back} in range(1, {depth + 1}):"):
            self.copy_array(f"o{i}", (row,), f"h{i}", (ring,), ndim)
        return f"o{i}"

    def final_carry(self, i: int) -> str:
        return f"c{i}" if self.layout.carries[i] else f"as_array(c{i})"
