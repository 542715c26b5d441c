"""`ElemwiseScan` under JAX: a compiled loop on the CPU, `lax.scan` elsewhere.

The compiled loop (`scanlib.backends.jax.kernels`) runs a known number of steps. Loops that end by
a condition are `lax.while_loop`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.body import array_of
from scanlib.backends.jax.bounded import Bounded, static_int
from scanlib.backends.jax.kernels import kernel_for, with_kernel
from scanlib.backends.jax.loops import JAXLoop, single
from scanlib.ops.elemwise_scan import ElemwiseScan


@jax_funcify.register(ElemwiseScan)
def funcify_elemwise_scan(op: ElemwiseScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of an elementwise loop."""
    loop = JAXLoop(op.scan)
    target = kernel_for(op, node)

    def elemwise_scan(*inputs: Any) -> Any:
        known = not any(isinstance(value, Bounded) for value in inputs)
        if op.signature.has_n_steps:
            known = known and static_int(inputs[0]) is not None
        if target is None or not known:
            return single(loop(*inputs))
        arrays = [array_of(*pair) for pair in zip(inputs, node.inputs, strict=True)]
        if not op.signature.has_n_steps:
            return single(with_kernel(target, loop)(*arrays))
        steps = static_int(inputs[0])

        def portable(number: Any, *others: Any) -> list[Any]:
            return loop(steps, *others)

        return single(with_kernel(target, portable)(jnp.asarray(steps), *arrays[1:]))

    return elemwise_scan
