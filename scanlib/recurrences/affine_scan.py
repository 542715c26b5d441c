r"""Affine steps ``h ← a h + b`` of one state, composed in vector registers.

With ``(a, b)`` for a step in each lane, a scan by halves (J. Sklansky, "Conditional-sum addition
logic", 1960) composes the second lane of each pair with the first, then the second pair of each
four with the last lane of the first pair, and so on:

    b ← a · last(b) + b,    a ← a · last(a)

after which lane `i` takes the state before the group to the state after step `i`, and only one
multiplication and one addition of a vector wait for the state before it. In the shortest halves,
lanes move within the parts of a register in which they move fastest. Two vectors are composed
side by side: the instructions of one fill the waits of the other.

No more than eight steps are composed (products of their coefficients stay in range), so a vector of
sixteen numbers holds two groups.

With one coefficient for all steps, its powers are computed once, and the state between vectors is
kept in double precision: single precision is rounded in sums of a few terms only, which leaves a
fraction of the error of rounding at every step, and powers that are rounded would change the
coefficient.

A block is scanned while the memory waits: the elements before and the results after are computed
faster than they are read and written. So the scan asks for what the next block reads and writes
(`Block.ahead`): a million steps of a gradient take half the time then, and short loops no longer.

Where the sum comes first, ``s = h + b``, ``h ← a s`` (`ops.lowered.sums_first`), the sums are
written, and lane `i` is to hold the sum before its own coefficient acts: it is composed with the
coefficient of the lane before.
"""

from __future__ import annotations

from dataclasses import dataclass

from scanlib.kernels.language import BOOL, Local, Type, Value
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.spans import Items, Same, Span
from scanlib.recurrences.lanes import Block, Lanes, halves
from scanlib.recurrences.trust import Found, is_extreme, is_moderate

GROUP = 8  # how many steps are composed at most
_SIDE_BY_SIDE = 2  # vectors
_WITH_DOUBLES = 4  # vectors, where the state between them is in double precision


@dataclass(frozen=True)
class AffineSteps:
    """The steps of one block.

    Attributes
    ----------
    a : Items
        Coefficients; `Same` where all steps have one.
    b : Items, optional
        What is added; None for a product.
    h : Span
        Where the new values go, or, where the sum comes first, the sums.
    before : Value
        The state before the block.
    sum_first : bool
    """

    a: Items
    b: Items | None
    h: Span
    before: Value
    sum_first: bool = False

    @property
    def dtype(self) -> str:
        return self.h.dtype

    @property
    def fixed(self) -> Value | None:
        """The coefficient of all steps, if there is one."""
        if not isinstance(self.a, Same):
            return None
        assert isinstance(self.a.value, Value)
        return self.a.value

    def one(self, state: Value, j: Value) -> tuple[Value, Value]:
        """Write one step at a place in memory: return the next state, and what is stored."""
        w = self.h.w
        a = self.a.real(j)
        if self.b is None:
            after = a * state
            return after, after
        b = self.b.real(j)
        if self.sum_first:
            total = state + b
            return a * total, total
        after = w.fma(a, state, b)
        return after, after


def scan_affine(block: Block, steps: AffineSteps) -> tuple[Value, Value]:
    """Write the scan; return the state after the block, and whether all values can be trusted."""
    w, dtype = block.writer, steps.dtype
    fixed = steps.fixed
    wide = "float64" if fixed is not None else dtype
    good = is_moderate(w, steps.before)
    if fixed is not None:
        good = good & ~is_extreme(w, fixed)
    trusted = w.local(False, BOOL)
    after = w.local(w.cast(steps.before, wide))
    with w.when(good):
        plain = fixed is None and steps.b is not None
        short = dtype == "float64" and register_bytes() < 64
        done, lost = (_Scalars if plain and short else _Scan)(block, steps, after).write()
        wrong = w.local(lost)
        with w.loop(done, block.size) as k:
            j = block.step(k)
            state, stored = (
                _wide_step(steps, w.copy(after), j)
                if wide != dtype
                else steps.one(w.copy(after), j)
            )
            w.assign(after, state)
            steps.h.store(j, stored)
            bad = ~is_moderate(w, stored)
            if fixed is None:
                bad = bad | is_extreme(w, steps.a.real(j))
            w.assign(wrong, w.copy(wrong) | bad)
        w.assign(trusted, ~w.copy(wrong))
    return w.cast(w.copy(after), dtype), w.copy(trusted)


def _wide_step(steps: AffineSteps, state: Value, j: Value) -> tuple[Value, Value]:
    """Write a step of single precision whose state is kept in double precision."""
    w = steps.h.w
    a = w.cast(steps.a.real(j), "float64")
    assert steps.b is not None
    b = w.cast(steps.b.real(j), "float64")
    if steps.sum_first:
        total = state + b
        return a * total, w.cast(total, steps.dtype)
    after = w.fma(a, state, b)
    return after, w.cast(after, steps.dtype)


