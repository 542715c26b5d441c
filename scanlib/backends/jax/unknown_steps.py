"""Loops whose number of steps JAX does not know when it compiles: `lax.while_loop`.

The loop carries buffers of `bound` rows for what is stored over time, writes one row per step, and
ends when the condition says so or all steps are taken. With ``n`` steps taken, a history has the
rows ``0 … K + n - 1`` of its buffer. A reverse loop writes row ``t = T - 1 - i`` at step `i`;
rows that a condition left out stand before the others, so its buffers are rolled to begin with
row ``T - n``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from scanlib.backends.jax.bounded import Bounded, rows_of
from scanlib.backends.jax.mesh_axes import varying
from scanlib.backends.jax.state_rows import StepCount, last_rows, shifted
from scanlib.ops.signature import OuterInputs

if TYPE_CHECKING:
    from scanlib.backends.jax.loops import JAXLoop


class Progress(NamedTuple):
    """What `lax.while_loop` carries from step to step."""

    taken: Any
    stopped: Any
    windows: list[Any]
    carries: list[Any]
    histories: list[Any]
    stacks: list[Any]


def run_unknown(
    loop: JAXLoop, outer: OuterInputs, steps: StepCount, windows: list[Any]
) -> list[Any]:
    """Run a loop of an unknown number of steps."""
    signature = loop.signature
    stores = signature.n_outputs or not all(signature.untraced)
    if steps.bound is None and stores:
        loop.refuse_unbounded()
    start = Progress(
        jnp.asarray(0),
        jnp.asarray(False),
        windows,
        outer.carries,
        _empty_histories(outer, steps, signature),
        loop.empty_outputs(outer, windows, steps.bound or 0),
    )
    if steps.bound == 0:  # XLA has no rows to index then
        return _results(loop, steps, start)
    start = varying(start, outer)
    end = lax.while_loop(
        lambda progress: (progress.taken < steps.number) & ~progress.stopped,
        lambda progress: _advance(loop, outer, steps, progress),
        start,
    )
    return _results(loop, steps, end)


def _time(signature: Any, steps: StepCount, taken: Any) -> Any:
    return steps.number - 1 - taken if signature.reverse else taken


def _empty_histories(outer: OuterInputs, steps: StepCount, signature: Any) -> list[Any]:
    """Return buffers that hold the initial rows of traced states."""
    buffers = []
    for initial, untraced in zip(outer.initials, signature.untraced, strict=True):
        if untraced:
            continue
        buffer = jnp.zeros(((steps.bound or 0) + len(initial), *initial.shape[1:]), initial.dtype)
        place = steps.number if signature.reverse else 0
        buffers.append(lax.dynamic_update_slice_in_dim(buffer, initial, place, 0))
    return buffers


def _advance(loop: JAXLoop, outer: OuterInputs, steps: StepCount, progress: Progress) -> Progress:
    """Take one step."""
    signature = loop.signature
    t = _time(signature, steps, progress.taken)
    rows = [
        lax.dynamic_index_in_dim(rows_of(sequence), t, keepdims=False)
        for sequence in outer.sequences
    ]
    values = loop.step(rows, progress.windows, progress.carries, outer.non_sequences)
    traced = [
        (value, depth)
        for value, depth, untraced in zip(
            values.states, signature.depths, signature.untraced, strict=True
        )
        if not untraced
    ]
    return Progress(
        progress.taken + 1,
        progress.stopped if values.stop is None else values.stop,
        [shifted(*pair) for pair in zip(progress.windows, values.states, strict=True)],
        list(values.carries),
        [
            lax.dynamic_update_index_in_dim(buffer, value, t if signature.reverse else t + depth, 0)
            for buffer, (value, depth) in zip(progress.histories, traced, strict=True)
        ],
        [
            lax.dynamic_update_index_in_dim(buffer, value, t, 0)
            for buffer, value in zip(progress.stacks, values.outputs, strict=True)
        ],
    )


def origins_of(loop: JAXLoop) -> list[str | None]:
    """Return what messages call each result that is `Bounded`, None for the others."""
    signature, title = loop.signature, loop.title()
    names: list[str | None] = [
        None if untraced else f"state {i} of {title}"
        for i, untraced in enumerate(signature.untraced)
    ]
    names += [None] * signature.n_carries
    return names + [f"output {i} of {title}" for i in range(signature.n_outputs)]


def _results(loop: JAXLoop, steps: StepCount, end: Progress) -> list[Any]:
    signature, origins = loop.signature, iter(origins_of(loop))
    skipped = steps.number - end.taken if signature.reverse and signature.has_stop else None
    buffers = iter(end.histories)
    results = []
    for window, depth in zip(end.windows, signature.depths, strict=True):
        origin = next(origins)
        if origin is None:
            rows = last_rows(window, signature.reverse)
            results.append(marked(rows, end.taken >= signature.required_steps))
        else:
            results.append(Bounded(rolled(next(buffers), skipped), end.taken + depth, origin))
    results += end.carries
    outputs = [origin for origin in origins if origin is not None]
    for buffer, origin in zip(end.stacks, outputs, strict=True):
        results.append(Bounded(rolled(buffer, skipped), end.taken, origin))
    return results


def as_stopped(op: Any, steps: int, found: list[Any]) -> list[Any]:
    """Return what compiled code has written for a loop of at most so many steps, the number of
    those that it took last, as `lax.while_loop` leaves it: buffers, then their lengths."""
    signature = op.signature
    *results, taken = found[: signature.n_states + signature.n_carries + signature.n_outputs + 1]
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


def rolled(buffer: Any, skipped: Any) -> Any:
    """Return a buffer without the rows that a reverse loop skipped, which come first."""
    return buffer if skipped is None else jnp.roll(buffer, -skipped, axis=0)


def marked(rows: Any, exist: Any) -> Any:
    """Return rows, or NaN where they do not exist: compiled code cannot raise an error."""
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return rows
    return jnp.where(exist, rows, jnp.asarray(jnp.nan, rows.dtype))
