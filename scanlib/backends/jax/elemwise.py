"""`ElemwiseScan` under JAX: a compiled loop on the CPU, kernels on CUDA devices, else `lax.scan`.

The compiled loop (`scanlib.backends.jax.kernels`) and the kernels (`scanlib.backends.jax.cuda`) run
a known number of steps. Loops that end by a condition are `lax.while_loop`, or kernels
(`scanlib.backends.jax.until`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.cuda.launch import KernelLoop
from scanlib.backends.jax.body import array_of, body_function
from scanlib.backends.jax.bounded import (
    has_unknown_rows,
    static_int,
)
from scanlib.backends.jax.cuda import call_kernels, kernels_for, sizes_of
from scanlib.backends.jax.kernels import (
    compiled,
    is_compiled,
    target_for,
    windows_of,
    with_kernel,
    words_of,
)
from scanlib.backends.jax.loops import JAXLoop, single
from scanlib.backends.jax.until import run_until
from scanlib.backends.jax.windows import Window, windows
from scanlib.ops.elemwise_scan import ElemwiseScan


@jax_funcify.register(ElemwiseScan)
def funcify_elemwise_scan(op: ElemwiseScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of an elementwise loop."""
    loop = JAXLoop(op.scan, body_function(op.scan.body))
    in_c = is_compiled(op, node)
    kernels = kernels_for(op, node)

    def elemwise_scan(*inputs: Any) -> Any:
        if op.signature.has_stop:
            return single(run_until(op, node, loop, kernels, inputs))
        known = not any(has_unknown_rows(value) for value in inputs)
        if op.signature.has_n_steps:
            known = known and static_int(inputs[0]) is not None
        if (not in_c and kernels is None) or not known:
            return single(loop(*(v.rows() if isinstance(v, Window) else v for v in inputs)))
        return single(run_compiled(op, node, loop, kernels, inputs))

    return elemwise_scan


def run_compiled(
    op: ElemwiseScan,
    node: Apply,
    loop: JAXLoop,
    kernels: KernelLoop | None,
    inputs: tuple[Any, ...],
) -> list[Any]:
    """Run a loop of a known number of steps by compiled code, or by kernels."""
    count, first = windows_of(op)
    values, places = windows(inputs, first, count)
    arrays = [array_of(*pair) for pair in zip(values, node.inputs, strict=True)]
    steps = [static_int(inputs[0])] if op.signature.has_n_steps else []

    def portable(*arguments: Any) -> list[Any]:
        rows = list(arguments[: len(arrays)])
        for k, (start, length) in enumerate(np.asarray(places).tolist(), first):
            rows[k] = rows[k][start : start + length]
        return loop(*steps, *rows[len(steps) :])

    def on_cuda() -> Callable[..., list[Any]] | None:
        n_steps = steps[0] if steps else None
        own = arrays[len(steps) :]
        sizes = None if kernels is None else sizes_of(kernels, own, places, n_steps)
        if kernels is None or sizes is None:
            return None
        count = len(node.outputs)
        return lambda *a: call_kernels(kernels, sizes, a[len(steps) : len(arrays)], places)[:count]

    on_cpu = compiled(target_for(op, node), portable)
    if steps:
        arrays[0] = jnp.asarray(words_of(steps))
    window = [jnp.asarray(words_of(places))] if count else []
    return with_kernel(portable, on_cpu, on_cuda())(*arrays, *window)
