"""Rows cut into segments under JAX: what checkpointed loops read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.bounded import UnknownLengthError, static_int
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows


def _known(*values: Any) -> list[int]:
    """Return integers that JAX must know when it compiles."""
    found = [static_int(value) for value in values]
    if None in found:
        raise UnknownLengthError(
            "JAX needs to know the number of steps of a checkpointed loop when it compiles, but "
            "the function computes it; pass n_steps as an input or a constant"
        )
    return [value for value in found if value is not None]


@jax_funcify.register(SplitRows)
def funcify_split_rows(op: SplitRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the first rows of an array, cut into segments."""

    def split_rows(value: Any, count: Any, length: Any) -> Any:
        n, size = _known(count, length)
        if n * size > len(value):
            raise SequenceLengthError(
                f"a sequence has {len(value)} rows, but the loop takes {n * size} steps or more"
            )
        return jnp.reshape(value[: n * size], (n, size, *value.shape[1:]))

    return split_rows


@jax_funcify.register(MergeRows)
def funcify_merge_rows(op: MergeRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return segments of rows, one above the other."""
    return lambda value: jnp.reshape(value, (value.shape[0] * value.shape[1], *value.shape[2:]))
