"""Rows cut into segments, under JAX: reshapes, whose sizes JAX knows when it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.bounded import UnknownLengthError, rows_of, static_int
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.segments import JoinRows, MergeRows, SplitRows


@jax_funcify.register(SplitRows)
def funcify_split_rows(op: SplitRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the first rows of an array, cut into segments."""

    def split_rows(value: Any, count: Any, length: Any) -> Any:
        n, s = static_int(count), static_int(length)
        if n is None or s is None:
            raise UnknownLengthError(
                "the segments of a checkpointed loop need the number of its steps when JAX compiles"
            )
        rows = rows_of(value)
        if n * s > len(rows):
            raise SequenceLengthError(
                "a sequence has {} rows, but the loop takes {} steps or more", len(rows), n * s
            )
        return rows[: n * s].reshape((n, s, *rows.shape[1:]))

    return split_rows


@jax_funcify.register(MergeRows)
def funcify_merge_rows(op: MergeRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return segments one above the other."""

    def merge_rows(value: Any) -> Any:
        rows = jnp.asarray(value)
        return rows.reshape((rows.shape[0] * rows.shape[1], *rows.shape[2:]))

    return merge_rows


@jax_funcify.register(JoinRows)
def funcify_join_rows(op: JoinRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return segments one above the other, and a tail behind them."""
    merge_rows = funcify_merge_rows(MergeRows(), node)

    def join_rows(segments: Any, tail: Any) -> Any:
        rows, rest = merge_rows(segments), rows_of(tail)
        return jnp.concatenate([rows, rest]) if len(rows) else rest

    return join_rows
