r"""Steps of matrix recurrences in vector registers: small real matrices, logarithms of sums.

For ``h_t = A h_{t-1} + b_t`` one step takes as long as the chain of multiplications and additions
from one state to the next. With ``c_1 = b_1``, ``c_q = A c_{q-1} + b_q`` the next `k` states are

    h_q = A^q h_0 + c_q,    q = 1 … k

and the chain has one product for `k` steps; the `c_q` do not depend on it. A product is a sum of
columns of the matrix, each held in one vector, times one number of the state.

Composing may overflow where the steps one after the other do not: a block of steps with states that
are not finite is repeated step by step. Powers may also be zero where what they give of a large
state is not: steps are composed where no item of the matrix is that large or small. (J. Kogge and
H. Stone, "A parallel algorithm for the efficient solution of a general class of recurrence
equations", 1973, of which this is the sequential use.)

In the log semiring with a fixed matrix, let `m` be the largest number of `h`, `a[i]` that of a row,
and ``E[i, j] = exp(A[i, j] - a[i])``, which are computed once:

    log Σ_j exp(A[i, j] + h[j]) = log( Σ_j E[i, j] exp(h[j] - m) ) + m + a[i]

so that a step takes `d` exponentials and logarithms, and a real product. A sum that comes near the
smallest numbers, or is not finite, is computed again term by term: nothing underflows.

States of at most as many numbers as a vector has lanes stay in a vector: with three states, a step
takes a quarter less time. Others have buffers that are padded to whole vectors: with minus
infinity, which adds nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from scanlib.kernels.arrays.sizes import Size, pieces, product
from scanlib.kernels.elementary import compute
from scanlib.kernels.lanes import any_lane
from scanlib.kernels.language import INT64, Local, Type, Value
from scanlib.kernels.linalg.matrices import Matrix, packed
from scanlib.kernels.linalg.semiring_products import (
    VECTOR_BYTES,
    Combination,
    SmallVectors,
    extreme_of,
    largest_lane,
)
from scanlib.kernels.spans import Span
from scanlib.recurrences.trust import outside, some
from scanlib.schedules.polls import between_polls

if TYPE_CHECKING:
    from scanlib.schedules.linear_steps import MatrixRun, Position

BLOCK = 64  # steps after which finiteness is checked; their offsets are read side by side
BLOCKS_PER_POLL = 64


class VectorSteps:
    """Writes all steps of a vector in registers, and the products of states and other rows."""

    def __init__(self, run: MatrixRun, size: int) -> None:
        self.run, self.w, self.size = run, run.w, size
        self.vectors = SmallVectors(run.w, run.loop.dtype, size)
        self.traced = not run.op.untraced
        self.checks = run.loop.fixed or run.op.has_mask  # whether states are finite

    def write(self) -> None:
        run, w, zero = self.run, self.w, self.vectors.zero
        self.powers = self.powers_of_matrix() if run.loop.fixed else []
        ahead = len(self.powers)
        composes = self.composes() if ahead else None
        state, done = w.local(self.first_state()), w.local(0, INT64)
        self.write_products(w.constant(0, INT64), w.copy(state))
        length = BLOCK * BLOCKS_PER_POLL
        with (
            between_polls(w, done, run.steps, length) as (start, end),
            w.loop(start, end, BLOCK) as first,
        ):
            last = w.select(first + BLOCK < run.steps, first + BLOCK, run.steps)
            before, check = w.copy(state), w.local(zero)
            self.offsets = self.offset_rows(first, last)
            if composes is None:
                self.single(first, w.constant(0, INT64), last, state, check)
            else:
                whole = w.select(composes, (last - first) & -ahead, 0)
                with w.loop(0, whole, ahead) as k:
                    self.composed(first, k, state, check)
                self.single(first, whole, last, state, check)
                with w.when(self.vectors.is_nan(w.copy(check)) & (whole > 0)):
                    w.assign(state, before)
                    w.assign(check, zero)
                    self.single(first, w.constant(0, INT64), last, state, check)
            if run.op.has_mask:
                with w.when(self.vectors.is_nan(w.copy(check))):
                    run.masked_steps(first, last)
                    w.assign(state, self.vectors.load(run.history, run.row_before(last)))
        if not self.traced:
            self.vectors.store(run.history, run.row_before(run.steps), w.copy(state))

    def first_state(self) -> Value:
        return self.vectors.load(self.run.history, self.run.row_before(self.w.constant(0, INT64)))

    def store_state(self, n: Value, state: Value) -> None:
        """Write the state before step `n` to its row, if it has one."""
        if self.traced:
            place = self.run.place_of(n) * (self.size * self.vectors.itemsize)
            self.vectors.store(self.run.history, place, state)

    def times(self, columns: list[Value], vector: Value, start: Value, awaited: bool) -> Value:
        return self.vectors.product(columns, self.vectors.copies(vector), start, awaited)

    # What a step reads

    def powers_of_matrix(self) -> list[list[Value]]:
        """Return the columns of the first powers of the fixed matrix."""
        matrix, lines = self.run.space["matrix"], self.size * self.vectors.itemsize
        columns = [self.vectors.load(matrix, j * lines) for j in range(self.size)]
        powers = [columns]
        for _ in range(3 if self.size <= 4 else 1):
            powers.append(
                [self.times(columns, own, self.vectors.zero, False) for own in powers[-1]]
            )
        return powers

    def composes(self) -> Value:
        """Return whether no power of the matrix is zero where what it gives is not."""
        w, dtype = self.w, self.run.loop.dtype
        items = Span(w, dtype, self.run.space["matrix"])
        # Of products of four numbers within these bounds, none is a subnormal number.
        high = 2.0 ** (30 if dtype == "float32" else 250)
        return ~some(w, items, w.constant(self.size**2, INT64), outside(1 / high, high))

    def columns(self, t: Value) -> list[Value]:
        """Return the columns of the matrix of a step."""
        if self.powers:
            return self.powers[0]
        run, vectors = self.run, self.vectors
        matrix = run.in_rows(run.given("matrix", {"matrix": t * run.stride("matrix", 0)}), "matrix")
        rows = vectors.rows(matrix, self.size)
        return vectors.transposed(rows) if run.op.side == "left" else rows

    def offset_rows(self, first: Value, last: Value) -> Matrix | None:
        """Return the offsets of the steps of a block, in the order of the steps."""
        run = self.run
        if "offset" not in run.loop.roles:
            return None
        line = run.stride("offset", 0)
        row = run.given("offset", {"offset": run.time(first) * line})
        rows = replace(row, rows=last - first, row_stride=-line if run.op.reverse else line)
        return run.in_rows(rows, "rows")

    def offset(self, k: Value, q: int = 0) -> Value:
        """Return the offset of step ``k + q`` of a block."""
        if self.offsets is None:
            return self.vectors.zero
        line = self.w.as_value(self.offsets.row_stride, INT64)
        place = k * line
        return self.vectors.load(self.offsets.pointer, place + line * q if q else place)

    # Steps

    def composed(self, first: Value, k: Value, state: Local, check: Local) -> None:
        """Write as many steps at once as there are powers, from step ``first + k`` on."""
        w, n = self.w, first + k
        constants: list[Value] = []
        for q in range(len(self.powers)):
            own = self.offset(k, q)
            if constants and self.offsets is not None:
                own = self.times(self.powers[0], constants[-1], own, False)
            constants.append(own)
        items, total = self.vectors.copies(w.copy(state)), w.copy(check)
        for q, columns in enumerate(self.powers):
            is_last = columns is self.powers[-1]
            new = self.vectors.product(columns, items, constants[q], is_last)
            self.store_state(n + (q + 1), new)
            total = w.fma(new, 0.0, total)  # NaN as soon as a state is not finite
        w.assign(state, new)
        w.assign(check, total)

    def single(self, first: Value, begin: Value, last: Value, state: Local, check: Local) -> None:
        """Write steps one after the other, from step ``first + begin`` up to `last`."""
        w = self.w
        with w.loop(begin, last - first) as k:
            n = first + k
            columns = self.columns(self.run.time(n))
            new = self.times(columns, w.copy(state), self.offset(k), True)
            self.store_state(n + 1, new)
            self.write_products(n + 1, new)
            if self.checks:
                w.assign(check, w.fma(new, 0.0, w.copy(check)))
            w.assign(state, new)

    def write_products(self, n: Value, state: Value) -> None:
        """Write the products of the state before step `n` and the row beside it."""
        run, vectors = self.run, self.vectors
        if not run.loop.products:
            return
        row = run.place_of(n)
        left, right = run.in_order(state, vectors.load(run.other_at(row), 0))
        size = self.size * vectors.itemsize
        first = row * (size * self.size)
        for i, item in enumerate(vectors.copies(left)):
            vectors.store(run.outer, first + i * size, item * right)


class LogSteps:
    """Writes steps with a fixed matrix in the log semiring."""

    def __init__(self, run: MatrixRun) -> None:
        self.run, self.w = run, run.w
        self.dtype = run.loop.dtype
        self.item = Type(self.dtype)
        self.lanes = lanes_of(self.dtype, run.loop.known_size)
        self.kind = Type(self.dtype, self.lanes)
        self.length = run.value_of(padded(self.dtype, run.loop.size))
        limits = np.finfo(self.dtype)
        self.smallest = float(limits.tiny / limits.eps**2)
        size, self.vectors = run.loop.known_size, None
        if size is not None and 2 <= size <= self.lanes:
            self.vectors = SmallVectors(run.w, self.dtype, size)
        self.state: Local | None = None

    # Before the first step

    def prepare(self) -> None:
        run, w, item = self.run, self.w, self.item
        bytes_of_line = self.length * item.itemsize
        buffers = [w.offset(run.space["buffers"], bytes_of_line * k) for k in range(4)]
        self.values, self.weights, self.sums, self.adds = buffers
        with run.over_batch(opens=run.loop.matrix_batched) as place:
            self.prepare_matrix(place)
        with w.loop(0, self.length) as i:
            neutral = w.select(i < run.size, w.constant(0.0, item), -inf)
            w.store(self.adds, i * item.itemsize, neutral)
            w.store(self.values, i * item.itemsize, w.constant(-inf, item))
        first = w.offset(run.history, run.row_before(w.constant(0, INT64)))
        if run.loop.batch:
            return
        if self.vectors is not None:
            self.state = w.local(self.vectors.load(first, 0))
        else:
            self.read_values(first)

    def read_values(self, row: Value) -> None:
        self.w.move(self.values, row, self.run.size * self.item.itemsize)

    def prepare_matrix(self, place: Position) -> None:
        """Write the exponentials of a matrix: column by column, padded."""
        run, w, item = self.run, self.w, self.item
        matrix = run.matrix_at(place)
        exponentials, largest = self.of_matrix(place)
        last = run.size - 1
        with w.loop(0, self.length) as i:
            own = w.select(i < run.size, i, last)  # lanes past the end repeat the last number
            items = partial(matrix.load, w, own)
            found = extreme_of(w, "max", item, run.size, items)
            found = w.select(abs(found) < inf, found, 0.0)
            w.store(largest, i * item.itemsize, found)
            with w.loop(0, run.size) as j:
                value = matrix.load(w, own, j) - found
                w.store(exponentials, (j * self.length + i) * item.itemsize, value)
        with w.loop(0, run.size * self.length, self.lanes) as i:
            at = i * item.itemsize
            w.store(exponentials, at, compute(w, "exp", w.load(self.kind, exponentials, at)))

    def of_matrix(self, place: Position) -> tuple[Value, Value]:
        """Return where the exponentials of a matrix are, and the largest numbers of its rows."""
        run, w = self.run, self.w
        exponentials, largest = run.space["exponentials"], run.space["largest"]
        if not run.loop.matrix_batched:
            return exponentials, largest
        line = place["index"] * self.length * self.item.itemsize
        return w.offset(exponentials, line * run.size), w.offset(largest, line)

    # One step

    def is_irregular(self, sums: Value) -> Value:
        return ~((sums > self.smallest) & (sums < inf))

    def step(self, place: Position, old: Value, new: Value) -> None:
        if self.vectors is not None:
            self.step_in_registers(self.vectors, place, old, new)
        else:
            self.step_in_memory(place, old, new)

    def step_in_registers(
        self, vectors: SmallVectors, place: Position, old: Value, new: Value
    ) -> None:
        """Write a step whose state is one vector, carried from step to step without a batch."""
        run, w = self.run, self.w
        state = vectors.load(old, 0) if self.state is None else w.copy(self.state)
        exponentials, largest = self.of_matrix(place)
        line = self.lanes * self.item.itemsize
        columns = [w.load(self.kind, exponentials, j * line) for j in range(vectors.size)]
        top = largest_lane(w, state)
        weights = compute(w, "exp", state - w.splat(top, self.lanes))
        sums = vectors.product(columns, vectors.copies(weights), vectors.zero)
        scale = w.splat(top, self.lanes) + w.load(self.kind, largest)
        result = compute(w, "log", sums) + scale
        add = run.offset_at(place)
        if add is not None:
            result = result + vectors.load(run.in_rows(add.turned, "row").pointer, 0)
        vectors.store(new, 0, result)
        if self.state is not None:
            w.assign(self.state, result)
        with w.when(any_lane(w, self.is_irregular(sums)) | ~(abs(top) < inf)):
            w.store(self.sums, 0, sums)
            self.term_by_term(place, old, new, top)
            if self.state is not None:
                w.assign(self.state, vectors.load(new, 0))

    def step_in_memory(self, place: Position, old: Value, new: Value) -> None:
        run, w, item, kind = self.run, self.w, self.item, self.kind
        size = item.itemsize
        exponentials, largest = self.of_matrix(place)
        if run.loop.batch:
            self.read_values(old)
        tops = w.local(w.constant(-inf, kind))
        with w.loop(0, self.length, self.lanes) as c:
            value, before = w.load(kind, self.values, c * size), w.copy(tops)
            w.assign(tops, w.select(value > before, value, before))
        top = largest_lane(w, w.copy(tops))
        with w.loop(0, self.length, self.lanes) as c:
            value = w.load(kind, self.values, c * size) - w.splat(top, self.lanes)
            w.store(self.weights, c * size, compute(w, "exp", value))
        rows = packed(exponentials, self.dtype, run.size, self.length)
        Combination(w, "real", self.sums, self.weights, rows, None).write()
        whole = run.size & -self.lanes
        adds = self.addends(place, whole)
        wrong = w.local(w.constant(0.0, kind))
        with w.loop(0, self.length, self.lanes) as c:
            at = c * size
            sums = w.load(kind, self.sums, at)
            scale = w.splat(top, self.lanes) + w.load(kind, largest, at)
            source = w.select(c < whole, adds, self.adds)
            value = (compute(w, "log", sums) + scale) + w.load(kind, source, at)
            w.store(self.values, at, value)
            w.assign(wrong, w.select(self.is_irregular(sums), 1.0, w.copy(wrong)))
            with w.when(c < whole):
                w.store(new, at, value)
        with w.loop(whole, run.size) as i:
            w.store(new, i * size, w.load(item, self.values, i * size))
        is_wrong = any_lane(w, w.copy(wrong).differs(0.0))
        with w.when(is_wrong | ~(abs(top) < inf)):
            self.term_by_term(place, old, new, top)
            if not run.loop.batch:
                self.read_values(new)

    def addends(self, place: Position, whole: Value) -> Value:
        """Return where the offset's whole vectors are; what is left is copied to the buffer."""
        run, w, item = self.run, self.w, self.item
        add = run.offset_at(place)
        if add is None:
            return self.adds
        row = run.in_rows(add.turned, "row").pointer
        with w.loop(whole, run.size) as k:
            at = k * item.itemsize
            w.store(self.adds, at, w.load(item, row, at))
        return row

    def term_by_term(self, place: Position, old: Value, new: Value, top: Value) -> None:
        """Write a step again, with sums that are not regular computed from their terms."""
        run, w, item = self.run, self.w, self.item
        matrix, add = run.matrix_at(place), run.offset_at(place)
        _, largest = self.of_matrix(place)
        with w.loop(0, run.size) as i:
            at = i * item.itemsize
            found = w.local(w.load(item, self.sums, at))
            sums = w.copy(found)
            with w.when(self.is_irregular(sums) | ~(abs(top) < inf)) as choice:

                def term(j: Value, i: Value = i) -> Value:
                    return matrix.load(w, i, j) + w.load(item, old, j * item.itemsize)

                w.assign(found, extreme_of(w, "log", item, run.size, term))
            with w.otherwise(choice):
                scale = top + w.load(item, largest, at)
                w.assign(found, compute(w, "log", sums) + scale)
            value = w.copy(found)
            if add is not None:
                value = value + add.load(w, i, 0)
            w.store(new, at, value)


def lanes_of(dtype: str, size: int | None) -> int:
    """Return how many numbers of a state are computed at once."""
    full = VECTOR_BYTES // Type(dtype).itemsize
    if not size:
        return 8 if size is None else full
    return min(full, max(2, 1 << (size - 1).bit_length()))


def padded(dtype: str, size: Size) -> Size:
    """Return how many numbers a buffer has for a state of a size."""
    lanes = lanes_of(dtype, size if isinstance(size, int) else None)
    return product(lanes, pieces(size, lanes))
