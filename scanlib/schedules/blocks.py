"""Blocks of steps of one channel: elements, scan, map.

A loop of one channel, or of a few, whose parts all belong to recurrence classes is run in blocks of
steps. The channels of a block take turns:

1. the elements of a recurrence are computed for all steps of the block, several at once;
2. a kernel scans them from the state before the block (`scanlib.recurrences`); where
   composing steps is not safe, the block is run step by step instead;
3. what depends on the states (histories, outputs, sums) is computed for all steps of the block,
   again several at once. A sum over the steps has a total in each lane.

Buffers hold one block, so that they stay in the first-level cache; nothing but what the loop
returns is stored for all steps. A traced state of one channel is scanned where its history is
stored; other parts have a buffer with the values before the block in front (behind, where the loop
walks backwards). Between blocks, the values before the next one are in the output that is the
part's result: so the blocks of several channels can take turns.

Of a part whose sum comes first (`scanlib.ops.lowered.sums_first`), the sums are scanned: where they
are an output of one channel, in the output, else in a buffer. Its own value is a number.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib.kernels import language
from scanlib.kernels.language import (
    BOOL,
    FLOATS,
    INT64,
    POINTER,
    Block,
    Kernel,
    Scratch,
    Value,
    Writer,
)
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.scalars import Number, real
from scanlib.kernels.spans import (
    LINE,
    Cell,
    Items,
    Same,
    Span,
    Total,
    itemsize,
    load_number,
    store_number,
)
from scanlib.ops.lowered.elemwise_scan import Recurrence
from scanlib.ops.lowered.sums_first import sums_first
from scanlib.recurrences import CLASSES, affine
from scanlib.recurrences.block_scans import History, StepBlock, Steps
from scanlib.recurrences.coupled import scan_coupled
from scanlib.schedules.elementwise import ElemwiseLoop
from scanlib.schedules.loop_kernels import TableReader, write_result
from scanlib.schedules.polls import between_polls
from scanlib.schedules.quotients import Quotients, quotients_in
from scanlib.schedules.selection import BLOCK
from scanlib.schedules.shared_values import StepGraph, shared_values

BLOCKS_PER_POLL = 8
MOST_ON_STACK = 1 << 16  # bytes of buffers
UNROLLED = 4  # steps of a pass over numbers that lie apart

# Reads a variable at a step, or at several side by side, of the block.
Reader = Callable[[Value, int], Number]
# A value of a step, the dtype in which it is kept, and what keeps it, given a step.
Goal = tuple[Variable, str, Callable[[Value, Number], None]]


class Buffers:
    """Memory for one block: on the stack, or, if there is much of it, in the workspace."""

    def __init__(self, w: Writer) -> None:
        self.w = w
        self.pointer = Value(POINTER, w.name("m"), w)
        self.size = 0
        self.block, self.place = w.block, len(w.block.statements)

    def span(self, dtype: str, items: int) -> Span:
        """Return memory for so many numbers."""
        span = Span(self.w, dtype, self.pointer, self.size)
        # Not a multiple of 4096 bytes apart, where processors take one place for another.
        self.size += -(-items * itemsize(dtype) // LINE) * LINE + 3 * LINE
        return span

    def define(self, workspace: Callable[[], tuple[Value, Value]]) -> int:
        """Write where the memory is; return how much of it is in the workspace.

        `workspace` writes an address and how many bytes after it this part's memory starts.
        """
        before, fits = Block(), self.size <= MOST_ON_STACK
        with self.w.inside(before):
            if fits:
                before.statements.append(Scratch(self.pointer, "uint8", max(self.size, 1)))
            else:
                before.statements.append(language.Apply(self.pointer, "offset", workspace()))
        self.block.statements[self.place : self.place] = before.statements
        return 0 if fits else self.size


class BlocksRun(TableReader[ElemwiseLoop]):
    """Writes the kernel that takes the steps in blocks."""

    def __init__(self, loop: ElemwiseLoop) -> None:
        super().__init__(loop, "blocks")
        self.reverse, self.inner, self.result = loop.reverse, loop.inner, loop.result
        values = [*self.result.states, *self.result.carries]
        self.nexts = {part: values[part] for r in loop.op.recurrences for part in r.parts}
        self.names = list(loop.depths)
        self.taps = {tap: (self.names.index(name), k) for tap, (name, k) in loop.taps.items()}
        self.sums_first = sums_first(loop.op, loop.graph)
        scanned = [part for part in self.nexts if part not in self.sums_first]
        self.depths = {part: loop.depths[self.names[part]] for part in scanned}
        self.size = max([BLOCK, *self.depths.values()])
        self.sums = [i for i, is_sum in enumerate(loop.layout.sums) if is_sum]
        self.indices: list[Value] = []
        self.elements: dict[tuple[int, int], Items] = {}
        self.kept: dict[int, Cell] = {}
        # Of the elements of each recurrence, and of what depends on the states.
        self.graphs = [*map(self.graph_of_elements, range(len(loop.op.recurrences)))]
        self.graphs.append(self.graph_of_map())
        self.shared_in = shared_values(self.graphs, self.inner)

    # What is where

    def is_direct(self, part: int) -> bool:
        """Whether a part is scanned in its history; others are in a buffer of one block."""
        return self.is_traced(part) and not self.loop.layout.ndim

    def is_traced(self, part: int) -> bool:
        return self.loop.is_traced(self.names[part])

    def keeps_latest(self, part: int) -> bool:
        """Whether a block leaves the latest values of a part where the next one finds them."""
        return not self.is_traced(part)

    def output_of_sums(self, part: int) -> int | None:
        """Return the output that is the sums of a part, if these can be scanned there."""
        total = self.sums_first[part].total
        outputs = self.result.outputs if not self.loop.layout.ndim else []
        return next((k for k, value in enumerate(outputs) if value is total), None)

    def dtype_of(self, part: int) -> str:
        return self.loop.arrays[self.names[part]].dtype

    def prepare_buffers(self) -> None:
        """Reserve the memory of one block."""
        self.buffers = buffers = Buffers(self.w)
        loop, size = self.loop, self.size
        self.row_buffers = [buffers.span(row.type.dtype, size) for row in self.inner.rows]
        self.values = {
            part: buffers.span(self.dtype_of(part), size + depth)
            for part, depth in self.depths.items()
            if not self.is_direct(part)
        }
        self.totals = {
            part: buffers.span(self.dtype_of(part), size)
            for part in self.sums_first
            if self.output_of_sums(part) is None
        }
        self.output_buffers = (
            [buffers.span(value.type.dtype, size) for value in self.result.outputs]
            if loop.layout.ndim
            else []
        )
        self.shared: dict[int, Span] = {}
        for own in self.shared_in:
            for value, number in own.items():
                if number not in self.shared:
                    self.shared[number] = buffers.span(value.type.dtype, size)
        self.varying: dict[tuple[int, int], Span] = {}
        for number, recurrence in enumerate(loop.op.recurrences):
            graph = self.graphs[number]
            for k, out in enumerate(graph.outputs):
                read = {v for v in ancestors([out]) if v.owner is None}
                if any(not isinstance(v, Constant) for v in read - set(self.inner.non_sequences)):
                    dtype = self.dtype_of(recurrence.parts[0])
                    self.varying[number, k] = buffers.span(dtype, size)

    def own_memory(self) -> tuple[Value, Value]:
        """Write where the workspace is, and how far into it this part's memory begins."""
        part = self.out.number(self.words.part, "part")
        return self.workspace, part * self.buffers.size + self.value_of(self.loop.end_of_rings)

    def offset(self, name: str, lead: int) -> Value | int:
        """Return where the item of the channel is in a row of an array."""
        place: Value | int = 0
        for own, axis in enumerate(self.loop.arrays[name].axes):
            if axis is not None and axis < len(self.indices):
                place = self.indices[axis] * self.stride_of(name, own + lead) + place
        return place

    def number_of(self, name: str) -> Number:
        """Return the item of the channel of an array without rows."""
        dtype = self.loop.arrays[name].dtype
        return load_number(self.w, dtype, self.data(name), self.offset(name, 0))

    def place_of_value(self, part: int, row: Value | int) -> tuple[Value, Value | int]:
        """Return where a part's values outside of the block are: those before it, and after.

        `row` is a row of its history, or of its latest values where there is none.
        """
        array = self.loop.arrays[self.names[part]]
        at = self.w.as_value(row, INT64) * self.stride_of(array.name, 0) if array.lead else 0
        return self.data(array.name), at + self.offset(array.name, array.lead)

    # The kernel

    def kernel(self) -> Kernel:
        w = self.w
        self.steps = self.out.number(self.words.steps, "steps")
        self.prepare_buffers()
        if not self.loop.layout.ndim:
            self.write_constants()
        self.write_blocks(w.constant(0, INT64), self.steps)
        write_result(self, self.steps, self.steps)
        return self.finished()

    def finished(self) -> Kernel:
        """Return the kernel that was written."""
        self.loop.block_bytes = self.buffers.define(self.own_memory)
        return self.whole_kernel(register_bytes())

    def write_blocks(self, first: Value, last: Value) -> None:
        """Write the loop over the blocks of some steps."""
        w, done = self.w, self.w.local(first)
        length = BLOCKS_PER_POLL * self.size
        with (
            between_polls(w, done, last, length) as (start, end),
            w.loop(start, end, self.size) as i,
        ):
            self.write_steps(i, last)

    def write_steps(self, i: Value, last: Value) -> None:
        """Write the block that begins with a step."""
        w, loop = self.w, self.loop
        self.i, left = i, last - i
        self.n = w.select(left < self.size, left, self.size)
        self.low = self.steps - i - self.n if self.reverse else i
        with ExitStack() as stack:
            for axis in range(loop.layout.ndim):
                number = loop.loops.get((id(loop.plan.targets[0]), axis))
                size = w.constant(1, INT64) if number is None else self.length(number)
                self.indices.append(stack.enter_context(w.loop(0, size)))
            with self.scalars.scope():
                if loop.layout.ndim:
                    self.write_constants()
                self.write_block()
        self.indices = []

    def write_block(self) -> None:
        """Write one block of one channel."""
        w = self.w
        self.safe = w.local(True, BOOL)
        self.write_views()
        self.block = StepBlock(w, self.n, self.reverse, self.ahead())
        self.late: dict[int, Value] = {}
        self.write_shared()
        for number, recurrence in enumerate(self.loop.op.recurrences):
            self.write_recurrence(number, recurrence)
            if self.block.ahead:  # the first scan asks for all
                self.block = StepBlock(w, self.n, self.reverse)
        with w.when(w.copy(self.safe)) as choice:
            for part, value in self.late.items():
                self.kept[part].value = value
        with w.otherwise(choice):
            self.write_one_by_one()
        self.write_map()
        self.move_on()

    def trust(self, fine: Value) -> None:
        self.w.assign(self.safe, self.w.copy(self.safe) & fine)

    # Views

    def write_constants(self) -> None:
        """Read what a channel keeps for all steps, and compute its elements that never change."""
        loop = self.loop
        for variable, name in zip(self.inner.non_sequences, loop.outer.non_sequences, strict=True):
            self.scalars.bind(variable, self.number_of(name))
        for number, recurrence in enumerate(loop.op.recurrences):
            with self.scalars.scope():
                for k, out in enumerate(self.graphs[number].outputs):
                    if (number, k) not in self.varying:
                        self.scalars.emit([out])
                        dtype = self.dtype_of(recurrence.parts[0])
                        value = self.scalars.number_as(self.scalars.number(out), dtype)
                        self.elements[number, k] = Same(self.w, value)

    def write_views(self) -> None:
        """Write where the rows, histories and outputs of the block are, and what is before it."""
        loop, w = self.loop, self.w
        self.rows = {row: self.row_span(i) for i, row in enumerate(self.inner.rows)}
        for part in self.sums_first:
            before = load_number(w, self.dtype_of(part), *self.place_of_value(part, 0))
            self.kept[part] = Cell(w, before)
        self.histories: dict[int, History] = {}
        for part, depth in self.depths.items():
            if self.is_direct(part):
                self.histories[part] = self.history_of(part)
            else:
                self.histories[part] = History(self.values[part], depth, self.reverse)
                self.read_values_before(part, depth)
        self.outputs = self.output_buffers or [
            Span(w, array.dtype, self.data(array.name), self.low * array.itemsize)
            for array in loop.arrays.values()
            if array.is_output and array.name[0] == "z"
        ]
        for part in self.sums_first:
            output = self.output_of_sums(part)
            if output is not None:
                self.totals[part] = self.outputs[output]

    def row_span(self, i: int) -> Span:
        """Return the rows of a sequence in this block: where they are, or a copy side by side."""
        w, name = self.w, self.loop.outer.sequences[i]
        own, stride = self.row_buffers[i], self.stride_of(name, 0)
        start = self.low * stride + self.offset(name, 1)
        apart = stride.differs(own.itemsize)
        with w.when(apart):
            for j in self.each_step():
                own.store(j, load_number(w, own.dtype, self.data(name), start + j * stride))
        pointer = w.select(apart, own.pointer, self.data(name))
        return Span(w, own.dtype, pointer, w.select(apart, own.start, start))

    def history_of(self, part: int) -> History:
        """Return where the loop's history of a part has the block, and what is before it."""
        dtype = self.dtype_of(part)
        values = Span(self.w, dtype, self.data(f"h{part}"), self.low * itemsize(dtype))
        return History(values, self.depths[part], self.reverse)

    def read_values_before(self, part: int, depth: int) -> None:
        """Write the copy of the values before the block to the part's buffer."""
        w = self.w
        with w.loop(0, depth) as k:
            row: Value = k
            if not self.keeps_latest(part):
                row = self.low + (self.n + k if self.reverse else k)
            value = load_number(w, self.dtype_of(part), *self.place_of_value(part, row))
            self.values[part].store(self.n + k if self.reverse else k, value)

    def ahead(self) -> tuple[Span, ...]:
        """Return what the next block reads and writes; the rows of several channels lie apart."""
        if self.loop.layout.ndim:
            return ()
        direct = [own.values for part, own in self.histories.items() if self.is_direct(part)]
        move = -self.n if self.reverse else self.n
        return tuple(span.moved(move) for span in (*self.rows.values(), *self.outputs, *direct))

    def value(self, part: int, offset: int, j: Value, count: int = 1) -> Number:
        """Read the values of a part, `offset` steps after some steps of the block."""
        if part in self.sums_first:
            return self.kept[part].value
        return self.histories[part].at(offset).load(j, count)

    # All steps of a block at once

    def steps_at_once(self, outputs: Iterable[Variable]) -> int:
        """Return how many steps fill a register with numbers of the widest dtype."""
        dtypes = {variable.type.dtype for variable in ancestors(list(outputs))}
        widest = max((np.dtype(dtype).itemsize for dtype in dtypes), default=8)
        return register_bytes() // widest

    def bind_read(self, outputs: list[Variable], known: dict[Variable, Reader], j: Value) -> None:
        """Bind what some variables are computed from at some steps.

        `known` are variables that have been computed.
        """
        count = self.scalars.lanes
        above = dict.fromkeys(ancestors(outputs, blockers=set(known)))  # in the same order always
        for variable, read in known.items():
            if variable in above:
                self.scalars.bind(variable, read(j, count))
        for variable in above:
            if variable.owner is not None or variable in self.scalars.values:
                continue
            if variable in self.taps:
                self.scalars.bind(variable, self.value(*self.taps[variable], j, count))
            elif variable in self.rows:
                self.scalars.bind(variable, self.rows[variable].load(j, count))

    # What is computed once for the elements and for what depends on the states

    def graph_of_elements(self, number: int) -> StepGraph:
        """Return what the scan of a recurrence needs: its elements, the addend in the place of the
        constant where the sum comes first."""
        recurrence = self.loop.op.recurrences[number]
        outputs, scanned = self.loop.op.elements_of(number, self.loop.graph.inputs)
        first = self.sums_first.get(recurrence.parts[0])
        if first is not None:
            (constant,) = recurrence.constants
            assert constant is not None
            outputs[constant] = first.addend
        return StepGraph(outputs, scanned)

    def graph_of_map(self) -> StepGraph:
        """Return what is computed when the states are known; sums are scanned as well."""
        scanned = {found.total: part for part, found in self.sums_first.items()}
        scanned |= {self.nexts[part]: part for part in self.depths if self.nexts[part].owner}
        wanted = [*self.addends().values(), *self.mapped_outputs().values()]
        return StepGraph(wanted, scanned)

    def readers(self, number: int) -> dict[Variable, Reader]:
        """Return what reads the values that a graph finds: those that are scanned, and shared."""
        found: dict[Variable, Reader] = {}
        for value, part in self.graphs[number].scanned.items():
            own = self.totals.get(part)
            found[value] = partial(self.value, part, 0) if own is None else own.load
        return found | {value: self.shared[k].load for value, k in self.shared_in[number].items()}

    def write_shared(self) -> None:
        """Write what elements and map, or several recurrences, compute alike."""
        left = set(self.shared)
        for own in self.shared_in:
            computed = {k: value for value, k in own.items() if k in left}
            left -= set(computed)
            goals = [(v, self.shared[k].dtype, self.shared[k].store) for k, v in computed.items()]
            self.write_values(goals, {})

    def write_elements(self, number: int) -> None:
        """Write the elements of a recurrence for all steps of the block."""
        graph = self.graphs[number]
        goals: list[Goal] = []
        for k, out in enumerate(graph.outputs):
            own = self.varying.get((number, k))
            is_read = out in self.taps or out in self.rows
            if own is not None and is_read and out.type.dtype == own.dtype:
                self.elements[number, k] = self.view(out)
            elif own is not None:
                self.elements[number, k] = own
                goals.append((out, own.dtype, own.store))
        self.write_values(goals, self.readers(number))

    def write_values(
        self, goals: Sequence[Goal], known: dict[Variable, Reader], totals: Iterable[Total] = ()
    ) -> None:
        """Write some values for all steps of the block, and keep them.

        Quotients are computed without divisions, and if they are wrong, everything once more, from
        `totals` of nothing.
        """
        if not goals:
            return
        wanted = [value for value, _, _ in goals]
        count = self.steps_at_once(wanted)

        def write(j: Value, lanes: int, *special: Callable[[Apply], bool]) -> None:
            with self.scalars.taking(lanes):
                self.bind_read(wanted, known, j)
                self.scalars.emit(wanted, *special)
                for value, dtype, keep in goals:
                    number = self.scalars.spread(self.scalars.number(value))
                    keep(j, self.scalars.number_as(number, dtype))

        with self.scalars.scope():
            divisions = quotients_in(wanted, known, self.inner.non_sequences)
            quotients = Quotients(self.w, self.scalars, divisions, count)
            self.block.for_all(count, lambda j, lanes: write(j, lanes, quotients.write))
            if divisions:
                with self.w.when(quotients.are_wrong()):
                    for total in totals:
                        total.clear()
                    self.block.for_all(count, write)

    def view(self, own: Variable) -> Span:
        """Return the values of a row or a past value during the block."""
        if own in self.rows:
            return self.rows[own]
        part, offset = self.taps[own]
        return self.histories[part].at(offset)

    # Scans

    def write_recurrence(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of one recurrence, from its elements."""
        self.write_elements(number)
        part, (terms, *more) = recurrence.parts[0], recurrence.terms
        known, dtype = CLASSES[recurrence.family], self.dtype_of(part)
        single = not more and len(terms) == 1 and terms[0].tap == -1
        if single and (dtype in FLOATS or not known.is_real):
            if part in self.sums_first:
                self.write_sums_first(number, recurrence)
            else:
                self.trust(known.scan(self.block, self.steps_of(number, recurrence)))
        elif recurrence.family == "affine":
            elements = {k: own for (n, k), own in self.elements.items() if n == number}
            read = self.parts_read()
            self.trust(scan_coupled(self.block, recurrence, elements, self.histories, read))
        else:
            self.w.assign(self.safe, False)

    def parts_read(self) -> set[int]:
        """Return the parts of which more is read than what is before and after the block."""
        read = {part for part in self.depths if self.is_traced(part)}
        read |= {part for part, depth in self.depths.items() if depth > 1}
        for graph in self.graphs:
            for variable in ancestors(graph.outputs, blockers=set(graph.scanned)):
                if variable in graph.scanned:
                    read.add(graph.scanned[variable])
                elif variable in self.taps:
                    read.add(self.taps[variable][0])
        return read

    def chosen_elements(self, number: int, recurrence: Recurrence) -> tuple[Items | None, ...]:
        """Return the elements of a recurrence of one state, None where it has none."""
        places = (recurrence.terms[0][0].coefficient, *recurrence.constants)
        return tuple(None if k is None else self.elements[number, k] for k in places)

    def steps_of(self, number: int, recurrence: Recurrence) -> Steps:
        """Return the steps of a recurrence of one state."""
        (part,) = recurrence.parts
        own, dtype = self.histories[part], self.dtype_of(part)
        return Steps(
            elements=self.chosen_elements(number, recurrence),
            h=own.at(0),
            before=own.at(-1).real(self.block.step(self.w.constant(0, INT64))),
            old=own.at(-1),
            buffer=lambda: self.buffers.span(dtype, self.size),
        )

    def write_sums_first(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of the sums of a state and its addend."""
        part, elements = recurrence.parts[0], self.chosen_elements(number, recurrence)
        steps = Steps(elements, self.totals[part], real(self.kept[part].value))
        self.late[part], fine = affine.scan(self.block, steps, sum_first=True)
        self.trust(fine)

    # One step after the other

    def write_one_by_one(self) -> None:
        """Write the block step by step, with the body as it is."""
        w = self.w
        totals = {part: found.total for part, found in self.sums_first.items()}
        wanted = [*self.nexts.values(), *totals.values()]
        with w.loop(0, self.n) as k, self.scalars.scope():
            j = self.n - 1 - k if self.reverse else k
            self.bind_read(wanted, {}, j)
            self.scalars.emit(wanted)
            for part, total in totals.items():
                self.totals[part].store(j, self.scalars.number(total))
            values = [(part, self.scalars.number(value)) for part, value in self.nexts.items()]
            for part, value in values:
                value = self.scalars.number_as(value, self.dtype_of(part))
                if part in self.sums_first:
                    self.kept[part].value = value
                else:
                    self.histories[part].at(0).store(j, value)

    # What depends on the states

    def write_map(self) -> None:
        """Write the sums and outputs for all steps of the block."""
        w = self.w
        outputs, addends = self.mapped_outputs(), self.addends()
        lanes = [self.steps_at_once([*addends.values(), *outputs.values()])]
        goals: list[Goal] = []
        sums: dict[int, Total] = {}

        def adds_to(total: Total) -> Callable[[Value, Number], None]:
            return lambda j, number: total.add(number)

        for i, addend in addends.items():
            dtype = self.inner.carries[i].type.dtype
            zero = self.scalars.constant(-0.0 if dtype in FLOATS else 0, dtype)
            sums[i] = Total(w, zero, lanes)
            goals.append((addend, dtype, adds_to(sums[i])))
        goals += [(v, self.outputs[k].dtype, self.outputs[k].store) for k, v in outputs.items()]
        self.write_values(goals, self.readers(-1), sums.values())
        for i, total in sums.items():
            place = self.place_of_value(self.loop.signature.n_states + i, 0)
            old = load_number(w, self.inner.carries[i].type.dtype, *place)
            store_number(w, *place, total.after(old))

    def mapped_outputs(self) -> dict[int, Variable]:
        """Return the outputs that no scan writes."""
        scanned = {self.output_of_sums(part) for part in self.sums_first}
        return {k: v for k, v in enumerate(self.result.outputs) if k not in scanned}

    def addends(self) -> dict[int, Variable]:
        return {i: self.result.carries[i] for i in self.sums}

    def move_on(self) -> None:
        """Write what the block leaves: histories and outputs of channels, the latest values."""
        w = self.w
        for part, cell in self.kept.items():
            store_number(w, *self.place_of_value(part, 0), cell.value)
        for part, depth in self.depths.items():
            if self.keeps_latest(part):
                with w.loop(0, depth) as k:
                    value = self.values[part].load(k if self.reverse else self.n + k)
                    store_number(w, *self.place_of_value(part, k), value)
            elif not self.is_direct(part):
                first = 0 if self.reverse else depth
                for j in self.each_step():
                    value = self.values[part].load(j + first)
                    store_number(w, *self.place_of_value(part, self.low + j + first), value)
        for number, output in enumerate(self.output_buffers):
            name = f"z{number}"
            for j in self.each_step():
                at = (self.low + j) * self.stride_of(name, 0) + self.offset(name, 1)
                store_number(w, self.data(name), at, output.load(j))

    def each_step(self) -> Iterator[Value]:
        """Write loops over the steps of the block, a few in one pass; yield each."""
        w, done = self.w, self.n & -UNROLLED
        with w.loop(0, done, UNROLLED) as first:
            yield from (first + k for k in range(UNROLLED))
        with w.loop(done, self.n) as j:
            yield j
