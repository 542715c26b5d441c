"""Integers that JAX knows when it compiles, and what others do not exceed.

Lengths of slices, sizes of arrays and numbers of steps must be known to JAX when it compiles. They
are, wherever they are computed from shapes and from integers that the function takes: the shapes
are part of what compiled code is compiled for, and PyTensor's JAX linker compiles anew for every
value of an integer input that only `JAXShapeTuple` reads. But PyTensor's rules compute with them by
JAX operations, whose results are not known until the code runs. Here an Op on numbers, or on a few
side by side, is its own NumPy function (`perform`) while JAX traces, if all that it is given is
known.

A number that is not known may have a least and a greatest value (`Length`): what is computed from
it has them where they follow, in sums, differences, products, extremes and choices::

    n <= 5, k any number:    minimum(k, n + 1) <= 6    switch(k < 0, n, 2) <= 5
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Variable
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarOp, ScalarType
from pytensor.tensor.basic import Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import TensorType, discrete_dtypes

from scanlib._compat.jax import JAXShapeTuple
from scanlib.backends.jax.bounded import Length, has_value, known_number
from scanlib.lengths.known import is_scalar

SAME = (ScalarFromTensor, TensorFromScalar)
SIDE_BY_SIDE = (CAReduce, DimShuffle, IncSubtensor, Join, MakeVector, Shape, Subtensor)
ON_NUMBERS = (CheckAndRaise, Elemwise, ScalarOp, Shape_i, *SAME, *SIDE_BY_SIDE)
NUMBERS = (bool, int, float, np.generic, np.ndarray)
INF = float("inf")
Range = tuple[Any, Any]  # the least and the greatest value
# What has its least and greatest values where all that it is given has.
WRAPS = (ps.Add, ps.Mul, ps.Neg, ps.Sub)  # in few bits
AT_CORNERS = (*WRAPS, ps.Clip, ps.ScalarMaximum, ps.ScalarMinimum, ps.Switch)


class KnownNumber(JAXShapeTuple):
    """A number, by which PyTensor's linker finds the integer inputs to compile for, and which
    rewrites do not fuse with other work."""

    __props__ = ()

    def make_node(self, number: Variable) -> Apply:
        return Apply(self, [number], [number.type()])

    def do_constant_folding(self, fgraph: Any, node: Apply) -> bool:
        return False

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = inputs[0]


@jax_funcify.register(KnownNumber)
def funcify_known_number(op: KnownNumber, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that gives a number its dtype, which Python's have not."""

    def with_dtype(value: Any) -> Any:
        found = None if known_number(value) is None else computed(node, (value,))
        return value if found is None else found[0]

    return with_dtype


def may_be_known(node: Apply) -> bool:
    """Whether the results of a node are numbers, or some side by side."""
    return isinstance(node.op, ON_NUMBERS) and all(map(_is_small, node.outputs))


def _is_small(variable: Variable) -> bool:
    if is_scalar(variable):
        return True
    is_vector = isinstance(variable.type, TensorType) and variable.type.ndim == 1
    return is_vector and variable.type.dtype in discrete_dtypes


def computed(node: Apply, inputs: tuple[Any, ...]) -> list[Any] | None:
    """Return the results of a node whose inputs JAX knows, None if it does not know one."""
    if isinstance(node.op, Shape | Shape_i):
        shape = np.array(np.shape(inputs[0]), np.int64)
        return [shape if isinstance(node.op, Shape) else shape[node.op.i]]
    values = []
    for value, variable in zip(inputs, node.inputs, strict=True):
        if not (isinstance(value, NUMBERS) or has_value(value)):
            return None
        dtype = getattr(variable.type, "dtype", None)
        values.append(value if dtype is None else np.asarray(value, dtype))
        if isinstance(variable.type, ScalarType):
            values[-1] = values[-1][()]
    if isinstance(node.op, Subtensor):
        values[1:] = inputs[1:]
    storage: list[list[Any]] = [[None] for _ in node.outputs]
    try:
        node.op.perform(node, values, storage)
    except OverflowError:
        # A Composite computes with Python's numbers, which may not fit its constants' small dtypes.
        node.op.perform(node, [_as_objects(value) for value in values], storage)
    pairs = zip(storage, node.outputs, strict=True)
    return [np.asarray(value, out.type.dtype) for (value,), out in pairs]


def _as_objects(value: Any) -> Any:
    """Return integers as objects, each a number of NumPy's with 64 bits."""
    given = np.asarray(value)
    if given.dtype.kind not in "iu":
        return value
    found = np.empty(given.size, object)
    found[:] = list(given.ravel().astype("int64"))
    return found.reshape(given.shape)


# What numbers do not exceed


def with_bounds(node: Apply, inputs: tuple[Any, ...], found: Any) -> Any:
    """Return the numbers that a node computes with the greatest value they can have, where they
    have one."""
    dtypes = [getattr(variable.type, "dtype", "float64") for variable in node.inputs]
    ranges = _ranges_of(node, list(map(range_of, inputs, dtypes)))
    results = []
    values = found if len(ranges) > 1 else [found]
    for value, (low, high), out in zip(values, ranges, node.outputs, strict=True):
        has_bound = high < INF and out.type.dtype in discrete_dtypes
        results.append(Length(value, low, int(high)) if has_bound else value)
    return results if len(ranges) > 1 else results[0]


def range_of(value: Any, dtype: str = "int64") -> Range:
    """Return the least and the greatest value of a number of a dtype."""
    if isinstance(value, Length):
        return value.low, value.bound
    known = known_number(value)
    if known is not None:
        known = float(known) if isinstance(known, float) else int(known)  # NumPy's warn of infinity
        return known, known
    return {"b": (0, 1), "u": (0, INF)}.get(np.dtype(dtype).kind, (-INF, INF))


def _ranges_of(node: Apply, ends: list[Range]) -> list[Range]:
    """Return the least and the greatest value of what a node computes."""
    op = node.op.scalar_op if isinstance(node.op, Elemwise) else node.op
    if isinstance(op, (*SAME, ps.Cast, ps.Identity, CheckAndRaise, KnownNumber)):
        return ends[:1]
    if isinstance(op, ps.Composite):
        return _ranges_of_graph(op.fgraph, ends)
    dtypes = {out.type.dtype for out in node.outputs}
    exact = {"bool", "int32", "int64"} if isinstance(op, WRAPS) else set(discrete_dtypes)
    if not (isinstance(op, AT_CORNERS) and dtypes <= exact):
        return [range_of(None, out.type.dtype) for out in node.outputs]
    if isinstance(op, ps.Switch):
        ends = [(0, 1), *ends[1:]]
    values = [op.impl(*corner) for corner in product(*ends)]
    unknown = any(value != value for value in values)
    return [(-INF, INF) if unknown else (min(values), max(values))]


def _ranges_of_graph(graph: Any, ends: list[Range]) -> list[Range]:
    known = dict(zip(graph.inputs, ends, strict=True))

    def read(variable: Variable) -> Range:
        return known[variable] if variable in known else range_of(variable.data)

    for node in graph.toposort():
        ranges = _ranges_of(node, list(map(read, node.inputs)))
        known.update(zip(node.outputs, ranges, strict=True))
    return list(map(read, graph.outputs))
