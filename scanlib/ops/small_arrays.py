"""Arrays of a few numbers, taken apart: a step that reads and makes them item by item.

Where a step takes items of a small state and puts a new one together, as the right-hand side of a
system of differential equations does, its arrays would be written to memory only to be read from
there: each step would wait until the last one's items are in the cache. Here all of a step's work
is done on numbers, by doing once to arrays of variables what the step does to arrays of numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar.basic import Add, Pow
from pytensor.tensor.basic import Alloc, AllocDiag, ExtractDiag, Join, MakeVector, Split
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import TensorType

from scanlib._compat import join_of, split_of, thaw_graph
from scanlib.lengths.numbers import constant_place
from scanlib.ops.graph import ByOp, is_cheap
from scanlib.ops.scan import Scan
from scanlib.ops.signature import Signature

# Of more items, several at a time are faster: of an array that is read, of one that is computed, of
# one axis where steps neither read nor join single items, and of logarithms and the like.
MOST_READ, MOST_COMPUTED, LONGEST_AXIS, MOST_COSTLY = 16, 9, 4, 3
MOST_NUMBERS = 512  # that a step computes

Items = np.ndarray  # of variables without axes
Sizes = tuple[int | None, ...]


class WholeArrayError(Exception):
    """A step does something to an array that is not done to its items."""


@dataclass(frozen=True)
class TakenApart:
    """The results of a step that works on numbers; arrays are put together from their items.

    `expected` are sizes that arrays of unknown ones must have, with the node that wants them.
    """

    results: list[Variable]
    expected: dict[Variable, tuple[Sizes, Apply]]


def take_apart(
    graph: FunctionGraph, signature: Signature, most: float = MOST_NUMBERS
) -> TakenApart | None:
    """Return what a loop's step computes if it works on numbers only; None if it is not to."""
    by_item = any(isinstance(node.op, Subtensor | MakeVector | Join) for node in graph.apply_nodes)
    step = _Step(graph, signature, MOST_COMPUTED if by_item else LONGEST_AXIS)
    try:
        for node in graph.toposort():
            step.add(node)
            if len(step.known) > most:
                return None
        results = [step.whole(out) for out in graph.outputs]
    except (WholeArrayError, IndexError, ValueError):  # NumPy's, where sizes do not fit
        return None
    return TakenApart(results, step.expected)


def works_on_numbers(op: Scan, most: float = MOST_NUMBERS) -> bool:
    """Whether kernels take the steps of a loop apart, or would if these had no more numbers."""
    return take_apart(thaw_graph(op.body), op.signature, most) is not None


def _shapes_of_states(graph: FunctionGraph, signature: Signature) -> dict[Variable, Sizes]:
    """Return the shapes of states and carries: those of what a step makes of them are the same."""
    inner = signature.split_body_inputs(graph.inputs)
    result = signature.split_body_outputs(graph.outputs)
    pairs = [
        (tap, new) for taps, new in zip(inner.taps, result.states, strict=True) for tap in taps
    ]
    pairs += zip(inner.carries, result.carries, strict=True)
    return {
        old: tuple(
            known if other is None else other
            for known, other in zip(old.type.shape, new.type.shape, strict=True)
        )
        for old, new in pairs
        if isinstance(new.type, TensorType)
    }


