"""Loops under JAX: compiled code on the CPU, kernels on CUDA devices, else `lax.scan`, or
`lax.while_loop`.

The compiled loop (`scanlib.backends.jax.kernels`) and the kernels (`scanlib.backends.jax.cuda`) run
a number of steps that JAX knows when it compiles, or at most so many where a condition ends the
loop. Then both write into buffers as long as the loop can get, as `lax.while_loop` does, and say
how many steps they took. Between the three, results are plain arrays: the buffers, then the
lengths of those that are `Bounded`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.body import array_of
from scanlib.backends.jax.bounded import Bounded, has_unknown_rows
from scanlib.backends.jax.cuda import CudaLoop, kernels_for
from scanlib.backends.jax.kernels import (
    Loop,
    call_target,
    is_compiled,
    known_numbers,
    results_like,
    target_for,
    windows_of,
    with_known,
    words_of,
)
from scanlib.backends.jax.linear import LinearLoop
from scanlib.backends.jax.loops import JAXLoop, count_steps, single
from scanlib.backends.jax.mesh_axes import check_whole, varying
from scanlib.backends.jax.partitioned import loop_factors, part_of
from scanlib.backends.jax.platforms import on_platforms
from scanlib.backends.jax.windows import sliced, windows
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan


@jax_funcify.register(Scan)
@jax_funcify.register(ElemwiseScan)
@jax_funcify.register(LinearScan)
def funcify_loop(op: Loop, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of a loop."""
    loop: JAXLoop | LinearLoop
    if isinstance(op, LinearScan):
        loop = LinearLoop(op, node)
    else:
        loop = JAXLoop(op.scan if isinstance(op, ElemwiseScan) else op, node)
    kernels, told = kernels_for(op, node), op.steps_of(node)
    has_code = kernels is not None or is_compiled(op, node)
    read = [node.inputs.index(sequence) for sequence in told.sequences]

    def scan(*inputs: Any) -> Any:
        sequences = [inputs[k] for k in read]
        check_whole(loop.title, zip(told.sequences, sequences, strict=True))
        if has_code and not any(map(has_unknown_rows, inputs)):
            n_steps = inputs[0] if op.has_n_steps else None
            steps = count_steps(n_steps, sequences, loop.title).known
            if steps is not None and (steps < 2**31 or not told.may_stop):
                return single(run_compiled(node, loop, kernels, inputs, steps))
        return single(loop(*map(sliced, inputs)))

    return scan


def run_compiled(
    node: Apply,
    loop: JAXLoop | LinearLoop,
    kernels: CudaLoop | None,
    inputs: tuple[Any, ...],
    taken: int,
) -> list[Any]:
    """Run a loop of a known number of steps, or of a greatest one, by compiled code or kernels."""
    op: Loop = node.op
    origins = loop.origins() if isinstance(loop, JAXLoop) and op.signature.has_stop else []
    count, first = windows_of(op)
    values, places = windows(inputs, first, count)
    arrays = [array_of(*pair) for pair in zip(values, node.inputs, strict=True)]
    known = known_numbers(values)
    has_steps = op.has_n_steps

    def as_stopped(found: list[Any]) -> list[Any]:
        """Return what compiled code has written; see `JAXLoop.as_stopped`."""
        if not origins:
            return found[: len(node.outputs)]
        assert isinstance(loop, JAXLoop)
        return loop.as_stopped(taken, found)

    def portable(*arguments: Any) -> list[Any]:
        rows = with_known(arguments[: len(arrays)], known)
        for k, (start, length) in enumerate(np.asarray(places).tolist(), first):
            rows[k] = rows[k][start : start + length]
        found = loop(*rows)
        lengths = [jnp.asarray(r.length, jnp.int64) for r in found if has_unknown_rows(r)]
        return [r.rows if has_unknown_rows(r) else r for r in found] + lengths

    def own(arguments: Sequence[Any]) -> list[Any]:
        """Return a loop's arguments without the places, and the number of steps as one number."""
        return [*[taken][:has_steps], *arguments[has_steps : len(arrays)]]

    def run_kernels(*arguments: Any) -> list[Any]:
        assert kernels is not None
        return as_stopped(kernels(taken, own(arguments)[has_steps:], places))

    factors = loop_factors(op, [np.ndim(array) for array in arrays], int(count > 0))
    part = None if factors is None else part_of(node, factors)
    sizes = [np.shape(array) for array in arrays]

    def target_of(arguments: Sequence[Any]) -> tuple[Apply, str | None]:
        """Return the loop for these arguments, which may be parts of the arrays."""
        whole = part is None or [np.shape(a) for a in own(arguments)] == sizes
        fit = node if whole else part
        assert fit is not None
        return fit, target_for(fit.op, fit)

    def results(*arguments: Any) -> list[Any]:
        fit, target = target_of(arguments)
        like = results_like(target, fit, own(arguments), known, places)
        if like is None:
            return portable(*arguments)
        lengths = [jnp.asarray(taken, jnp.int64) for origin in origins if origin is not None]
        return [*like(*arguments), *varying(lengths, arguments)]

    def run_target(*arguments: Any) -> list[Any]:
        fit, target = target_of(arguments)
        assert target is not None
        like = jax.eval_shape(results, *arguments)[: len(node.outputs)]
        found = call_target(fit, target, [array.shape for array in like], arguments)
        if origins:
            found[-1] = found[-1][0]
        return as_stopped(found)

    loop.check(inputs, taken)
    target = target_for(op, node)
    results_like(target, node, arrays, known, places)  # raises what else is wrong with the shapes
    on_cpu = None if target is None else run_target
    fits = kernels is not None and kernels.fit(taken, arrays[has_steps:], places) is not None
    on_cuda = run_kernels if fits else None
    if has_steps:
        arrays[0] = jnp.asarray(words_of([taken]))
    window = [jnp.asarray(words_of(places))] if count else []
    run = on_platforms(portable, results, on_cpu, on_cuda, factors if part else None)
    found = run(*arrays, *window)
    if not origins:
        return found
    lengths = iter(found[len(origins) :])
    return [
        rows if origin is None else Bounded(rows, next(lengths), origin[0])
        for rows, origin in zip(found, origins, strict=False)
    ]
