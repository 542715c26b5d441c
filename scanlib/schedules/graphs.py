"""Graphs of arrays without loops: what stands around the loops of a function, as one program.

The nodes are written as those of a step are (`scanlib.kernels.arrays`), once.
"""

from __future__ import annotations

from functools import partial

from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.subtensor import Subtensor

from scanlib.kernels.arrays.array_step import Destination, Step
from scanlib.kernels.arrays.nests import deliver
from scanlib.kernels.arrays.places import Place, Workspace
from scanlib.kernels.arrays.sizes import Check, Size, Sizes
from scanlib.kernels.language import BOOL, INT64, POINTER, Block, Kernel
from scanlib.kernels.program import ArrayType, Kernels, LoopProgram, Output, TableKernel, Words
from scanlib.kernels.scalars import Scalars
from scanlib.kernels.spans import itemsize
from scanlib.schedules.array_kernels import (
    bind_input,
    inline,
    place_input,
    size_values,
    write_checks,
)
from scanlib.schedules.elementwise import Array, TableReader, Tables


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