class _Scan:
    """Writes the loop over the vectors of a block."""

    def __init__(self, block: Block, steps: AffineSteps, state: Local) -> None:
        self.block, self.steps, self.state = block, steps, state
        self.w, self.dtype = block.writer, steps.dtype
        lanes = register_bytes() // steps.h.itemsize
        self.v = Lanes(self.w, self.dtype, block.reverse, lanes, min(lanes, GROUP))
        self.fixed = steps.fixed
        # Where the state between vectors is: in all lanes, or wider than they are.
        self.in_lanes = self.fixed is None or self.dtype == "float64"
        self.side_by_side = _SIDE_BY_SIDE if self.in_lanes else _WITH_DOUBLES

    def write(self) -> tuple[Value, Value]:
        """Write the loop; return how many steps it takes, and whether they are lost."""
        w, v, n = self.w, self.v, self.block.size
        v.prepare_masks()
        self.found = Found(w, v.type)
        if self.fixed is not None:
            self.prepare_powers(self.fixed)
        if not self.in_lanes:
            self.prepare_groups()
        size = self.side_by_side * v.lanes
        done = n & -size
        lanes = v.lanes if self.in_lanes else self.doubles.lanes
        state = w.local(w.splat(w.copy(self.state), lanes))
        with w.loop(0, done, size) as first:
            places = []
            for k in range(self.side_by_side):
                place = first + k * v.lanes if k else first
                places.append(n - v.lanes - place if self.block.reverse else place)
            self.block.fetch(places[-1 if self.block.reverse else 0], size)
            w.assign(state, self.write_vectors(w.copy(state), places))
        w.assign(self.state, w.lane(w.copy(state), 0))
        return done, self.found.anything()

    # Powers of one coefficient

    def prepare_powers(self, a: Value) -> None:
        w, v, late = self.w, self.v, int(self.steps.sum_first)
        wide = w.cast(a, "float64")
        self.powers: list[Value] = [w.constant(1.0, Type("float64"))]
        for _ in range(v.group):
            self.powers.append(self.powers[-1] * wide)
        powers = [w.cast(power, self.dtype) for power in self.powers]
        self.factors = v.by_step(lambda step: powers[step + 1 - late])
        self.weights = {half: v.weights(powers, half) for half in v.masks}

    def prepare_groups(self) -> None:
        """Make the powers that compose the groups of all vectors, in double precision."""
        groups = self.side_by_side * len(self.v.groups)
        self.doubles = d = Lanes(self.w, "float64", False, groups, groups)
        powers = [self.powers[0]]
        for _ in range(groups):
            powers.append(powers[-1] * self.powers[self.v.group])
        self.group_weights = {half: d.weights(powers, half) for half in halves(groups)}
        self.group_powers = d.by_step(lambda k: powers[k])
        self.all_groups = self.w.splat(powers[groups], groups)

    # Vectors

    def write_vectors(self, state: Value, places: list[Value]) -> Value:
        """Write some vectors of steps; return the state after them."""
        w, lanes = self.w, self.v.lanes
        own = [self.steps.a.real(place, lanes) for place in places]
        if self.fixed is not None:
            maps = self.fixed_maps(places)
        else:
            for coefficients in own:
                self.found.coefficients(coefficients)
            maps = self.maps(own, places)
        if self.in_lanes:
            befores = []
            for (a, b), coefficient in zip(maps, own, strict=True):
                before, state = self.states(state, a, b, coefficient)
                befores.append(before)
        else:
            ends = [b for _, b in maps if b is not None]
            befores, state = self.double_states(state, ends)
        results = []
        for (a, b), before in zip(maps, befores, strict=True):
            results.append(a * before if b is None else w.fma(a, before, b))
        for value, place in zip(results, places, strict=True):
            self.steps.h.store(place, value)
            self.found.values(value)
        return state

    def terms(self, places: list[Value]) -> list[Value]:
        assert self.steps.b is not None
        return [self.steps.b.real(place, self.v.lanes) for place in places]

    def fixed_maps(self, places: list[Value]) -> list[tuple[Value, Value | None]]:
        """Return the compositions of the first steps of each group up to each, of each vector."""
        v, vectors = self.v, self.terms(places)
        for half, weight in self.weights.items():
            # Lanes of first halves have the weight zero. What is not finite spreads among lanes,
            # but never gets lost.
            vectors = [self.w.fma(weight, v.half_before(b, half), b) for b in vectors]
        return [(self.factors, b) for b in vectors]

    def maps(self, own: list[Value], places: list[Value]) -> list[tuple[Value, Value | None]]:
        """Return the same for coefficients that differ from step to step."""
        v, factors = self.v, own
        if self.steps.sum_first:
            factors = [v.after_first(v.earlier(a, 1), v.constant(1.0)) for a in own]
        product = self.steps.b is None
        terms = [] if product else self.terms(places)
        for half in v.masks:
            if not product:
                sums = [
                    self.w.fma(a, v.half_before(b, half), b)
                    for a, b in zip(factors, terms, strict=True)
                ]
                terms = self.second_halves(half, sums, terms)
            products = [a * v.half_before(a, half) for a in factors]
            factors = self.second_halves(half, products, factors)
        if product:
            return [(a, None) for a in factors]
        return list(zip(factors, terms, strict=True))

    def second_halves(self, half: int, values: list[Value], others: list[Value]) -> list[Value]:
        """Return values in second halves, others in first ones."""
        pairs = zip(values, others, strict=True)
        return [self.v.in_second_half(half, value, other) for value, other in pairs]

    def states(
        self, state: Value, a: Value, b: Value | None, coefficient: Value
    ) -> tuple[Value, Value]:
        """Return the states before each group, and after the vector, in all lanes."""
        v, before = self.v, state
        if self.steps.sum_first:
            assert b is not None
            a, b = coefficient * a, coefficient * b
        for group in v.groups:
            if group != v.groups[0]:
                before = v.in_group(group, state, before)
            factor = v.splat_last(a, group)
            state = (
                factor * state if b is None else self.w.fma(factor, state, v.splat_last(b, group))
            )
        return before, state

    def double_states(self, state: Value, terms: list[Value]) -> tuple[list[Value], Value]:
        """Return the states before the groups of each vector, and after all, in double precision.

        The terms of all groups come into one vector, are widened, and are composed there.
        """
        v, d, w = self.v, self.doubles, self.w
        ends = w.cast(v.lasts(terms), "float64")
        if self.steps.sum_first:
            ends = w.splat(self.powers[1], d.lanes) * ends
        for half, weight in self.group_weights.items():
            ends = w.fma(weight, d.half_before(ends, half), ends)
        # Minus zero, so that a sum with it is what is added to it.
        before = w.fma(self.group_powers, state, d.shifted(ends, -0.0))
        after = w.fma(self.all_groups, state, d.splat_last(ends, 0))
        return v.spread(w.cast(before, self.dtype), len(terms)), after


