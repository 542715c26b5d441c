"""Arrays whose time axis is cut over devices.

Nothing here runs on one device by itself: arrays are whole, and constraints tell XLA, which
partitions the program, along which axis they are cut. It moves what slices, sums and items need: a
few rows between neighbours, partial sums. What it would gather whole, joined arrays and cumulative
sums, is written here by what it cuts: padding, selecting, and *pieces*.

The pieces of T rows are an axis of their own::

    rows (T, …)  →  pieces (P, R, …)    P · R ≥ T

P is the number of devices, and the axis P is the one that is cut; or, with tiles, R is given, and
each device has several. What is mapped over the pieces by `jax.vmap` runs on each device for its
own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

FREE = PartitionSpec.UNCONSTRAINED


class TimeShardingError(ValueError):
    """Something that cannot be computed from pieces of a time axis that is cut."""


@dataclass(frozen=True)
class Cut:
    """Over which devices time is cut: the `axis` of a mesh whose axes are `AxisType.Auto`. A piece
    has `tile` rows; None for one piece on each device."""

    mesh: Any
    axis: str
    tile: int | None

    @property
    def devices(self) -> int:
        return self.mesh.shape[self.axis]

    def placed(self, value: Any, axis: int, name: str | None) -> Any:
        """Return an array whose axis is cut, or which all devices have whole along it."""
        spec: list[Any] = [FREE] * value.ndim
        spec[axis] = name
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def spread(self, value: Any, axis: int = 0) -> Any:
        """Return an array cut along an axis; as it is where the devices do not divide it."""
        return value if value.shape[axis] % self.devices else self.placed(value, axis, self.axis)

    def gathered(self, value: Any) -> Any:
        """Return an array that all devices have whole along its first axis."""
        return self.placed(value, 0, None)


@dataclass(frozen=True)
class Pieces:
    """The steps of a loop in pieces.

    Rows that fill the last piece up stand behind all steps in the order of walking, so that no step
    comes after them. They are like the last one.
    """

    cut: Cut
    steps: int
    reverse: bool = False

    @property
    def rows(self) -> int:
        return self.cut.tile or max(-(-self.steps // self.cut.devices), 1)

    @property
    def count(self) -> int:
        devices = self.cut.devices
        return devices * max(-(-self.steps // (self.rows * devices)), 1)

    @property
    def gap(self) -> int:
        """How many rows are none of the steps."""
        return self.count * self.rows - self.steps

    @property
    def last(self) -> int:
        """The number of the piece that has the last step."""
        if self.reverse:
            return min(self.gap // self.rows, self.count - 1)
        return max(self.steps - 1, 0) // self.rows

    @property
    def gap_in_last(self) -> int:
        """How many rows of the piece that has the last step are none."""
        behind = self.last if self.reverse else self.count - 1 - self.last
        return self.gap - behind * self.rows

    def valid(self) -> Any:
        """Return which rows are steps."""
        numbers = jnp.arange(self.count * self.rows).reshape(self.count, self.rows)
        return numbers >= self.gap if self.reverse else numbers < self.steps

    def split(self, value: Any, filler: Any = None) -> Any:
        """Return rows as pieces, filled up with a number, or with the row next to them."""
        value = jnp.asarray(value)[: self.steps]
        if self.gap:
            places = (self.gap, 0) if self.reverse else (0, self.gap)
            wide = _padded(value, *places)
            if filler is None and self.steps:
                filler = value[0] if self.reverse else value[-1]
            if filler is not None:
                wide = jnp.where(_column(self.valid().ravel(), wide.ndim), wide, filler)
            value = wide
        return self.cut.spread(value.reshape(self.count, self.rows, *value.shape[1:]))

    def join(self, value: Any) -> Any:
        """Return pieces as rows."""
        value = self.cut.spread(value)
        rows = value.reshape(self.count * self.rows, *value.shape[2:])
        return rows[self.gap :] if self.reverse else rows[: self.steps]

    def is_first(self, value: Any) -> Any:
        """Return which of the pieces, along the first axis of an array, is walked first."""
        first = jnp.arange(self.count) == (self.count - 1 if self.reverse else 0)
        return _column(first, value.ndim)

    def moved(self, value: Any, by: int = 1) -> Any:
        """Return for each piece the value of one before it; zeros where there is none."""
        by = min(by, self.count)
        kept, places = (value[by:], (0, by)) if self.reverse else (value[:-by], (by, 0))
        return self.cut.spread(_padded(kept, *places))

    def fold(self, summaries: Any, start: Any, apply: Callable[[Any, Any], Any]) -> Any:
        """Return the state before each piece, from the summaries of all and the first state."""
        _, before = lax.scan(
            lambda h, summary: (apply(summary, h), h), start, summaries, reverse=self.reverse
        )
        return jax.tree.map(self.cut.spread, before)

    def sum(self, value: Any) -> Any:
        """Return the sum of a value over all pieces; with tiles in a fixed order."""
        if self.cut.tile is None:
            return value.sum(axis=0)
        value = self.cut.gathered(value)
        return lax.scan(lambda total, row: (total + row, None), jnp.zeros_like(value[0]), value)[0]


def sum_rows(cut: Cut, value: Any) -> Any:
    """Return the sum over the first axis, in the same order on any number of devices: rows of a
    tile are added by halves, since XLA chooses another order for another number of tiles, and may
    fuse products with sums."""
    pieces = Pieces(cut, len(value))
    rows = lax.optimization_barrier(pieces.split(value, 0))
    while rows.shape[1] > 1:
        half = (rows.shape[1] + 1) // 2
        first, second = rows[:, :half], rows[:, half:]
        rows = first.at[:, : second.shape[1]].add(second)
    return pieces.sum(rows[:, 0])


def cumulated(cut: Cut, value: Any, total: Callable[..., Any], join: Any, neutral: int) -> Any:
    """Return cumulative sums or products along the first axis."""
    pieces = Pieces(cut, len(value))
    local = total(pieces.split(value, neutral), axis=1)
    ends = cut.gathered(local[:, -1])
    before = pieces.fold(ends, jnp.full_like(ends[0], neutral), join)
    return pieces.join(join(local, before[:, None]))


@dataclass(frozen=True)
class Timed:
    """An array of which an axis is the time that is cut.

    Of the history of a state, `initial` are the rows before the others, or behind them if
    `reverse`. Slices of histories then move no more rows than they are apart.
    """

    rows: Any
    axis: int = 0
    initial: Any = None
    reverse: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        count = 0 if self.initial is None else len(self.initial)
        shape = list(self.rows.shape)
        shape[self.axis] += count
        return tuple(shape)

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    def whole(self) -> Any:
        return self.rows if self.initial is None else self.sliced(0, self.length)

    def sliced(self, start: int, stop: int) -> Any:
        """Return the rows from `start` to `stop`."""
        stop = max(start, stop)
        if self.initial is None:
            return lax.slice_in_dim(self.rows, start, stop, axis=self.axis)
        parts = [self.rows, self.initial] if self.reverse else [self.initial, self.rows]
        second = len(parts[0])
        found = [parts[0][start:stop], parts[1][max(start - second, 0) : max(stop - second, 0)]]
        return joined([part for part in found if len(part)] or found[:1])


def plain(values: Sequence[Any]) -> list[Any]:
    """Return arrays as JAX has them."""
    return [v.whole() if isinstance(v, Timed) else v for v in values]


def joined(parts: Sequence[Any], axis: int = 0) -> Any:
    """Return arrays behind one another along an axis."""
    parts = [jnp.moveaxis(jnp.asarray(part), axis, 0) for part in parts]
    found = jnp.zeros((sum(map(len, parts)), *parts[0].shape[1:]), jnp.result_type(*parts))
    for start, part in zip(accumulate(map(len, parts), initial=0), parts, strict=False):
        found = written(found, part, start, True)
    return jnp.moveaxis(found, 0, axis)


def written(whole: Any, part: Any, start: int, replaces: bool) -> Any:
    """Return an array with other rows from `start` on, in their place or added."""
    behind = len(whole) - start - len(part)
    wide = _padded(part.astype(whole.dtype), start, behind)
    numbers = jnp.arange(len(whole))
    mask = _column((numbers >= start) & (numbers < start + len(part)), whole.ndim)
    return jnp.where(mask, wide if replaces else whole + wide, whole)


def _padded(value: Any, before: int, behind: int) -> Any:
    return jnp.pad(value, [(before, behind)] + [(0, 0)] * (value.ndim - 1))


def _column(mask: Any, ndim: int) -> Any:
    return mask.reshape(-1, *[1] * (ndim - 1))
