r"""Loops whose steps work on arrays, and graphs of arrays without loops, as programs.

A loop takes one step after the other. Rows of sequences and histories are where they are in the
loop's inputs and outputs, results of a step in a workspace that all steps use
(`scanlib.kernels.arrays`); what a result of the loop is made of is computed where it belongs.
States and carries that are numbers live in local variables. Any other carry has two buffers, its
output and one in the workspace, which change roles from step to step, so that no step writes what
it reads; it keeps its size.

The nodes of a graph, which stands around the loops of a function, are written as those of a step
are, once. Inputs whose items are not in order of memory are copied, once, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.subtensor import Subtensor

from scanlib._compat import INDEX_WRITES, thaw_graph
from scanlib.kernels.arrays import (  # noqa: F401  (their rules)
    algebra,
    blockwise,
    gathers,
    views,
)
from scanlib.kernels.arrays.array_step import RULES, Destination, Step, core_op, overwrites
from scanlib.kernels.arrays.meanings import inline, stands_for_others
from scanlib.kernels.arrays.nests import deliver, write_copy
from scanlib.kernels.arrays.places import Place, Workspace
from scanlib.kernels.arrays.sizes import (
    Check,
    Given,
    Size,
    Sizes,
    SizeValues,
    combined,
    product,
    total,
)
from scanlib.kernels.language import BOOL, INT64, POINTER, Block, Kernel, Type, Value
from scanlib.kernels.program import (
    UNFIT,
    ArrayType,
    Kernels,
    LoopProgram,
    Output,
    TableKernel,
    Words,
)
from scanlib.kernels.scalars import Scalars
from scanlib.kernels.spans import Cell, itemsize, load_number, store_number
from scanlib.ops.scan import Scan
from scanlib.schedules.elementwise import (
    REGISTER_DEPTH,
    Array,
    Checks,
    Loop,
    Start,
    Storage,
    TableReader,
    Tables,
)
from scanlib.schedules.step_by_step import TakesSteps
from scanlib.schedules.turns import steps_of_a_turn

LONGEST_TURN = 512  # steps

# What kernels of loops and of graphs share


def has_rule(op: Op) -> bool:
    """Whether an Op has a rule, or stands for others that may have."""
    if stands_for_others(op):
        return True
    core = op.core_op if isinstance(op, Blockwise) else op
    return any(kind in RULES for kind in type(core).__mro__)


def items_of(array: Array) -> tuple[Size, ...]:
    """Return the sizes of an input, or of its rows."""
    return tuple(Given("dim", array.name, array.lead + axis) for axis in range(len(array.axes)))


def copied_bytes(array: Array) -> Size:
    """Return how many bytes the copy of an input has: none where it is in order of memory.

    Of an input that has rows, the rows must be.
    """
    size: Size = array.itemsize
    misplaced: Size = 0
    for axis in reversed(range(array.lead, array.lead + len(array.axes))):
        dim, stride = Given("dim", array.name, axis), Given("stride", array.name, axis)
        wrong = combined("equal", stride, size, 0, combined("equal", dim, 1, 0, 1))
        misplaced = combined("max", misplaced, wrong)
        size = product(size, dim)
    if array.lead:
        size = product(size, Given("dim", array.name, 0))
    return product(misplaced, size)


def size_values(
    kernel: TableReader, before: Block, workspace: Callable[[], Workspace]
) -> SizeValues:
    """Return what writes sizes into a kernel, in a block before all others."""

    def given(size: Given) -> Value:
        if size.kind == "dim":
            return kernel.dim(size.array, size.axis)
        if size.kind == "stride":
            return kernel.given_stride(size.array, size.axis)
        if size.kind == "part":
            return workspace().value(size.axis, values)
        array = kernel.loop.arrays[size.array]
        return kernel.w.cast(kernel.w.load(Type(array.dtype), kernel.data(size.array)), "int64")

    values = SizeValues(kernel.w, given, lambda: kernel.w.inside(before))
    return values


def place_input(kernel: TableReader, step: Step, array: Array, in_order: bool = True) -> Place:
    """Write where an input is, and its copy if its items have to be in order of memory."""
    w, name = step.writer, array.name
    axes = range(array.lead + len(array.axes))
    sizes: list[Size] = [Given("dim", name, axis) for axis in axes]
    strides: list[Size] = [Given("stride", name, axis) for axis in axes]
    place = Place(kernel.data(name), array.dtype, tuple(sizes), tuple(strides))
    if not array.axes or not in_order:
        return place
    size = copied_bytes(array)
    part = step.workspace.take(size, pinned=True)
    copy = w.offset(step.space, step.value(part.start))
    own = step.sizes.contiguous_strides(place.itemsize, tuple(sizes))
    is_copied = step.value(size) > 0
    with w.when(is_copied):
        write_copy(step, place, Place(copy, place.dtype, place.sizes, own))
    pointer = w.select(is_copied, copy, place.pointer)
    if array.lead:
        own = (combined("equal", size, 0, strides[0], own[0]), *own[1:])
    return Place(pointer, place.dtype, place.sizes, own)


def bind_input(step: Step, variable: Variable, name: str, place: Place) -> None:
    """Bind an input that is the same for all steps; an integer is known before the first one."""
    step.bind_place(variable, place)
    if variable.type.ndim == 0 and np.dtype(variable.type.dtype).kind in "iub":
        step.bind_known(variable, Given("value", name))


def step_work(step: Step, graph: FunctionGraph) -> Size:
    """Return how many numbers a step computes, about; `step` has written the nodes."""
    terms: list[Size] = [1]
    for node in graph.toposort():
        given = [step.places[v] for v in node.inputs if v in step.places]
        found = [step.places[v] for v in node.outputs if v in step.places]
        rule = RULES.get(type(core_op(node)))
        if rule is not None and rule.__module__ == algebra.__name__:
            terms += [product(*p.sizes, *p.sizes[-1:]) for p in given]
        elif isinstance(node.op, Elemwise | CAReduce):
            terms += [product(*p.sizes) for p in (*given, *found)]
        else:
            known = [None, *(place.part for place in given)]  # those of views
            terms += [product(*place.sizes) for place in found if place.part not in known]
    return step.sizes.same(total(*terms))


def write_checks(
    kernel: TableReader, values: SizeValues, checks: Iterable[Check], holds: Value
) -> None:
    """Write the checks of sizes, which are made where a condition holds."""
    w = kernel.w
    for check in checks:
        one, other = map(values.value, check.sizes)
        wrong = one.differs(other) if check.operation == "ne" else one < other
        with w.when(holds & wrong):
            code = kernel.loop.failure(check.error, check.template, len(check.values))
            w.fail(code, *map(values.value, check.values))


# Loops


class ArrayLoop(Loop):
    """A loop whose steps work on arrays.

    Raises
    ------
    NoKernelError
        Where an input is no array.
    """

    def __init__(self, op: Scan, may_be_empty: bool = False) -> None:
        self.may_be_empty = may_be_empty
        graph = thaw_graph(op.body)
        inline(graph)
        types = op.outer_input_types()
        super().__init__(op, graph, types)
        self.outer = self.signature.split_inputs([f"x{i}" for i in range(len(types))])
        self.outputs = tuple(self._outputs())
        self.words = Words(self.inputs, self.outputs, self.functions)
        self.arrays = {array.name: array for array in self._arrays()}
        # What the step turns out to need.
        self.workspace = Workspace(Sizes())
        self.checks: list[Check] = []
        self.work: Size = 1  # numbers that it computes
        self.rows: dict[int, tuple[Size, ...]] = {}  # the sizes of a stacked output's rows

    def _outputs(self) -> Iterator[Output]:
        signature, inner = self.signature, self.inner
        for i, depth in enumerate(signature.depths):
            variable = inner.taps[i][0]
            kind = ArrayType(variable.type.dtype, 1 + variable.type.ndim)
            yield Output(kind, not signature.untraced[i], depth)
        for variable in inner.carries:
            yield Output(ArrayType(variable.type.dtype, variable.type.ndim))
        for variable in self.result.outputs:
            yield Output(ArrayType(variable.type.dtype, 1 + variable.type.ndim), grows=True)

    def _arrays(self) -> Iterator[Array]:
        outer, n = self.outer, self.signature.n_states
        leading = {*outer.initials, *outer.sequences}
        for number, kind in enumerate(self.inputs):
            lead = int(f"x{number}" in leading)
            axes = tuple(range(kind.ndim - lead))
            yield Array(f"x{number}", False, number, kind.dtype, axes, lead)
        m = n + self.signature.n_carries
        for number, output in enumerate(self.outputs):
            letter = "h" if number < n else "c" if number < m else "z"
            first = {"h": 0, "c": n, "z": m}[letter]
            lead = int(letter != "c")
            axes = tuple(range(output.type.ndim - lead))
            name = f"{letter}{number - first}"
            yield Array(name, True, number, output.type.dtype, axes, lead)


class PrepareArrays(Checks[ArrayLoop]):
    """Writes the kernel that checks the inputs and computes the sizes of everything."""

    def __init__(self, loop: ArrayLoop) -> None:
        super().__init__(loop, "prepare")
        self.before = Block()
        self.values = size_values(self, self.before, lambda: loop.workspace)

    def kernel(self) -> Kernel:
        loop, w, words = self.loop, self.w, self.words
        steps = self.checked_steps(loop.may_be_empty)
        write_checks(self, self.values, loop.checks, steps > 0)
        capacity = self.capacity(steps)
        self.write_dims(capacity, lambda k: [self.values.value(size) for size in loop.rows[k]])
        space = self.space_bytes() + self.values.value(loop.workspace.end)
        self.out.write_word(words.workspace_size, space)
        turn = steps_of_a_turn(w, self.values.value(loop.work), LONGEST_TURN)
        self.out.write_word(words.turn, turn)
        for word, value in ((words.part, 0), (words.parts, 1), (words.choice, 0)):
            self.out.write_word(word, value)
        w.block.statements[:0] = self.before.statements
        return self.out.kernel(runs_once=True)


class ArraysRun(TakesSteps[ArrayLoop]):
    """Writes the kernel that takes the steps."""

    def __init__(self, loop: ArrayLoop) -> None:
        super().__init__(loop, "arrays")
        self.first, self.before = Block(), Block()
        self.scalars = Scalars(self.w, self.call_outside)
        self.values = size_values(self, self.first, lambda: self.body.workspace)

    def kernel(self) -> Kernel:
        loop, w, words = self.loop, self.w, self.words
        self.storage = Storage(self)
        self.steps = self.out.number(words.steps, "steps")
        self.begin = self.out.number(words.begin, "begin")
        space = w.offset(
            self.out.word(words.workspace, POINTER, "workspace"), self.storage.end_of_spaces
        )
        memory, w.block.statements = w.block.statements, []
        self.body = Step(
            w, self.scalars, self.values, space, self.before, loop.failure, self.routine
        )
        self.body.messages = loop.messages.at_step(loop.inner)
        self.place_inputs()
        self.read_locals()
        taken = self.take_steps()
        self.finish_carries(taken)
        self.finish(taken)
        w.block.statements[:0] = [
            *memory,
            *self.first.statements,
            *self.before.statements,
        ]
        loop.workspace, loop.checks = self.body.workspace, self.body.sizes.checks
        loop.work = step_work(self.body, loop.graph)
        return self.out.kernel()

    # Before the first step

    def place_inputs(self) -> None:
        """Write where sequences, non-sequences and the second buffers of carries are."""
        loop, body = self.loop, self.body
        self.given_places: dict[str, Place] = {}
        with self.w.inside(self.before):
            for name in (*loop.outer.sequences, *loop.outer.non_sequences):
                self.given_places[name] = place_input(self, body, loop.arrays[name])
        self.second: dict[int, Place] = {}
        for i, name in enumerate(loop.outer.carries):
            if items_of(loop.arrays[name]) and not self.stays(i):
                self.second[i] = body.pinned(loop.arrays[name].dtype, items_of(loop.arrays[name]))

    def read_locals(self) -> None:
        """Write locals for the states and carries that are numbers."""
        loop, w = self.loop, self.w
        self.i = self.begin
        self.t = self.steps - 1 - self.i if loop.reverse else self.i
        self.past: dict[int, list[Cell]] = {}
        for i, depth in enumerate(loop.signature.depths):
            if loop.inner.taps[i][0].type.ndim == 0 and depth <= REGISTER_DEPTH:
                places = [self.row_place(f"h{i}", -k) for k in range(1, depth + 1)]
                self.past[i] = [
                    Cell(w, load_number(w, place.dtype, place.pointer, 0)) for place in places
                ]
        self.carried = {
            i: Cell(w, load_number(w, variable.type.dtype, self.data(f"c{i}"), 0))
            for i, variable in enumerate(loop.inner.carries)
            if variable.type.ndim == 0
        }

    # One step

    def step(self, i: Value) -> None:
        loop, body, w = self.loop, self.body, self.w
        self.i = body.i = i
        self.t = self.steps - 1 - i if loop.reverse else i
        self.bind_inputs()
        self.results = list(self.all_destinations())
        self.choose_destinations()
        body.emit(loop.graph)
        results = loop.result
        if results.stop is not None:
            w.assign(self.stopped, self.scalars.truth(body.number(results.stop)))
        for value in loop.graph.outputs:
            if value.type.ndim == 0:
                body.number(value)  # it is read before anything is overwritten
        for value, destination in self.results:
            deliver(body, value, destination)
        for state, cells in self.past.items():
            for later, cell in zip(cells[-2::-1], cells[:0:-1], strict=True):
                cell.value = later.value
            cells[0].value = body.number(results.states[state])
        for carry, cell in self.carried.items():
            cell.value = body.number(results.carries[carry])

    def bind_inputs(self) -> None:
        loop, body = self.loop, self.body
        for variable, name in zip(loop.inner.rows, loop.outer.sequences, strict=True):
            whole = self.given_places[name]
            row = self.w.offset(whole.pointer, body.bytes(self.t, whole.strides[0]))
            body.bind_place(variable, Place(row, whole.dtype, whole.sizes[1:], whole.strides[1:]))
        for i, taps in enumerate(loop.inner.taps):
            for offset, variable in zip(loop.signature.taps[i], taps, strict=True):
                if i in self.past:
                    body.bind_number(variable, self.past[i][-offset - 1].value)
                else:
                    body.bind_place(variable, self.row_place(f"h{i}", offset))
        for i, variable in enumerate(loop.inner.carries):
            if i in self.carried:
                body.bind_number(variable, self.carried[i].value)
            else:
                body.bind_place(variable, self.carry(i, 0))
        for variable, name in zip(loop.inner.non_sequences, loop.outer.non_sequences, strict=True):
            bind_input(body, variable, name, self.given_places[name])
            body.fixed.add(variable)

    def row_place(self, name: str, offset: int = 0) -> Place:
        """Return a row of a state's history."""
        loop, i = self.loop, int(name[1:])
        pointer = self.w.offset(self.memory_of(i), self.row_of(i, offset))
        sizes = items_of(loop.arrays[loop.outer.initials[i]])
        return self.contiguous(pointer, loop.arrays[name].dtype, sizes)

    def contiguous(self, pointer: Value, dtype: str, sizes: tuple[Size, ...]) -> Place:
        sizes = tuple(map(self.body.sizes.same, sizes))
        strides = self.body.sizes.contiguous_strides(itemsize(dtype), sizes)
        return Place(pointer, dtype, sizes, strides)

    def carry(self, i: int, ahead: int) -> Place:
        """Return the buffer that holds a carry, or, one step ahead, the one for its next value."""
        loop, w = self.loop, self.w
        name = loop.outer.carries[i]
        first = self.contiguous(
            self.data(f"c{i}"), loop.arrays[name].dtype, items_of(loop.arrays[name])
        )
        if i not in self.second:
            return first
        is_second = ((self.i + ahead) & 1).differs(0)
        pointer = w.select(is_second, self.second[i].pointer, first.pointer)
        return first.view(list(first.sizes), list(first.strides), pointer)

    @cached_property
    def order(self) -> dict[Apply, int]:
        """Which node of a step comes when."""
        return {node: position for position, node in enumerate(self.loop.graph.toposort())}

    def stays(self, i: int) -> bool:
        """Whether the new value of a carry may be written over the old one.

        Only its own node reads the old one, at the same index and before it writes there, or items
        are written into it that others have read before.
        """
        loop, graph = self.loop, self.loop.graph
        carry, value = loop.inner.carries[i], loop.result.carries[i]
        node = value.owner
        if node is None or graph.outputs.count(value) > 1:
            return False
        if isinstance(node.op, Elemwise):
            same = value.type.dtype == carry.type.dtype and all(
                (a == 1) == (b == 1)
                for a, b in zip(value.type.shape, carry.type.shape, strict=True)
            )
            alone = [client for client, _ in graph.clients[carry]] == [node]
            return same and alone and len(node.outputs) == 1
        while node is not None and isinstance(node.op, INDEX_WRITES):
            if not overwrites(graph, node, self.order):
                return False
            if node.inputs[0] is carry:
                return True
            node = node.inputs[0].owner
        return False

    # Where results go

    def all_destinations(self) -> Iterator[tuple[Variable, Destination]]:
        """Yield each result, with where it goes."""
        loop = self.loop
        for i, value in enumerate(loop.result.states):
            texts = tuple(loop.messages.state_shape(i, axis) for axis in range(value.type.ndim))
            yield value, Destination(partial(self.next_row, i), "StepShapeError", texts)
        for i, value in enumerate(loop.result.outputs):
            texts = tuple(loop.messages.output_shape(i, axis) for axis in range(value.type.ndim))
            yield value, Destination(partial(self.output_row, i), "StepShapeError", texts)
        for i, value in enumerate(loop.result.carries):
            if i not in self.carried:
                texts = (CARRY,) * value.type.ndim
                yield value, Destination(partial(self.next_carry, i), UNFIT, texts)

    def choose_destinations(self) -> None:
        """Let results be computed in the row or the buffer that will hold them."""
        destinations = self.body.destinations
        for value, destination in self.results:
            if value.owner is not None and value.type.ndim and value not in destinations:
                destinations[value] = destination

    def next_row(self, i: int, sizes: tuple[Size, ...]) -> Place:
        return self.row_place(f"h{i}")

    def output_row(self, i: int, sizes: tuple[Size, ...]) -> Place:
        """Return the row of an output; the first result says how large it is."""
        body, array = self.body, self.loop.arrays[f"z{i}"]
        sizes = self.loop.rows.setdefault(i, sizes)
        row = body.sizes.same(product(array.itemsize, *sizes))
        pointer = self.w.offset(self.data(f"z{i}"), body.bytes(self.t, row))
        return self.contiguous(pointer, array.dtype, sizes)

    def next_carry(self, i: int, sizes: tuple[Size, ...]) -> Place:
        return self.carry(i, 1)

    # After the last step

    def finish_carries(self, taken: Value) -> None:
        """Write carries that are in locals or in their second buffers to the outputs."""
        loop, w = self.loop, self.w
        for i, cell in self.carried.items():
            store_number(w, self.data(f"c{i}"), 0, cell.value)
        with w.when((taken & 1).differs(0)):
            for i, place in self.second.items():
                array = loop.arrays[loop.outer.carries[i]]
                output = self.contiguous(self.data(f"c{i}"), array.dtype, items_of(array))
                write_copy(self.body, place, output)


