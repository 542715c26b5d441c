r"""Loops whose steps work on arrays, and graphs of arrays without loops, as programs.

A loop takes one step after the other. Rows of sequences and histories are where they are in the
loop's inputs and outputs, results of a step in a workspace that all steps use
(`scanlib.kernels.arrays`); what a result of the loop is made of is computed where it belongs.
States and carries that are numbers live in local variables. Of others the last rows are kept in a
ring of one row more than are read, so that no step writes what it reads; one row that may be
written over the one before, as a table of which a step changes an item, stays where it is.

The nodes of a graph, which stands around the loops of a function, are written as those of a step
are, once. Inputs whose items are not in order of memory are copied, once, before the first step.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.tensor.basic import MakeVector, tensor_copy
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.type import TensorType

from scanlib._compat import thaw_graph
from scanlib.kernels.arrays import (  # noqa: F401  (their rules)
    algebra,
    blockwise,
    convolutions,
    orders,
    spectra,
    views,
)
from scanlib.kernels.arrays.array_step import RULES, Destination, Step, StepOrder, before_write
from scanlib.kernels.arrays.decompositions import decompose, is_decomposed
from scanlib.kernels.arrays.nests import deliver, require_shape, write_copy
from scanlib.kernels.arrays.sizes import (
    UNFIT,
    Given,
    Size,
    changes,
    if_equal,
    maximum,
    minimum,
    product,
    quotient,
    total,
    unchanging,
)
from scanlib.kernels.arrays.workspace import Place
from scanlib.kernels.language import FLOATS, Kernel
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.program import ArrayType, Kernels, LoopProgram, Output, TableKernel, Words
from scanlib.kernels.scalars import NoKernelError
from scanlib.kernels.spans import LINE, Cell, load_number, shift
from scanlib.ops.graph import core_op, substitute
from scanlib.ops.scan import Scan
from scanlib.ops.small_arrays import take_apart
from scanlib.schedules.loop_kernels import (
    REGISTER_DEPTH,
    Array,
    Loop,
    TableReader,
    Tables,
    prepare,
    start,
    writing_step,
)
from scanlib.schedules.step_by_step import TakesSteps

VIEWS = Subtensor | DimShuffle | SpecifyShape
MOST_STEPS = 512  # between two polls
# Bytes of a matrix, and how often it is multiplied, from which on it pays to copy it to where lines
# of the cache begin.
LARGE, MANY_PRODUCTS = 2048, 64
Numbers = Mapping[Given, int]  # what sizes of inputs are
NONE: Numbers = MappingProxyType({})

# What kernels of loops and of graphs share


def has_rule(op: Op) -> bool:
    """Whether an Op has a rule, or stands for others that may have."""
    if is_decomposed(op):
        return True
    core = op.core_op if isinstance(op, Blockwise) else op
    return RULES.of(core) is not None


def copied_bytes(array: Array, products: Size = 0) -> Size:
    """Return how many bytes the copy of an input has: none where it is in order of memory.

    Of an input that has rows, the rows must be. A large matrix of which there are many products is
    copied to where lines of the cache begin, too, if lines, or their halves, end with its rows.
    """
    size: Size = array.itemsize
    misplaced: Size = 0
    for axis in reversed(range(array.lead, array.lead + len(array.axes))):
        dim, stride = Given("dim", array.name, axis), Given("stride", array.name, axis)
        wrong = if_equal(stride, size, 0, if_equal(dim, 1, 0, 1))
        misplaced = maximum(misplaced, wrong)
        size = product(size, dim)
    if array.lead:
        size = product(size, Given("dim", array.name, 0))
    if products != 0:
        address, row = Given("address", array.name), product(array.itemsize, array.dims[-1])
        shifted = if_equal(product(quotient(address, LINE), LINE), address, 0, 1)
        fits = if_equal(product(quotient(row, LINE // 2), LINE // 2), row, shifted, 0)
        large = minimum(quotient(size, LARGE), quotient(products, MANY_PRODUCTS))
        misplaced = maximum(misplaced, minimum(fits, large))
    return product(misplaced, size)


def place_input(
    kernel: TableReader, step: Step, array: Array, in_order: bool = True, products: Size = 0
) -> Place:
    """Write where an input is, and its copy if its items have to be in order of memory, or a matrix
    is multiplied so often that it pays."""
    w, sizes, strides = step.writer, array.dims, array.strides
    place = Place(kernel.data(array.name), array.dtype, sizes, strides)
    if not array.axes or not in_order:
        return place
    size = copied_bytes(array, products)
    part = step.workspace.take(size, pinned=True)
    copy = w.offset(step.space, step.value(part.start))
    own = step.sizes.contiguous_strides(place.itemsize, sizes)
    is_copied = step.value(size) > 0
    with w.when(is_copied):
        write_copy(step, place, Place(copy, place.dtype, place.sizes, own))
    pointer = w.select(is_copied, copy, place.pointer)
    if array.lead:
        own = (if_equal(size, 0, strides[0], own[0]), *own[1:])
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
    return step.sizes.same(total(*(term for term in terms if not changes(term))))


# Loops


class ArrayLoop(Loop):
    """A loop whose steps work on arrays; `NoKernelError` where an input is none."""

    most_steps_per_poll = MOST_STEPS

    def __init__(self, op: Scan, may_be_empty: bool, numbers: Numbers = NONE) -> None:
        self.may_be_empty = may_be_empty
        graph = _of_sizes(op, numbers)
        decompose(graph)
        apart = take_apart(graph, op.signature)
        self.expected = {} if apart is None else apart.expected
        results = graph.outputs if apart is None else apart.results
        results = [tensor_copy(out) if _is_view(out) else out for out in results]
        graph = FunctionGraph(graph.inputs, results, clone=False)
        super().__init__(op, graph, op.outer_input_types())

    @cached_property
    def lengths_in_locals(self) -> dict[str, int]:
        """How many numbers the states and carries are of which steps read and write items only."""
        lengths = {}
        values = [*self.result.states, *self.result.carries]
        for name, value in zip(self.depths, values, strict=True):
            node = value.owner
            if node is not None and isinstance(node.op, Reshape):
                node = node.inputs[0].owner
            if node is not None and isinstance(node.op, MakeVector):
                lengths[name] = len(node.inputs)
        for variable, (name, _) in self.taps.items():
            unknown = variable.type.ndim > 1 and None in variable.type.shape
            is_deep = self.depths[name] > REGISTER_DEPTH
            if unknown or is_deep or not _gives_items(self.graph, variable):
                lengths.pop(name, None)
        return lengths

    @cached_property
    def multiplied(self) -> set[str]:
        """The matrices that are the same for all steps and factors of products."""
        factors = {x for node in self.order.nodes if isinstance(node.op, Dot) for x in node.inputs}
        factors |= {
            x.owner.inputs[0] for x in factors if x.owner and isinstance(x.owner.op, DimShuffle)
        }
        pairs = zip(self.inner.non_sequences, self.outer.non_sequences, strict=True)
        return {
            name
            for x, name in pairs
            if x in factors and x.type.ndim == 2 and x.type.dtype in FLOATS
        }

    def has_ring(self, name: str) -> bool:
        return not (self.is_traced(name) or self.is_local(name) or self.stays(name))

    @cached_property
    def order(self) -> StepOrder:
        """In which order the nodes of a step are computed."""
        return StepOrder(self.graph)

    def stays(self, name: str) -> bool:
        """Whether the new value of a state or a carry may be written over the old one.

        Only its own node reads the old one, at the same index and before it writes there, or items
        are written into it that others have read before.
        """
        values = [*self.result.states, *self.result.carries]
        graph, value = self.graph, dict(zip(self.depths, values, strict=True))[name]
        before = next((tap for tap, (own, _) in self.taps.items() if own == name), None)
        node = value.owner
        if before is None or node is None or self.depths[name] > 1:
            return False
        if graph.outputs.count(value) > 1:
            return False
        if isinstance(node.op, Elemwise):
            same = value.type.dtype == before.type.dtype and all(
                (a == 1) == (b == 1)
                for a, b in zip(value.type.shape, before.type.shape, strict=True)
            )
            alone = [client for client, _ in graph.clients[before]] == [node]
            return same and alone and len(node.outputs) == 1
        while (base := before_write(value)) is not None:
            if not self.order.overwrites(value):
                return False
            if base is before:
                return True
            value = base
        return False


def _inner_arrays(op: Scan, inputs: Sequence[Variable]) -> Iterator[tuple[Variable, list[Given]]]:
    """Yield the arrays that a body reads, with what their sizes are among those of the loop's."""
    inner = op.signature.split_body_inputs(inputs)
    outer = op.signature.split_inputs([f"x{k}" for k in range(len(op.outer_input_types()))])
    groups = [(1, taps, name) for taps, name in zip(inner.taps, outer.initials, strict=True)]
    groups += [(1, [row], name) for row, name in zip(inner.rows, outer.sequences, strict=True)]
    whole = [*inner.carries, *inner.non_sequences], [*outer.carries, *outer.non_sequences]
    groups += [(0, [variable], name) for variable, name in zip(*whole, strict=True)]
    for lead, variables, name in groups:
        for variable in variables:
            if isinstance(variable.type, TensorType):
                yield variable, [Given("dim", name, lead + k) for k in range(variable.type.ndim)]


