r"""Time outside, channels inside: one pass over memory, no temporaries.

For an elementwise loop (`scanlib.ops.lowered.elemwise_scan`) with steps `t` and channels `c`,

    for t:
        for c:  y[t, c] = f(x[t, c], y[t-1, c] …, w[c])

a step is a nest of loops over the channels' axes. Every value is computed as far outside as the
axes it depends on allow; states are read from the rows before and written to their own, carries are
updated where they are. Results that share no array have loops of their own
(`ops.lowered.channel_plan`). What has no channels lives in local variables; a loop without channels
is this schedule with no loops inside.

* **Lanes.** The innermost loop takes as many channels at once as fill a vector register, and the
  rest one by one, where the items of all arrays lie side by side along it.
* **Strips.** Where rows are short and steps do little, a step waits longer for the values that the
  one before has written than for its operations. The channels of a vector register then take
  several steps, a strip, before the next ones do: their states stay in registers, and the steps of
  other channels run beside them. Loops of 4 to 24 channels take 0.4 to 0.7 of the time. In strips,
  and of complex numbers, ``a h + b`` is one operation, whose products are rounded once each: two
  channels, and complex numbers, take 0.7 of the time.
* **Sums** over inner axes are collected in locals, in one sum for each lane, which are added
  pairwise; float32 is summed in float64, as PyTensor does. Other sums are collected in memory.
* **Rows ahead.** Processors guess which memory comes next, but no further than to the end of a
  page, and not at all before the first rows of one. A step that asks for rows some thousand bytes
  ahead spares 15 to 35 percent of the time of ``a h + b`` for rows of 128 to 2,048 bytes. That does
  not pay where the arrays fit in a cache (the requests are instructions as well), for rows shorter
  than what is fetched together, for rows of several pages, most of which the processor guesses, and
  on processors that guess them all (`foresees_rows`).
* **Slices.** Where results belong to the channels of the first axis, or are sums over it, several
  calls can each walk a part of them (``words.part`` of ``words.parts``).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import permutations

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Add, Mul

from scanlib.kernels.language import BOOL, FLOATS, INT64, Kernel, Value, Writer
from scanlib.kernels.processor import foresees_rows, register_bytes
from scanlib.kernels.scalars import Number, added, parts_of, times_plus
from scanlib.kernels.spans import LINE, Cell, Total, lane_counts, load_number, store_number, walk
from scanlib.ops.lowered.channel_plan import Target
from scanlib.schedules.elementwise import ElemwiseLoop
from scanlib.schedules.polls import between_polls
from scanlib.schedules.selection import (
    LONGEST_STRIP_ROW,
    has_short_rows,
    is_cheap_step,
    strip_steps,
)
from scanlib.schedules.step_by_step import TakesSteps

DISTANCE = 4096  # how many bytes ahead rows are asked for
LONGEST_ROW = 8192  # bytes
LEAST_BYTES = 1 << 21  # of all arrays: fewer stay in a cache
REGISTER = 64  # bytes of the lanes of the widest dtype: of one register, or of two short ones


def rows_ahead(w: Writer, steps: Value, sizes: Sequence[Value]) -> Value:
    """Write how many rows ahead arrays are asked for, 0 for not at all; `sizes` are their rows'."""
    total: Value = w.constant(0, INT64)
    longest: Value = w.constant(1, INT64)
    for size in sizes:
        total, longest = total + size, w.select(size > longest, size, longest)
    pays = (longest >= LINE) & (longest <= LONGEST_ROW) & (total * steps >= LEAST_BYTES)
    rows = w.apply("quotient", w.constant(DISTANCE, INT64), longest)
    return w.select(pays, w.select(rows < 1, 1, rows), 0)