class _Step:
    """The items of each array of a step, and the numbers that are computed, each once."""

    def __init__(self, graph: FunctionGraph, signature: Signature, longest: int) -> None:
        self.shapes, self.longest = _shapes_of_states(graph, signature), longest
        self.expected: dict[Variable, tuple[Sizes, Apply]] = {}
        self.items: dict[Variable, Items] = {}
        self.known: dict[tuple[Any, ...], list[Variable]] = {}
        nodes = [node for node in graph.toposort() if isinstance(node.op, Elemwise)]
        for node in (*nodes, *reversed(nodes)):
            self._agree(node)

    def shape(self, variable: Variable) -> Any:
        """Return the sizes of an array, None where they are not known."""
        return self.shapes.get(variable, variable.type.shape)

    def _agree(self, node: Apply) -> None:
        """Give all arrays of an elementwise node the sizes that are known of one of them."""
        arrays = [*node.inputs, *node.outputs]
        axes = zip(*map(self.shape, arrays), strict=True)
        sizes = [next((k for k in known if k not in (None, 1)), None) for known in axes]
        for variable in arrays:
            if None in self.shape(variable):
                pairs = zip(self.shape(variable), sizes, strict=True)
                shape = tuple(size if own is None else own for own, size in pairs)
                self.shapes[variable] = shape
                if variable.owner is None:
                    self.expected[variable] = shape, node

    def of(self, variable: Variable) -> Items:
        """Return the items of an array; of a number, itself in an array without axes."""
        if variable in self.items:
            return self.items[variable]
        if not isinstance(variable.type, TensorType):
            raise WholeArrayError
        shape = self.shape(variable)
        if None in shape or not 0 < np.prod(shape, dtype=int) <= MOST_READ:
            raise WholeArrayError
        items = self.items[variable] = np.empty(shape, dtype=object)
        for place in np.ndindex(*shape):
            if isinstance(variable, Constant):
                items[place] = pt.constant(np.asarray(variable.data)[place], dtype=variable.dtype)
            else:
                items[place] = variable[place] if place else variable
        return items

    def whole(self, variable: Variable) -> Variable:
        """Return a result, put together from its items."""
        if not getattr(variable.type, "ndim", 0):
            return self.items[variable][()] if variable in self.items else variable
        items = self.of(variable)
        vector = MakeVector(variable.type.dtype)(*items.flat)
        return vector if items.ndim == 1 else pt.reshape(vector, items.shape)

    def add(self, node: Apply) -> None:
        """Do to items what a node does to arrays."""
        way = WAYS.of(node.op)
        if way is None:  # what any Op does to numbers
            if any(getattr(v.type, "ndim", 0) for v in (*node.inputs, *node.outputs)):
                raise WholeArrayError
            found = self.of_numbers(node)
        else:
            found = way(self, node)
        for out, items in zip(node.outputs, found, strict=True):
            if not 0 < items.size <= MOST_COMPUTED or max(items.shape, default=1) > self.longest:
                raise WholeArrayError
            self.items[out] = items

    def of_numbers(self, node: Apply) -> list[Items]:
        """Return the results of a node that is given the same arrays, and the numbers of now."""
        return [_single(out) for out in self.with_numbers(node).outputs]

    def with_numbers(self, node: Apply) -> Apply:
        """Return a node that is given the same arrays, and the numbers of now."""
        given = [
            self.items[inp][()] if inp in self.items and not self.items[inp].ndim else inp
            for inp in node.inputs
        ]
        same = all(new is old for new, old in zip(given, node.inputs, strict=True))
        return node if same else node.clone_with_new_inputs(given, strict=False)

    def apply(self, op: Elemwise, *numbers: Variable) -> list[Variable]:
        """Apply an elementwise Op to numbers; a sum leaves out zeros that are only written."""
        if isinstance(op.scalar_op, Add):
            kept = [number for number in numbers if not _is_zero(number)]
            if len(kept) == 1 and all(kept[0].dtype == number.dtype for number in numbers):
                return kept
        key = op.scalar_op, *numbers
        if key not in self.known:
            self.known[key] = Elemwise(op.scalar_op).make_node(*numbers).outputs
        return self.known[key]

    def each(self, op: Elemwise, *arrays: Items, result: int = 0) -> Items:
        """Apply an elementwise Op to the items of arrays; return those of one result."""
        return _each(lambda *numbers: self.apply(op, *numbers)[result], *arrays)

    def fold(self, op: Elemwise, rows: Items) -> Items:
        """Combine the items along the last axis, in order."""
        return reduce(partial(self.each, op), [rows[..., k] for k in range(rows.shape[-1])])


def _each(function: Callable[..., Variable], *arrays: Items) -> Items:
    """Return what a function makes of the items at each place."""
    given = np.broadcast_arrays(*arrays)
    found = np.empty(given[0].shape, dtype=object)
    for place in np.ndindex(*found.shape):
        found[place] = function(*(items[place] for items in given))
    return found


def _cast(items: Items, dtype: str) -> Items:
    return _each(lambda number: pt.cast(number, dtype), items)


def _sizes(node: Apply) -> tuple[int, ...]:
    """Return the sizes of a result, all of which are known."""
    shape = node.outputs[0].type.shape
    if None in shape:
        raise WholeArrayError
    return shape


def _single(variable: Variable) -> Items:
    items = np.empty((), dtype=object)
    items[()] = variable
    return items


def _is_zero(number: Variable) -> bool:
    return isinstance(number, Constant) and not np.any(number.data)


def _elemwise(step: _Step, node: Apply) -> list[Items]:
    given = np.broadcast_arrays(*map(step.of, node.inputs))
    op = node.op.scalar_op  # powers are products, or never computed several at a time
    if given[0].size > MOST_COSTLY and not (is_cheap(op) or isinstance(op, Pow)):
        raise WholeArrayError
    return [step.each(node.op, *given, result=k) for k in range(len(node.outputs))]


def _dimshuffle(step: _Step, node: Apply) -> list[Items]:
    op, items = node.op, step.of(node.inputs[0])
    if any(items.shape[axis] != 1 for axis in op.drop):
        raise WholeArrayError
    kept = items.transpose(*op.shuffle, *op.drop).reshape([items.shape[k] for k in op.shuffle])
    return [np.expand_dims(kept, tuple(op.augment))]