CARRY = "a carry gets another shape"


def array_program(op: Scan, may_be_empty: bool = False) -> LoopProgram:
    """Return the kernels of a loop whose steps work on arrays.

    Histories that `may_be_empty` need no initial rows where there are no steps.

    Raises
    ------
    NoKernelError
        If an Op or a dtype of its body has none.
    """
    loop = ArrayLoop(op, may_be_empty)
    run = ArraysRun(loop).kernel()
    prepare = PrepareArrays(loop).kernel()
    rings = any(map(loop.has_ring, range(loop.signature.n_states)))
    return LoopProgram(
        name=op.name or "loop",
        inputs=loop.inputs,
        outputs=loop.outputs,
        words=loop.words,
        kernels=Kernels(prepare, Start(loop).kernel(), (run,)),
        failures=loop.failures,
        functions=tuple(loop.functions),
        may_stop=loop.signature.has_stop,
        has_workspace=rings or bool(loop.workspace.parts),
    )


# Graphs


class ArrayGraph(Tables):
    """A graph, and what its kernels need to know of it.

    Raises
    ------
    NoKernelError
        Where an input is no array.
    """

    def __init__(self, graph: FunctionGraph) -> None:
        super().__init__([variable.type for variable in graph.inputs])
        self.graph = graph
        self.outputs = tuple(
            Output(ArrayType(out.type.dtype, out.type.ndim)) for out in graph.outputs
        )
        self.words = Words(self.inputs, self.outputs, self.functions)
        groups = {False: self.inputs, True: [output.type for output in self.outputs]}
        self.arrays = {}
        for is_output, kinds in groups.items():
            for number, kind in enumerate(kinds):
                name = f"{'z' if is_output else 'x'}{number}"
                axes = tuple(range(kind.ndim))
                self.arrays[name] = Array(name, is_output, number, kind.dtype, axes, 0)
        # What the nodes turn out to need.
        self.workspace = Workspace(Sizes())
        self.checks: list[Check] = []
        self.sizes: dict[int, tuple[Size, ...]] = {}  # of the outputs


