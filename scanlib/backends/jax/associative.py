"""`AssociativeScan` under JAX: `lax.associative_scan` of the body, vectorized over time.

See `ops.lowered.associative_scan`. On a CPU associative scans have become walks before the linker
sees them; here they are combined in a tree of logarithmic depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.body import array_of, body_function
from scanlib.backends.jax.loops import single
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.lowered.associative_scan import AssociativeScan, length_message


@jax_funcify.register(AssociativeScan)
def funcify_associative_scan(op: AssociativeScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of an associative scan."""
    body = body_function(op.body)
    inner = op.split_body_inputs(op.body.inputs)

    def associative_scan(*inputs: Any) -> Any:
        elems = list(map(array_of, inputs[: op.n_elems], inner.earlier))
        non_sequences = inputs[op.n_elems :]
        for i, elem in enumerate(elems):
            if len(elem) != len(elems[0]):
                raise SequenceLengthError(length_message(op, i))
        if len(elems[0]) < 2:
            return single([jnp.array(elem) for elem in elems])

        def combine(earlier: list[Any], later: list[Any]) -> list[Any]:
            values = body(*earlier, *later, *non_sequences)
            return [
                jnp.broadcast_to(array_of(value, variable), row.shape)
                for value, variable, row in zip(values, inner.earlier, earlier, strict=True)
            ]

        return single(lax.associative_scan(jax.vmap(combine), elems, reverse=op.reverse))

    return associative_scan