def _free_sizes(op: Scan) -> tuple[Given, ...]:
    """Return the sizes of rows, and of what is the same for all steps, that no type tells."""
    arrays = _inner_arrays(op, op.body.inputs)
    pairs = [zip(sizes, variable.type.shape, strict=True) for variable, sizes in arrays]
    return tuple(dict.fromkeys(size for each in pairs for size, known in each if known is None))


def _of_sizes(op: Scan, numbers: Numbers) -> FunctionGraph:
    """Return the body of a loop some sizes of whose inputs are known."""
    graph, typed = thaw_graph(op.body), {}
    for variable, sizes in _inner_arrays(op, graph.inputs):
        pairs = zip(sizes, variable.type.shape, strict=True)
        shape = tuple(numbers.get(size) if known is None else known for size, known in pairs)
        if shape != variable.type.shape:
            typed[variable] = variable.type.clone(shape=shape)(name=variable.name)
    if not typed:
        return graph
    values = [out for node in graph.toposort() for out in node.outputs]
    found = substitute([*graph.outputs, *values], typed)
    outputs, inputs = found[: len(graph.outputs)], [typed.get(v, v) for v in graph.inputs]
    inner = op.signature.split_body_inputs(inputs)
    following = op.signature.split_body_outputs(outputs)
    twins = [(tap, new) for k, new in enumerate(following.states) for tap in inner.taps[k]]
    twins += zip(inner.carries, following.carries, strict=True)
    twins += zip(values, found[len(outputs) :], strict=True)
    for one, other in twins:
        shapes = [v.type.shape for v in (one, other) if isinstance(v.type, TensorType)]
        if any(None not in sizes and len({*sizes}) > 1 for sizes in zip(*shapes, strict=True)):
            raise NoKernelError("an array gets another shape than it should")
    return FunctionGraph(inputs, outputs, clone=False)


