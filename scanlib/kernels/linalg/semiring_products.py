r"""Products of small dense vectors and matrices, in the real, log, max and min semirings.

Most combine rows that are contiguous in memory,

    out[c] = Σ_j factor[j] ⊗ row[j, c] + add[c]

several numbers `c` at a time, in tiles of a few vectors that stay in registers while `j` runs. What
is left after the last whole vector is computed with a vector that begins earlier: no number is the
worse for being computed twice. Only where the contiguous axis is the one that is summed over
(`Combination.dots`) is a sum collected in several lanes, which are added at the end.

In the order in which the terms of a number are added, sizes alone have a say.

`SmallVectors` has the products of vectors that are one vector of the processor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from scanlib.kernels.elementary import compute
from scanlib.kernels.lanes import any_lane, over_lanes
from scanlib.kernels.language import INT64, Local, Type, Value, Writer
from scanlib.kernels.linalg.matrices import Matrix, known, sized
from scanlib.kernels.spans import lane_counts, lane_pieces, walk

VECTOR_BYTES = 64
# How many vectors a tile has, and how many terms are summed apart so that additions need not wait
# for one another.
_TILES, _APART = ((4, 2), (2, 4)), 4  # of a single vector as well


def choose(w: Writer, size: Value, cases: Sequence[tuple[int, Callable[[], None]]]) -> None:
    """Write the first case whose least size is not above a size, or the choice between them.

    The last one is for all sizes.
    """
    (least, write), *others = cases
    number = known(size)
    if not others or (number is not None and number >= least):
        write()
    elif number is not None:
        choose(w, size, others)
    else:
        with w.when(size >= least) as choice:
            write()
        with w.otherwise(choice):
            choose(w, size, others)


def less(w: Writer, x: Value, y: Value) -> Value:
    """Return the smaller one of two integers."""
    return w.select(x < y, x, y)


def largest_lane(w: Writer, value: Value) -> Value:
    """Return the largest number of all lanes; NaN may be overlooked."""
    return over_lanes(w, value, lambda low, high: w.select(low > high, low, high))


@dataclass
class Combination:
    """Writes combinations of rows, or sums over them; see the module's text.

    `out`, `factors` and `add`, if anything is added, are addresses of numbers that lie side by
    side; rows are contiguous. Where steps have matrices of their own, what is `ahead` bytes of what
    is read is asked for.
    """

    w: Writer
    semiring: str
    out: Value
    factors: Value
    rows: Matrix
    add: Value | None
    ahead: Value | None = None

    def __post_init__(self) -> None:
        self.dtype, self.itemsize = self.rows.dtype, self.rows.itemsize
        self.terms, self.width = sized(self.w, self.rows.rows, self.rows.columns)

    def write(self) -> None:
        full = VECTOR_BYTES // self.itemsize
        cases = [(lanes, partial(self.vectors, lanes)) for lanes in (full, full // 2, 1)]
        choose(self.w, self.width, cases)

    def vectors(self, lanes: int) -> None:
        """Write all numbers, in vectors that are not longer than all of them."""
        w, kind = self.w, Type(self.dtype, lanes)
        place: Value = w.constant(0, INT64)
        is_real = self.semiring == "real"
        wide = is_real and lanes * self.itemsize == VECTOR_BYTES
        for vectors, apart in _TILES if wide else ():
            size = vectors * lanes
            end = place + ((self.width - place) & -size)
            with w.loop(place, end, size) as c:
                self.sums(c, Type(self.dtype, size), apart)
            place = end
        with w.loop(place, self.width, lanes) as c:
            first = less(w, c, self.width - lanes) if lanes > 1 else c
            if is_real:
                self.sums(first, kind, _APART)
            else:
                self.extremes(first, kind)

    def load(self, kind: Type, place: Value) -> Value:
        """Return numbers of the rows."""
        lines = kind.lanes * self.itemsize // VECTOR_BYTES if self.ahead is not None else 0
        for line in range(lines):
            self.w.prefetch(self.rows.pointer, place + self.ahead + line * VECTOR_BYTES)
        return self.w.load(kind, self.rows.pointer, place)

    def factor(self, j: Value, lanes: int) -> Value:
        value = self.w.load(Type(self.dtype), self.factors, j * self.itemsize)
        return self.w.splat(value, lanes) if lanes > 1 else value

    def sums(self, c: Value, kind: Type, apart: int) -> None:
        """Write sums of products, as many as `kind` has lanes, whose terms are summed `apart`."""
        w, place = self.w, c * self.itemsize
        zero: Value = w.constant(0, kind)
        sums = [w.local(zero if self.add is None else w.load(kind, self.add, place))]
        sums += [w.local(zero) for _ in range(apart - 1)]

        def term(j: Value, total: Local) -> None:
            row = self.load(kind, j * self.rows.row_stride + place)
            w.assign(total, w.fma(row, self.factor(j, kind.lanes), w.copy(total)))

        whole = self.terms & -apart
        with w.loop(0, whole, apart) as j:
            for part, total in enumerate(sums):
                term(j + part if part else j, total)
        with w.loop(whole, self.terms) as j:
            term(j, sums[0])
        found: list[Value] = list(map(w.copy, sums))
        while len(found) > 1:
            found = [a + b for a, b in zip(found[::2], found[1::2], strict=True)]
        w.store(self.out, place, found[0])

    def extremes(self, c: Value, kind: Type) -> None:
        """Write the extreme, or the logarithm of the sum of exponentials, of sums."""
        w, place = self.w, c * self.itemsize

        def term(j: Value) -> Value:
            row = w.load(kind, self.rows.pointer, j * self.rows.row_stride + place)
            return self.factor(j, kind.lanes) + row

        value = extreme_of(w, self.semiring, kind, self.terms, term)
        if self.add is not None:
            value = value + w.load(kind, self.add, place)
        w.store(self.out, place, value)

    def dots(self, lanes: int) -> None:
        """Write ``out[i] = Σ_j rows[i, j] factor[j] + add[i]``, four rows at a time.

        There are as many as they have numbers, no fewer than four and than `lanes`.
        """
        w, kind, item, size = self.w, Type(self.dtype, lanes), self.itemsize, self.terms
        whole, last = size & -lanes, size - lanes
        # Of the last vector, only what no vector before it has.
        numbers = w.constant(range(lanes), Type("int64", lanes))
        is_new = numbers + w.splat(last, lanes) >= w.splat(whole, lanes)
        with w.loop(0, size, 4) as block:
            first = less(w, block, size - 4)
            starts = [(first + k) * self.rows.row_stride for k in range(4)]
            sums = [w.local(0.0, kind) for _ in starts]

            def terms(at: Value) -> list[Value]:
                other = w.load(kind, self.factors, at)
                return [
                    w.fma(self.load(kind, start + at), other, w.copy(total))
                    for start, total in zip(starts, sums, strict=True)
                ]

            with w.loop(0, whole, lanes) as j:
                for total, value in zip(sums, terms(j * item), strict=True):
                    w.assign(total, value)
            with w.when(whole < size):
                for total, value in zip(sums, terms(last * item), strict=True):
                    w.assign(total, w.select(is_new, value, w.copy(total)))
            found = _sums_of_lanes(w, [w.copy(total) for total in sums])
            if self.add is not None:
                found = found + w.load(found.type, self.add, first * item)
            w.store(self.out, first * item, found)


def better(w: Writer, semiring: str, x: Value, y: Value) -> Value:
    """Return the larger, or the smaller, one of two numbers; NaN wins."""
    is_better = y < x if semiring == "min" else y > x
    return w.select(is_better | y.differs(y), y, x)


def extreme_of(
    w: Writer, semiring: str, kind: Type, terms: Value, term: Callable[[Value], Value]
) -> Value:
    """Return the extreme, or the logarithm of the sum of exponentials, of numbers; NaN wins."""
    start = inf if semiring == "min" else -inf
    best = w.local(w.constant(start, kind))
    with w.loop(0, terms) as j:
        w.assign(best, better(w, semiring, w.copy(best), term(j)))
    found = w.copy(best)
    if semiring != "log":
        return found
    is_finite = abs(found) < inf
    shift = w.select(is_finite, found, 0.0)
    total = w.local(w.constant(0.0, kind))
    with w.loop(0, terms) as j:
        value = compute(w, "exp", term(j) - shift)
        w.assign(total, w.copy(total) + value)
    return w.select(is_finite, found + compute(w, "log", w.copy(total)), found)


def _sums_of_lanes(w: Writer, values: list[Value]) -> Value:
    """Return the vector of the sums of the lanes of four vectors."""
    lanes = values[0].type.lanes
    while lanes > 4:
        lanes //= 2
        halves = range(lanes), range(lanes, 2 * lanes)
        pairs = [[w.shuffle(v, v, half) for half in halves] for v in values]
        values = [x + y for x, y in pairs]
    even, odd = (0, 4, 2, 6), (1, 5, 3, 7)
    low, high = (w.shuffle(x, y, even) + w.shuffle(x, y, odd) for x, y in (values[:2], values[2:]))
    return w.shuffle(low, high, (0, 1, 4, 5)) + w.shuffle(low, high, (2, 3, 6, 7))


def write_multiple(w: Writer, out: Value, factor: Value, row: Value, width: Value) -> None:
    """Write a row times a number; all of them are contiguous."""
    itemsize = factor.type.itemsize

    def write(c: Value, lanes: int) -> None:
        kind, at = Type(factor.type.dtype, lanes), c * itemsize
        w.store(out, at, w.as_value(factor, kind) * w.load(kind, row, at))

    walk(w, w.constant(0, INT64), width, lane_counts(VECTOR_BYTES // itemsize), write)


class SmallVectors:
    """Vectors of a few numbers as one vector of the processor.

    Lanes are as many as the next power of two; those past the end are copies of the last number.
    """

    def __init__(self, w: Writer, dtype: str, size: int) -> None:
        self.w, self.size = w, size
        self.lanes = 1 << (size - 1).bit_length()
        self.type = Type(dtype, self.lanes)
        self.itemsize = self.type.itemsize
        self.zero = w.constant(0, self.type)
        self.places = [min(lane, size - 1) for lane in range(self.lanes)]
        self.pieces = lane_pieces(size, self.lanes)

    def load(self, pointer: Value, offset: Value | int) -> Value:
        w = self.w
        offset = w.as_value(offset, INT64)
        items = [
            w.load(
                Type(self.type.dtype, count),
                pointer,
                offset + place * self.itemsize if place else offset,
            )
            for place, count in self.pieces
        ]
        value, have = items[0], items[0].type.lanes
        for item in items[1:]:
            wide, count = value.type.lanes, item.type.lanes
            if count == 1:
                item = w.splat(item, wide)
            else:
                item = w.shuffle(item, item, [min(lane, count - 1) for lane in range(wide)])
            more = [wide + min(lane, count - 1) for lane in range(self.lanes - have)]
            value = w.shuffle(value, item, [*range(have), *more])
            have += count
        return value

    def rows(self, matrix: Matrix, count: int) -> list[Value]:
        """Return the first rows of a matrix, whose numbers lie side by side."""
        return [self.load(matrix.pointer, matrix.place(self.w, i, 0)) for i in range(count)]

    def store(self, pointer: Value, offset: Value | int, value: Value) -> None:
        w = self.w
        offset = w.as_value(offset, INT64)
        for place, count in self.pieces:
            at = offset + place * self.itemsize if place else offset
            if count == self.lanes:
                part = value
            elif count == 1:
                part = w.lane(value, place)
            else:
                part = w.shuffle(value, value, range(place, place + count))
            w.store(pointer, at, part)

    def copies(self, value: Value) -> list[Value]:
        """Return, for each number, a vector that repeats it."""
        return [self.w.shuffle(value, value, [j] * self.lanes) for j in range(self.size)]

    def product(
        self, columns: list[Value], items: list[Value], start: Value, is_awaited: bool = True
    ) -> Value:
        """Return ``start + Σ_j columns[j] items[j]``.

        There are two chains of multiply-adds if the next step waits for the result, and one, which
        is less work, otherwise.
        """
        w, size = self.w, len(columns)
        half = size // 2 if is_awaited and size > 2 else size
        first = start
        for column, item in zip(columns[:half], items[:half], strict=True):
            first = w.fma(column, item, first)
        if half == size:
            return first
        second = columns[half] * items[half]
        for column, item in zip(columns[half + 1 :], items[half + 1 :], strict=True):
            second = w.fma(column, item, second)
        return first + second

    def transposed(self, rows: list[Value]) -> list[Value]:
        """Return the columns of a square matrix given by rows."""
        lanes = self.lanes
        rows, block = [rows[place] for place in self.places], 1
        while block < lanes:
            # Blocks off the diagonal change places.
            low = [k if not k & block else lanes + k - block for k in range(lanes)]
            high = [k + block if not k & block else lanes + k for k in range(lanes)]
            for i in range(lanes):
                if not i & block:
                    one, two = rows[i], rows[i + block]
                    rows[i] = self.w.shuffle(one, two, low)
                    rows[i + block] = self.w.shuffle(one, two, high)
            block *= 2
        return rows[: self.size]

    def is_nan(self, value: Value) -> Value:
        """Return whether some number is NaN."""
        return any_lane(self.w, value.differs(value))
