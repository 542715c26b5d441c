"""Arrays whose length JAX does not know when it compiles.

A loop that ends by a condition has as many rows as it took steps. Compiled by JAX, such an array
is a buffer as long as the loop can get, and the number of rows that count::

    rows = [r_0 … r_{n-1}, whatever]      length = n <= capacity

`Bounded` is both. scanlib's rules read and write it, and where PyTensor's compiled function returns
one, the caller gets a NumPy array of the `n` rows: outside of compiled code the length is known.
Items that a mask selects are `Bounded` as well. Where neither scanlib's Ops nor the rules of `rows`
take one, it raises `UnknownLengthError`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CHOSEN = "an array of the items that a mask selects"
MASKED = (
    "Keep all rows and let the mask say what counts: pt.where(mask, x, 0) in place of x[mask], "
    "pt.where(mask[:, None], A, 0) in place of the rows A[mask], and in a matrix that is inverted "
    "ones on the diagonal where the mask is False"
)
STEPS = (
    "Those of a loop are as many as it takes steps. Return it from the function, read rows of it, "
    "or reduce it along time. Have the step compute anything else, or give the loop a number of "
    "steps and no `until`, or let it run over all steps and say by a mask, pt.where(mask, x, 0), "
    'which of them count, or compile with mode="NUMBA"'
)
LARGE = (
    "JAX needs to know when it compiles how large an array is; the function itself computes its "
    "size from data. Take an array of the greatest size and let pt.where choose (ones on the "
    "diagonal of a matrix that is inverted), give the size as an input, or compile with "
    'mode="NUMBA"'
)


class UnknownLengthError(NotImplementedError):
    """JAX needs a length when it compiles that is known only when the loop has run."""


class Length:
    """A number, an array of JAX's, that is known when the loop has run, and the least and the
    greatest it can be: `low` is ``-inf`` where nothing is known."""

    def __init__(self, value: Any, low: float, bound: int) -> None:
        self.value = value
        self.low = low
        self.bound = bound

    def __jax_array__(self) -> Any:
        return jnp.asarray(self.value)


def number_of(value: Any) -> Any:
    """Return a number without its bounds."""
    return value.value if isinstance(value, Length) else value


def marked(values: Any, exist: Any) -> Any:
    """Return values, or NaN where they do not exist: compiled code cannot raise an error."""
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return values
    return jnp.where(exist, values, jnp.asarray(jnp.nan, values.dtype))


class Bounded:
    """The first `length` rows of a buffer of shape (capacity, …), which are at least `low`;
    `origin` says in messages what made it."""

    def __init__(self, rows: Any, length: Any, origin: str, low: float = 0) -> None:
        self.rows = rows
        self.length = length
        self.origin = origin
        self.low = max(low, 0)

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.length, *self.rows.shape[1:])

    @property
    def ndim(self) -> int:
        return self.rows.ndim

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    @property
    def capacity(self) -> int:
        return self.rows.shape[0]

    def like(self, rows: Any) -> "Bounded":
        """Return an array of the same length in another buffer."""
        return Bounded(rows, self.length, self.origin, self.low)

    def filled(self, value: Any = 0) -> Any:
        """Return the buffer with `value` where it does not count."""
        counts = jnp.arange(self.capacity) < self.length
        counts = counts.reshape((-1, *[1] * (self.ndim - 1)))
        return jnp.where(counts, self.rows, jnp.asarray(value, self.rows.dtype))

    def __jax_array__(self) -> Any:
        raise UnknownLengthError(
            f"JAX does not know when it compiles how many rows {self.origin} has. "
            + (MASKED if self.origin == CHOSEN else STEPS)
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if isinstance(self.length, jax.core.Tracer) or np.ndim(self.length):
            self.__jax_array__()
        return np.asarray(self.rows)[: int(self.length)].astype(dtype or self.dtype)

    def row(self, place: Any) -> Any:
        """Return one row, counted from the end where the place is negative."""
        if np.ndim(place):
            self.__jax_array__()
        if not self.capacity:
            raise IndexError(f"a row of {self.origin} was read, but it has none")
        position = jnp.where(jnp.asarray(place) < 0, self.length + place, place)
        return jax.lax.dynamic_index_in_dim(self.rows, position, keepdims=False)

    def slice(self, where: slice) -> Any:
        """Return the rows of a slice, as NumPy counts them: those at an end that are sure to exist
        are an array of JAX's."""
        step = 1 if where.step is None else static_int(where.step)
        if step == -1:
            return self.backwards(where.start, where.stop)
        if step != 1:
            self.__jax_array__()
        start, stop = (None if b is None else static_int(b) for b in (where.start, where.stop))
        if where.stop is None and start is not None and 0 < -start <= self.low:
            return jax.lax.dynamic_slice_in_dim(self.rows, self.length + start, -start)
        first = 0 if where.start is None else place_of(where.start, self.length, self.low)
        last = self.length if where.stop is None else place_of(where.stop, self.length, self.low)
        known, end = static_int(first), static_int(last)
        if known is None:
            rows = jnp.roll(self.rows, -first, axis=0)
            return Bounded(rows, jnp.maximum(last - first, 0), self.origin)
        if end is not None:
            return self.rows[known : max(known, end)]
        rows, low = self.rows[known:], self.low if where.stop is None else 0
        if stop is not None:
            rows = rows if stop < 0 else rows[: max(stop - known, 0)]
            low = self.low + min(stop, 0)
        return Bounded(rows, jnp.maximum(last - known, 0), self.origin, low - known)

    def backwards(self, start: Any, stop: Any) -> Any:
        """Return the rows of the slice ``start:stop:-1``."""
        ends = [None if b is None else static_int(b) for b in (stop, start)]
        if [b is None for b in ends] != [b is None for b in (stop, start)] or ends[0] == -1:
            self.__jax_array__()
        found = self.slice(slice(*(None if b in (None, -1) else b + 1 for b in ends)))
        if not isinstance(found, Bounded):
            return found[::-1]
        return found.like(jnp.roll(found.rows[::-1], found.length - found.capacity, axis=0))