class _Scalars:
    """Four steps composed without vectors: in float64, for short registers, cheaper than the
    shuffles that these need."""

    def __init__(self, block: Block, steps: AffineSteps, state: Local) -> None:
        self.block, self.steps, self.state = block, steps, state
        self.w = block.writer
        self.v = Lanes(self.w, "float64", block.reverse, 4, 4)

    def write(self) -> tuple[Value, Value]:
        """Write the loop; return how many steps it takes, and whether they are lost."""
        w, n = self.w, self.block.size
        self.found = Found(w, self.v.type)
        done = n & -4
        with w.loop(0, done, 4) as first:
            places = [self.block.step(first + k if k else first) for k in range(4)]
            self.block.fetch(places[-1 if self.block.reverse else 0], 4)
            w.assign(self.state, self.four_steps(w.copy(self.state), places))
        return done, self.found.anything()

    def four_steps(self, state: Value, places: list[Value]) -> Value:
        """Write four steps; return the state after them."""
        w, steps = self.w, self.steps
        assert steps.b is not None
        own = [steps.a.real(place) for place in places]
        b = [steps.b.real(place) for place in places]
        # What each step does to what the one before it gives; with the sum first, to its sum,
        # where the first coefficient is one.
        a = [own[3], *own[:3]] if steps.sum_first else own
        early = a[1] if steps.sum_first else a[1] * a[0], w.fma(a[1], b[0], b[1])
        late = a[3] * a[2], w.fma(a[3], b[2], b[3])
        all_four = late[0] * early[0], w.fma(late[0], early[1], late[1])
        first = state + b[0] if steps.sum_first else w.fma(a[0], state, b[0])
        second = w.fma(early[0], state, early[1])
        last = w.fma(all_four[0], state, all_four[1])
        after = last
        if steps.sum_first:
            factor, term = (own[3] * number for number in all_four)
            after = w.fma(factor, state, term)
        values = [first, second, w.fma(a[2], second, b[2]), last]
        lowest = places[-1 if self.block.reverse else 0]
        self.found.coefficients(steps.a.real(lowest, 4))
        together = self.v.by_step(lambda step: values[step])
        self.found.values(together)
        steps.h.store(lowest, together)
        return after
