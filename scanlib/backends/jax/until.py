"""Loops with `until`: compiled on the CPU, kernels on CUDA, else `lax.while_loop`.

Both write into buffers as long as the loop can get, as `lax.while_loop` does (see
`scanlib.backends.jax.unknown_steps`), and say how many steps they took. Between the three, results
are plain arrays: the buffers, then the lengths of those that are `Bounded`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply

from scanlib.backends.cuda.geometry import Geometry
from scanlib.backends.cuda.launch import KernelLoop
from scanlib.backends.jax.body import array_of
from scanlib.backends.jax.bounded import (
    Bounded,
    has_unknown_rows,
    static_int,
)
from scanlib.backends.jax.cuda import call_kernels, sizes_of
from scanlib.backends.jax.kernels import (
    call_target,
    is_compiled,
    known_numbers,
    results_like,
    target_for,
    with_known,
    words_of,
)
from scanlib.backends.jax.loops import JAXLoop
from scanlib.backends.jax.mesh_axes import varying
from scanlib.backends.jax.platforms import on_platforms
from scanlib.backends.jax.state_rows import count_steps
from scanlib.backends.jax.unknown_steps import marked, origins_of, rolled
from scanlib.backends.jax.windows import Window
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan

WHOLE = np.zeros((0, 2), np.int64)  # all rows of all sequences are read


def run_until(
    op: Scan | ElemwiseScan,
    node: Apply,
    loop: JAXLoop,
    kernels: KernelLoop | None,
    inputs: tuple[Any, ...],
) -> list[Any]:
    """Run a loop that ends by a condition."""
    values = [value.rows() if isinstance(value, Window) else value for value in inputs]
    number = _number_of_steps(op, values)
    in_c = number is not None and number >= op.signature.required_steps and is_compiled(op, node)
    if number is None or not (kernels or in_c):
        return loop(*values)
    outer = op.signature.split_inputs(values)
    loop.check(outer, count_steps(outer.n_steps, outer.sequences))
    arrays = [array_of(*pair) for pair in zip(values, node.inputs, strict=True)]
    steps = [number] if op.signature.has_n_steps else []
    sizes = None if kernels is None else _sizes(kernels, arrays[len(steps) :], steps)
    target = target_for(op, node) if in_c else None
    if sizes is None and target is None:
        return loop(*values)
    known, origins = known_numbers(values), origins_of(loop)

    def portable(*arguments: Any) -> list[Any]:
        results = loop(*with_known(arguments, known))
        lengths = [r.length for r in results if has_unknown_rows(r)]
        rows = [r.rows if has_unknown_rows(r) else r for r in results]
        return [*rows, *(jnp.asarray(length, jnp.int64) for length in lengths)]

    rows_like = results_like(target, node, arrays, known, WHOLE)
    if steps:
        arrays[0] = jnp.asarray(words_of(steps))

    def results(*arguments: Any) -> list[Any]:
        if rows_like is None:
            return portable(*arguments)
        lengths = [jnp.asarray(number, jnp.int64) for origin in origins if origin is not None]
        return [*rows_like(*arguments), *varying(lengths, arguments)]

    def on_cuda(*arguments: Any) -> list[Any]:
        own = arguments[len(steps) :]
        return _flat(op, number, call_kernels(kernels, sizes, own, WHOLE))

    def on_cpu(*arguments: Any) -> list[Any]:
        buffers = jax.eval_shape(results, *arguments)[: len(node.outputs)]
        taken = jax.ShapeDtypeStruct((2,), jnp.int32)
        assert target is not None
        *found, words = call_target(target, [*buffers, taken], arguments)
        return _flat(op, number, [*found, words[0]])

    special = on_cpu if target else None, on_cuda if sizes else None
    found = on_platforms(portable, results, *special)(*arrays)
    rows, lengths = found[: len(origins)], iter(found[len(origins) :])
    return [
        buffer if origin is None else Bounded(buffer, next(lengths), origin)
        for buffer, origin in zip(rows, origins, strict=True)
    ]


def _number_of_steps(op: Scan | ElemwiseScan, values: list[Any]) -> int | None:
    """Return the number of steps if there is no `until`, None if it is not known or wrong."""
    if any(has_unknown_rows(value) for value in values):
        return None
    if op.signature.has_n_steps:
        steps = static_int(values[0])
        return steps if steps is not None and 0 <= steps < 2**31 else None
    lengths = {len(value) for value in values[: op.signature.n_sequences]}
    return lengths.pop() if len(lengths) == 1 else None


def _sizes(kernels: KernelLoop, arrays: list[Any], steps: list[int]) -> Geometry | None:
    """Return the sizes of a loop, None if it has no kernel of these."""
    sizes = sizes_of(kernels, arrays, WHOLE, steps[0] if steps else None)
    return sizes if sizes is not None and sizes.channels and sizes.steps else None


def _flat(op: Scan | ElemwiseScan, steps: int, found: list[Any]) -> list[Any]:
    """Return what has been written for a loop of so many steps as `lax.while_loop` leaves it."""
    signature = op.signature
    count = signature.n_states + signature.n_carries + signature.n_outputs
    results, taken = found[:count], found[count]
    skipped = steps - taken if signature.reverse else None
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
