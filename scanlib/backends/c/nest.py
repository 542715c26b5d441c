"""Time outside, channels inside: one pass over memory, no temporaries.

A step is a nest of loops over the channels' axes. Every value is computed as far outside as the
axes it depends on allow; states are read from the row before and written to the next one, and
carries are updated where they are. What is summed over inner axes is collected in a local
variable, what is summed over outer ones in memory. Results that share no array have loops of their
own. A state or carry without channels lives in local variables; a loop without channels is this
schedule with no loops inside.

``NODE_run`` is a template: with ``FAST`` the items of the innermost axis lie side by side in every
array, so that compilers vectorize; without, strides are read. Where the last two axes are one in
memory, they are walked as one.
"""

from __future__ import annotations

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors, toposort

from scanlib.backends.c import fetching
from scanlib.backends.c.base import REGISTER_DEPTH
from scanlib.backends.c.channels import ChannelsPrinter
from scanlib.backends.c.positions import PositionalCode, Row
from scanlib.backends.c.source import added, c_type, is_reducible
from scanlib.backends.c.threads import write_slices
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.channels import Target
from scanlib.ops.elemwise_scan import Axes, ElemwiseScan
from scanlib.ops.positions import Position, loaded, only_place


class NestPrinter(ChannelsPrinter):
    """Writes an elementwise loop with time outside and channels inside."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        self.scalars.positional = PositionalCode(self.source, self.messages, self.indexed_row).write

    def is_local(self, i: int) -> bool:
        """Whether a state lives in local variables."""
        free = all(axis is None for axis in self.layout.states[i])
        return free and self.signature.depths[i] <= REGISTER_DEPTH

    def needs_ring(self, i: int) -> bool:
        return self.signature.untraced[i] and not self.is_local(i)

    # Places of items

    def item(self, array: str, dtype: str, axes: Axes, base: str, lead: int, const: bool) -> str:
        """Return the text of an item; ``e0``, ``e1``, … are the channel's indices."""
        places = [
            f"e{axis} * {array}_{own + lead}" for own, axis in enumerate(axes) if axis is not None
        ]
        qualifier = "const " if const else ""
        return f"(*({qualifier}{c_type(dtype)} *)({' + '.join([base, *places])}))"

    def place(self, target: Target) -> str:
        """Return where a result is kept."""
        dtype = target.value.type.dtype
        if target.kind in ("carry", "sum"):
            if self.local_carries[target.number]:
                return f"c{target.number}_v"
            return self.item(target.array, dtype, target.axes, target.array, 0, False)
        return self.item(target.array, dtype, target.axes, f"{target.array}_w", 1, False)

    # The function

    def write_run(self) -> None:
        line = self.source.line
        line("template <bool FAST>")
        with self.source.block(f"static int {NODE}_run({NODE}_data &data)"):
            self.write_numbers()
            line("npy_intp capacity = data.capacity, i;")
            line("int failed = 0, stopped = 0;")
            self.write_locals()
            with self.source.block("for (i = 0; i < steps && !stopped; i++)"):
                line(f"const npy_intp t = {'steps - 1 - i' if self.reverse else 'i'};")
                if self.grows:
                    self.write_growth()
                self.write_step()
            line("data.taken = i;")
            self.write_locals_back()
            line("return failed ? -1 : 0;")

    def write_locals(self) -> None:
        """Write local copies of what ``NODE_data`` holds, states and carries included."""
        line, last = self.source.line, self.layout.ndim - 1
        for name, dtype, axes, lead in self.arrays():
            line(f"char *{name} = data.{name};")
            if lead:
                line(f"const npy_intp {name}_0 = data.{name}_s[0];")
            for own, axis in enumerate(axes):
                if axis is None:
                    continue
                stride = f"data.{name}_s[{own + lead}]"
                if axis == last:
                    stride = f"FAST ? (npy_intp)sizeof({c_type(dtype)}) : {stride}"
                line(f"const npy_intp {name}_{own + lead} = {stride};")
        for i, depth in enumerate(self.signature.depths):
            if self.in_ring[i]:
                line(f"const npy_intp h{i}_row = data.h{i}_row;")
            if not self.is_local(i):
                continue
            dtype, initial = c_type(self.state_dtype(i)), self.outer.initials[i]
            for k in range(1, depth + 1):
                row = k - 1 if self.reverse else depth - k
                line(f"{dtype} r{i}_{k} = *(const {dtype} *)({initial} + {row} * {initial}_0);")
        for i, local in enumerate(self.local_carries):
            if local:
                dtype = c_type(self.inner.carries[i].type.dtype)
                line(f"{dtype} c{i}_v = *({dtype} *)c{i};")

    def write_locals_back(self) -> None:
        line = self.source.line
        for i, depth in enumerate(self.signature.depths):
            if self.is_local(i) and self.signature.untraced[i]:
                dtype = c_type(self.state_dtype(i))
                for k in range(1, depth + 1):
                    row = k - 1 if self.reverse else depth - k
                    line(f"(({dtype} *)h{i})[{row}] = r{i}_{k};")
        for i, local in enumerate(self.local_carries):
            if local:
                line(f"*({c_type(self.inner.carries[i].type.dtype)} *)c{i} = c{i}_v;")

    def write_growth(self) -> None:
        line, signature = self.source.line, self.signature
        with self.source.block("if (i == capacity)"):
            line("capacity = 2 * capacity < steps ? 2 * capacity : steps;")
            names = [
                (f"h{i}", self.histories[i], depth)
                for i, depth in enumerate(signature.depths)
                if not signature.untraced[i]
            ]
            names += [(f"z{i}", name, 0) for i, name in enumerate(self.stacks)]
            for array, output, depth in names:
                line(f"if (scanlib_grow(data.{output}, capacity + {depth}, i + {depth}))")
                line("  return -1;")
                line(f"{array} = (char *)PyArray_DATA(*data.{output});")

    # One step

    def write_step(self) -> None:
        line = self.source.line
        self.write_rows()
        fetching.write_fetches(self)
        for target in self.plan.targets:
            if target.kind == "output" and target.reduced and target.total is None:
                self.write_clear(target)
        with self.scalars.scope():
            self.write_level(0, self.plan.targets)
        if self.scalars.can_fail:
            line("if (failed) return -1;")

    def write_rows(self) -> None:
        """Write where the rows of this step are."""
        line, signature = self.source.line, self.signature
        for name in self.outer.sequences:
            line(f"const char *{name}_t = {name} + t * {name}_0;")
        for i in range(signature.n_outputs):
            line(f"char *z{i}_w = z{i} + t * z{i}_0;")
        for i in range(signature.n_states):
            if not (self.is_local(i) and signature.untraced[i]):
                line(f"char *h{i}_w = h{i} + {self.row_of(i, 0)};")
            if self.is_local(i):
                continue
            for offset in signature.taps[i]:
                line(f"const char *h{i}_p{-offset} = h{i} + {self.row_of(i, offset)};")

    def row_of(self, i: int, offset: int) -> str:
        """Return the place of a state's row, in bytes, `offset` steps after this one's."""
        depth = self.signature.depths[i]
        if self.in_ring[i]:
            return f"(i + {depth + offset}) % {depth + 1} * h{i}_row"
        return f"(t + {-offset if self.reverse else depth + offset}) * h{i}_0"

    def write_clear(self, target: Target) -> None:
        """Write zeros where a sum over outer axes will be collected."""
        dtype = target.value.type.dtype
        for axis in target.kept:
            self.source.line(self.loop_head(self.loops[id(target), axis], axis))
        self.source.line(f"{self.place(target)} = {c_type(dtype)}(0);")

    def loop_head(self, number: int, axis: int) -> str:
        low, high = f"data.low[{number}]", f"data.high[{number}]"
        return f"for (npy_intp e{axis} = {low}; e{axis} < {high}; e{axis}++)"

    def write_level(self, level: int, targets: list[Target]) -> None:
        """Write what `level` loops enclose, and the loops inside."""
        line = self.source.line
        here = [target for target in targets if target.inner == level]
        self.compute(level, targets)
        if level == 0 and self.result.stop is not None:
            line(f"stopped = {self.scalars.text(self.result.stop)} != 0;")
        totals = [t for t in targets if t.total is not None and t.level == level]
        for target in totals:
            line(f"{self.wide(target)} {target.total} = {self.wide(target)}(0);")
        values = [self.scalars.text(target.value) for target in here]
        for group in self.plan.groups(targets, level):
            self.write_loop(level, group)
        self.write_values(list(zip(here, values, strict=True)))
        for target in totals:
            dtype = target.value.type.dtype
            value = f"({c_type(dtype)}){target.total}"
            if target.kind == "sum":
                line(f"{self.place(target)} = {added(self.place(target), value, dtype)};")
            else:
                line(f"{self.place(target)} = {value};")

    def write_loop(self, level: int, group: list[Target]) -> None:
        """Write the loop over the channels of one group of results."""
        number = self.loops.get((id(group[0]), level))
        with self.scalars.scope():
            if number is None:
                self.write_level(level + 1, group)
                return
            with self.source.block(""):
                head = self.loop_head(number, level)
                only = self.only_place(group, level)
                bounds = [f"data.low[{number}]", f"data.high[{number}]"]
                if only is not None:
                    bounds = [only, f"{only} + 1"]
                for bound, value in zip(("low", "high"), bounds, strict=True):
                    self.source.line(f"const npy_intp {bound} = {value};")
                    head = head.replace(f"data.{bound}[{number}]", bound)
                for directive in self.directives(level, group):
                    self.source.line(directive)
                with self.source.block(head):
                    self.write_level(level + 1, group)

    def only_place(self, group: list[Target], level: int) -> str | None:
        """Return the only position along an axis where results may change, None if all may."""
        kept = {"sum": lambda _: 0, "carry": self.inner.carries.__getitem__}
        found = {
            only_place(t.value, kept[t.kind](t.number) if t.kind in kept else None, level)
            for t in group
        }
        (place, *more) = found
        known = not more and place is not None and place in self.scalars.values
        return self.scalars.text(place) if known else None

    def write_values(self, values: list[tuple[Target, str]]) -> None:
        """Write what becomes of values: everything is read before anything is replaced."""
        line = self.source.line
        assigned, registers = [], []
        for target, value in values:
            dtype = target.value.type.dtype
            if target.total is not None:
                line(f"{target.total} = {added(target.total, value, self.wide_dtype(target))};")
            elif target.adds:
                line(f"{self.place(target)} = {added(self.place(target), value, dtype)};")
            elif target.kind == "state" and self.is_local(target.number):
                name = self.source.name("n")
                line(f"const {c_type(dtype)} {name} = {value};")
                registers.append((target.number, name))
            else:
                assigned.append((self.place(target), value))
        for place, value in assigned:
            line(f"{place} = {value};")
        for i, name in registers:
            if not self.signature.untraced[i]:
                line(f"*({c_type(self.state_dtype(i))} *)h{i}_w = {name};")
            for k in range(self.signature.depths[i], 1, -1):
                line(f"r{i}_{k} = r{i}_{k - 1};")
            line(f"r{i}_1 = {name};")

    def wide(self, target: Target) -> str:
        """Return the type in which a sum over channels is collected, as PyTensor's sums are."""
        return c_type(self.wide_dtype(target))

    def wide_dtype(self, target: Target) -> str:
        dtype = target.value.type.dtype
        return "float64" if dtype == "float32" else dtype

    def directives(self, level: int, group: list[Target]) -> list[str]:
        """Return what is said to the compiler about the loop over axis `level`."""
        if any(target.inner > level + 1 for target in group) or self.scalars.can_fail:
            return []
        nodes = list(toposort([target.value for target in group]))
        if any(
            isinstance(node.op, Position) and self.plan.levels[node.outputs[0]] > level
            for node in nodes
        ):
            return []  # an index may lie outside its array
        if any(v.type.dtype.startswith("complex") for node in nodes for v in node.inputs):
            return []  # lanes of pairs are put together number by number: five times as slow
        sums = []
        for target in group:
            if not target.adds or level in target.kept:
                continue
            if target.total is None or not is_reducible(target.value.type.dtype):
                return []  # adds to one place at every pass
            sums.append(target.total)
        clause = f" reduction(+ : {', '.join(sums)})" if sums else ""
        return [f"#pragma omp simd{clause}"]

    def compute(self, level: int, targets: list[Target]) -> None:
        """Write the reads and the values that `level` loops enclose."""
        wanted = [target.value for target in targets]
        if self.result.stop is not None and level == 0:
            wanted.append(self.result.stop)
        above, read = set(ancestors(wanted)), loaded(wanted)
        for variable in self.graph.inputs:
            if variable in read and self.plan.levels[variable] == level:
                self.read(variable)
        self.scalars.emit(
            out
            for node in self.graph.toposort()
            for out in node.outputs
            if self.plan.levels[out] == level and out in above
        )

    def read(self, variable: Variable) -> None:
        """Write the read of one input of the body."""
        if isinstance(variable, Constant) or variable in self.scalars.values:
            return
        dtype = variable.type.dtype
        if variable in self.parts:
            name, axes = self.parts[variable]
            row = variable in self.inner.rows
            base = f"{name}_t" if row else name
            self.scalars.bind_stored(variable, self.item(name, dtype, axes, base, int(row), True))
            return
        for i, taps in enumerate(self.inner.taps):
            for offset, tap in zip(self.signature.taps[i], taps, strict=True):
                if tap is not variable:
                    continue
                if self.is_local(i):
                    self.scalars.bind(variable, f"r{i}_{-offset}")
                else:
                    base, axes = f"h{i}_p{-offset}", self.layout.states[i]
                    text = self.item(f"h{i}", dtype, axes, base, 1, True)
                    self.scalars.bind_new(variable, text)
        for i, carry in enumerate(self.inner.carries):
            if carry is variable:
                axes = self.layout.carries[i]
                local = self.local_carries[i]
                text = f"c{i}_v" if local else self.item(f"c{i}", dtype, axes, f"c{i}", 0, True)
                self.scalars.bind_new(variable, text)

    def indexed_row(self, variable: Variable) -> Row:
        """Return where the row is that an input of the body stands for."""
        array, lead, _ = self.plan.array_of(variable)
        base, strides = array, array
        if variable in self.inner.rows:
            base = f"{array}_t"
        for i, taps in enumerate(self.inner.taps):
            for offset, tap in zip(self.signature.taps[i], taps, strict=True):
                if tap is variable:
                    base, strides = f"h{i}_p{-offset}", f"h{i}"
        if variable in self.inner.carries:
            base = strides = f"c{self.inner.carries.index(variable)}"
        return Row(base, f"data.{strides}_s", f"data.{array}_d", lead)

    def fields(self) -> list[str]:
        rows = [f"{name}_row_bytes" for name, _ in fetching.streams(self)]
        return ["ahead", "part", "parts", *rows]

    def write_start(self) -> None:
        fetching.write_rows_ahead(self)
        write_slices(self)
