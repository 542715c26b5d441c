"""The last rows of a state, as a loop carries them, and the rows of its history."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def window_of(initial: Any, depth: int, reverse: bool) -> tuple[Any, ...]:
    """Return the initial rows of a state, the latest one first."""
    return tuple(initial[k if reverse else depth - 1 - k] for k in range(depth))


def shifted(window: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
    """Return the last rows of a state after a step."""
    return (new, *window[:-1])


def last_rows(window: tuple[Any, ...], reverse: bool) -> Any:
    """Return the last rows of a state as they stand in its history."""
    return jnp.stack(window if reverse else window[::-1])


def joined(initial: Any, rows: Any, reverse: bool) -> Any:
    """Return a history from its initial rows and the others."""
    return jnp.concatenate([rows, initial] if reverse else [initial, rows])
