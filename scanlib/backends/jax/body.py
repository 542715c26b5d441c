"""The body of a loop as a function of JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.compile.aliasing import add_supervisor_to_fgraph
from pytensor.compile.io import In
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.tensor.shape import Shape_i

from scanlib._compat import thaw_graph
from scanlib._compat.jax import JAXShapeTuple
from scanlib.backends.jax.bounded import number_of
from scanlib.ops.graph import is_numeric
from scanlib.ops.linker_features import NeedsKnownLengths
from scanlib.ops.scan import Scan


def function_of(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> Callable[..., tuple]:
    """Return the JAX function of a graph, after PyTensor's JAX rewrites; the graph is copied."""
    with jax.ensure_compile_time_eval():  # its constants are for every program that calls it
        return jax_funcify(_rewritten(FunctionGraph(list(inputs), list(outputs), clone=True)))


def prepared_body(op: Scan, node: Apply) -> FunctionGraph:
    """Return the body of a loop after PyTensor's JAX rewrites; integers that are the same at all
    steps may be known: constants, and those that `scanlib.backends.jax.prepare` has made so."""
    fgraph = thaw_graph(op.body)
    inner = op.signature.split_body_inputs(fgraph.inputs).non_sequences
    outer = op.signature.split_inputs(node.inputs).non_sequences
    known = {v for v, given in zip(inner, outer, strict=True) if _is_known(given)}
    return _rewritten(fgraph, [v for v in fgraph.inputs if v not in known])


def _is_known(variable: Variable) -> bool:
    if variable.owner is None:
        return isinstance(variable, Constant)
    return isinstance(variable.owner.op, JAXShapeTuple | Shape_i)


def _rewritten(fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> FunctionGraph:
    specs = [In(variable, borrow=True, mutable=False) for variable in fgraph.inputs]
    add_supervisor_to_fgraph(fgraph=fgraph, input_specs=specs, accept_inplace=True)
    # Sizes that a step computes are known as well.
    fgraph.attach_feature(NeedsKnownLengths(data))
    get_mode("JAX").optimizer.rewrite(fgraph)
    return fgraph


def array_of(value: Any, variable: Variable) -> Any:
    """Return numbers, also Python's, as an array of a variable's dtype, others as they are."""
    if not is_numeric(variable):
        return value
    dtype = jax.dtypes.canonicalize_dtype(variable.type.dtype)
    return jnp.asarray(number_of(value), dtype=dtype)
