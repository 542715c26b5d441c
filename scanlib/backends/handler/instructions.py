"""A graph that holds loops, as a list of instructions.

An instruction runs a program of kernels (a loop, or a cluster of nodes around loops, see
`scanlib.backends.handler.clusters`), makes a view, checks something, or calls a function of Python
for a node that has no kernel. Values are in registers. ``graph.h`` runs all of them in one call,
Python where there is no C++ compiler (`GraphRunner`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import numpy as np
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import DeepCopyOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import numba_funcify_and_cache_key
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Shape_i, SpecifyShape
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import DenseTensorType

from scanlib._compat import FUSED_ELEMWISE, NUMBERS_INSIDE, READY_GRAPHS, thaw_graph
from scanlib.backends.handler.clusters import SAME, Cluster, Plan, Products, products_of
from scanlib.backends.handler.functions import performed
from scanlib.backends.handler.programs import address, program_of_node, registered
from scanlib.backends.handler.thunks import library, runner
from scanlib.kernels.program import LoopProgram
from scanlib.ops.errors import SpecifiedShapeError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.messages import SPECIFIED_SHAPE
from scanlib.ops.row_ops.checked_rows import CheckedRows
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.scan import Scan
from scanlib.schedules.linear_steps import linear_program

LOOPS = (Scan, ElemwiseScan, LinearScan)
FEW = 1 << 14  # items that stay in the cache
RUN, CALL, SUBTENSOR, SHUFFLE, SIZE, CHECK, ROWS = range(7)
NO_END, NUMBER, REGISTER = range(3)


@dataclass
class Instruction:
    """What is done with some registers; ``graph.h`` says how.

    Attributes
    ----------
    kind : int
    node : Apply
        What it stands for.
    inputs, outputs : list of int
        Registers.
    numbers : list of int
    program : LoopProgram, optional
    function : callable, optional
    done : list of int
        Registers that no later instruction reads.
    """

    kind: int
    node: Apply
    inputs: list[int]
    outputs: list[int]
    numbers: list[int] = field(default_factory=list)
    program: LoopProgram | None = None
    function: Callable[..., Any] | None = None
    done: list[int] = field(default_factory=list)


class Instructions:
    """The instructions of a graph.

    Registers have the constants first, then the inputs.

    Parameters
    ----------
    fgraph : FunctionGraph
    node_function : callable
        Returns the function of a node that has no kernel, from values to a value, or to several.
    as_constant : callable
        Returns the value of a constant.

    Attributes
    ----------
    code : list of Instruction
    constants : list
    results : list of int
        The registers of the results.
    count : int
        How many registers there are.
    """

    def __init__(
        self,
        fgraph: FunctionGraph,
        node_function: Callable[[Apply], Callable[..., Any]],
        as_constant: Callable[[Constant], Any],
    ) -> None:
        self.node_function, self.as_constant = node_function, as_constant
        self.code: list[Instruction] = []
        self.constants: list[Any] = []
        self.registers: dict[Variable, int] = {}
        self.count = 0
        for variable in fgraph.inputs:
            self.new_register(variable)
        self._inputs = self.count
        self.add_graph(fgraph)
        self.results = [self.register(out) for out in fgraph.outputs]
        self._put_constants_first()
        self._find_done()

    def new_register(self, variable: Variable) -> int:
        self.registers[variable] = self.count
        self.count += 1
        return self.count - 1

    def register(self, variable: Variable) -> int:
        """Return where a variable is; constants, which have negative numbers, are made here."""
        if variable not in self.registers:
            if not isinstance(variable, Constant):
                # A view that was left to its readers.
                assert variable.owner is not None, variable
                self.add(variable.owner)
                return self.registers[variable]
            self.constants.append(self.as_constant(variable))
            self.registers[variable] = -len(self.constants)
        return self.registers[variable]

    def _put_constants_first(self) -> None:
        first = len(self.constants)

        def moved(places: Sequence[int]) -> list[int]:
            return [-1 - place if place < 0 else first + place for place in places]

        for own in self.code:
            own.inputs, own.outputs = moved(own.inputs), moved(own.outputs)
            if own.kind == SUBTENSOR:
                for k in range(0, len(own.numbers), 7):
                    for j in (1, 3, 5):
                        if own.numbers[k + j] == REGISTER:
                            own.numbers[k + j + 1] = moved([own.numbers[k + j + 1]])[0]
        self.results = moved(self.results)
        self.count += first
        self._inputs += first

    def _find_done(self) -> None:
        """Let each register be given up behind the last instruction that reads it."""
        seen = {*range(self._inputs), *self.results}
        for own in reversed(self.code):
            for place in (*own.outputs, *own.inputs):
                if place not in seen:
                    seen.add(place)
                    own.done.append(place)

    # Graphs

    def add_graph(self, fgraph: FunctionGraph) -> None:
        """Add all nodes of a graph, whose inputs have registers."""
        products = products_of(fgraph)
        fused = {found.product for found in products.values()}
        early = {node: [found.other] for node, found in products.items()}
        for item in Plan(fgraph, set(fused), early).order_with_numbers():
            if isinstance(item, Cluster):
                node = next(out.owner for out in item.outputs if out.owner is not None)
                self._run(node, item.program, item.inputs, item.outputs)
            elif item in products:
                self._add_products(item, products[item])
            elif item not in fused and not isinstance(item.op, SAME):
                self.add(item)

    def _add_inside(self, inside: FunctionGraph, node: Apply) -> None:
        """Add a graph in the place of a node."""
        inside = thaw_graph(inside)  # equal nodes may share the variables of their graphs
        for own, inp in zip(inside.inputs, node.inputs, strict=True):
            self.registers[own] = self.register(inp)
        self.add_graph(inside)
        for out, own in zip(node.outputs, inside.outputs, strict=True):
            self.registers[out] = self.register(own)

    def _add_products(self, node: Apply, found: Products) -> None:
        program = linear_program(node.op, node, found.outer)
        outputs = [*node.outputs, *found.product.outputs]
        self._run(node, program, [*node.inputs, found.other], outputs)

    # Nodes

    def add(self, node: Apply) -> None:
        """Add the instruction of a node."""
        op = node.op
        if isinstance(op, LOOPS) and (program := program_of_node(node)) is not None:
            self._run(node, program, node.inputs, node.outputs)
        elif isinstance(op, ScalarFromTensor | TensorFromScalar):
            self.registers[node.outputs[0]] = self.register(node.inputs[0])
        elif isinstance(op, Shape_i) and isinstance(node.inputs[0].type, DenseTensorType):
            self._instruct(SIZE, node, [node.inputs[0]], numbers=[op.i])
        elif isinstance(op, CheckAndRaise):
            self._instruct(CHECK, node, node.inputs, function=partial(_raise, op.exc_type, op.msg))
        elif isinstance(op, DimShuffle):
            order = [-1 if axis == "x" else int(axis) for axis in op.new_order]
            self._instruct(SHUFFLE, node, node.inputs, numbers=order)
        elif isinstance(op, DeepCopyOp) and isinstance(node.inputs[0].type, DenseTensorType):
            self._instruct(CALL, node, node.inputs, function=np.array)
        elif isinstance(op, PaddedRows | CheckedRows):
            self._instruct(ROWS, node, node.inputs, function=self.node_function(node))
        elif isinstance(op, SpecifyShape):
            self._instruct(CALL, node, node.inputs, function=_specified)
        elif isinstance(op, Subtensor) and self._add_subtensor(op, node):
            pass
        elif (inside := graph_inside(op)) is not None:
            self._add_inside(inside, node)
        else:
            function = _on_numbers(node, self.node_function(node))
            self._instruct(CALL, node, node.inputs, function=function)

    def _run(
        self,
        node: Apply,
        program: LoopProgram,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
    ) -> None:
        given = [self.register(v) for v in inputs]
        made = [self.new_register(v) for v in outputs]
        self.code.append(Instruction(RUN, node, given, made, program=program))

    def _instruct(self, kind: int, node: Apply, inputs: Sequence[Variable], **parts: Any) -> None:
        given = [self.register(v) for v in inputs]
        made = [self.new_register(v) for v in node.outputs]
        self.code.append(Instruction(kind, node, given, made, **parts))

    def _add_subtensor(self, op: Subtensor, node: Apply) -> bool:
        """Add basic indices: of each whether it is a slice, and its ends or itself."""
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        if not all(isinstance(index, slice | int | Variable) for index in indices):
            return False
        numbers: list[int] = []
        for index in indices:
            ends = (
                (index.start, index.stop, index.step)
                if isinstance(index, slice)
                else (index, None, None)
            )
            numbers.append(int(isinstance(index, slice)))
            for end in ends:
                if isinstance(end, Variable) and not isinstance(end, Constant):
                    numbers += [REGISTER, self.register(end)]
                    continue
                value = end.data if isinstance(end, Constant) else end
                numbers += [NO_END, 0] if value is None else [NUMBER, int(value)]
        self._instruct(SUBTENSOR, node, node.inputs, numbers=numbers)
        return True


def _raise(kind: type[Exception], message: str) -> None:
    raise kind(message)


def _specified(value: Any, *sizes: Any) -> Any:
    """Return an array whose sizes are those given, None for any."""
    for axis, size in enumerate(sizes):
        if size is not None and value.shape[axis] != size:
            raise SpecifiedShapeError(SPECIFIED_SHAPE.format(axis, value.shape[axis], int(size)))
    return value


def _on_numbers(node: Apply, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a node that takes numbers where its inputs are no tensors."""
    if not any(isinstance(inp.type, ScalarType) for inp in node.inputs):
        return function
    numbers = [isinstance(inp.type, ScalarType) for inp in node.inputs]

    def call(*values: Any) -> Any:
        given = zip(values, numbers, strict=True)
        return function(*(np.asarray(v)[()] if number else v for v, number in given))

    return call