def _is_view(result: Variable) -> bool:
    """Whether a result of a step is a part of an input, which can be written over once the part has
    been copied."""
    base = result
    while base.owner is not None and isinstance(base.owner.op, VIEWS):
        base = base.owner.inputs[0]
    return base is not result and base.owner is None and result.type.ndim > 0


class ArraysRun(TakesSteps[ArrayLoop]):
    """Writes the kernel that takes the steps."""

    def kernel(self) -> Kernel:
        loop = self.loop
        self.begin_steps()
        with writing_step(self, loop.end_of_rings) as self.body:
            self.body.messages = loop.messages.at_step(loop.inner)
            self.given_places: dict[str, Place] = {}
            with self.w.inside(self.body.before):
                for name in (*loop.outer.sequences, *loop.outer.non_sequences):
                    products = loop.steps if name in loop.multiplied else 0
                    self.given_places[name] = place_input(
                        self, self.body, loop.arrays[name], products=products
                    )
            self.write_loop()
        loop.work = step_work(self.body, loop.graph)
        return self.whole_kernel(register_bytes())

    # Before the first step

    def read_locals(self) -> None:
        super().read_locals()
        loop, w = self.loop, self.w
        self.items: dict[str, list[list[Cell]]] = {}
        for name, length in loop.lengths_in_locals.items():
            start = loop.starts[name]
            zero = self.scalars.constant(0, start.dtype)
            items = self.items[name] = [
                [Cell(w, zero) for _ in range(loop.depths[name])] for _ in range(length)
            ]
            with w.when(self.begin < self.steps):
                self.be_at(self.begin)
                for back in range(loop.depths[name]):
                    pointer = self.row_place(name, -1 - back).pointer
                    for k, cells in enumerate(items):
                        place = k * start.itemsize
                        cells[back].value = load_number(w, start.dtype, pointer, place)

    # One step

    def step(self) -> None:
        loop, body, w = self.loop, self.body, self.w
        body.i = self.i
        self.bind_inputs()
        for variable, (shape, body.node) in loop.expected.items():
            require_shape(body, variable, shape)
        self.results = list(self.all_destinations())
        for value, destination in self.results:  # the first row or buffer that will hold it
            if value.owner is not None and value.type.ndim:
                body.destinations.setdefault(value, destination)
        body.emit(loop.order)
        results = loop.result
        if results.stop is not None:
            w.assign(self.stopped, self.scalars.truth(body.number(results.stop)))
        for value in loop.graph.outputs:
            if value.type.ndim == 0:
                body.number(value)  # it is read before anything is overwritten
        for value, destination in self.results:
            deliver(body, value, destination)
        for name, value in zip(loop.depths, [*results.states, *results.carries], strict=True):
            if name in self.registers:
                self.push(name, body.number(value))
            if name in self.items:
                numbers = list(map(body.number, body.items[value]))
                for cells, number in zip(self.items[name], numbers, strict=True):
                    shift(cells, number)

    def bind_inputs(self) -> None:
        loop, body = self.loop, self.body
        for variable, name in zip(loop.inner.rows, loop.outer.sequences, strict=True):
            whole = self.given_places[name]
            row = body.moved(whole.pointer, self.t, whole.strides[0])
            body.bind_place(variable, Place(row, whole.dtype, whole.sizes[1:], whole.strides[1:]))
        for variable, (name, offset) in loop.taps.items():
            if name in self.registers:
                body.bind_number(variable, self.registers[name][-offset - 1].value)
            else:
                body.bind_place(variable, self.row_place(name, offset))
            if name in self.items:
                latest = [cells[-offset - 1].value for cells in self.items[name]]
                body.bind_items(variable, latest)
        for variable, name in zip(loop.inner.non_sequences, loop.outer.non_sequences, strict=True):
            bind_input(body, variable, name, self.given_places[name])
            body.fixed.add(variable)

    def row_place(self, name: str, offset: int = 0, sizes: tuple[Size, ...] = ()) -> Place:
        """Return where a state or a carry is, of a step before or of this one."""
        start = self.loop.starts[name]
        pointer = self.w.offset(self.memory_of(name), self.row_of(name, offset))
        return self.body.contiguous(pointer, start.dtype, start.dims[start.lead :])

    # Where results go

    def all_destinations(self) -> Iterator[tuple[Variable, Destination]]:
        """Yield each result, with where it goes."""
        loop = self.loop
        for i, value in enumerate(loop.result.states):
            texts = tuple(loop.messages.state_shape(i, axis) for axis in range(value.type.ndim))
            if f"h{i}" not in self.registers or loop.is_traced(f"h{i}"):
                place = partial(self.row_place, f"h{i}", 0)
                yield value, Destination(place, "StepShapeError", texts)
        for i, value in enumerate(loop.result.outputs):
            texts = tuple(loop.messages.output_shape(i, axis) for axis in range(value.type.ndim))
            yield value, Destination(partial(self.output_row, i), "StepShapeError", texts)
        for i, value in enumerate(loop.result.carries):
            if f"c{i}" not in self.registers:
                texts = (CARRY,) * value.type.ndim
                yield value, Destination(partial(self.row_place, f"c{i}", 0), UNFIT, texts)

    def output_row(self, i: int, sizes: tuple[Size, ...]) -> Place:
        """Return the row of an output; the first result says how large it is."""
        body, array = self.body, self.loop.arrays[f"z{i}"]
        sizes = self.loop.sizes.setdefault(array.number, unchanging(sizes))
        row = body.sizes.same(product(array.itemsize, *sizes))
        pointer = body.moved(self.data(f"z{i}"), self.t, row)
        return body.contiguous(pointer, array.dtype, sizes)


