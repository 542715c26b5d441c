"""Integers that JAX knows when it compiles.

Lengths of slices, sizes of arrays and numbers of steps must be known to JAX when it compiles. They
are, wherever they are computed from shapes and from integers that the function takes: the
shapes are part of what compiled code is compiled for, and PyTensor's JAX linker compiles anew for
every value of an integer input that is used as a shape only. But PyTensor's rules compute them
by JAX operations, whose results are not known until the code runs.

A `StaticNumber` holds such a computation, from sizes and integer inputs to one integer, and does it
in Python. It is a kind of `JAXShapeTuple`, by which PyTensor's linker finds the integer inputs that
it has to compile for. Where an input is not known after all, the computation is a JAX one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.graph.op import Op
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.link.jax.dispatch.shape import JAXShapeTuple
from pytensor.scalar.basic import IntDiv, Mod, ScalarType, TrueDiv
from pytensor.tensor.type import TensorType

from scanlib._compat import thaw_graph
from scanlib.backends.jax.bounded import (
    Bounded,
    Length,
    UnknownLengthError,
    number_of,
    static_int,
)
from scanlib.backends.jax.gathered_rows import split


class StaticNumber(JAXShapeTuple):
    """One number computed from sizes and integers.

    Parameters
    ----------
    body : FrozenFunctionGraph
        From integer scalars to one scalar.
    """

    __props__ = ("body",)

    def __init__(self, body: FrozenFunctionGraph) -> None:
        self.body = body

    def make_node(self, *inputs: Variable) -> Apply:
        return Apply(self, list(inputs), [self.body.outputs[0].type()])

    def do_constant_folding(self, fgraph: Any, node: Apply) -> bool:
        return False

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = evaluate(self.body, inputs)


@jax_funcify.register(StaticNumber)
def funcify_static_number(op: StaticNumber, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that computes the number in Python, or by JAX where it has to."""
    in_jax: list[Callable[..., tuple]] = []

    def static_number(*inputs: Any) -> Any:
        known = [static_int(value) for value in inputs]
        if None not in known:
            return np.asarray(evaluate(op.body, known)).item()
        numbers = [number_of(value) for value in inputs]
        if not in_jax:
            in_jax.append(jax_funcify(thaw_graph(op.body)))
        (number,) = in_jax[0](*numbers)
        ranges = [(0, v.bound) if isinstance(v, Length) else (static_int(v),) * 2 for v in inputs]
        if any(None in given for given in ranges):
            return number
        return Length(number, max(greatest(op.body, ranges), 0))

    return static_number


class StaticRange(Op):
    """The integers from a first to a last one that are `StaticNumber`.

    PyTensor's own rule for `arange` takes constants alone.

    Parameters
    ----------
    dtype : str
        Of the result.
    """

    __props__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def make_node(self, start: Variable, stop: Variable, step: Variable) -> Apply:
        return Apply(self, [start, stop, step], [TensorType(self.dtype, shape=(None,))()])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = np.arange(*inputs, dtype=self.dtype)


