"""The body of a loop as a function of JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from pytensor.compile.aliasing import add_supervisor_to_fgraph
from pytensor.compile.io import In
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FrozenFunctionGraph, FunctionGraph
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib._compat import thaw_graph
from scanlib.ops.graph import is_numeric
from scanlib.ops.whole_loops import NeedsKnownLengths


def function_of(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> Callable[..., tuple]:
    """Return the JAX function of a graph, after PyTensor's JAX rewrites; the graph is copied."""
    return _converted(FunctionGraph(list(inputs), list(outputs), clone=True))


def body_function(body: FrozenFunctionGraph) -> Callable[..., tuple]:
    """Return the JAX function of a body, after PyTensor's JAX rewrites."""
    return _converted(thaw_graph(body))


def _converted(fgraph: FunctionGraph) -> Callable[..., tuple]:
    specs = [In(variable, borrow=True, mutable=False) for variable in fgraph.inputs]
    add_supervisor_to_fgraph(fgraph=fgraph, input_specs=specs, accept_inplace=True)
    fgraph.attach_feature(NeedsKnownLengths())  # sizes that a step computes are known as well
    get_mode("JAX").optimizer.rewrite(fgraph)
    return jax_funcify(fgraph)


def array_of(value: Any, variable: Variable) -> Any:
    """Return a value with the dtype of a variable; PyTensor passes constants as Python numbers.

    Values that do not consist of numbers stay as they are.
    """
    if not is_numeric(variable):
        return value
    dtype = jax.dtypes.canonicalize_dtype(variable.type.dtype)
    return jnp.asarray(value, dtype=dtype)
