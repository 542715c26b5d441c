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

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.link.jax.dispatch.shape import JAXShapeTuple
from pytensor.scalar.basic import ScalarType

from scanlib._compat import thaw_graph
from scanlib.backends.jax.bounded import Length, number_of, static_int


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
        bounds = [v.bound if isinstance(v, Length) else static_int(v) for v in inputs]
        if None in bounds:
            return number
        # Lengths enter sums and differences with constants: the greatest give the greatest.
        return Length(number, np.asarray(evaluate(op.body, bounds)).item())

    return static_number


def evaluate(body: FrozenFunctionGraph, values: list[Any]) -> Any:
    """Return the value of a graph of scalars, by the `perform` of its Ops."""
    known: dict[Variable, Any] = {}

    def typed(variable: Variable, value: Any) -> Any:
        value = np.asarray(value, dtype=variable.type.dtype)
        return value[()] if isinstance(variable.type, ScalarType) else value

    def read(variable: Variable) -> Any:
        if isinstance(variable, Constant):
            return variable.data
        return known[variable]

    for variable, value in zip(body.inputs, values, strict=True):
        known[variable] = typed(variable, value)
    for node in body.toposort():
        storage: list[list[Any]] = [[None] for _ in node.outputs]
        node.op.perform(node, [read(inp) for inp in node.inputs], storage)
        for out, (value,) in zip(node.outputs, storage, strict=True):
            known[out] = typed(out, value)
    return read(body.outputs[0])
