"""`Scan` and `ElemwiseScan` under JAX: compiled loops on the CPU, elementwise ones kernels on CUDA
devices, else `lax.scan`.

The compiled loop (`scanlib.backends.jax.kernels`) and the kernels (`scanlib.backends.jax.cuda`) run
a known number of steps. Loops that end by a condition are `lax.while_loop`, or kernels
(`scanlib.backends.jax.until`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    CallTarget,
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
from scanlib.backends.jax.mesh_axes import check_whole
from scanlib.backends.jax.partitioned import loop_factors, part_of
from scanlib.backends.jax.platforms import on_platforms
from scanlib.backends.jax.state_rows import count_steps
from scanlib.backends.jax.until import run_until
from scanlib.backends.jax.windows import Window, windows
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan


@jax_funcify.register(Scan)
@jax_funcify.register(ElemwiseScan)
def funcify_loop(op: Scan | ElemwiseScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of a loop."""
    is_elementwise = isinstance(op, ElemwiseScan)
    loop = JAXLoop(op.scan if is_elementwise else op, node)
    in_c = is_compiled(op, node)
    kernels = kernels_for(op, node) if is_elementwise else None

    read = op.signature.split_inputs(node.inputs).sequences

    def scan(*inputs: Any) -> Any:
        check_whole(
            loop.title(), zip(read, op.signature.split_inputs(inputs).sequences, strict=True)
        )
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

    def own(arguments: Sequence[Any]) -> list[Any]:
        """Return a loop's arguments without the places, and the number of steps as one number."""
        return [*steps, *arguments[len(steps) : len(arrays)]]

    def run_kernels(*arguments: Any) -> list[Any]:
        sizes = cuda_sizes(arguments)
        kept = call_kernels(kernels, sizes, own(arguments)[len(steps) :], places)
        return kept[: len(node.outputs)]

    def cuda_sizes(arguments: Sequence[Any]) -> Any:
        if kernels is None:
            return None
        given = own(arguments)[len(steps) :]
        return sizes_of(kernels, given, places, steps[0] if steps else None)

    factors = loop_factors(op, int(count > 0))
    part = None if factors is None else part_of(node, factors)
    sizes = [np.shape(array) for array in arrays]

    def target_of(arguments: Sequence[Any]) -> tuple[Apply, CallTarget | None]:
        """Return the loop for these arguments, which may be parts of the arrays."""
        whole = part is None or [np.shape(a) for a in own(arguments)] == sizes
        fit = node if whole else part
        assert fit is not None
        return fit, target_for(fit.op, fit)

    def results(*arguments: Any) -> list[Any]:
        fit, target = target_of(arguments)
        like = results_like(target, fit, own(arguments), known, places) or portable
        return like(*arguments)

    def run_target(*arguments: Any) -> list[Any]:
        _, target = target_of(arguments)
        assert target is not None
        return calling(target, results)(*arguments)

    target = target_for(op, node)
    results_like(target, node, arrays, known, places)  # raises what is wrong with the shapes
    on_cpu = None if target is None else run_target
    on_cuda = None if cuda_sizes(arrays) is None else run_kernels
    if steps:
        arrays[0] = jnp.asarray(words_of(steps))
    window = [jnp.asarray(words_of(places))] if count else []
    run = on_platforms(portable, results, on_cpu, on_cuda, factors if part else None)
    return run(*arrays, *window)