class ChannelsRun(TakesSteps[ElemwiseLoop]):
    """Writes the kernel that takes the steps."""

    def __init__(self, loop: ElemwiseLoop) -> None:
        super().__init__(loop, "channels")
        self.indices: list[Value] = []  # of the loops over channels that are open
        self.totals: dict[int, Total] = {}
        self.rows: dict[str | tuple[str, int], Value] = {}  # of the step that is written
        inner, outer = loop.inner, loop.outer
        self.given_as = dict(zip(inner.rows, outer.sequences, strict=True))
        self.given_as |= zip(inner.non_sequences, outer.non_sequences, strict=True)
        self.strip_steps, self.in_strips = strip_steps(loop.op), False
        self.varying = {*inner.rows, *loop.taps}  # from step to step

    # Memory

    def item_offset(self, name: str, base: Value | int) -> Value | int:
        """Return where the item of the channel is, `base` bytes after the array's address."""
        array, offset = self.loop.arrays[name], base
        for own, axis in enumerate(array.axes):
            if axis is None:
                continue
            last = axis == self.loop.layout.ndim - 1 and self.scalars.lanes > 1
            stride = array.itemsize if last else self.stride_of(name, own + array.lead)
            offset = self.indices[axis] * stride + offset
        return offset

    def has_lanes(self, name: str) -> bool:
        """Whether the items of an array differ along the loop that takes several at once."""
        return len(self.indices) - 1 in self.loop.arrays[name].axes

    def load(self, name: str, pointer: Value, offset: Value | int) -> Number:
        several = self.scalars.lanes
        if parts_of(self.loop.arrays[name].dtype) is None and not self.has_lanes(name):
            several = 1
        return load_number(self.w, self.loop.arrays[name].dtype, pointer, offset, several)

    # The function

    def kernel(self) -> Kernel:
        self.begin_steps()
        self.prepare_channels()
        self.ahead = self.rows_ahead()
        self.write_loop()
        # Memory is read and written faster in short vectors: long ones cross lines of the cache.
        is_cheap = is_cheap_step(self.loop.op)
        return self.whole_kernel(Kernel.register if is_cheap else register_bytes())

    # Before the first step

    def prepare_channels(self) -> None:
        """Write the bounds of all loops over channels, and whether their items lie side by side."""
        loop, w = self.loop, self.w
        self.low: list[Value] = []
        self.high: list[Value] = []
        for number, level in enumerate(loop.axes_of_loops):
            low, high = w.as_value(0, INT64), self.length(number)
            if level == 0:
                low, high = self.own_part(high)
            self.low.append(low)
            self.high.append(high)
        last = loop.layout.ndim - 1
        self.fast: Value = w.constant(True, BOOL)
        for name, array in loop.arrays.items():
            if array.is_output or last not in array.axes:
                continue
            axis = array.axes.index(last) + array.lead
            plain = self.given_stride(name, axis).equals(array.itemsize)
            self.fast = self.fast & (plain | (self.dim(name, axis) <= 1))

    # Strips of steps

    def steps_to(self, end: Value) -> None:
        if self.strip_steps == 1:
            super().steps_to(end)
        elif has_short_rows(self.loop.op):
            self.strips_to(end)
        else:
            w, is_short = self.w, self.w.as_value(True, BOOL)
            for start in self.loop.starts.values():
                is_short = is_short & (self.value_of(start.row) <= LONGEST_STRIP_ROW)
            with w.when(is_short) as choice:
                self.strips_to(end)
            with w.otherwise(choice):
                super().steps_to(end)

    def strips_to(self, end: Value) -> None:
        """Write all steps, strip by strip."""
        w, length = self.w, self.out.number(self.words.steps_per_poll, "steps_per_poll")
        with between_polls(w, self.done, end, length) as (first, last):
            start, most = w.local(first), self.strip_steps
            self.in_strips = True
            with w.loop_while(lambda: w.copy(start) < last):
                one = w.copy(start)
                self.strip = one, w.select(last - one < most, last, one + most)
                self.fetch_strip()
                with self.scalars.scope():
                    self.level(0, self.loop.plan.targets)
                w.assign(start, self.strip[1])
            self.in_strips = False

    def fetch_strip(self) -> None:
        """Ask for the rows that later strips read and write."""
        if self.ahead is None:
            return
        with self.w.when(self.ahead > 0), self.w.loop(*self.strip) as i:
            self.be_at(i)
            self.fetch_rows()

    def take_strip(self, targets: Sequence[Target]) -> None:
        """Write the steps of some channels, whose states are in registers meanwhile."""
        loop, w = self.loop, self.w
        first, last = self.strip
        names = [name for name in loop.depths if name not in self.registers]

        def places(i: Value, name: str) -> list[Value | int]:
            """Return where the values are that the step `i` reads."""
            self.be_at(i)
            rows = [self.row_of(name, -k) for k in range(1, loop.depths[name] + 1)]
            return [self.item_offset(name, row) for row in rows]

        before, cells = self.registers, {}
        for name in names:
            memory = self.memory_of(name)
            values = [self.load(name, memory, place) for place in places(first, name)]
            cells[name] = [Cell(w, value) for value in values]
        self.registers = before | cells
        try:
            with w.loop(first, last) as i, self.scalars.scope():
                self.be_at(i)
                self.rows = self.rows_of_step()
                self.compute(loop.layout.ndim, targets)
                self.write_values([(t, self.scalars.number(t.value)) for t in targets])
        finally:
            self.registers = before
        for name in names:
            if not loop.is_traced(name):
                for cell, place in zip(cells[name], places(last, name), strict=True):
                    store_number(w, self.memory_of(name), place, cell.value)

    # One step

    def step(self) -> None:
        loop = self.loop
        self.rows = self.rows_of_step()
        self.fetch_rows()
        for target in loop.plan.targets:
            if target.kind == "output" and target.reduced and not target.collected:
                self.clear(target)
        with self.scalars.scope():
            self.level(0, loop.plan.targets)

    def rows_of_step(self) -> dict[str | tuple[str, int], Value]:
        """Write where the rows of this step are, by what they are of."""
        loop = self.loop
        outputs = [f"z{i}" for i in range(loop.signature.n_outputs)]
        rows: dict[str | tuple[str, int], Value] = {
            name: self.t * self.stride_of(name, 0) for name in (*loop.outer.sequences, *outputs)
        }
        for name, offset in loop.taps.values():
            if loop.is_traced(name) or name not in self.registers:
                rows.setdefault(name, self.row_of(name, 0))
            if name not in self.registers:
                rows[name, offset] = self.row_of(name, offset)
        return rows

    def rows_ahead(self) -> Value | None:
        """Write how many rows ahead the arrays are asked for, 0 for not at all."""
        if foresees_rows():
            return None
        loop, w = self.loop, self.w
        self.streams: dict[str, Value] = {}
        for name, array in loop.arrays.items():
            walked = name in loop.outer.sequences or name[0] == "z" or loop.is_traced(name)
            if not walked or not any(axis is not None for axis in array.axes):
                continue
            size = self.value_of(array.row)
            stride = self.stride_of(name, 0)
            dense = stride.equals(size) | stride.equals(-size)
            self.streams[name] = w.select(dense & (size >= LINE), size, 0)
        if not self.streams:
            return None
        return w.select(self.fast, rows_ahead(w, self.steps, list(self.streams.values())), 0)

    def fetch_rows(self) -> None:
        """Ask for the rows that later steps read and write."""
        if self.ahead is None:
            return
        w = self.w
        with w.when(self.ahead > 0):
            row = self.t - self.ahead if self.loop.reverse else self.t + self.ahead
            for name, size in self.streams.items():
                first = row * self.stride_of(name, 0)
                with w.loop(*self.own_part(size), LINE) as place:
                    w.prefetch(self.data(name), first + place)

    # Loops over channels

    def clear(self, target: Target) -> None:
        """Write zeros where a sum over outer axes will be collected."""
        w, name = self.w, target.array
        with ExitStack() as stack:
            for axis in range(max(target.kept, default=-1) + 1):
                number = self.loop.loops.get((id(target), axis))
                index: Value = w.constant(0, INT64)
                if axis in target.kept and number is not None:
                    index = stack.enter_context(w.loop(self.low[number], self.high[number]))
                self.indices.append(index)
            zero = self.scalars.constant(0, target.value.type.dtype)
            store_number(w, self.data(name), self.item_offset(name, self.rows[name]), zero)
        self.indices = []

    def level(self, level: int, targets: Sequence[Target]) -> None:
        """Write what `level` loops enclose, and the loops inside."""
        loop, w = self.loop, self.w
        if self.in_strips and level == loop.layout.ndim:
            self.take_strip(targets)
            return
        here = [target for target in targets if target.inner == level]
        self.compute(level, targets)
        if level == 0 and loop.result.stop is not None:
            stop = self.scalars.truth(self.scalars.number(loop.result.stop))
            w.assign(self.stopped, stop)
        totals = [t for t in targets if t.collected and t.level == level]
        for target in totals:
            zero = self.scalars.constant(0, self.wide(target))
            lanes = lane_counts(self.lanes_of([target], target.inner - 1))
            self.totals[id(target)] = Total(w, zero, lanes)
        values = [self.scalars.number(target.value) for target in here]
        for group in loop.plan.groups(targets, level):
            self.loop_over(level, group)
        self.write_values(list(zip(here, values, strict=True)))
        for target in totals:
            whole = self.totals[id(target)].after()
            value = self.scalars.number_as(whole, target.value.type.dtype)
            if target.kind == "sum":
                value = added(self.read_place(target), value)
            self.write_place(target, value)

    def loop_over(self, level: int, group: list[Target]) -> None:
        """Write the loop over the channels of one group of results."""
        loop, w = self.loop, self.w
        number = loop.loops.get((id(group[0]), level))

        def write(index: Value, lanes: int) -> None:
            self.indices.append(index)
            try:
                with self.scalars.taking(lanes):
                    self.level(level + 1, group)
            finally:
                self.indices.pop()

        if number is None:
            write(w.constant(0, INT64), 1)
            return
        low, high = self.low[number], self.high[number]
        lanes, most = lane_counts(self.lanes_of(group, level)), w.select(self.fast, high, low)
        walk(w, low, high, lanes, write, most)

    def lanes_of(self, group: list[Target], level: int) -> int:
        """Return how many channels a loop takes at once."""
        loop = self.loop
        if level != loop.layout.ndim - 1 or any(target.inner > level + 1 for target in group):
            return 1
        widest = 1
        for variable in ancestors([target.value for target in group]):
            if variable.type.dtype.startswith("complex"):
                return 1
            widest = max(widest, np.dtype(variable.type.dtype).itemsize)
        for target in group:
            if target.adds and level not in target.kept and not target.collected:
                return 1  # adds to one place at every pass
            if not target.adds and level not in target.kept:
                return 1  # a result without these channels
        return REGISTER // widest

    # Values

    def compute(self, level: int, targets: Sequence[Target]) -> None:
        """Write the reads and the values that `level` loops enclose."""
        loop = self.loop
        wanted = [target.value for target in targets]
        if loop.result.stop is not None and level == 0:
            wanted.append(loop.result.stop)
        above = set(ancestors(wanted))
        for variable in loop.graph.inputs:
            if variable in above and self.level_of(variable) == level:
                self.read(variable)
        self.scalars.emit(
            (
                out
                for node in loop.graph.toposort()
                for out in node.outputs
                if self.level_of(out) == level and out in above
            ),
            self.write_fused,
        )

    def write_fused(self, node: Apply) -> bool:
        """Write ``a h + b`` in a strip, or of complex numbers, as one operation, which later steps
        wait for; return whether it is such a sum of a state."""
        dtype, taps = node.outputs[0].type.dtype, self.loop.taps
        is_complex = dtype.startswith("complex")
        may_fuse = (self.in_strips or is_complex) and not self.loop.op.exact
        if not may_fuse or type(node.op) is not Add or len(node.inputs) != 2:
            return False
        for product, addend in permutations(node.inputs):
            inner = product.owner
            if inner is None or type(inner.op) is not Mul or len(inner.inputs) != 2:
                continue
            is_read_once = len(self.loop.graph.clients[product]) == 1
            is_in_dtype = product.type.dtype == dtype and (is_complex or dtype in FLOATS)
            if is_read_once and is_in_dtype and not taps.keys().isdisjoint(inner.inputs):
                factors = [self.scalars.number(v) for v in (*inner.inputs, addend)]
                wide = [self.scalars.number_as(self.scalars.spread(v), dtype) for v in factors]
                self.scalars.bind(node.outputs[0], times_plus(self.w, *wide))
                return True
        return False

    def level_of(self, variable: Variable) -> int:
        """Return how many loops over channels enclose a value; steps of strips are inside all."""
        if self.in_strips and variable in self.varying:
            return self.loop.layout.ndim
        return self.loop.plan.levels[variable]

    def read(self, variable: Variable) -> None:
        """Write the read of one input of the body."""
        if isinstance(variable, Constant) or variable in self.scalars.values:
            return
        name, offset = self.loop.taps.get(variable) or (self.given_as[variable], None)
        if name in self.registers and offset is not None:
            value = self.registers[name][-offset - 1].value
        else:
            row = self.rows.get(name, 0) if offset is None else self.rows[name, offset]
            value = self.load(name, self.memory_of(name), self.item_offset(name, row))
        self.scalars.bind(variable, value)

    def place_of(self, target: Target) -> tuple[Value, Value | int]:
        """Return where a result is kept."""
        name = target.array
        return self.memory_of(name), self.item_offset(name, self.rows.get(name, 0))

    def read_place(self, target: Target) -> Number:
        if target.array in self.registers:
            return self.registers[target.array][0].value
        return self.load(target.array, *self.place_of(target))

    def write_place(self, target: Target, value: Number) -> None:
        name = target.array
        if name not in self.registers or self.loop.is_traced(name):
            store_number(self.w, *self.place_of(target), value)
        if name in self.registers:
            self.push(name, value)

    def write_values(self, values: list[tuple[Target, Number]]) -> None:
        """Write what becomes of values: everything is read before anything is replaced."""
        for target, value in values:
            if target.collected:
                value = self.scalars.number_as(value, self.wide(target))
                self.totals[id(target)].add(self.scalars.spread(value))
                continue
            spread = self.scalars.spread(value)
            if target.adds:
                spread = added(self.read_place(target), spread)
            self.write_place(target, spread)

    def wide(self, target: Target) -> str:
        """Return the dtype in which a sum over channels is collected, as PyTensor's sums are."""
        dtype = target.value.type.dtype
        return "float64" if dtype == "float32" else dtype