CARRY = "a carry gets another shape"


def array_program(op: Scan, may_be_empty: bool = False, numbers: Numbers = NONE) -> LoopProgram:
    """Return the kernels of a loop whose steps work on arrays; `NoKernelError` if an Op or a dtype
    has none.

    Histories that `may_be_empty` need no initial rows where there are no steps. `numbers` are what
    sizes of inputs are known to be. If a step cannot work on such arrays, the kernels are those for
    all sizes, which say so when they run.
    """
    try:
        loop = ArrayLoop(op, may_be_empty, numbers)
        run = ArraysRun(loop, "arrays").kernel()
    except Exception:
        if numbers:
            return array_program(op, may_be_empty)
        raise
    return loop.program(
        op.name or "loop",
        Kernels(prepare(loop), start(loop), (run,)),
        free_sizes=() if numbers else _free_sizes(op),
        of_sizes=partial(array_program, op, may_be_empty),
    )


# Graphs


class ArrayGraph(Tables):
    """A graph, and what its kernels need to know of it.

    `NoKernelError` where an input is no array.
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

    def dims(self, number: int) -> Sequence[Size]:
        """Return the dimensions of an output, its first row, and how many there are."""
        dims = self.sizes[number]
        return [*dims, 0, *dims[:1]]


class GraphRun(TableReader[ArrayGraph]):
    """Writes the kernel that computes all nodes."""

    def kernel(self) -> Kernel:
        graph = self.loop.graph
        with writing_step(self) as self.step:
            step = self.step
            with self.w.inside(step.before):
                for number, variable in enumerate(graph.inputs):
                    array = self.loop.arrays[f"x{number}"]
                    place = place_input(self, step, array, not _gives_items(graph, variable))
                    bind_input(step, variable, array.name, place)
            goals = []
            for number, out in enumerate(graph.outputs):
                goals.append(Destination(partial(self.place, number), "", ()))
                if out.owner is not None and out.type.ndim:
                    step.destinations.setdefault(out, goals[-1])
            step.emit(StepOrder(graph))
            for out, goal in zip(graph.outputs, goals, strict=True):
                deliver(step, out, goal)
        return self.whole_kernel(register_bytes())

    def place(self, number: int, sizes: tuple[Size, ...]) -> Place:
        """Return where an output is; whoever asks first says how large it is."""
        sizes = self.loop.sizes.setdefault(number, unchanging(sizes))
        array = self.loop.arrays[f"z{number}"]
        return self.step.contiguous(self.data(array.name), array.dtype, sizes)


def _gives_items(graph: FunctionGraph, variable: Variable) -> bool:
    """Whether nothing is read of a variable but single items."""
    clients = [client for client, _ in graph.clients[variable]]
    return all(isinstance(c.op, Subtensor) and c.outputs[0].type.ndim == 0 for c in clients)


def graph_program(graph: FunctionGraph) -> LoopProgram:
    """Return the kernels of a graph without loops; `NoKernelError` if an Op or a dtype has none.

    The graph is changed: the nodes of Ops that are graphs take their places.
    """
    decompose(graph)
    tables = ArrayGraph(graph)
    run = GraphRun(tables, "graph").kernel()
    nothing = TableKernel("start").kernel(runs_once=True)
    kernels = Kernels(prepare(tables), nothing, (run,))
    return tables.program("graph", kernels, progress=False)
