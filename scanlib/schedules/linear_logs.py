r"""Steps of the log semiring with a fixed matrix: products with exponentials.

With `m` the largest number of `h` and ``E[i, j] = exp(A[i, j] - a[i])``, `a[i]` the largest number
of a row, which are computed once,

    log Σ_j exp(A[i, j] + h[j]) = log( Σ_j E[i, j] exp(h[j] - m) ) + m + a[i]

so that a step takes `d` exponentials and logarithms, and a real product. A sum that comes near the
smallest numbers, or is not finite, is computed again term by term: nothing underflows.

States of at most as many numbers as a vector has lanes stay in a vector. Longer ones, and those of
a size that is not known when the kernel is written, have buffers that are padded to whole vectors:
with minus infinity, which adds nothing.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from scanlib.kernels.elementary import vector_function
from scanlib.kernels.language import INT64, Local, Type, Value, Writer
from scanlib.kernels.linalg.matrices import Matrix
from scanlib.kernels.linalg.semiring_products import (
    VECTOR_BYTES,
    Combination,
    SmallVectors,
    extreme_of,
    largest_lane,
    plainly,
)
from scanlib.kernels.spans import any_lane

if TYPE_CHECKING:
    from scanlib.schedules.linear_run import Run

Place = dict[str, Value]


class LogSteps:
    """Writes steps with a fixed matrix in the log semiring."""

    def __init__(self, run: Run) -> None:
        self.run, self.w = run, run.w
        self.dtype = run.loop.dtype
        self.item = Type(self.dtype)
        self.lanes = lanes_of(self.dtype, run.loop.size)
        self.kind = Type(self.dtype, self.lanes)
        self.length = padded(run.w, self.dtype, run.size, run.loop.size)
        limits = np.finfo(self.dtype)
        self.smallest = float(limits.tiny / limits.eps**2)
        size, self.vectors = run.loop.size, None
        if size is not None and 2 <= size <= self.lanes:
            self.vectors = SmallVectors(run.w, self.dtype, size)
        self.state: Local | None = None

    def function(self, name: str, value: Value) -> Value:
        (found,) = self.w.call(vector_function(name, self.dtype, value.type.lanes), value)
        return found

    # Before the first step

    def prepare(self) -> None:
        run, w, item = self.run, self.w, self.item
        bytes_of_line = self.length * item.itemsize
        buffers = [w.offset(run.space["buffers"], bytes_of_line * k) for k in range(4)]
        self.values, self.weights, self.sums, self.adds = buffers
        with run.over_batch(opens=run.loop.matrix_batched) as place:
            self.prepare_matrix(place)
        with w.loop(0, self.length) as k:
            i = plainly(w, k)
            w.store(self.adds, i * item.itemsize, self.pad(i, w.constant(0.0, item), -inf))
            w.store(self.values, i * item.itemsize, w.constant(-inf, item))
        first = w.offset(run.history, run.row_of(w.constant(0, INT64)))
        if run.loop.batch:
            return
        if self.vectors is not None:
            self.state = w.local(self.vectors.load(first, 0))
        else:
            self.read_values(first)

    def pad(self, i: Value, value: Value, other: float) -> Value:
        return self.w.select(i < self.run.size, value, other)

    def read_values(self, row: Value) -> None:
        w, item = self.w, self.item
        with w.loop(0, self.run.size) as j:
            at = j * item.itemsize
            w.store(self.values, at, w.load(item, row, at))

    def prepare_matrix(self, place: Place) -> None:
        """Write the exponentials of a matrix: column by column, padded."""
        run, w, item = self.run, self.w, self.item
        matrix = run.matrix_at(place)
        exponentials, largest = self.of_matrix(place)
        last = run.size - 1
        with w.loop(0, self.length) as i:
            # Where a state is one vector, its lanes past the end repeat the last number.
            own = w.select(i < run.size, i, last)
            top = w.local(-inf, item)
            with w.loop(0, run.size) as k:
                value, before = matrix.load(w, own, plainly(w, k)), w.copy(top)
                w.assign(top, w.select((value > before) | value.differs(value), value, before))
            found = w.copy(top)
            found = w.select(abs(found) < inf, found, 0.0)
            w.store(largest, i * item.itemsize, found)
            with w.loop(0, run.size) as k:
                j = plainly(w, k)
                value = matrix.load(w, own, j) - found
                w.store(exponentials, (j * self.length + i) * item.itemsize, value)
        with w.loop(0, run.size * self.length, self.lanes) as i:
            at = i * item.itemsize
            w.store(exponentials, at, self.function("exp", w.load(self.kind, exponentials, at)))

    def of_matrix(self, place: Place) -> tuple[Value, Value]:
        """Return where the exponentials of a matrix are, and the largest numbers of its rows."""
        run, w = self.run, self.w
        exponentials, largest = run.space["exponentials"], run.space["largest"]
        if not run.loop.matrix_batched:
            return exponentials, largest
        line = place["index"] * self.length * self.item.itemsize
        return w.offset(exponentials, line * run.size), w.offset(largest, line)

    # One step

    def step(self, place: Place, old: Value, new: Value) -> None:
        if self.vectors is not None:
            self.step_in_registers(place, old, new)
        else:
            self.step_in_memory(place, old, new)

    def is_irregular(self, sums: Value) -> Value:
        return ~((sums > self.smallest) & (sums < inf))

    def step_in_registers(self, place: Place, old: Value, new: Value) -> None:
        run, w, vectors = self.run, self.w, self.vectors
        assert vectors is not None
        state = vectors.load(old, 0) if self.state is None else w.copy(self.state)
        exponentials, largest = self.of_matrix(place)
        line = self.lanes * self.item.itemsize
        columns = [w.load(self.kind, exponentials, j * line) for j in range(vectors.size)]
        top = largest_lane(w, state)
        weights = self.function("exp", state - w.splat(top, self.lanes))
        sums = vectors.product(columns, vectors.copies(weights), vectors.zero)
        scale = w.splat(top, self.lanes) + w.load(self.kind, largest)
        result = self.function("log", sums) + scale
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

    def step_in_memory(self, place: Place, old: Value, new: Value) -> None:
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
            w.store(self.weights, c * size, self.function("exp", value))
        width, dtype = self.length, self.dtype
        out, factors = (Matrix(p, dtype, 1, width, 0, size) for p in (self.sums, self.weights))
        rows = Matrix(exponentials, dtype, run.size, width, width * size, size)
        Combination(w, "real", out, factors, rows, None).write()
        whole = run.size & -self.lanes
        adds = self.addends(place, whole)
        wrong = w.local(w.constant(0.0, kind))
        with w.loop(0, self.length, self.lanes) as c:
            at = c * size
            sums = w.load(kind, self.sums, at)
            scale = w.splat(top, self.lanes) + w.load(kind, largest, at)
            source = w.select(c < whole, adds, self.adds)
            value = (self.function("log", sums) + scale) + w.load(kind, source, at)
            w.store(self.values, at, value)
            w.assign(wrong, w.select(self.is_irregular(sums), 1.0, w.copy(wrong)))
            with w.when(c < whole):
                w.store(new, at, value)
        with w.loop(whole, run.size) as k:
            i = plainly(w, k)
            w.store(new, i * size, w.load(item, self.values, i * size))
        is_wrong = any_lane(w, w.copy(wrong).differs(0.0))
        with w.when(is_wrong | ~(abs(top) < inf)):
            self.term_by_term(place, old, new, top)
            if not run.loop.batch:
                self.read_values(new)

    def addends(self, place: Place, whole: Value) -> Value:
        """Return where the offset's whole vectors are; what is left is copied to the buffer."""
        run, w, item = self.run, self.w, self.item
        add = run.offset_at(place)
        if add is None:
            return self.adds
        row = run.in_rows(add.turned, "row").pointer
        with w.loop(whole, run.size) as k:
            at = plainly(w, k) * item.itemsize
            w.store(self.adds, at, w.load(item, row, at))
        return row

    def term_by_term(self, place: Place, old: Value, new: Value, top: Value) -> None:
        """Write a step again, with sums that are not regular computed from their terms."""
        run, w, item = self.run, self.w, self.item
        matrix, add = run.matrix_at(place), run.offset_at(place)
        _, largest = self.of_matrix(place)
        with w.loop(0, run.size) as i:
            at = i * item.itemsize
            found = w.local(w.load(item, self.sums, at))
            sums = w.copy(found)
            with w.when(self.is_irregular(sums) | ~(abs(top) < inf)) as choice:

                def term(k: Value, i: Value = i) -> Value:
                    j = plainly(w, k)
                    return matrix.load(w, i, j) + w.load(item, old, j * item.itemsize)

                w.assign(found, extreme_of(w, "log", item, run.size, term))
            with w.otherwise(choice):
                scale = top + w.load(item, largest, at)
                w.assign(found, self.function("log", sums) + scale)
            value = w.copy(found)
            if add is not None:
                value = value + add.load(w, i, 0)
            w.store(new, at, value)


def lanes_of(dtype: str, size: int | None) -> int:
    """Return how many numbers of a state are computed at once."""
    full = VECTOR_BYTES // Type(dtype).itemsize
    if size is None:
        return 8
    if size >= full:
        return full
    return max(2, 1 << (size - 1).bit_length()) if size else full


def padded(w: Writer, dtype: str, size: Value, known: int | None) -> Value:
    """Return how many numbers a buffer has; `known` is the size if it is known."""
    lanes = lanes_of(dtype, known)
    if known is not None:
        return w.constant(-(-known // lanes) * lanes, INT64)
    return (size + (lanes - 1)) & -lanes