def _read_items(step: _Step, items: Items, node: Apply) -> Items:
    """Return a view of the items that a node reads or writes."""
    place = constant_place(step.with_numbers(node))
    if place is None:
        raise WholeArrayError
    return items[(*place, ...)]


def _subtensor(step: _Step, node: Apply) -> list[Items]:
    inp = node.inputs[0]
    is_known = inp.owner is not None or None not in step.shape(inp)
    fixed = all(isinstance(index, Constant) for index in node.inputs[1:])
    if inp.owner is None and not (is_known and fixed) and not node.outputs[0].type.ndim:
        return step.of_numbers(node)  # an item, of an array that stays in memory
    return [_read_items(step, step.of(inp), node)]


def _inc_subtensor(step: _Step, node: Apply) -> list[Items]:
    items, value = step.of(node.inputs[0]).copy(), step.of(node.inputs[1])
    part = _read_items(step, items, node)
    value = _cast(np.broadcast_to(value, part.shape), node.outputs[0].type.dtype)
    part[...] = value if node.op.set_instead_of_inc else step.each(pt.add, part, value)
    return [items]


def _join(step: _Step, node: Apply) -> list[Items]:
    axis, parts = join_of(node)
    if axis is None:
        raise WholeArrayError
    return [_cast(np.concatenate(list(map(step.of, parts)), axis), node.outputs[0].type.dtype)]


def _split(step: _Step, node: Apply) -> list[Items]:
    whole, axis, sizes = split_of(node)
    items = step.of(whole)
    if axis is None or not isinstance(sizes, Constant) or sum(sizes.data) != items.shape[axis]:
        raise WholeArrayError
    return np.split(items, np.cumsum(sizes.data)[:-1], axis)


def _reduce(step: _Step, node: Apply) -> list[Items]:
    op, items, out = node.op, step.of(node.inputs[0]), node.outputs[0]
    axes = range(items.ndim) if op.axis is None else [axis % items.ndim for axis in op.axis]
    kept = [axis for axis in range(items.ndim) if axis not in axes]
    rows = items.transpose(*kept, *axes).reshape([*(items.shape[k] for k in kept), -1])
    rows = _cast(rows, getattr(op, "acc_dtype", None) or out.type.dtype)
    return [_cast(step.fold(Elemwise(op.scalar_op), rows), out.type.dtype)]


def _specify_shape(step: _Step, node: Apply) -> list[Items]:
    items, shape = step.of(node.inputs[0]), node.outputs[0].type.shape
    if any(size not in (None, own) for size, own in zip(shape, items.shape, strict=True)):
        raise WholeArrayError
    return [items]


def _shape(step: _Step, node: Apply) -> list[Items]:
    items = np.empty(node.inputs[0].type.ndim, dtype=object)
    items[:] = [pt.constant(size, dtype="int64") for size in step.of(node.inputs[0]).shape]
    return [items]


def _alloc_diagonal(step: _Step, node: Apply) -> list[Items]:
    op, items = node.op, step.of(node.inputs[0])
    if items.ndim != 1 or (op.offset, op.axis1, op.axis2) != (0, 0, 1):
        raise WholeArrayError
    matrix = np.full((items.size, items.size), pt.constant(0, dtype=node.outputs[0].type.dtype))
    matrix[np.diag_indices(items.size)] = items
    return [matrix]


def _dot(step: _Step, node: Apply) -> list[Items]:
    """Multiply by sums of products, the items of a sum in order."""
    left, right = map(step.of, node.inputs)
    if left.shape[-1] != right.shape[0]:
        raise WholeArrayError
    return [step.fold(pt.add, step.each(pt.mul, left[:, None], right.T))]


Way = Callable[[_Step, Apply], list[Items]]
WAYS: ByOp[Way] = ByOp(
    {
        Elemwise: _elemwise,
        DimShuffle: _dimshuffle,
        Subtensor: _subtensor,
        IncSubtensor: _inc_subtensor,
        Join: _join,
        Split: _split,
        MakeVector: lambda step, node: [
            _cast(np.stack(list(map(step.of, node.inputs))), node.outputs[0].type.dtype)
        ],
        CAReduce: _reduce,
        Reshape: lambda step, node: [step.of(node.inputs[0]).reshape(_sizes(node))],
        SpecifyShape: _specify_shape,
        Alloc: lambda step, node: [np.broadcast_to(step.of(node.inputs[0]), _sizes(node))],
        Shape: _shape,
        Shape_i: lambda step, node: [_shape(step, node)[0][node.op.i : node.op.i + 1].reshape(())],
        Dot: _dot,
        ExtractDiag: lambda step, node: [
            np.diagonal(step.of(node.inputs[0]), node.op.offset, node.op.axis1, node.op.axis2)
        ],
        AllocDiag: _alloc_diagonal,
    }
)
