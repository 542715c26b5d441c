"""`AssociativeScan` under JAX: `lax.associative_scan` of the body, vectorized over time.

See `ops.lowered.associative_scan`. On a CPU loops are walked; here rows are combined in a tree of
logarithmic depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib._compat import thaw_graph
from scanlib.backends.jax.body import array_of, function_of
from scanlib.backends.jax.loops import single
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.messages import Messages


@jax_funcify.register(AssociativeScan)
def funcify_associative_scan(op: AssociativeScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of an associative scan."""
    scan, signature = op.scan, op.scan.signature
    graph = thaw_graph(scan.body)
    body = function_of(graph.inputs, graph.outputs)
    rows = signature.split_body_inputs(scan.body.inputs).rows
    messages = Messages(signature, scan.labels, scan.name)

    def associative_scan(*inputs: Any) -> Any:
        outer = signature.split_inputs(inputs)
        messages.count_steps(None, map(len, outer.sequences))
        pairs = zip(outer.initials, outer.sequences, rows, strict=True)
        elems = []
        for first, others, row in pairs:
            parts = [array_of(others, row), array_of(first, row)]
            elems.append(jnp.concatenate(parts if signature.reverse else parts[::-1]))

        def combine(earlier: list[Any], later: list[Any]) -> list[Any]:
            values = body(*later, *earlier, *outer.non_sequences)
            return [
                jnp.broadcast_to(array_of(value, variable), row.shape)
                for value, variable, row in zip(values, rows, earlier, strict=True)
            ]

        return single(lax.associative_scan(jax.vmap(combine), elems, reverse=signature.reverse))

    return associative_scan