def graph_inside(op: Op) -> FunctionGraph | None:
    """Return the graph that may be written in the place of a node, if there is one."""
    if isinstance(op, NUMBERS_INSIDE):
        return op.fgraph
    if isinstance(op, FUSED_ELEMWISE):
        indexed = any(op.indexed_inputs) or any(op.indexed_outputs)
        # One walk there is several here, and what is between them has memory.
        return None if indexed and not _is_small(op.fgraph) else op.fgraph
    finds = numba_funcify_and_cache_key.dispatch
    ready = isinstance(op, READY_GRAPHS) and finds(type(op)) is finds(OpFromGraph)
    return op.fgraph if ready else None


def _is_small(fgraph: FunctionGraph) -> bool:
    """Whether all that is computed in a graph surely has few items."""
    return all(
        None not in out.type.shape and prod(out.type.shape) <= FEW
        for node in fgraph.apply_nodes
        for out in node.outputs
    )


# Running them


class GraphRunner:
    """Runs a graph.

    Parameters
    ----------
    whole : Instructions
    inputs, outputs : sequence of list
        Lists of one item, in which values are.
    timed : bool
        Whether to note how long instructions take; Python runs them then.

    Attributes
    ----------
    stored : callable
        Computes the values of `outputs` from those of `inputs`, and returns a list of them.
    values : callable
        Returns the list of results for given values.
    where : list of int
        The number of the instruction that failed last.
    seconds : list of float
        How long each instruction took in all calls.
    """

    def __init__(
        self,
        whole: Instructions,
        inputs: Sequence[list[Any]],
        outputs: Sequence[list[Any]],
        timed: bool = False,
    ) -> None:
        self.where = [0]
        self.seconds = [0.0] * len(whole.code)
        self.stored: Callable[[], list[Any]]
        self.values: Callable[..., list[Any]]
        found = None if timed else library()
        if found is None:
            self._run_in_python(whole, inputs, outputs)
            return
        code = tuple(
            (
                own.kind,
                0 if own.program is None else address(registered(own.program)),
                own.function,
                *map(tuple, (own.inputs, own.outputs, own.numbers, own.done)),
            )
            for own in whole.code
        )
        self.stored, self.values = found.scanlib_graph(
            code,
            tuple(whole.constants),
            tuple(whole.results),
            tuple(inputs),
            tuple(outputs),
            self.where,
        )

    def _run_in_python(
        self, whole: Instructions, inputs: Sequence[list[Any]], outputs: Sequence[list[Any]]
    ) -> None:
        functions = [python_function(own) for own in whole.code]

        def values(*given: Any) -> list[Any]:
            registers = [*whole.constants, *given]
            registers += [None] * (whole.count - len(registers))
            for number, (own, function) in enumerate(zip(whole.code, functions, strict=True)):
                self.where[0] = number
                started = perf_counter()
                function(registers)
                self.seconds[number] += perf_counter() - started
                for place in own.done:
                    registers[place] = None
            return [registers[place] for place in whole.results]

        def stored() -> list[Any]:
            results = values(*(cell[0] for cell in inputs))
            for cell, result in zip(outputs, results, strict=True):
                cell[0] = result
            return results

        self.values, self.stored = values, stored


def python_function(own: Instruction) -> Callable[[list[Any]], None]:
    """Return what does an instruction with a list of registers."""
    compute = _several(own)

    def run(registers: list[Any]) -> None:
        results = compute(*(registers[place] for place in own.inputs))
        for place, result in zip(own.outputs, results, strict=True):
            registers[place] = result

    return run


def _several(own: Instruction) -> Callable[..., Sequence[Any]]:
    """Return a function from the inputs of an instruction to its outputs."""
    if own.program is not None:
        return runner(own.program)
    function = own.function if own.kind in (CALL, ROWS) else performed(own.node)
    assert function is not None
    return function if len(own.outputs) > 1 else lambda *inputs: [function(*inputs)]
