"""Time outside, channels inside: one pass over memory, no temporaries.

A step is a nest of loops over the channels' axes. Every value is computed as far outside as the
axes it depends on allow; states are read from the row before and written to the next one, and
carries are updated where they are. What is summed over inner axes is collected in a local
variable, what is summed over outer ones in memory. Results that share no array have loops of
their own; see `channels`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib.backends.numba.contiguous import contiguous
from scanlib.backends.numba.elemwise.base import ElemwiseWriter
from scanlib.backends.numba.elemwise.channels import (
    Place,
    partition,
    places_at_positions,
    write_sizes,
)
from scanlib.backends.numba.elemwise.positions import PositionalCode
from scanlib.backends.numba.loop import FIRST_CAPACITY
from scanlib.ops.elemwise_scan import Axes, ElemwiseScan
from scanlib.ops.positions import inputs_read, loaded, node_level, only_place


def _depth(axes: Axes) -> int:
    """Return how many loops enclose what has these axes."""
    return max((axis + 1 for axis in axes if axis is not None), default=0)


@dataclass
class Target:
    """A result of the step: where its value goes.

    `level` is the number of loops around the write; `total` is the local variable that collects
    a sum over the axes inside.
    """

    kind: str
    number: int
    value: Variable
    axes: Axes
    reduced: tuple[int, ...] = ()
    level: int = 0
    total: str | None = None


class NestWriter(ElemwiseWriter):
    """Writes an elementwise loop with channels."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        self.levels: dict[Variable, int] = {}
        self.source.object("contiguous", contiguous)
        self.positional = PositionalCode(self.source, self.emitter, self.messages, self.source_of)
        self.indices: list[str] = []
        self._place_values()
        self.targets = list(self._make_targets())
        self.sizes: dict[tuple[int, int], str] = {}

    def _place_values(self) -> None:
        """Find how many loops must enclose each value."""
        for variable, (_, axes) in self.parts.items():
            self.levels[variable] = _depth(axes)
        for taps, axes in zip(self.inner.taps, self.layout.states, strict=True):
            self.levels.update({tap: _depth(axes) for tap in taps})
        for variable, axes in zip(self.inner.carries, self.layout.carries, strict=True):
            self.levels[variable] = _depth(axes)
        for node in self.graph.toposort():
            self.levels.update(dict.fromkeys(node.outputs, node_level(node, self.levels)))

    def _make_targets(self):
        layout, result = self.layout, self.result
        for i, value in enumerate(result.states):
            yield Target("state", i, value, layout.states[i])
        for i, value in enumerate(result.carries):
            kind = "sum" if layout.sums[i] else "carry"
            yield Target(kind, i, value, layout.carries[i], layout.carry_reductions[i])
        for i, value in enumerate(result.outputs):
            yield Target("output", i, value, layout.outputs[i], layout.output_reductions[i])

    # Sizes

    def places(self, target: Target) -> list[Place]:
        """Return the arrays that a result is computed from or kept in."""
        reads = inputs_read([target.value])
        above = {variable for variable, hidden in reads.items() if None in hidden}
        found = [
            Place(array, 1 if variable in self.inner.rows else 0, axes)
            for variable, (array, axes) in self.parts.items()
            if variable in above
        ]
        found += places_at_positions(self, reads)
        for i, taps in enumerate(self.inner.taps):
            read = not above.isdisjoint(taps)
            if read or (target.kind == "state" and target.number == i):
                own = None if read else i
                found.append(Place(self.outer.initials[i], 1, self.layout.states[i], own))
        for i, carry in enumerate(self.inner.carries):
            if carry in above or (target.kind in ("carry", "sum") and target.number == i):
                found.append(Place(self.outer.carries[i], 0, self.layout.carries[i]))
        return found

    def groups(self, targets: list[Target], level: int) -> list[list[Target]]:
        """Return the results inside `level` loops that share the next one."""
        inside = [target for target in targets if self.depth(target) > level]
        found = partition([self.places(target) for target in inside], level)
        return [[inside[position] for position in group] for group in found]

    def depth(self, target: Target) -> int:
        """Return how many loops enclose the computation of a result or its write."""
        axes = [_depth(target.axes), *(axis + 1 for axis in target.reduced)]
        return max(self.levels.get(target.value, 0), *axes)

    def write_all_sizes(self, targets: list[Target], level: int) -> None:
        """Write the lengths of all loops over channels, and the checks that inputs agree."""
        for group in self.groups(targets, level):
            name = self.source.name("size")
            places = [place for target in group for place in self.places(target)]
            write_sizes(self.source.line, self.check_size, name, places, level)
            self.sizes.update({(id(target), level): name for target in group})
            self.write_all_sizes(group, level + 1)

    def check_size(self, text: str, size: str, place: Place, level: int) -> None:
        """Write the check that an array has as many channels as the others."""
        with self.source.block(f"if steps > 0 and {text} != {size}:"):
            if place.owned is None:
                message = "Incompatible Elemwise input shapes inside a scan"
                self.source.line(f"raise ValueError('{message}')")
            else:
                axis = place.axes.index(level)
                message = self.messages.state_shape(place.owned, axis)
                self.raise_error("StepShapeError", message, "np.int64(0)", text, size)

    # Storage

    def write_storage(self) -> None:
        line = self.source.line
        line(f"capacity = min(steps, {FIRST_CAPACITY})" if self.grows else "capacity = steps")
        self.write_all_sizes(self.targets, 0)
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
        for target in self.targets:
            if target.kind != "output":
                continue
            i, key = target.number, id(target)
            row = ["1" if axis is None else self.sizes[key, axis] for axis in target.axes]
            sizes = ", ".join(["capacity", *row])
            line(f"z{i} = np.empty(({sizes},), {self.emitter._dtype(target.value)})")
            line(f"advise(z{i})")

    def write_state_storage(self, i: int) -> None:
        line, initial = self.source.line, self.outer.initials[i]
        depth, untraced = self.signature.depths[i], self.signature.untraced[i]
        rows = f"capacity + {depth}"
        if untraced:
            rows = "1" if depth == 1 else f"{depth + 1}"
        line(f"h{i} = np.empty(({rows},) + {initial}.shape[1:], {initial}.dtype)")
        line(f"advise(h{i})")
        for row in range(depth):
            # A ring holds rows in the order of iteration, the latest one last.
            flipped = self.reverse and untraced
            place = depth - 1 - row if flipped else f"steps + {row}" if self.reverse else row
            ndim = len(self.layout.states[i])
            self.copy_array(f"h{i}", (str(place),), initial, (str(row),), ndim)

        if self.has_latest_row(i):
            line(f"r{i} = np.empty({initial}.shape[1:], {initial}.dtype)")
            self.copy_array(f"r{i}", (), initial, ("0",), len(self.layout.states[i]))

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
        if self.grows:
            self.write_growth()
        with self.scope():
            self.place_targets()
            self.write_level(0, [], self.targets)
            if self.result.stop is not None:
                line(f"stopped = {self.emitter.scalar(self.result.stop)} != 0")

    def place_targets(self) -> None:
        """Decide where each result is written, and clear sums that are collected in memory."""
        for target in self.targets:
            inner = self.depth(target)
            kept = [axis for axis in target.axes if axis is not None]
            suffix = target.reduced and kept == list(range(len(kept)))
            target.level = len(kept) if suffix else inner
            target.total = None
            if suffix and min(target.reduced) == len(kept):
                target.total = self.source.name("total")
            elif target.reduced:
                target.level = inner
                if target.kind == "output":
                    self.clear(target)

    def clear(self, target: Target) -> None:
        """Write zeros where a sum over outer axes will be collected."""
        indices = [f"e{axis}" for axis in range(self.layout.ndim)]
        zero = f"{self.emitter._dtype(target.value)}(0)"
        text = f"{self.place(target, indices)} = {zero}"
        kept = [axis for axis in target.axes if axis is not None]
        sizes = [self.sizes[id(target), axis] for axis in kept]
        self.emitter._nest([indices[axis] for axis in kept], sizes, text)

    def array_of(self, target: Target) -> tuple[str, list[str]]:
        """Return the array that keeps a result, and its indices before the channels'."""
        i = target.number
        if target.kind == "state":
            return f"h{i}", [self.written_row(i)]
        return (f"z{i}", ["t"]) if target.kind == "output" else (f"c{i}", [])

    def place(self, target: Target, indices: list[str]) -> str:
        """Return where a result is kept."""
        array, lead = self.array_of(target)
        whole = array[0] == "c" and not target.axes
        return array if whole else self.item(array, target.axes, indices, *lead)

    def write_level(self, level: int, indices: list[str], targets: list[Target]) -> None:
        """Write what `level` loops enclose, and the loops inside."""
        line = self.source.line
        here = [target for target in targets if self.inner_level(target) == level]
        self.compute(level, indices, targets)
        for target in targets:
            if target.total is not None and target.level == level:
                line(f"{target.total} = {self.wide(target)}(0)")
        values = {id(target): self.emitter.scalar(target.value) for target in here}
        for group in self.groups(targets, level):
            index, size = self.source.name("j"), self.sizes[id(group[0]), level]
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

    def inner_level(self, target: Target) -> int:
        """Return how many loops enclose the computation of a result's value."""
        return target.level if target.total is None else self.depth(target)

    def compute(self, level: int, indices: list[str], targets: list[Target]) -> None:
        """Write the reads and the values that `level` loops enclose."""
        wanted = [target.value for target in targets]
        if self.result.stop is not None and level == 0:
            wanted.append(self.result.stop)
        for variable in self._read(wanted):
            if self.levels[variable] == level and variable not in self.emitter.values:
                self.read(variable, indices)
        ready = [
            out
            for node in self.graph.toposort()
            for out in node.outputs
            if self.levels[out] == level
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
            self.source.line("capacity = min(steps, 2 * capacity)")
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
        self.source.line(f"o{i} = np.empty({initial}.shape, {initial}.dtype)")
        for k in range(1, depth + 1):
            row = k - 1 if self.reverse else depth - k
            ring = f"(i + {depth - k}) % {depth + 1}"
            ndim = len(self.layout.states[i])
            self.copy_array(f"o{i}", (str(row),), f"h{i}", (ring,), ndim)
        return f"o{i}"

    def final_carry(self, i: int) -> str:
        return f"c{i}" if self.layout.carries[i] else f"np.asarray(c{i})"
