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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.graph.op import Op
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.tensor.type import TensorType, discrete_dtypes

from scanlib._compat import thaw_graph
from scanlib._compat.jax import JAXShapeTuple
from scanlib.backends.jax.bounded import (
    RANGE,
    Bounded,
    Length,
    UnknownLengthError,
    has_unknown_rows,
    known_number,
    number_of,
    static_int,
)
from scanlib.backends.jax.indexed_rows import split
from scanlib.lengths.bounds import evaluate, greatest
from scanlib.lengths.known import is_scalar


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
    has_scalars_only = all(is_scalar(out) for n in op.body.toposort() for out in n.outputs)

    def static_number(*inputs: Any) -> Any:
        known = [known_number(value) for value in inputs]
        if None not in known:
            return np.asarray(evaluate(op.body, known)).item()
        numbers = [number_of(value) for value in inputs]
        if not in_jax:
            in_jax.append(jax_funcify(thaw_graph(op.body)))
        (number,) = in_jax[0](*numbers)
        most = None
        if has_scalars_only:
            ends = [
                (0, v.bound) if isinstance(v, Length) else (known_number(v),) * 2 for v in inputs
            ]
            most = greatest(op.body, [None if None in e else e for e in ends])
        return number if most is None else Length(number, max(most, 0))

    return static_number


class StaticRange(Op):
    """So many numbers from a first one on, if that is a `StaticNumber`.

    PyTensor's own rule for `arange` takes constants alone.

    Parameters
    ----------
    dtype : str
        Of the result.
    """

    __props__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def make_node(self, start: Variable, step: Variable, count: Variable) -> Apply:
        return Apply(self, [start, step, count], [TensorType(self.dtype, shape=(None,))()])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        start, step, count = inputs
        output_storage[0][0] = _numbers(np, start, step, count, self.dtype)


def static_range(node: Apply) -> Variable:
    """Return an `ARange` as the range of a number of numbers that is computed outside of it."""
    whole = all(end.type.dtype in discrete_dtypes for end in node.inputs)
    start, stop, step = (_wide(end, "int64" if whole else "float64") for end in node.inputs)
    count = -((start - stop) // step) if whole else pt.ceil((stop - start) / step)
    return StaticRange(node.op.dtype)(start, step, pt.maximum(count.astype("int64"), 0))


def _wide(end: Variable, dtype: str) -> Variable:
    if isinstance(end, Constant):
        return pt.constant(end.data.astype(dtype))
    return pt.cast(end, dtype)


def _numbers(xp: Any, start: Any, step: Any, count: Any, dtype: Any) -> Any:
    """Return numbers as NumPy does, which adds the rounded difference of the first two."""
    first, second = xp.asarray(start, dtype), xp.asarray(start + step, dtype)
    return first + (second - first) * xp.arange(count, dtype=dtype)


@jax_funcify.register(StaticRange)
def funcify_static_range(op: StaticRange, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that makes as many numbers as there can be at most."""
    dtype = jax.dtypes.canonicalize_dtype(op.dtype)

    def numbers(start: Any, step: Any, count: Any) -> Any:
        room = count.bound if isinstance(count, Length) else static_int(count)
        if room is None:
            raise UnknownLengthError(
                "JAX needs to know when it compiles how long a range can get, and arange is given "
                "a number that the function computes. Say what it is at most, as in "
                "pt.arange(pt.minimum(n, 10)), or make a range of the greatest length and let "
                "pt.where(range < n, …, 0) choose"
            )
        found = _numbers(jnp, number_of(start), number_of(step), room, dtype)
        return Bounded(found, count.value, RANGE) if isinstance(count, Length) else found

    return numbers


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
    if len(known) < len(sizes) or has_unknown_rows(array):
        if axis != 0:
            raise UnknownLengthError(
                "JAX must know the sizes of the parts of an array. Give them as inputs or "
                'constants, or compile with mode="NUMBA"'
            )
        return split(array, sizes)
    if min(known) < 0 or sum(known) != array.shape[axis]:
        raise ValueError(
            f"an array of {array.shape[axis]} rows cannot be split into parts of {known}"
        )
    return jnp.split(array, np.cumsum(known)[:-1], axis=axis)
