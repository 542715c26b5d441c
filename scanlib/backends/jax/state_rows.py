"""How many steps a loop takes, the last rows of a state as it carries them, and its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from scanlib.backends.jax.bounded import Length, has_unknown_rows, number_of, rows_of, static_int


class StepCount(NamedTuple):
    """How many steps a loop takes: `known` to the compiler or not, and at most `bound`."""

    number: Any
    known: int | None
    bound: int | None


def count_steps(n_steps: Any, sequences: Sequence[Any]) -> StepCount:
    """Return the number of steps of a loop that is given it, or has sequences that tell it."""
    room = [len(rows_of(sequence)) for sequence in sequences]
    partial = [sequence for sequence in sequences if has_unknown_rows(sequence)]
    if isinstance(n_steps, Length):
        room.append(n_steps.bound)
    bound = min(room, default=None)
    told: Any = partial[0].length if partial else bound
    number = told if n_steps is None else number_of(n_steps)
    known = static_int(number)
    if known is not None:
        return StepCount(known, known, known)
    number = jnp.maximum(number, 0)
    return StepCount(number if bound is None else jnp.minimum(number, bound), None, bound)


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