class GraphRun(TableReader[ArrayGraph]):
    """Writes the kernel that computes all nodes."""

    def __init__(self, graph: ArrayGraph) -> None:
        super().__init__(graph, "graph")
        self.first, before = Block(), Block()
        scalars = Scalars(self.w, self.call_outside)
        values = size_values(self, self.first, lambda: self.step.workspace)
        space = self.out.word(self.words.workspace, POINTER, "workspace")
        self.step = Step(self.w, scalars, values, space, before, graph.failure, self.routine)

    def kernel(self) -> Kernel:
        graph, step, w = self.loop.graph, self.step, self.w
        with w.inside(step.before):
            for number, variable in enumerate(graph.inputs):
                array, in_order = self.loop.arrays[f"x{number}"], not _gives_items(graph, variable)
                place = place_input(self, step, array, in_order)
                bind_input(step, variable, array.name, place)
        goals = []
        for number, out in enumerate(graph.outputs):
            goal = Destination(partial(self.place, number), "", ())
            goals.append(goal)
            if out.owner is not None and out.type.ndim and out not in step.destinations:
                step.destinations[out] = goal
        step.emit(graph)
        for out, goal in zip(graph.outputs, goals, strict=True):
            deliver(step, out, goal)
        w.block.statements[:0] = [*self.first.statements, *step.before.statements]
        self.loop.workspace, self.loop.checks = step.workspace, step.sizes.checks
        return self.out.kernel()

    def place(self, number: int, sizes: tuple[Size, ...]) -> Place:
        """Return where an output is; whoever asks first says how large it is."""
        sizes = self.loop.sizes.setdefault(number, sizes)
        array = self.loop.arrays[f"z{number}"]
        strides = self.step.sizes.contiguous_strides(itemsize(array.dtype), sizes)
        return Place(self.data(array.name), array.dtype, sizes, strides)