def place_of(bound: Any, length: Any, low: float = 0) -> Any:
    """Return the place of a slice's bound in an array of some length, at least `low`."""
    known, of = static_int(bound), static_int(length)
    if known is not None and 0 <= known <= low:
        return known
    if known is not None and of is not None:
        return min(known, of) if known >= 0 else max(of + known, 0)
    from_end = jnp.maximum(length + bound, 0)
    if known is not None and known < 0:
        return from_end
    from_start = 0 if known == 0 else jnp.minimum(bound, length)
    return from_start if known is not None else jnp.where(bound < 0, from_end, from_start)


def static_int(value: Any) -> int | None:
    """Return an integer that is known when JAX compiles, else None."""
    if isinstance(value, float | np.floating):
        return None
    known = known_number(value)
    return None if known is None else int(known)


def known_number(value: Any) -> Any:
    """Return a number of Python's that is known when JAX compiles, else None."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.generic | np.ndarray) or has_value(value):
        return value.item() if value.ndim == 0 else None
    return None


def rows_of(array: Any) -> Any:
    """Return an array, or the buffer of one of unknown length."""
    return array.rows if isinstance(array, Bounded) else array


def _unflatten(about: tuple[str, float], parts: tuple[Any, Any]) -> Any:
    (origin, low), (rows, length) = about, parts
    # What compiled code returns: the length has a value now, and the rows are cut to it. NumPy does
    # it, since JAX's compiled calls crash where what they return runs JAX while it is put together.
    if has_value(rows) and has_value(length) and not length.ndim:
        return np.array(np.asarray(rows)[: int(length)])
    return Bounded(rows, length, origin, low)


def has_value(array: Any) -> bool:
    """Whether an array is JAX's and no tracer."""
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


jax.tree_util.register_pytree_node(
    Bounded, lambda value: ((value.rows, value.length), (value.origin, value.low)), _unflatten
)
# A length that leaves compiled code, or enters a loop, is an ordinary number.
jax.tree_util.register_pytree_node(
    Length, lambda length: ((length.value,), None), lambda _, parts: parts[0]
)
