"""Sizes as functions of shapes, which are numbers of Python: so `torch.compile` sees one graph.

It asks for the shapes of a loop's results before anything is computed. Where they depend on values
(a number of steps computed in the graph, `until`), there is no answer, and the loop runs between
two compiled graphs.

PyTensor's translation makes a tensor of every size: ``x[: y.shape[0]]`` makes a tensor of the
length of `y`, and takes the number out of it again to slice with. `torch.compile` cannot follow a
number out of a tensor, and cuts its graph there, with a warning. Such expressions stand in most
loops: sequences are cut to the shortest one, and gradients are filled up with zeros. Before a graph
is translated, what reads sizes reads them from a `Size` instead, one node for the whole expression:
a function of the shapes of its inputs whose result is a number of Python.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Any

import numpy as np
import pytensor.tensor as pt
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    MakeVector,
    ScalarFromTensor,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Reshape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.backends.torch.operator import Shapes
from scanlib.lengths.numbers import constant_integer, measured
from scanlib.ops.graph import is_numeric
from scanlib.ops.linker_features import holds_scanlib_ops
from scanlib.ops.row_ops.checked_rows import CheckedItems, CheckedRows
from scanlib.ops.row_ops.padded_rows import PaddedRows

SizeOf = Callable[[Sequence[torch.Tensor]], Any]


class UnknownSizeError(Exception):
    """A size is not a function of the inputs' shapes that is known here."""


def shapes_of_loop(op: Any, node: Apply) -> Shapes | None:
    """Return the rule for the results of a loop, None if shapes depend on values."""
    # Of stand-ins: what inputs are computed from would be copied.
    alone = [inp.type() for inp in node.inputs]
    shapes = [[Shape_i(axis)(inp) for axis in range(inp.type.ndim)] for inp in alone]
    try:
        rules = [
            [size_of(pt.as_tensor_variable(size), [*alone, *node.inputs]) for size in shape]
            for shape in op.infer_shape(None, node, shapes)
        ]
    except UnknownSizeError:
        return None
    return lambda inputs: [tuple(rule([*inputs, *inputs]) for rule in row) for row in rules]


_SIZES: dict[type, Callable[..., Any]] = {
    ps.Add: lambda *sizes: sum(sizes),
    ps.Mul: lambda *sizes: reduce(mul, sizes),
    ps.Sub: lambda a, b: a - b,
    ps.Neg: lambda a: -a,
    ps.IntDiv: lambda a, b: a // b,
    ps.Mod: lambda a, b: a % b,
    ps.Cast: lambda a: a,
    ps.ScalarMaximum: torch.sym_max,
    ps.ScalarMinimum: torch.sym_min,
    ps.Switch: lambda condition, a, b: a if condition else b,
    ps.EQ: lambda a, b: a == b,
    ps.NEQ: lambda a, b: a != b,
    ps.LT: lambda a, b: a < b,
    ps.LE: lambda a, b: a <= b,
    ps.GT: lambda a, b: a > b,
    ps.GE: lambda a, b: a >= b,
}


def size_of(size: Variable, arrays: list[Variable], grows: bool = False) -> SizeOf:
    """Return the function of the shapes of arrays that a size is, or a tuple of several sizes.

    If the list of arrays `grows`, those that are read come into it. `UnknownSizeError` if something
    else decides it.
    """
    if not is_numeric(size):
        raise UnknownSizeError
    known = constant_integer(size) if size.type.ndim == 0 else None
    if known is not None:
        return lambda values: known
    node, read = size.owner, measured(size)
    if node is None:
        raise UnknownSizeError
    if read is not None and grows and read[0] not in arrays:
        arrays.append(read[0])
    if read is not None and read[0] in arrays:
        position, axis = arrays.index(read[0]), read[1]
        return lambda values: values[position].shape[axis]
    rule = _rule(node)
    parts = [size_of(inp, arrays, grows) for inp in node.inputs]
    return lambda values: rule(*(part(values) for part in parts))


