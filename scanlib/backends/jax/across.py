"""Arrays of unknown length whose time is not the first axis, as that of a transposed trace.

`Bounded` arrays have time first. Whatever has it elsewhere is a `Bounded` array and the place of
time::

    array[i, j, t]  =  first[t, i, j]      time = 2

What most Ops do along an axis they do along any. So rules move time to the front, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scanlib.backends.jax.bounded import Bounded

Plain = Callable[..., Any]


class Across:
    """An array whose axis `time`, not the first one, has an unknown length.

    Parameters
    ----------
    first : Bounded
        The array with time as its first axis.
    time : int
    """

    def __init__(self, first: Bounded, time: int) -> None:
        self.first = first
        self.time = time

    @property
    def ndim(self) -> int:
        return self.first.ndim

    @property
    def dtype(self) -> Any:
        return self.first.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        length, *others = self.first.shape
        return (*others[: self.time], length, *others[self.time :])

    def whole(self) -> Any:
        """Return the buffer with its axes in the order of the array's."""
        return jnp.moveaxis(self.first.rows, 0, self.time)

    def filled(self, value: Any = 0) -> Any:
        """Return the same with `value` where it does not count."""
        return jnp.moveaxis(self.first.filled(value), 0, self.time)

    def __jax_array__(self) -> Any:
        return self.first.__jax_array__()


UNKNOWN = (Bounded, Across)


def with_time(first: Bounded, time: int) -> Bounded | Across:
    """Return an array whose time is moved from the first axis to another one."""
    return Across(first, time) if time else first


def like(value: Bounded | Across, whole: Any, time: int | None = None) -> Bounded | Across:
    """Return an array of as many rows as another one, from a buffer with its axes in order."""
    time = value.time if time is None else time
    first = value.first
    return with_time(Bounded(jnp.moveaxis(whole, time, 0), first.length, first.origin), time)


def common_time(inputs: tuple[Any, ...]) -> int | None:
    """Return the axis that has an unknown length in operands, None if none has."""
    values = [value for value in inputs if isinstance(value, UNKNOWN)]
    if len({value.time for value in values}) > 1:
        values[0].__jax_array__()
    return values[0].time if values else None


def time_first(plain: Plain, inputs: tuple[Any, ...], time: int) -> tuple[Plain, list[Any]]:
    """Return operands with an axis moved to the front, and their function for them."""

    def forward(value: Any) -> Any:
        if isinstance(value, UNKNOWN):
            return value.first
        return jnp.moveaxis(value, time, 0) if np.ndim(value) > time else value

    def moved(*operands: Any) -> Any:
        found = plain(*(jnp.moveaxis(v, 0, time) if np.ndim(v) > time else v for v in operands))
        if isinstance(found, tuple | list):
            return [jnp.moveaxis(result, time, 0) for result in found]
        return jnp.moveaxis(found, time, 0)

    return (moved, list(map(forward, inputs))) if time else (plain, list(inputs))


def _unflatten(time: int, parts: tuple[Any]) -> Any:
    (first,) = parts  # what compiled code returns is an array of NumPy's
    return np.moveaxis(first, 0, time) if isinstance(first, np.ndarray) else Across(first, time)


jax.tree_util.register_pytree_node(
    Across, lambda across: ((across.first,), across.time), _unflatten
)
