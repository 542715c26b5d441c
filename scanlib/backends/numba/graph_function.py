"""A graph that holds loops, as a function of Python.

Each line runs a program of kernels (a loop, or a cluster of nodes around loops, see
`scanlib.backends.handler.clusters`), makes a view, checks something, or calls the function of a
node that has no kernel. Programs are functions in C, and a line costs less than the call of one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import index
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
from pytensor.tensor.basic import Alloc, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Reshape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.type import DenseTensorType

from scanlib._compat import FUSED_ELEMWISE, NUMBERS_INSIDE, READY_GRAPHS, thaw_graph
from scanlib.backends.handler.clusters import SAME, Cluster, Plan
from scanlib.backends.handler.functions import performed
from scanlib.backends.handler.programs import program_of_node
from scanlib.backends.handler.thunks import program_function
from scanlib.backends.numba.state_products import Products, products_of
from scanlib.kernels.program import LoopProgram
from scanlib.lengths.numbers import indices_of
from scanlib.ops.errors import SpecifiedShapeError
from scanlib.ops.execution import LoopOp
from scanlib.ops.messages import SPECIFIED_SHAPE
from scanlib.ops.row_ops.checked_rows import CheckedItems, CheckedRows
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.schedules.linear_steps import linear_program

FEW = 1 << 14  # items that stay in the cache


@dataclass
class Line:
    """What stands for a node: the names that it gives values, and their value."""

    node: Apply
    made: list[str]
    value: str

    def names(self) -> list[str]:
        """Return the names of what lines compute, those that it makes first."""
        return [*self.made, *re.findall(r"\bv\d+", self.value)]

    def text(self, done: Sequence[str]) -> str:
        """Return the line, which gives up the names that no later one reads."""
        given_up = f"; del {', '.join(done)}" if done else ""
        return f"{', '.join(self.made)} = {self.value}{given_up}"


class GraphWriter:
    """Writes the function of a graph.

    In its text ``x`` are inputs, ``v`` what lines compute, and ``k`` constants and functions.
    Lengths of arrays are numbers of Python where slices and checks read them, arrays elsewhere.
    `node_function` returns the function of a node that has no kernel, from values to a value, or to
    several, and `as_constant` the value of a constant. `seconds` says how long each line took in
    all calls, where that is wanted.
    """

    def __init__(
        self,
        fgraph: FunctionGraph,
        node_function: Callable[[Apply], Callable[..., Any]],
        as_constant: Callable[[Constant], Any],
    ) -> None:
        self.node_function, self.as_constant = node_function, as_constant
        self.scope: dict[str, Any] = {"array": np.array, "index": index, "clock": perf_counter}
        self.lines: list[Line] = []
        self.count = 0
        self.inputs = [f"x{i}" for i in range(len(fgraph.inputs))]
        self.names = dict(zip(fgraph.inputs, self.inputs, strict=True))
        self.lengths: dict[Variable, str] = {}  # names of numbers
        self.add_graph(fgraph)
        self.results = [self.name(out) for out in fgraph.outputs]
        self.seconds = self.scope["seconds"] = [0.0] * len(self.lines)

    def functions(
        self,
        inputs: Sequence[list[Any]],
        outputs: Sequence[list[Any]],
        fail: Callable[[Apply, list[list[Any]]], None],
        timed: bool = False,
    ) -> tuple[Callable[..., list[Any]], Any]:
        """Return the function from values to a list of results, and the one that computes the
        values of `outputs` from those of `inputs`, lists of one item, and returns a list of them.

        `fail` is called with the node that raised an error, while that is handled, and with the
        values of its inputs, lists of one item: None where they are not known, as inside of a
        program. `timed` is whether to note how long lines take.
        """
        scope = dict(self.scope)

        def failed(number: int, values: dict[str, Any]) -> None:
            node = self.lines[number].node
            names = [self.names.get(v) or self.lengths.get(v) for v in node.inputs]
            fail(node, [[values.get(name, scope.get(name))] for name in map(str, names)])

        scope["failed"] = failed
        for letter, cells in (("i", inputs), ("o", outputs)):
            scope |= {f"{letter}{number}": cell for number, cell in enumerate(cells)}
        body, names, results = self.body(timed), ", ".join(self.inputs), ", ".join(self.results)
        given = [f"{name} = i{number}[0]" for number, name in enumerate(self.inputs)]
        kept = [f"o{number}[0] = {name}" for number, name in enumerate(self.results)]
        text = [
            *("def stored():", "  try:", f"    {'; '.join(given) or 'pass'}"),
            *(*body, f"    {'; '.join(kept)}", f"    return [{results}]"),
            "  except Exception as error:",
            *("    failed(error.__traceback__.tb_lineno - 4, locals())", "    raise"),
            *(f"def values({names}):", *body, f"    return [{results}]"),
        ]
        exec("\n".join(text), scope)
        return scope["values"], scope["stored"]

    def body(self, timed: bool = False) -> list[str]:
        """Return the lines of the function."""
        seen, found = {*self.results}, []
        for number in reversed(range(len(self.lines))):
            line = self.lines[number]
            names = dict.fromkeys(line.names())
            done = [name for name in names if name.startswith("v") and name not in seen]
            seen |= names.keys()
            text = line.text(done)
            if timed:
                text = f"start = clock(); {text}; seconds[{number}] += clock() - start"
            found.append(f"    {text}")
        return found[::-1]

    # Names

    def name(self, variable: Variable) -> str:
        """Return the name of a variable; what was left to its readers is written here."""
        if variable not in self.names:
            if isinstance(variable, Constant):
                self.names[variable] = self.known(self.as_constant(variable))
            else:
                node = variable.owner
                assert node is not None, variable
                if variable not in self.lengths:
                    self.add(node)
                if variable in self.lengths:
                    array = f"array({self.lengths[variable]})"
                    (self.names[variable],) = self._write(node, array)
        return self.names[variable]

    def number(self, variable: Variable | int) -> str:
        """Return the text of a length or an index as a number of Python."""
        if not isinstance(variable, Variable):
            return str(variable)
        if isinstance(variable, Constant):
            return str(int(variable.data))
        node = variable.owner
        if node is not None and not (variable in self.names or variable in self.lengths):
            if isinstance(node.op, ScalarFromTensor | TensorFromScalar):
                return self.number(node.inputs[0])
            self.add(node)
        return self.lengths.get(variable) or f"index({self.name(variable)})"

    def known(self, value: Any) -> str:
        """Return the name of what the text refers to."""
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def line(
        self,
        node: Apply,
        value: str,
        inputs: Sequence[Variable] | None = None,
        outputs: Sequence[Variable] | None = None,
    ) -> None:
        """Write a line for a node, from the text of what it computes with ``{}`` for inputs."""
        read = [self.name(v) for v in (node.inputs if inputs is None else inputs)]
        outputs = node.outputs if outputs is None else outputs
        made = self._write(node, value.format(*read, all=", ".join(read)), len(outputs))
        self.names |= dict(zip(outputs, made, strict=True))

    def _write(self, node: Apply, value: str, results: int = 1) -> list[str]:
        """Write a line; return the names that it makes."""
        made = [f"v{self.count + k}" for k in range(results)]
        self.count += results
        self.lines.append(Line(node, made, value))
        return made

    # Graphs

    def add_graph(self, fgraph: FunctionGraph) -> None:
        """Write all nodes of a graph, whose inputs have names."""
        products = products_of(fgraph)
        fused = {found.product for found in products.values()}
        early = {node: [found.other] for node, found in products.items()}
        for item in Plan(fgraph, set(fused), early).order():
            if isinstance(item, Cluster):
                node = next(out.owner for out in item.outputs if out.owner is not None)
                self._run(node, item.program, item.inputs, item.outputs)
            elif item in products:
                self._add_products(item, products[item])
            elif item not in fused and not isinstance(item.op, SAME):
                self.add(item)

    def _add_inside(self, inside: FunctionGraph, node: Apply) -> None:
        """Write a graph in the place of a node."""
        inside = thaw_graph(inside)  # equal nodes may share the variables of their graphs
        for own, inp in zip(inside.inputs, node.inputs, strict=True):
            self.names[own] = self.name(inp)
        self.add_graph(inside)
        for out, own in zip(node.outputs, inside.outputs, strict=True):
            self.names[out] = self.name(own)

    def _add_products(self, node: Apply, found: Products) -> None:
        program = linear_program(node.op, node, found.outer)
        outputs = [*node.outputs, *found.product.outputs]
        self._run(node, program, [*node.inputs, found.other], outputs)

    def _run(
        self,
        node: Apply,
        program: LoopProgram,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
    ) -> None:
        self.line(node, f"{self.known(program_function(program))}({{all}})", inputs, outputs)

    # Nodes

    def add(self, node: Apply) -> None:
        op = node.op
        if isinstance(op, LoopOp) and (program := program_of_node(node)) is not None:
            self._run(node, program, node.inputs, node.outputs)
        elif isinstance(op, ScalarFromTensor | TensorFromScalar):
            self.names[node.outputs[0]] = self.name(node.inputs[0])
        elif isinstance(op, Shape_i) and isinstance(node.inputs[0].type, DenseTensorType):
            length = f"{self.name(node.inputs[0])}.shape[{op.i}]"
            (self.lengths[node.outputs[0]],) = self._write(node, length)
        elif isinstance(op, CheckAndRaise):
            holds = " and ".join(["{}"] * (len(node.inputs) - 1)) or "True"
            error = self.known(partial(_raise, op.exc_type, op.msg))
            self.line(node, f"{{}} if {holds} else {error}()")
        elif isinstance(op, DimShuffle) and not op.drop:
            self.line(node, f"{{}}{_shuffled(op)}")
        elif isinstance(op, DeepCopyOp) and isinstance(node.inputs[0].type, DenseTensorType):
            self.line(node, "array({})")
        elif isinstance(op, PaddedRows | CheckedRows):
            rows, *wanted = node.inputs
            function, numbers = self.known(self.node_function(node)), list(map(self.number, wanted))
            fits, arrays = " == ".join(numbers), ", ".join(f"array({n})" for n in numbers)
            text = f"{{0}} if {{0}}.shape[0] == {fits} else {function}({{0}}, {arrays})"
            self.line(node, text, [rows])
        elif isinstance(op, CheckedItems):
            holds = " and ".join(f"{{0}}.shape[{axis}] >= {n}" for axis, n in op.sizes.items())
            self.line(node, f"{{0}} if {holds} else {self.known(op.passed)}({{all}})")
        elif isinstance(op, SpecifyShape):
            self.line(node, f"{self.known(_specified)}({{all}})")
        elif isinstance(op, Subtensor) and (places := self._indices(op, node)) is not None:
            # One number does not keep a whole array.
            text = f"{{}}[{places}]" if node.outputs[0].type.ndim else f"array({{}}[{places}])"
            self.line(node, text, node.inputs[:1])
        elif (inside := graph_inside(op)) is not None:
            self._add_inside(inside, node)
        else:
            compute = (
                performed(node)
                if isinstance(op, DimShuffle | Alloc | Reshape)
                else self.node_function(node)
            )
            self.line(node, f"{self.known(_on_numbers(node, compute))}({{all}})")

    def _indices(self, op: Subtensor, node: Apply) -> str | None:
        """Return the text of basic indices, None if there are others."""
        indices = indices_of(node)
        if not all(isinstance(place, slice | int | Variable) for place in indices):
            return None
        texts = []
        for place in indices:
            if isinstance(place, slice):
                ends = (place.start, place.stop, place.step)
                texts.append(":".join("" if end is None else self.number(end) for end in ends))
            else:
                texts.append(self.number(place))
        return ", ".join(texts)


def _raise(kind: type[Exception], message: str) -> None:
    raise kind(message)


def _shuffled(op: DimShuffle) -> str:
    """Return what follows an array for its axes in another order, with new ones."""
    kept = [int(axis) for axis in op.new_order if axis != "x"]
    text = "" if kept == sorted(kept) else f".transpose({', '.join(map(str, kept))})"
    if len(kept) == len(op.new_order):
        return text or "[...]"
    return f"{text}[{', '.join('None' if axis == 'x' else ':' for axis in op.new_order)}]"


def _specified(value: Any, *sizes: Any) -> Any:
    """Return an array whose sizes are those given, None for any."""
    for axis, size in enumerate(sizes):
        if size is not None and value.shape[axis] != size:
            raise SpecifiedShapeError(SPECIFIED_SHAPE.format(axis, value.shape[axis], int(size)))
    return value


def _on_numbers(node: Apply, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a node that takes numbers where its inputs are no tensors."""
    numbers = [isinstance(inp.type, ScalarType) for inp in node.inputs]
    if not any(numbers):
        return function

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
