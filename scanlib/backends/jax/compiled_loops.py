"""`Scan` and `ElemwiseScan` under JAX: compiled loops on the CPU, elementwise ones kernels on CUDA
devices, else `lax.scan`.

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
from scanlib.backends.jax.body import array_of
from scanlib.backends.jax.bounded import has_unknown_rows, static_int
from scanlib.backends.jax.cuda import call_kernels, kernels_for, sizes_of
from scanlib.backends.jax.kernels import (
    calling,
    is_compiled,
    known_numbers,
    results_like,
    target_for,
    windows_of,
    with_known,
    words_of,
)
from scanlib.backends.jax.loops import JAXLoop, single
from scanlib.backends.jax.platforms import on_platforms
from scanlib.backends.jax.state_rows import count_steps
from scanlib.backends.jax.until import run_until
from scanlib.backends.jax.windows import Window, windows
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan


@jax_funcify.register(Scan)
@jax_funcify.register(ElemwiseScan)
def funcify_loop(op: Scan | ElemwiseScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of a loop."""
    is_elementwise = isinstance(op, ElemwiseScan)
    loop = JAXLoop(op.scan if is_elementwise else op, node)
    in_c = is_compiled(op, node)
    kernels = kernels_for(op, node) if is_elementwise else None

    def scan(*inputs: Any) -> Any:
        if op.signature.has_stop:
            return single(run_until(op, node, loop, kernels, inputs))
        known = not any(has_unknown_rows(value) for value in inputs)
        if op.signature.has_n_steps:
            known = known and static_int(inputs[0]) is not None
        if (not in_c and kernels is None) or not known:
            return single(loop(*(v.rows() if isinstance(v, Window) else v for v in inputs)))
        return single(run_compiled(op, node, loop, kernels, inputs))

    return scan


def run_compiled(
    op: Scan | ElemwiseScan,
    node: Apply,
    loop: JAXLoop,
    kernels: KernelLoop | None,
    inputs: tuple[Any, ...],
) -> list[Any]:
    """Run a loop of a known number of steps by compiled code, or by kernels."""
    outer = op.signature.split_inputs(inputs)
    number = count_steps(outer.n_steps, outer.sequences)
    loop.check(outer, number)
    assert number.known is not None
    count, first = windows_of(op)
    values, places = windows(inputs, first, count)
    arrays = [array_of(*pair) for pair in zip(values, node.inputs, strict=True)]
    steps = [number.known] if op.signature.has_n_steps else []
    known = known_numbers(values)

    def portable(*arguments: Any) -> list[Any]:
        rows = with_known(arguments[: len(arrays)], known)
        for k, (start, length) in enumerate(np.asarray(places).tolist(), first):
            rows[k] = rows[k][start : start + length]
        return loop(*rows)

    def on_cuda() -> Callable[..., list[Any]] | None:
        own = arrays[len(steps) :]
        if kernels is None:
            return None
        sizes = sizes_of(kernels, own, places, steps[0] if steps else None)
        if sizes is None:
            return None
        count = len(node.outputs)
        return lambda *a: call_kernels(kernels, sizes, a[len(steps) : len(arrays)], places)[:count]

    target = target_for(op, node)
    results = results_like(target, node, arrays, known, places) or portable
    on_cpu = None if target is None else calling(target, results)
    if steps:
        arrays[0] = jnp.asarray(words_of(steps))
    window = [jnp.asarray(words_of(places))] if count else []
    return on_platforms(portable, results, on_cpu, on_cuda())(*arrays, *window)
