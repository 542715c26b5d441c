r"""Steps of small real matrices: columns and states in vector registers.

For ``h_t = A h_{t-1} + b_t`` one step takes as long as the chain of multiplications and additions
from one state to the next. With ``c_1 = b_1``, ``c_q = A c_{q-1} + b_q`` the next `k` states are

    h_q = A^q h_0 + c_q,    q = 1 … k

and the chain has one product for `k` steps; the `c_q` do not depend on it. A product is a sum of
columns of the matrix, each held in one vector, times one number of the state.

Composing may overflow where the steps one after the other do not: a block of steps with states that
are not finite is repeated step by step. Powers may also be zero where what they give of a large
state is not: steps are composed where the items of the matrix are in `powers_range`. (J. Kogge and
H. Stone, "A parallel algorithm for the efficient solution of a general class of recurrence
equations", 1973, of which this is the sequential use.)

With products from both sides, ``h_t = A_t h_{t-1} R_t + b_t`` with `h` of shape ``(d, m)``, a step
is ``g = A h`` and then ``g R + b``, one vector for each row: row `i` of `g` is the sum of
``A[i, j] h[j]``, row `i` of the result ``b[i] + Σ_j g[i, j] R[j]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scanlib.kernels.language import INT64, Local, Type, Value
from scanlib.kernels.linalg.semiring_products import SmallVectors

if TYPE_CHECKING:
    from scanlib.schedules.linear_run import Run

BLOCK = 64  # steps after which finiteness is checked
BLOCKS_OF_A_TURN = 64


def look_ahead(size: int) -> int:
    """Return how many steps to take at once for matrices of a size."""
    return 4 if size <= 4 else 2


def powers_range(dtype: str) -> tuple[float, float]:
    """Return the sizes of items, zero aside, whose products of four are no subnormal numbers."""
    power = 30 if dtype == "float32" else 250
    return 2.0**-power, 2.0**power


class _Small:
    """What all of these schedules share."""

    def __init__(self, run: Run, size: int) -> None:
        self.run, self.w, self.size = run, run.w, size
        self.vectors = SmallVectors(run.w, run.loop.dtype, size)
        self.traced = not run.op.untraced

    def store_state(self, n: Value, state: Value) -> None:
        """Write the state before step `n` to its row, if it has one."""
        if self.traced:
            self.vectors.store(self.run.history, self.run.row_of(n), state)

    def first_state(self) -> Value:
        return self.vectors.load(self.run.history, self.run.row_of(self.w.constant(0, INT64)))

    def keep_last(self, state: Local) -> None:
        if not self.traced:
            row = self.run.row_of(self.run.steps)
            self.vectors.store(self.run.history, row, self.w.copy(state))

    def offset(self, t: Value) -> Value:
        """Return the offset of a step."""
        run = self.run
        if not run.has("offset"):
            return self.vectors.zero
        row = run.given("offset", {"offset": t * run.stride("offset", 0)})
        return self.vectors.load(run.in_rows(row, "row").pointer, 0)


class FixedSteps(_Small):
    """Writes all steps with a fixed matrix."""

    def write(self) -> None:
        run, w = self.run, self.w
        ahead = look_ahead(self.size)
        matrix = run.space["matrix"]
        lines = self.size * self.vectors.itemsize
        columns = [self.vectors.load(matrix, j * lines) for j in range(self.size)]
        powers = [columns]
        for _ in range(1, ahead):
            powers.append([self.times(columns, column) for column in powers[-1]])
        composes = self.composes(matrix)
        state, done = w.local(self.first_state()), w.local(0, INT64)
        with w.loop_while(lambda: w.copy(done) < run.steps):
            first = w.copy(done)
            with w.when((first & (BLOCK * BLOCKS_OF_A_TURN - 1)).equals(0)):
                w.poll(first, run.steps)
            left = run.steps - first
            count = w.select(left < BLOCK, left, BLOCK)
            whole = w.select(composes, count & -ahead, 0)
            before = w.copy(state)
            check = w.local(self.vectors.zero)
            with w.loop(0, whole, ahead) as n:
                self.composed(first + n, powers, state, check)
            self.single(first + whole, first + count, columns, state, check)
            with w.when(self.vectors.is_nan(w.copy(check)) & (whole > 0)):
                w.assign(state, before)
                w.assign(check, self.vectors.zero)
                self.single(first, first + count, columns, state, check)
            if run.op.has_mask:
                with w.when(self.vectors.is_nan(w.copy(check))):
                    run.masked_steps(first, first + count)
                    at = run.row_of(first + count)
                    w.assign(state, self.vectors.load(run.history, at))
            w.assign(done, first + count)
        self.keep_last(state)

    def times(self, columns: list[Value], vector: Value, start: Value | None = None) -> Value:
        start = self.vectors.zero if start is None else start
        return self.vectors.product(columns, self.vectors.copies(vector), start)

    def composes(self, matrix: Value) -> Value:
        """Return whether no power of the matrix is zero where what it gives is not."""
        w, item = self.w, Type(self.run.loop.dtype)
        low, high = powers_range(item.dtype)
        outside = w.local(0, INT64)
        with w.loop(0, self.size * self.size) as i:
            size = abs(w.load(item, matrix, i * item.itemsize))
            fits = size.equals(0.0) | ((size >= low) & (size <= high))
            w.assign(outside, w.copy(outside) | w.cast(~fits, "int64"))
        return w.copy(outside).equals(0)

    def composed(self, n: Value, powers: list[list[Value]], state: Local, check: Local) -> None:
        """Write as many steps at once as there are powers."""
        w, run = self.w, self.run
        constants: list[Value] = []
        for q in range(len(powers)):
            own = self.offset(run.time(n + q if q else n))
            if constants and run.has("offset"):
                own = self.times(powers[0], constants[-1], own)
            constants.append(own)
        items, total = self.vectors.copies(w.copy(state)), w.copy(check)
        for q, columns in enumerate(powers):
            new = self.vectors.product(columns, items, constants[q])
            self.store_state(n + (q + 1), new)
            total = w.fma(new, 0.0, total)  # NaN as soon as a state is not finite
        w.assign(state, new)
        w.assign(check, total)

    def single(
        self, first: Value, last: Value, columns: list[Value], state: Local, check: Local
    ) -> None:
        """Write steps one after the other."""
        w = self.w
        with w.loop(first, last) as n:
            new = self.times(columns, w.copy(state), self.offset(self.run.time(n)))
            self.store_state(n + 1, new)
            w.assign(check, w.fma(new, 0.0, w.copy(check)))
            w.assign(state, new)


class MatrixSteps(_Small):
    """Writes all steps with a matrix for each, and the products of states and other rows.

    `outer` is that of `scanlib.schedules.linear_steps.linear_program`.
    """

    def __init__(self, run: Run, size: int, outer: str) -> None:
        super().__init__(run, size)
        self.outer = outer

    def write(self) -> None:
        run, w = self.run, self.w
        state, done = w.local(self.first_state()), w.local(0, INT64)
        self.write_products(w.constant(0, INT64), w.copy(state))
        block = BLOCK if run.op.has_mask else BLOCK * BLOCKS_OF_A_TURN
        with w.loop_while(lambda: w.copy(done) < run.steps):
            first = w.copy(done)
            with w.when((first & (BLOCK * BLOCKS_OF_A_TURN - 1)).equals(0)):
                w.poll(first, run.steps)
            last = w.select(first + block < run.steps, first + block, run.steps)
            check = w.local(self.vectors.zero)
            with w.loop(first, last) as n:
                self.step(n, state, check)
            if run.op.has_mask:
                with w.when(self.vectors.is_nan(w.copy(check))):
                    run.masked_steps(first, last)
                    w.assign(state, self.vectors.load(run.history, run.row_of(last)))
            w.assign(done, last)
        self.keep_last(state)

    def step(self, n: Value, state: Local, check: Local) -> None:
        run, w, vectors = self.run, self.w, self.vectors
        t = run.time(n)
        matrix = run.in_rows(run.given("matrix", {"matrix": t * run.stride("matrix", 0)}), "matrix")
        rows = vectors.rows(matrix, self.size)
        columns = vectors.transposed(rows) if run.op.side == "left" else rows
        new = vectors.product(columns, vectors.copies(w.copy(state)), self.offset(t))
        self.store_state(n + 1, new)
        self.write_products(n + 1, new)
        if run.op.has_mask:
            w.assign(check, w.fma(new, 0.0, w.copy(check)))
        w.assign(state, new)

    def write_products(self, n: Value, state: Value) -> None:
        """Write the products of the state before step `n` and the row beside it."""
        if not self.outer:
            return
        run, vectors = self.run, self.vectors
        row = run.steps - n if run.op.reverse else n
        pair = state, vectors.load(run.other_at(row), 0)
        left, right = pair if self.outer == "after" else pair[::-1]
        size = self.size * vectors.itemsize
        first = row * (size * self.size)
        for i, item in enumerate(vectors.copies(left)):
            vectors.store(run.result(1), first + i * size, item * right)


class BothSides:
    """Writes all steps of a small state with matrices at both sides."""

    def __init__(self, run: Run, rows: int, columns: int) -> None:
        self.run, self.w = run, run.w
        self.rows, self.columns = rows, columns
        self.vectors = SmallVectors(run.w, run.loop.dtype, columns)

    def write(self) -> None:
        run, w, vectors = self.run, self.w, self.vectors
        item = vectors.itemsize
        size = self.columns * item
        first = run.row_of(w.constant(0, INT64))
        state = [w.local(vectors.load(run.history, first + i * size)) for i in range(self.rows)]
        cost = w.constant(self.rows * self.columns * (self.rows + self.columns), INT64)
        with run.turns(cost) as n:
            self.step(n, state)
        if run.op.untraced:
            last = run.row_of(run.steps)
            for i, row in enumerate(state):
                vectors.store(run.history, last + i * size, w.copy(row))

    def step(self, n: Value, state: list[Local]) -> None:
        run, w, vectors = self.run, self.w, self.vectors
        size = self.columns * vectors.itemsize
        with run.over_batch(run.time(n)) as place:
            left, right, add = run.matrix_at(place), run.right_at(place), run.offset_at(place)
        left = run.in_rows(left, "matrix")
        across = vectors.rows(run.in_rows(right, "right"), self.columns)
        starts: list[Value] = [vectors.zero] * self.rows
        if add is not None:
            starts = vectors.rows(run.in_rows(add, "row"), self.rows)
        rows = [w.copy(row) for row in state]
        target = run.row_of(n + 1)
        for i in range(self.rows):
            items = [left.load(w, i, j) for j in range(self.rows)]
            factors = [w.splat(item, vectors.lanes) for item in items]
            half = vectors.product(rows, factors, vectors.zero)
            new = vectors.product(across, vectors.copies(half), starts[i])
            if not run.op.untraced:
                vectors.store(run.history, target + i * size, new)
            w.assign(state[i], new)
