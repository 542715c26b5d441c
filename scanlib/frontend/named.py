"""Variables with named dimensions: what becomes of them around a loop and in its step.

A loop is made of tensors. Its step is called with the named variables that its placeholders stand
for, and what it computes by name is lowered to tensors at once, so the body of a loop, its gradient
and its batches know nothing of names.
"""

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import vars_between

from scanlib._compat.xtensor import (
    LOWER_XTENSOR,
    XRandomGeneratorType,
    XTensorType,
    as_xtensor,
    rng_to_xrng,
    xrng_to_rng,
)
from scanlib.frontend.step_function import captured_variables
from scanlib.ops.graph import substitute

Dims = tuple[str, ...]


def is_named(variable: Variable) -> bool:
    """Whether a variable has dimensions with names."""
    return isinstance(variable.type, XTensorType)


def unnamed(variable: Variable, first: str | None = None) -> tuple[Variable, Dims | None]:
    """Return a variable as a tensor, with one dimension in front, and the names of the others.

    The names of a tensor are None. Those of a generator that draws named variables are empty.
    """
    if isinstance(variable.type, XRandomGeneratorType):
        return xrng_to_rng(variable), ()
    if not is_named(variable):
        return variable, None
    # By position: operations by name have no gradient before they are lowered.
    dims, values = variable.type.dims, variable.values
    if first is None:
        return values, dims
    axis = dims.index(first)
    rows = pt.moveaxis(values, axis, 0) if axis else values
    return rows, (*dims[:axis], *dims[axis + 1 :])


def named(variable: Variable, dims: Dims | None) -> Variable:
    """Undo `unnamed`."""
    if dims is None:
        return variable
    if not hasattr(variable.type, "dtype"):
        return rng_to_xrng(variable)
    return as_xtensor(variable, dims=dims, name=variable.name)


def lower(outputs: Sequence[Variable], placeholders: Sequence[Variable]) -> list[Variable]:
    """Return tensors that a step computes with what it does by name done by position.

    What does not depend on its placeholders is left as it is, and so is a step without names.
    """
    captured = captured_variables(outputs, placeholders)
    inputs = [*placeholders, *captured]
    if not any(
        isinstance(x.type, XTensorType | XRandomGeneratorType)
        for x in vars_between(inputs, outputs)
    ):
        return list(outputs)
    graph = FunctionGraph(inputs, list(outputs), clone=True)
    rewrite_graph(graph, include=LOWER_XTENSOR)
    return substitute(graph.outputs, dict(zip(graph.inputs, inputs, strict=True)))
