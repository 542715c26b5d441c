"""Loops under JAX: compiled on the CPU, on CUDA devices kernels (elementwise loops and matrix
recurrences), else `lax.scan`, or `lax.while_loop`.

The compiled loop (`scanlib.backends.jax.kernels`) and the kernels (`scanlib.backends.jax.cuda`) run
a number of steps that JAX knows when it compiles, or at most so many where a condition ends the
loop. Then both write into buffers as long as the loop can get, as `lax.while_loop` does, and say
how many steps they took: what is stored over time is `Bounded`.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.cuda.launch import KernelLoop
from scanlib.backends.cuda.linear import LinearLoop
from scanlib.backends.jax.bounded import Bounded, rows_of, static_int
from scanlib.backends.jax.cuda import call_kernels, kernels_for, sizes_of
from scanlib.backends.jax.graph_functions import sliced, windows
from scanlib.backends.jax.kernels import (
    call_target,
    in_own_dtypes,
    is_compiled,
    kept_dtype,
    shapes_of_results,
    target_for,
)
from scanlib.backends.jax.loops import JAXLoop, array_of, count_steps, single
from scanlib.backends.jax.partitioned import check_whole, loop_factors, part_of, varying
from scanlib.backends.jax.platforms import on_platforms
from scanlib.ops.execution import LoopOp
from scanlib.ops.lowered.linear_scan import LinearScan


@jax_funcify.register(LoopOp)
def funcify_loop(op: LoopOp, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of a loop."""
    loop = JAXLoop(op.scan, node, "highest" if isinstance(op, LinearScan) else None)
    kernels = cache(partial(kernels_for, op, node))  # written where a program for CUDA is
    has_code = is_compiled(op, node) or kernels() is not None
    read = op.signature.split_inputs(node.inputs).sequences

    def scan(*inputs: Any) -> Any:
        outer = op.signature.split_inputs(inputs)
        check_whole(loop.title, zip(read, outer.sequences, strict=True))
        is_known = not any(isinstance(value, Bounded) for value in inputs)
        if is_known and isinstance(op, LinearScan) and op.is_empty(inputs):
            return sliced(outer.initials[0])
        if has_code and is_known:
            steps = count_steps(outer.n_steps, outer.sequences, loop.title)
            most = steps.known
            if most is not None and (most < 2**31 or not op.signature.has_stop):
                loop.check(outer, steps)
                return single(run_compiled(node, loop, kernels, inputs, most))
        return single(loop(*map(sliced, inputs)))

    return scan


def run_compiled(
    node: Apply,
    loop: JAXLoop,
    kernels: Callable[[], KernelLoop | LinearLoop | None],
    inputs: tuple[Any, ...],
    most: int,
) -> list[Any]:
    """Run a loop of `most` steps, or of fewer if it may stop, by compiled code or kernels."""
    op, stops, first = node.op, loop.signature.has_stop, int(node.op.has_n_steps)
    values, places = windows(inputs[first:], op.signature.n_sequences)
    arrays = [array_of(*pair) for pair in zip(values, node.inputs[first:], strict=True)]
    numbers = dict(enumerate([*[most][:first], *map(static_int, values)]))
    known = {k: number for k, number in numbers.items() if number is not None}

    def portable(*arguments: Any) -> list[Any]:
        rows = [known.get(k, array) for k, array in enumerate([*[None][:first], *arguments])]
        for k, (start, length) in enumerate(places.tolist(), first):
            rows[k] = rows[k][start : start + length]
        return loop(*rows)

    def run_kernels(*arguments: Any) -> list[Any]:
        cuda = kernels()
        sizes = cuda and sizes_of(cuda, arguments, places, most if first else None)
        if not sizes or (stops and not (sizes.channels and sizes.steps)):
            return portable(*arguments)
        return finished(in_own_dtypes(partial(call_kernels, cuda, sizes, places), node, arguments))

    def finished(found: list[Any]) -> list[Any]:
        return loop.as_stopped(most, found[:-1], found[-1]) if stops else found

    factors = None if stops else loop_factors(op)
    part = None if factors is None else part_of(node, factors)
    sizes = [np.shape(array) for array in arrays]

    def target_of(arguments: Sequence[Any]) -> tuple[Apply, str | None]:
        """Return the loop for these arguments, which may be parts of the arrays."""
        fit = node if part is None or [np.shape(a) for a in arguments] == sizes else part
        return fit, target_for(fit.op, fit)

    def results(*arguments: Any) -> list[Any]:
        fit, target = target_of(arguments)
        shapes = shapes_of_results(target, fit, arguments, known, places)
        if shapes is None:
            return portable(*arguments)
        dtypes = [kept_dtype(out.type.dtype) for out in node.outputs]
        empty = [jnp.empty(*both) for both in zip(shapes, dtypes, strict=True)]
        made, taken = varying((empty, jnp.asarray(most)), arguments)
        return loop.cut(made, taken) if stops else made

    def run_target(*arguments: Any) -> list[Any]:
        fit, target = target_of(arguments)
        assert target is not None
        shapes = [rows_of(array).shape for array in jax.eval_shape(results, *arguments)]
        return finished(call_target(fit, target, shapes, arguments, most, places))

    target = target_for(op, node)
    shapes_of_results(target, node, arrays, known, places)  # raises what is wrong with the shapes
    on_cpu = None if target is None else run_target
    run = on_platforms(portable, results, on_cpu, run_kernels, factors if part else None)
    return run(*arrays)
