"""Sizes stay numbers, so that `torch.compile` sees one graph.

PyTensor's translation makes a tensor of every size: ``x[: y.shape[0]]`` makes a tensor of the
length of `y`, and takes the number out of it again to slice with. `torch.compile` cannot follow a
number out of a tensor, and cuts its graph there, with a warning. Such expressions stand in most
loops: sequences are cut to the shortest one, and gradients are filled up with zeros.

Before a graph is translated, what reads sizes reads them from a `Size` instead, one node for the
whole expression: a function of the shapes of its inputs whose result is a number of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.backends.torch.result_shapes import UnknownSizeError, shapes_read, size_of
from scanlib.ops.linker_features import holds_scanlib_ops
from scanlib.ops.row_ops.checked_rows import CheckedRows
from scanlib.ops.row_ops.padded_rows import PaddedRows

# How many inputs come before those that are sizes, or conditions on sizes.
_READERS: dict[type, int] = {
    **dict.fromkeys((AllocEmpty, ARange), 0),
    **dict.fromkeys((Alloc, CheckAndRaise, Reshape, SpecifyShape, Subtensor), 1),
    **dict.fromkeys((CheckedRows, PaddedRows), 1),
    IncSubtensor: 2,
}

_KNOW_CONSTANTS = (IncSubtensor, Reshape, Subtensor)  # whose rules take numbers from them

_funcify_graph = pytorch_funcify.dispatch(FunctionGraph)


class Size(Op):
    """A number, or several as a tuple, that the shapes of arrays decide.

    Parameters
    ----------
    size : Variable
        The number as a graph of shapes of `arrays`.
    arrays : sequence of Variable
    """

    def __init__(self, size: Variable, arrays: Sequence[Variable]) -> None:
        self.number = size_of(size, list(arrays))
        self.type = size.type

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
    try:
        arrays = shapes_read(variable)
    except UnknownSizeError:
        return variable
    return Size(variable, arrays)(*arrays)


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
