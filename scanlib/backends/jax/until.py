"""Elementwise loops with `until` by a kernel on CUDA devices: `lax.while_loop` elsewhere.

A kernel writes into buffers as long as the loop can get, as `lax.while_loop` does (see
`scanlib.backends.jax.unknown_steps`), and says how many steps it took. Between the two, results are
plain arrays: the buffers, then the lengths of those that are `Bounded`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply

from scanlib.backends.cuda.geometry import Geometry
from scanlib.backends.cuda.launch import KernelLoop
from scanlib.backends.jax.body import array_of
from scanlib.backends.jax.bounded import Bounded, static_int
from scanlib.backends.jax.cuda import call_kernels, sizes_of
from scanlib.backends.jax.kernels import with_kernel
from scanlib.backends.jax.loops import JAXLoop
from scanlib.backends.jax.unknown_steps import marked, origins_of, rolled
from scanlib.backends.jax.windows import Window
from scanlib.ops.elemwise_scan import ElemwiseScan

WHOLE = np.zeros((0, 2), np.int64)  # all rows of all sequences are read


def run_until(
    op: ElemwiseScan,
    node: Apply,
    loop: JAXLoop,
    kernels: KernelLoop | None,
    inputs: tuple[Any, ...],
) -> list[Any]:
    """Run a loop that ends by a condition."""
    values = [value.rows() if isinstance(value, Window) else value for value in inputs]
    sizes = None if kernels is None else _sizes(op, kernels, values)
    if kernels is None or sizes is None:
        return loop(*values)
    arrays = [array_of(*pair) for pair in zip(values, node.inputs, strict=True)]
    steps = [static_int(values[0])] if op.signature.has_n_steps else []
    origins = origins_of(loop)

    def portable(*arguments: Any) -> list[Any]:
        results = loop(*steps, *arguments[len(steps) :])
        lengths = [r.length for r in results if isinstance(r, Bounded)]
        rows = [r.rows if isinstance(r, Bounded) else r for r in results]
        return [*rows, *(jnp.asarray(length, jnp.int64) for length in lengths)]

    def on_cuda(*arguments: Any) -> list[Any]:
        own = arguments[len(steps) :]
        return _flat(op, sizes, call_kernels(kernels, sizes, own, WHOLE))

    found = with_kernel(None, portable, on_cuda)(*arrays)
    rows, lengths = found[: len(origins)], iter(found[len(origins) :])
    return [
        buffer if origin is None else Bounded(buffer, next(lengths), origin)
        for buffer, origin in zip(rows, origins, strict=True)
    ]


def _sizes(op: ElemwiseScan, kernels: KernelLoop, values: list[Any]) -> Geometry | None:
    """Return the sizes of a loop, None if they are not known or it has no kernel of these."""
    has_steps = op.signature.has_n_steps
    if any(isinstance(value, Bounded) for value in values):
        return None
    steps = static_int(values[0]) if has_steps else None
    if has_steps and (steps is None or steps < 0):
        return None
    arrays = [jnp.asarray(value) for value in values[int(has_steps) :]]
    sizes = sizes_of(kernels, arrays, WHOLE, steps)
    return sizes if sizes is not None and sizes.channels and sizes.steps else None


def _flat(op: ElemwiseScan, sizes: Geometry, found: list[Any]) -> list[Any]:
    """Return what a kernel has written as `lax.while_loop` leaves it."""
    signature = op.signature
    count = signature.n_states + signature.n_carries + signature.n_outputs
    results, taken = found[:count], found[count]
    skipped = sizes.steps - taken if signature.reverse else None
    rows, lengths = [], []
    pairs = zip(signature.depths, signature.untraced, strict=True)
    depths = [None if untraced else depth for depth, untraced in pairs]
    depths += [None] * signature.n_carries + [0] * signature.n_outputs
    for i, (result, depth) in enumerate(zip(results, depths, strict=True)):
        if depth is not None:
            lengths.append(jnp.asarray(taken + depth, jnp.int64))
            result = rolled(result, skipped)
        elif i < signature.n_states:
            result = marked(result, taken >= signature.required_steps)
        rows.append(result)
    return [*rows, *lengths]