@jax_funcify.register(StaticRange)
def funcify_static_range(op: StaticRange, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return `jax.numpy.arange` of numbers that are known when JAX compiles."""

    def static_range(*ends: Any) -> Any:
        start, stop, step = map(static_int, ends)
        if start == 0 and step == 1 and isinstance(ends[1], Length):
            return Bounded(jnp.arange(ends[1].bound, dtype=op.dtype), ends[1].value, "a range")
        if start is None or stop is None or step is None:
            raise UnknownLengthError("JAX must know where a range of integers ends")
        return jnp.arange(start, stop, step, dtype=op.dtype)

    return static_range


class StaticSplit(Op):
    """Parts of an array whose sizes are numbers, each an input of its own.

    PyTensor's own rule for `split` takes constants alone. The gradient of a `join` is one.

    Parameters
    ----------
    axis : int
    """

    __props__ = ("axis",)

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def make_node(self, array: Variable, *sizes: Variable) -> Apply:
        shape = [None if k == self.axis else n for k, n in enumerate(array.type.shape)]
        part = TensorType(array.type.dtype, shape=shape)
        return Apply(self, [array, *sizes], [part() for _ in sizes])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        array, *sizes = inputs
        parts = np.split(array, np.cumsum(sizes)[:-1], axis=self.axis)
        for storage, part in zip(output_storage, parts, strict=True):
            storage[0] = part


@jax_funcify.register(StaticSplit)
def funcify_static_split(op: StaticSplit, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return `jax.numpy.split` by sizes that are known when JAX compiles."""

    def static_split(array: Any, *sizes: Any) -> Any:
        parts = _parts(array, op.axis, sizes)
        return parts if len(parts) > 1 else parts[0]

    return static_split


def _parts(array: Any, axis: int, sizes: tuple[Any, ...]) -> list[Any]:
    known = [size for size in map(static_int, sizes) if size is not None]
    if len(known) < len(sizes) or isinstance(array, Bounded):
        if axis != 0:
            raise UnknownLengthError("JAX must know the sizes of the parts of an array")
        return split(array, sizes)
    if min(known) < 0 or sum(known) != array.shape[axis]:
        raise ValueError(
            f"an array of {array.shape[axis]} rows cannot be split into parts of {known}"
        )
    return jnp.split(array, np.cumsum(known)[:-1], axis=axis)


class AtMost(Op):
    """A number that is computed from data, and an integer that it does not exceed."""

    __props__ = ()

    def make_node(self, number: Variable, bound: Variable) -> Apply:
        return Apply(self, [number, bound], [number.type()])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = inputs[0]


@jax_funcify.register(AtMost)
def funcify_at_most(op: AtMost, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that gives the number its bound."""

    def at_most(number: Any, bound: Any) -> Any:
        known = static_int(number_of(bound))
        if known is None or isinstance(number, Length):
            return number
        return Length(jnp.minimum(jnp.asarray(number), known), known)

    return at_most


def evaluate(body: FrozenFunctionGraph, values: list[Any]) -> Any:
    """Return the value of a graph of scalars, by the `perform` of its Ops."""
    known: dict[Variable, Any] = {}

    def read(variable: Variable) -> Any:
        return variable.data if isinstance(variable, Constant) else known[variable]

    for variable, value in zip(body.inputs, values, strict=True):
        known[variable] = _typed(variable, value)
    for node in body.toposort():
        known.update(zip(node.outputs, _computed(node, list(map(read, node.inputs))), strict=True))
    return read(body.outputs[0])


def greatest(body: FrozenFunctionGraph, ranges: list[tuple[Any, Any]]) -> int:
    """Return a number that the value of a graph of scalars does not exceed.

    An operation has its least and its greatest value where what it is given has: true of sums,
    differences, products, extremes, and quotients of lengths by positive numbers.

    Parameters
    ----------
    body : FrozenFunctionGraph
    ranges : list of tuple
        The least and the greatest value of each input.
    """
    known: dict[Variable, tuple[Any, ...]] = {}

    def read(variable: Variable) -> tuple[Any, ...]:
        return (variable.data,) if isinstance(variable, Constant) else known[variable]

    for variable, ends in zip(body.inputs, ranges, strict=True):
        known[variable] = tuple(_typed(variable, value) for value in dict.fromkeys(ends))
    for node in body.toposort():
        given = list(map(read, node.inputs))
        found = [_computed(node, list(values)) for values in product(*given)]
        for out, values in zip(node.outputs, zip(*found, strict=True), strict=True):
            known[out] = _ends(node, out, given, values)
    return int(max(read(body.outputs[0])))


def _ends(
    node: Apply, out: Variable, given: list[tuple[Any, ...]], values: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the least and the greatest value of a result, from those at the ends of ranges."""
    low, high = min(values), max(values)
    if all(len(value) == 1 for value in given):
        return values
    if out.type.dtype == "bool":
        return _typed(out, False), _typed(out, True)
    op = getattr(node.op, "scalar_op", node.op)
    if isinstance(op, Mod):
        low, high = min(0, *given[1]), max(0, *given[1])
    elif isinstance(op, IntDiv | TrueDiv) and len(given[1]) > 1:  # by one, where it is not zero
        high = max(abs(value) for value in given[0])
        low = -high
    return tuple(_typed(out, end) for end in ((low,) if low == high else (low, high)))


def _typed(variable: Variable, value: Any) -> Any:
    value = np.asarray(value, dtype=variable.type.dtype)
    return value[()] if isinstance(variable.type, ScalarType) else value


def _computed(node: Apply, values: list[Any]) -> list[Any]:
    """Return what an operation makes of values."""
    storage: list[list[Any]] = [[None] for _ in node.outputs]
    node.op.perform(node, values, storage)
    return [_typed(out, value) for out, (value,) in zip(node.outputs, storage, strict=True)]
