"""Small operations on PyTensor graphs that several parts of scanlib need."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, FrozenApply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.graph.traversal import graph_inputs, toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import ScalarFromTensor
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import IncSubtensor
from pytensor.tensor.type import DenseTensorType, TensorType, integer_dtypes

from scanlib._compat import INDEX_WRITES
from scanlib.lengths.numbers import constant_index, constant_place, indices_of

Variables = Sequence[Variable]
Found = TypeVar("Found")


class ByOp(dict[type, Found]):
    """What is known of Ops, by their class; of one that has none, what its base classes have."""

    def register(self, *kinds: type) -> Callable[[Found], Found]:
        """Register a function, as a decorator of it."""

        def keep(function: Found) -> Found:
            self.update(dict.fromkeys(kinds, function))
            return function

        return keep

    def of(self, op: Op) -> Found | None:
        """Return what is known of an Op, None if nothing is."""
        return next((self[kind] for kind in type(op).__mro__ if kind in self), None)


# Scalar operations that cost less than reading a number from memory, one by one.
CHEAP = (
    *(ps.Add, ps.Sub, ps.Mul, ps.TrueDiv, ps.Neg, ps.Sqr, ps.Abs, ps.Identity, ps.Cast),
    *(ps.Switch, ps.Second, ps.ScalarMaximum, ps.ScalarMinimum, ps.Reciprocal),
    *(ps.LogicalComparison, ps.BinaryBitOp, ps.UnaryBitOp, ps.Sign),
)


def is_cheap(op: Op) -> bool:
    """Whether a scalar Op, or all that one is made of, is."""
    if isinstance(op, ps.Composite):
        return all(is_cheap(node.op) for node in op.fgraph.toposort())
    return isinstance(op, CHEAP)


def is_tensor(variable: Variable) -> bool:
    """Whether a variable is a dense tensor."""
    return isinstance(variable.type, DenseTensorType)


def is_integer(variable: Variable) -> bool:
    """Whether a variable is a tensor of integers."""
    return is_tensor(variable) and variable.type.dtype in integer_dtypes


def is_numeric(variable: Variable) -> bool:
    """Whether a value consists of numbers; the state of a random generator does not."""
    return getattr(variable.type, "dtype", None) is not None


def is_dense(variable: Variable) -> bool:
    """Whether a value consists of numbers, all of which are stored."""
    return is_numeric(variable) and not hasattr(variable.type, "format")  # of sparse matrices


def zeros_like(variable: Variable, dtype: str | None = None) -> Variable:
    """Return zeros of the type of a dense or sparse variable; the dtype is for dense ones."""
    return pt.zeros_like(variable, dtype) if is_tensor(variable) else variable.zeros_like()


def is_outer_product(node: Apply) -> bool:
    """Whether a node multiplies a column with a row: a product without a sum."""
    if not isinstance(node.op, Dot):
        return False
    left, right = node.inputs
    return left.type.shape[-1] == right.type.shape[-2:][0] == 1


def is_linear_algebra(op: object) -> bool:
    """Whether an Op factorizes, inverts or solves."""
    return type(op).__module__.startswith("pytensor.tensor.linalg")


def core_op(node: Apply) -> Op:
    """Return the Op of a node, without the batch around it."""
    return node.op.core_op if isinstance(node.op, Blockwise) else node.op


def before_writes(array: Variable) -> Variable:
    """Return what an array was before items were written into it."""
    while array.owner is not None and isinstance(array.owner.op, INDEX_WRITES):
        array = array.owner.inputs[0]
    return array


def applies(node: Apply | None, scalar_ops: Any) -> bool:
    """Whether a node is an elementwise Op of some kinds, types of scalar Ops."""
    return (
        node is not None
        and isinstance(node.op, Elemwise)
        and isinstance(node.op.scalar_op, scalar_ops)
    )


def equality_tests(nodes: Iterable[Apply]) -> list[Apply]:
    """Return the nodes that ask whether numbers are equal, as derivatives of extremes do, but for
    tests for equal infinities, those of `logaddexp`, which do not mind rounding."""
    given = list(nodes)
    met = {inp for node in given if applies(node, ps.AND) for inp in node.inputs}
    tests = [node for node in given if applies(node, (ps.EQ, ps.NEQ))]
    return [node for node in tests if node.outputs[0] not in met]


def is_differentiable(variable: Variable) -> bool:
    """Whether a variable holds real or complex numbers that a derivative can flow through."""
    dtype = getattr(variable.type, "dtype", None)
    return dtype is not None and np.dtype(dtype).kind in "fc"


def substitute(
    outputs: Sequence[Variable], replacements: Mapping[Variable, Variable]
) -> list[Variable]:
    """Return copies of `outputs` in which `replacements` have been made.

    Keys may stand anywhere in the graph. Nodes above a key are not visited; nodes that do not
    depend on a key are shared with the original. Where a replacement has another type than its
    key, the nodes that read it are made anew and infer their types again.
    """
    if not replacements:
        return list(outputs)
    memo: dict[Variable, Variable] = dict(replacements)
    for node in toposort(outputs, blockers=list(replacements)):
        outs = node.outputs
        new_inputs = [memo.get(inp, inp) for inp in node.inputs]
        if all(new is old for new, old in zip(new_inputs, node.inputs, strict=True)):
            continue
        if isinstance(node, FrozenApply):  # such a node is its own clone, and would be changed
            node = Apply(node.op, list(node.inputs), [out.type() for out in node.outputs])
        if all(map(_is_alike, node.inputs, new_inputs)):
            new_node = node.clone()  # PyTensor makes an `Alloc` anew, which takes milliseconds
            new_node.inputs = new_inputs
        else:
            new_node = node.clone_with_new_inputs(new_inputs, strict=False)
        for old, new in zip(outs, new_node.outputs, strict=True):
            if old not in memo:
                memo[old] = new
    return [memo.get(out, out) for out in outputs]


def _is_alike(old: Variable, new: Variable) -> bool:
    """Whether no more is known of what replaces an input."""
    return new is old or (new.type == old.type and not isinstance(new, Constant))


def merge_equal(outputs: Sequence[Variable]) -> list[Variable]:
    """Return `outputs` with equal computations computed once. Nodes may be changed in place."""
    inputs = [v for v in graph_inputs(outputs) if not isinstance(v, Constant)]
    fgraph = FunctionGraph(inputs, list(outputs), clone=False)
    MergeOptimizer().rewrite(fgraph)
    return list(fgraph.outputs)


def depends_on(outputs: Sequence[Variable], inputs: Iterable[Variable]) -> set[Variable]:
    """Return every variable above `outputs` that depends on one of `inputs`, those included."""
    reached = set(inputs)
    for node in toposort(outputs, blockers=list(reached)):
        if any(inp in reached for inp in node.inputs):
            reached.update(node.outputs)
    return reached


def read_from_outside(
    nodes: Iterable[Apply],
    outputs: Sequence[Variable],
    dependent: set[Variable],
    belongs: Callable[[Apply, Variable], bool],
) -> list[Variable]:
    """Return what outputs, or nodes with dependent results, read that does not depend as well.

    In place of an input that `belongs` to the node that reads it stands what it is made of.
    """
    read = dict.fromkeys(outputs)
    for node in nodes:
        if any(out in dependent for out in node.outputs):
            for inp in node.inputs:
                read |= dict.fromkeys(inp.owner.inputs if belongs(node, inp) else [inp])
    return [variable for variable in read if variable not in dependent]


def reached_by(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> list[int]:
    """Return for each output which inputs it is connected to, as the bits of a number.

    PyTensor's `io_connection_pattern` makes a list of all inputs for each node.
    """
    masks = {inp: 1 << i for i, inp in enumerate(inputs)}
    for node in toposort(outputs, blockers=list(inputs)):
        own = [masks.get(inp, 0) for inp in node.inputs]
        find = getattr(node.op, "connection_pattern", None)
        pattern = find(node) if find is not None and any(own) else None
        for k, out in enumerate(node.outputs):
            mask = masks.get(out, 0)
            for i, bits in enumerate(own):
                if bits and (pattern is None or pattern[i][k]):
                    mask |= bits
            masks[out] = mask
    return [masks.get(out, 0) for out in outputs]


# The nodes that read each variable, once for each time; None for a result.
Readers = defaultdict[Variable, list[Apply | None]]


def readers_of(outputs: Sequence[Variable], blockers: Iterable[Variable] = ()) -> Readers:
    """Return who reads each variable of a graph, down to `blockers`: None stands for what is read
    as a result."""
    readers: Readers = defaultdict(list)
    for out in outputs:
        readers[out].append(None)
    for node in toposort(outputs, blockers=list(blockers)):
        for inp in node.inputs:
            readers[inp].append(node)
    return readers


def row_type(variable: Variable) -> TensorType:
    """Return the type of one row of a tensor."""
    return TensorType(variable.type.dtype, shape=variable.type.shape[1:])


def lifted_row(rows: Variable) -> Variable | None:
    """Return the row that was made into an array of one row; None if there is none."""
    node = rows.owner
    if node is None or not isinstance(node.op, DimShuffle):
        return None
    (row,) = node.inputs
    return row if node.op.new_order == ("x", *range(row.type.ndim)) else None


def with_axes(variable: Variable, first: int, count: int) -> Variable:
    """Return a tensor with so many axes of size one, if any, behind its first ones."""
    return pt.expand_dims(variable, tuple(range(first, first + count))) if count > 0 else variable


def conform(variable: Variable, type: Any) -> Variable:
    """Return `variable` as a value of `type`: cast, and with its static shape asserted.

    `TypeError` if the ranks differ or the type is not a tensor's.
    """
    if type.is_super(variable.type):
        return variable
    if not isinstance(type, TensorType) or not is_tensor(variable):
        raise TypeError(f"expected {type}, got {variable.type}")
    if variable.type.ndim != type.ndim:
        raise TypeError(f"expected {type.ndim} dimensions, got {variable.type.ndim}")
    if variable.type.dtype != type.dtype:
        variable = pt.cast(variable, type.dtype)
    if not type.is_super(variable.type):
        variable = pt.specify_shape(variable, type.shape)
    return variable


def writes_of(value: Variable) -> tuple[Variable, list[tuple[Apply, tuple[Any, ...]]]]:
    """Return the array before anything was written at constant places, and the nodes that write
    there, with the places, the first one first."""
    writes = []
    while value.owner is not None and isinstance(value.owner.op, IncSubtensor):
        node, place = value.owner, constant_place(value.owner)
        slices = sum(isinstance(index, slice) for index in place or ())
        if place is None or node.inputs[1].type.ndim != value.type.ndim - len(place) + slices:
            break
        writes.append((node, place))
        value = node.inputs[0]
    return value, writes[::-1]


def index_text(node: Apply) -> str:
    """Return the index of a `Subtensor` node as it is written: ``1:, -1``."""
    texts = []
    for index in indices_of(node):
        if isinstance(index, slice):
            ends = [
                "" if end is None else _number(end) for end in (index.start, index.stop, index.step)
            ]
            texts.append(f"{ends[0]}:{ends[1]}" + (f":{ends[2]}" if ends[2] else ""))
        else:
            texts.append(_number(index))
    return ", ".join(texts)


def _number(index: Any) -> str:
    known = constant_index(index)
    if known is not None:
        return str(known)
    node = getattr(index, "owner", None)
    if node is not None and isinstance(node.op, ScalarFromTensor):
        index = node.inputs[0]
    return getattr(index, "name", None) or "…"


# Graphs as deep as they get: Python's stack holds no more than a thousand calls.
MOST_TERMS = 10_000
CALLS_OF_A_NODE = 4  # of PyTensor's `grad`, which calls itself, and of `ScalarValues.convert`


@contextmanager
def room_for_calls(nodes: int) -> Iterator[None]:
    """Let functions call themselves as often as a graph of so many nodes takes.

    Calls between Python functions take memory, and no part of the stack of the C library.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, before + CALLS_OF_A_NODE * nodes))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def taken_apart(
    variable: Variable, parts: Callable[[Variable], Sequence[Variable] | None]
) -> list[Variable]:
    """Return the terms of nested sums in their order; `parts` are those of one sum, else None.

    A sum of more than `MOST_TERMS` is left whole: doubling thirty times makes a billion.
    """
    found: list[Variable] = []
    pending = [variable]
    while pending:
        term = pending.pop()
        inside = parts(term)
        if inside is None:
            found.append(term)
        else:
            pending += reversed(inside)
        if len(found) + len(pending) > MOST_TERMS:
            return [variable]
    return found
