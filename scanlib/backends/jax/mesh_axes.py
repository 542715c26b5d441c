"""Loops inside of `jax.shard_map`.

There, JAX keeps track of which values differ between devices: each is *varying* along some axes of
a mesh. What a loop carries must vary along the same axes before and after a step, and so must what
the kernels for different platforms return. So before the first step everything is made to vary
along all axes along which one of the arguments does.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


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
