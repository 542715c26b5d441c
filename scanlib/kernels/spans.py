"""Numbers side by side in memory, and one number in the place of such."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scanlib.kernels.lanes import over_lanes
from scanlib.kernels.language import INT64, Type, Value, Writer
from scanlib.kernels.scalars import LanesError, Number, Pair, added, parts, parts_of, real

LINE = 64  # bytes that are fetched together
FEWEST_LANES = 4


def itemsize(dtype: str) -> int:
    """Return how many bytes a number has, which may be complex."""
    half = parts_of(dtype)
    return Type(dtype).itemsize if half is None else 2 * Type(half).itemsize


def load_number(
    w: Writer, dtype: str, pointer: Value, offset: Value | int, lanes: int = 1
) -> Number:
    """Read a number, or several that lie side by side; `LanesError` for several complex ones."""
    half = parts_of(dtype)
    if half is None:
        return w.load(Type(dtype, lanes), pointer, offset)
    if lanes > 1:
        raise LanesError("complex numbers")
    kind = Type(half)
    second = w.as_value(offset, INT64) + kind.itemsize
    return Pair(w.load(kind, pointer, offset), w.load(kind, pointer, second))


def store_number(w: Writer, pointer: Value, offset: Value | int, value: Number) -> None:
    """Write a number, or several side by side; `LanesError` for several complex ones."""
    if isinstance(value, Value):
        w.store(pointer, offset, value)
        return
    if value.real.type.lanes > 1:
        raise LanesError("complex numbers")
    w.store(pointer, offset, value.real)
    second = w.as_value(offset, INT64) + value.real.type.itemsize
    w.store(pointer, second, value.imag)


class Cell:
    """A number in locals, which may be complex."""

    def __init__(self, w: Writer, value: Number) -> None:
        self.w = w
        self.locals = [w.local(part) for part in parts(value)]

    @property
    def value(self) -> Number:
        """The number that it is now."""
        values = [self.w.copy(local) for local in self.locals]
        return values[0] if len(values) == 1 else Pair(*values)

    @value.setter
    def value(self, value: Number) -> None:
        for local, part in zip(self.locals, parts(value), strict=True):
            self.w.assign(local, part)


def shift(cells: Sequence[Cell], value: Number) -> None:
    """Write the next value into cells that hold the latest ones, the last one first."""
    for later, cell in zip(cells[-2::-1], cells[:0:-1], strict=True):
        cell.value = later.value
    cells[0].value = value


def spread(w: Writer, value: Number, lanes: int) -> Number:
    """Return a number in all lanes; `LanesError` for complex ones in several."""
    if lanes == 1 or (isinstance(value, Value) and value.type.lanes == lanes):
        return value
    if isinstance(value, Pair):
        raise LanesError("complex numbers")
    return w.splat(value, lanes)


class Total:
    """What numbers give together: one in each lane, for every count of them in `lanes` that may be
    taken at once. `start` changes no number; `combine` returns what two give together."""

    def __init__(
        self,
        w: Writer,
        start: Number,
        lanes: Iterable[int],
        combine: Callable[[Number, Number], Number] = added,
    ) -> None:
        self.w, self.start, self.combine = w, start, combine
        several = lanes if isinstance(start, Value) else ()
        self.cells = {count: Cell(w, spread(w, start, count)) for count in {1, *several}}
        self.used: set[int] = set()

    def clear(self) -> None:
        """Write that there has been nothing yet."""
        for count, cell in self.cells.items():
            cell.value = spread(self.w, self.start, count)

    def add(self, value: Number) -> None:
        """Write that there is one number more, or several."""
        count = parts(value)[0].type.lanes
        if count not in self.cells:
            raise LanesError("complex numbers")
        self.cells[count].value = self.combine(self.cells[count].value, value)
        self.used.add(count)  # if there is a way to combine so many at once

    def after(self, old: Number | None = None) -> Number:
        """Return what all give together, after a number."""
        for count in sorted(self.used, reverse=True):
            value = self.cells[count].value
            if isinstance(value, Value):
                value = over_lanes(self.w, value, lambda low, high: real(self.combine(low, high)))
            old = value if old is None else self.combine(old, value)
        return self.start if old is None else old


def lane_counts(lanes: int) -> list[int]:
    """Return how many numbers are taken at once, one count after the other."""
    return [lanes, *lane_counts(lanes // 2)] if lanes >= FEWEST_LANES else []


def lane_pieces(size: int, most: int) -> list[tuple[int, int]]:
    """Return powers of two, up to `most`, that are a size together: where each begins, and it."""
    found, place = [], 0
    while place < size:
        while most > size - place:
            most //= 2
        found.append((place, most))
        place += most
    return found


def walk(
    w: Writer,
    first: Value,
    end: Value,
    lanes: Iterable[int],
    write: Callable[[Value, int], None],
    most: Value | None = None,
) -> None:
    """Write loops over numbers, several at once while there are enough, then one by one.

    `write` is given a place and a count; it may raise `LanesError`, after which all are taken one
    by one. So are, always, those from `most` on.
    """
    before, rest = len(w.block.statements), first
    most = end if most is None else most
    try:
        for count in lanes:
            last = rest + ((most - rest) & -count)
            with w.loop(rest, last, count) as index:
                write(index, count)
            rest = last
    except LanesError:
        del w.block.statements[before:]
        rest = first
    with w.loop(rest, end) as index:
        write(index, 1)


@dataclass(frozen=True)
class Span:
    """Numbers of one dtype side by side, from `start` bytes after a pointer on."""

    w: Writer
    dtype: str
    pointer: Value
    start: Value | int = 0

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    def place(self, index: Value | int) -> Value | int:
        """Return how many bytes after the pointer an item is."""
        if index == 0:
            return self.start
        if isinstance(index, int) and not isinstance(self.start, int):
            return self.start + index * self.itemsize
        return index * self.itemsize + self.start

    def load(self, index: Value | int, lanes: int = 1) -> Number:
        return load_number(self.w, self.dtype, self.pointer, self.place(index), lanes)

    def real(self, index: Value | int, lanes: int = 1) -> Value:
        """Read numbers that are known not to be complex."""
        return real(self.load(index, lanes))

    def store(self, index: Value | int, value: Number) -> None:
        store_number(self.w, self.pointer, self.place(index), value)

    def moved(self, items: Value | int) -> "Span":
        """Return the numbers from one of them on."""
        return Span(self.w, self.dtype, self.pointer, self.place(items))


@dataclass(frozen=True)
class Same:
    """One number, read like a span whose items are all equal to it."""

    w: Writer
    value: Number

    def load(self, index: Value | int, lanes: int = 1) -> Number:
        return spread(self.w, self.value, lanes)

    def real(self, index: Value | int, lanes: int = 1) -> Value:
        return real(self.load(index, lanes))


Items = Span | Same
