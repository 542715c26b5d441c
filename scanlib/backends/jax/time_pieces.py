"""Arrays whose time axis is cut into pieces, one or several for each device of a mesh.

A grid of `total` rows is cut into `pieces` pieces of `rows` rows; the last ones may be partly or
wholly behind its end. Row `i` of an array lies on grid row ``origin + i``. Rows before the grid,
such as the initial rows of a history, and behind it are few; every device has them:

    head            local                      tail
    i < -origin     0 ≤ origin + i < total     origin + i ≥ total

So a slice of rows moves nothing, and arrays with different origins meet by moving as many rows as
they are apart from one device to its neighbour (a *halo*). All functions here are called inside of
`jax.shard_map`. With tiles, every device has several pieces, along an axis of `jax.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from scanlib.backends.jax.mesh_axes import varying

TILES = "scanlib_tiles"  # the axis of `jax.vmap` along which a device has its tiles
FEW = 4  # rows of an array that every device may have whole


class TimeShardingError(ValueError):
    """Something that cannot be computed from pieces of a time axis that is cut."""


@dataclass(frozen=True)
class Grid:
    """How the time axis is cut.

    Attributes
    ----------
    axis : str
        The axis of the mesh.
    devices : int
        Their number along it.
    tiles : int or None
        How many pieces each device has; None for one, which is as long as it gets.
    rows : int
        The rows of a piece.
    total : int
        The rows of the grid.
    """

    axis: str
    devices: int
    tiles: int | None
    rows: int
    total: int

    @property
    def pieces(self) -> int:
        return self.devices * (self.tiles or 1)

    def place(self) -> Any:
        """Return the number of the piece."""
        place = lax.axis_index(self.axis)
        return place if self.tiles is None else place * self.tiles + lax.axis_index(TILES)

    def row_numbers(self) -> Any:
        """Return the grid rows of the piece."""
        return self.place() * self.rows + jnp.arange(self.rows)

    def gather(self, value: Any) -> Any:
        """Return a value of every piece, in order."""
        if self.tiles is not None:
            value = lax.all_gather(value, TILES)
        value = lax.all_gather(value, self.axis)
        return value if self.tiles is None else value.reshape(-1, *value.shape[2:])

    def sum(self, value: Any) -> Any:
        """Return the sum of a value over all pieces; with tiles in a fixed order."""
        if self.tiles is None:
            return lax.psum(value, self.axis)
        rows = lax.all_gather(value, TILES)
        pad = [(0, 0)] * (rows.ndim - 1)
        place = lax.axis_index(self.axis) * self.tiles
        # Every device adds zeros to what the others have, so that the order is that of the rows.
        whole = jnp.pad(jnp.zeros_like(rows), [(0, self.pieces - self.tiles), *pad])
        whole = lax.psum(lax.dynamic_update_slice_in_dim(whole, rows, place, 0), self.axis)
        start = jnp.zeros_like(whole[0])
        return lax.scan(lambda total, row: (total + row, None), start, whole)[0]

    def hop(self, value: Any, count: int) -> Any:
        """Return the value of the piece so many places before; zeros where there is none."""
        if not count:
            return value
        if self.tiles is None:
            pairs = [(k, k + count) for k in range(self.devices) if 0 <= k + count < self.devices]
            return lax.ppermute(value, self.axis, pairs)
        own = lax.all_gather(value, TILES)
        devices, rest = divmod(count, self.tiles)  # from so many devices before, and one more

        def from_device(k: int) -> Any:
            pairs = [(d, d + k) for d in range(self.devices) if 0 <= d + k < self.devices]
            return own if k == 0 else lax.ppermute(own, self.axis, pairs)

        near = from_device(devices)
        both = jnp.concatenate([from_device(devices + 1), near]) if rest else near
        place = lax.axis_index(TILES) + (self.tiles - rest if rest else 0)
        return lax.dynamic_index_in_dim(both, place, keepdims=False)


@dataclass(frozen=True)
class Timed:
    """An array whose axis `axis` is time; the pieces have it first.

    Attributes
    ----------
    grid : Grid
    local : array of shape (rows, …)
    origin, length : int
    head, tail : array or None
        The rows before and behind the grid.
    axis : int
    flipped : bool
        Whether the array's first row is the last one of all this: nothing has been moved.
    """

    grid: Grid
    local: Any
    origin: int
    length: int
    head: Any = None
    tail: Any = None
    axis: int = 0
    flipped: bool = False

    @property
    def ndim(self) -> int:
        return self.local.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        others = self.local.shape[1:]
        return (*others[: self.axis], self.length, *others[self.axis :])

    def before(self) -> int:
        return max(0, -self.origin)

    def behind(self) -> int:
        return max(0, self.origin + self.length - self.grid.total)

    def turned(self) -> Timed:
        """Return the array with its last row first."""
        return replace(self, flipped=not self.flipped)

    def inside(self) -> Any:
        """Return which rows of the piece are rows of the array, None for all."""
        grid, first, last = self.grid, max(self.origin, 0), self.origin + self.length
        if first == 0 and last >= grid.pieces * grid.rows:
            return None
        numbers = grid.row_numbers()
        return (numbers >= first) & (numbers < min(last, grid.total))

    def masked(self, filler: Any) -> Any:
        """Return the piece with another value where it is beside the array."""
        inside = self.inside()
        if inside is None:
            return self.local
        return jnp.where(_column(inside, self.ndim), self.local, filler)

    def on_rows(self, function: Callable[[Any], Any], axis: int | None = None) -> Timed:
        """Return what a function makes of the rows, each by itself."""
        parts = (None if v is None else function(v) for v in (self.local, self.head, self.tail))
        local, head, tail = parts
        axis = self.axis if axis is None else axis
        return replace(self, local=local, head=head, tail=tail, axis=axis)

    def sliced(self, start: int, stop: int) -> Timed:
        """Return the rows from `start` to `stop`."""
        stop = max(stop, start)
        new = replace(self, origin=self.origin + start, length=stop - start)
        first = self.length - self.behind()
        tail = None if self.tail is None else self.tail[max(start - first, 0) : stop - first]
        head = None if self.head is None else self.head[start:stop]
        return replace(
            new,
            head=head if new.before() else None,
            tail=tail if new.behind() else None,
        )

    def rows(self, start: int, stop: int) -> Any:
        """Return a few rows, which every device then has."""
        grid, parts = self.grid, []
        first, last = self.before(), self.length - self.behind()
        if start < first:
            parts.append(self.head[start : min(stop, first)])
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            numbers = self.origin + jnp.arange(begin, end) - grid.place() * grid.rows
            mine = (numbers >= 0) & (numbers < grid.rows)
            found = jnp.take(self.local, jnp.clip(numbers, 0, grid.rows - 1), axis=0)
            kind = jnp.int8 if found.dtype == bool else found.dtype
            found = jnp.where(_column(mine, self.ndim), found, 0).astype(kind)
            parts.append(grid.sum(found).astype(self.local.dtype))
        if stop > last:
            parts.append(self.tail[max(start - last, 0) : stop - last])
        return jnp.concatenate(parts) if parts else jnp.zeros((0, *self.local.shape[1:]))

    def at(self, origin: int) -> Timed:
        """Return the array with another origin."""
        if origin == self.origin:
            return self
        local = shifted(self.grid, self.local, origin - self.origin)
        new = replace(self, local=local, origin=origin, head=None, tail=None)
        before, behind = self.before(), self.behind()
        head = self.rows(0, new.before()) if new.before() else None
        tail = self.rows(self.length - new.behind(), self.length) if new.behind() else None
        if before > new.before():
            new = new.with_rows(self.head[new.before() :], origin + new.before())
        if behind > new.behind():
            new = new.with_rows(self.tail[: behind - new.behind()], origin + self.length - behind)
        return replace(new, head=head, tail=tail)

    def with_rows(self, values: Any, first: int) -> Timed:
        """Return the array with other rows from grid row `first` on."""
        numbers = self.grid.row_numbers() - first
        found = jnp.take(values, jnp.clip(numbers, 0, len(values) - 1), axis=0)
        here = _column((numbers >= 0) & (numbers < len(values)), self.ndim)
        return replace(self, local=jnp.where(here, found, self.local))


def add_rows(grid: Grid, rows: Any) -> Any:
    """Return the sum of the rows of a piece; of a tile by halves, in the same order on any device.

    XLA chooses another order for another number of tiles, and may fuse products with sums.
    """
    if grid.tiles is None:
        return rows.sum(axis=0)
    rows = lax.optimization_barrier(rows)
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        first, second = rows[:half], rows[half:]
        rows = first.at[: len(second)].add(second)
    return rows[0]


def _column(mask: Any, ndim: int) -> Any:
    return mask.reshape(-1, *[1] * (ndim - 1))


def shifted(grid: Grid, local: Any, by: int) -> Any:
    """Return pieces whose rows lie so many grid rows later."""
    count, rest = divmod(abs(by), grid.rows)
    if by > 0:
        near = grid.hop(local, count) if count or rest < grid.rows else local
        far = grid.hop(local[grid.rows - rest :], count + 1)
        return jnp.concatenate([far, near[: grid.rows - rest]]) if rest else near
    near = grid.hop(local, -count)
    far = grid.hop(local[:rest], -count - 1)
    return jnp.concatenate([near[rest:], far]) if rest else near


def split(grid: Grid, value: Any, origin: int = 0, axis: int = 0) -> Timed:
    """Return an array that every device has whole, cut along time."""
    rows = jnp.moveaxis(jnp.asarray(value), axis, 0)
    length = len(rows)
    numbers = jnp.clip(grid.row_numbers() - origin, 0, max(length - 1, 0))
    start = grid.place() * grid.rows
    if origin == 0 and length == grid.pieces * grid.rows:
        local = lax.dynamic_slice_in_dim(varying(rows, start), start, grid.rows)
    elif length:
        local = jnp.take(rows, numbers, axis=0)
    else:
        local = jnp.zeros((grid.rows, *rows.shape[1:]), rows.dtype)
    new = Timed(grid, local, origin, length, axis=axis)
    head = rows[: new.before()] if new.before() else None
    tail = rows[length - new.behind() :] if new.behind() else None
    return replace(new, head=head, tail=tail)


def together(values: Sequence[Any], axes: Sequence[int | None], origin: int | None = None) -> Any:
    """Return arrays with one origin, those that every device has whole cut as well.

    Parameters
    ----------
    values : sequence
        Arrays, or `Timed` ones.
    axes : sequence of int or None
        Which axis of each runs along time. None for those that have none.
    origin : int, optional
    """
    cut = [value for value in values if isinstance(value, Timed)]
    if origin is None:
        whole = [v.origin for v in cut if not v.before() and not v.behind()]
        origins = whole or [v.origin for v in cut]
        origin = max(origins, key=lambda o: (origins.count(o), -abs(o)))
    found = []
    for value, axis in zip(values, axes, strict=True):
        if isinstance(value, Timed):
            value = value.at(origin)
        elif axis is not None:
            value = split(cut[0].grid, value, origin, axis)
        found.append(value)
    return found


def by_rows(function: Callable[..., Any], values: Sequence[Any], axis: int) -> list[Timed]:
    """Return what a function of arrays makes of those with one origin, row by row.

    Parameters
    ----------
    function : callable
        Returns a list of arrays whose axis `axis` is time.
    values : sequence
        As `together` returns them: at least one is `Timed`.
    """
    first = next(value for value in values if isinstance(value, Timed))

    def run(name: str) -> list[Any]:
        given = [
            jnp.moveaxis(getattr(value, name), 0, value.axis) if isinstance(value, Timed) else value
            for value in values
        ]
        return [jnp.moveaxis(result, axis, 0) for result in function(*given)]

    locals_ = run("local")
    heads = run("head") if first.before() else [None] * len(locals_)
    tails = run("tail") if first.behind() else [None] * len(locals_)
    return [
        replace(first, local=local, head=head, tail=tail, axis=axis)
        for local, head, tail in zip(locals_, heads, tails, strict=True)
    ]