def _rule(node: Apply) -> Callable[..., Any]:
    """Return how a size is computed from others."""
    if isinstance(node.op, ScalarFromTensor | TensorFromScalar):
        return lambda a: a
    if isinstance(node.op, MakeVector):
        return lambda *sizes: sizes
    scalar = node.op.scalar_op if isinstance(node.op, Elemwise) else node.op
    rule = _SIZES.get(type(scalar))
    out = node.outputs[0].type
    if rule is None or out.ndim or np.dtype(out.dtype).kind not in "iub":
        raise UnknownSizeError
    if isinstance(scalar, ps.IntDiv | ps.Mod) and not constant_integer(node.inputs[1]):
        raise UnknownSizeError  # may be zero
    return rule


# Sizes of a graph

# How many inputs come before those that are sizes, or conditions on sizes.
_READERS: dict[type, int] = {
    **dict.fromkeys((AllocEmpty, ARange), 0),
    **dict.fromkeys((Alloc, CheckAndRaise, Reshape, SpecifyShape, Subtensor), 1),
    **dict.fromkeys((CheckedItems, CheckedRows, PaddedRows), 1),
    IncSubtensor: 2,
}

_KNOW_CONSTANTS = (IncSubtensor, Reshape, Subtensor)  # whose rules take numbers from them

_funcify_graph = pytorch_funcify.dispatch(FunctionGraph)


class Size(Op):
    """A number, or several as a tuple, that the shapes of arrays decide."""

    def __init__(self, number: SizeOf, type: Any) -> None:
        self.number, self.type = number, type

    def make_node(self, *arrays: Variable) -> Apply:
        return Apply(self, list(arrays), [self.type()])

    def perform(self, node: Apply, inputs: Sequence[Any], storage: list[list[Any]]) -> None:
        storage[0][0] = self.type.filter(self.number(inputs))


def keep_sizes(
    fgraph: FunctionGraph, order: Sequence[Apply] | None = None
) -> tuple[FunctionGraph, list[Apply]]:
    """Return a copy of a graph whose sizes are numbers, and its nodes in the order to run."""
    graph, copies = fgraph.clone_get_equiv(check_integrity=False, attach_feature=False)
    known: dict[Variable, Variable] = {}
    nodes: list[Apply] = []
    for original in order or fgraph.toposort():
        node = copies[original]
        first = _READERS.get(type(node.op), len(node.inputs))
        for position, inp in list(enumerate(node.inputs))[first:]:
            if isinstance(inp, Constant) and isinstance(node.op, _KNOW_CONSTANTS):
                continue
            if inp not in known:
                known[inp] = _number(inp)
                if known[inp] is not inp:
                    nodes.append(known[inp].owner)
            graph.change_node_input(node, position, known[inp])
        nodes.append(node)
    return graph, [node for node in nodes if node in graph.apply_nodes]


def _number(variable: Variable) -> Variable:
    """Return what is read instead of a variable: a `Size`, if it is one."""
    arrays: list[Variable] = []
    try:
        number = size_of(variable, arrays, grows=True)
    except UnknownSizeError:
        return variable
    return Size(number, variable.type)(*arrays)


@pytorch_funcify.register(Size)
def funcify_size(op: Size, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the number as a function of the arrays."""
    number = op.number
    return lambda *arrays: number(arrays)


@pytorch_funcify.register(FunctionGraph)
def funcify_graph(fgraph: FunctionGraph, **kwargs: Any) -> Callable[..., Any]:
    """Translate a graph; one with loops keeps its sizes."""
    if holds_scanlib_ops(fgraph):
        fgraph, order = keep_sizes(fgraph, kwargs.pop("order", None))
        kwargs |= {"order": order, "storage_map": {}}  # of the copy
    return _funcify_graph(fgraph, **kwargs)
