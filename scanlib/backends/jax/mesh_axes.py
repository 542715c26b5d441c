"""Loops inside of `jax.shard_map`.

There, JAX keeps track of which values differ between devices: each is *varying* along some axes of
a mesh. What a loop carries must vary along the same axes before and after a step, and so must what
the kernels for different platforms return. So before the first step everything is made to vary
along all axes along which one of the arguments does.

A loop there sees the rows that its device has, and starts from its initial state. So time must not
be cut there. It cannot be told from other axes, but where types say how long an array is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from pytensor.graph.basic import Variable

from scanlib.ops.errors import SequenceLengthError


def varying_axes(values: Any) -> frozenset[str]:
    """Return the axes of the mesh along which one of some values varies."""
    found: frozenset[str] = frozenset()
    if not hasattr(lax, "pcast"):  # JAX does not keep track of it
        return found
    for leaf in jax.tree.leaves(values):
        kind = jax.typeof(leaf)
        manual = getattr(kind, "manual_axis_type", None)
        found |= getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return found


def varying(values: Any, like: Any) -> Any:
    """Return values that vary along all axes along which they or others do."""
    axes = varying_axes([values, like])
    if not axes:
        return values

    def cast(leaf: Any) -> Any:
        missing = axes - varying_axes(leaf)
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, values)


def check_whole(title: str, sequences: Iterable[tuple[Variable, Any]]) -> None:
    """Raise where a device would run a loop from its start on a part of the time.

    `sequences` are what it reads row by row, each with its value here.
    """
    axes = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if not axes:
        return
    for k, (variable, value) in enumerate(sequences):
        wanted, given = variable.type.shape[0], len(value)
        if wanted is not None and wanted != given:
            name = f"`{variable.name}`" if variable.name else f"number {k} (counted from 0)"
            raise SequenceLengthError(
                f"{title}: sequence {name} has {wanted} rows, but {given} in jax.shard_map over "
                f"{', '.join(map(repr, axes))}: every device would start from the initial state. "
                "Cut channels or the batch there, not time"
            )
