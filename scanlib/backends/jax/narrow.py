"""Loops in the dtypes that JAX keeps.

Where JAX has no numbers of 64 bits, which it has not with ``floatX=float32``, it computes with
half as many instead: a table of ``int64`` comes as ``int32``. A kernel of the loop has to do so,
too. Every value of an elementwise step gets the dtype that JAX gives it, by a cast where the
operation makes another one. A matrix recurrence has one dtype, that of its arrays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.scalar.basic import Cast, get_scalar_type

from scanlib._compat import freeze_graph, thaw_graph
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import Parts, history_of


def kept_dtype(dtype: Any) -> str:
    """Return the name of the dtype that JAX gives to values of a dtype."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name


def narrowed(op: ElemwiseScan) -> ElemwiseScan:
    """Return a loop whose body has the dtypes that JAX keeps; the loop itself if it has."""
    if kept_dtype(np.int64) == "int64":
        return op
    recurrences = tuple(replace(r, elements=_narrow(r.elements)) for r in op.recurrences)
    return ElemwiseScan(op.scan, _narrow(op.body), op.layout, recurrences, op.notes)


def narrowed_linear(node: Apply) -> Apply:
    """Return a matrix recurrence of arrays with the dtypes that JAX keeps.

    A number of steps stays as it is: kernels are given all of its bits.
    """
    given = node.op.parts(node.inputs)
    types = (None if own is None else own.type for own in given)
    arrays = (own and own.clone(dtype=kept_dtype(own.dtype))() for own in types)
    return history_of(node.op.options, Parts(*arrays)._replace(n_steps=given.n_steps)).owner


def _narrow(body: FrozenFunctionGraph) -> FrozenFunctionGraph:
    graph = thaw_graph(body)
    known: dict[Variable, Variable] = {}

    def value_of(variable: Variable) -> Variable:
        if isinstance(variable, Constant):
            dtype = kept_dtype(variable.type.dtype)
            return ps.constant(np.asarray(variable.data).astype(dtype), dtype=dtype)
        return known[variable]

    for variable in graph.inputs:
        known[variable] = get_scalar_type(kept_dtype(variable.type.dtype))()
    for node in graph.toposort():
        results = _apply_again(node, [value_of(variable) for variable in node.inputs])
        known.update(zip(node.outputs, results, strict=True))
    inputs = [known[variable] for variable in graph.inputs]
    return freeze_graph(inputs, [value_of(variable) for variable in graph.outputs])


def _apply_again(node: Apply, inputs: list[Variable]) -> list[Variable]:
    """Return the results of an operation for other inputs, in the dtypes that JAX gives them."""
    wanted = [kept_dtype(out.type.dtype) for out in node.outputs]
    op = node.op
    if isinstance(op, Cast):
        op = Cast(get_scalar_type(wanted[0]))
    made = op.make_node(*inputs).outputs
    return [
        out if out.type.dtype == dtype else Cast(get_scalar_type(dtype))(out)
        for out, dtype in zip(made, wanted, strict=True)
    ]
