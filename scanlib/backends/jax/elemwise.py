"""`ElemwiseScan` under JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.loops import JAXLoop, single
from scanlib.ops.elemwise_scan import ElemwiseScan


@jax_funcify.register(ElemwiseScan)
def funcify_elemwise_scan(op: ElemwiseScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of an elementwise loop."""
    loop = JAXLoop(op.scan)

    def elemwise_scan(*inputs: Any) -> Any:
        return single(loop(*inputs))

    return elemwise_scan