def _gives_items(graph: FunctionGraph, variable: Variable) -> bool:
    """Whether nothing is read of a variable but single items."""
    clients = [client for client, _ in graph.clients[variable]]
    return all(isinstance(c.op, Subtensor) and c.outputs[0].type.ndim == 0 for c in clients)


class GraphPrepare(TableReader[ArrayGraph]):
    """Writes the kernel that checks the inputs and computes the sizes of everything."""

    def __init__(self, graph: ArrayGraph) -> None:
        super().__init__(graph, "prepare")

    def kernel(self) -> Kernel:
        graph, w, words = self.loop, self.w, self.words
        before = Block()
        values = size_values(self, before, lambda: graph.workspace)
        write_checks(self, values, graph.checks, w.constant(True, BOOL))
        for number, sizes in graph.sizes.items():
            dims = [values.value(size) for size in sizes]
            result = [w.constant(0, INT64), *dims[:1]]  # its first row, and how many there are
            for place, value in enumerate([*dims, *result]):
                self.out.write_word(words.outputs[number] + 1 + place, value)
        self.out.write_word(words.workspace_size, values.value(graph.workspace.end))
        for word in (words.steps, words.capacity, words.parts):
            self.out.write_word(word, 1)
        for word in (words.begin, words.taken, words.part, words.choice):
            self.out.write_word(word, 0)
        w.block.statements[:0] = before.statements
        return self.out.kernel(runs_once=True)


def graph_program(graph: FunctionGraph, name: str = "graph") -> LoopProgram:
    """Return the kernels of a graph without loops.

    Parameters
    ----------
    graph : FunctionGraph
        It is changed: the nodes of Ops that are graphs take their places.
    name : str, optional

    Raises
    ------
    NoKernelError
        If an Op or a dtype has none.
    """
    inline(graph)
    tables = ArrayGraph(graph)
    run = GraphRun(tables).kernel()
    prepare = GraphPrepare(tables).kernel()
    start = TableKernel("start").kernel(runs_once=True)
    return LoopProgram(
        name=name,
        inputs=tables.inputs,
        outputs=tables.outputs,
        words=tables.words,
        kernels=Kernels(prepare, start, (run,)),
        failures=tables.failures,
        functions=tuple(tables.functions),
        has_workspace=bool(tables.workspace.parts),
        progress=False,
    )
