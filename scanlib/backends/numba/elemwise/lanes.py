r"""Scans of one block of steps in vector registers.

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
(`ahead`): a million steps of a gradient take half the time then, and short loops no longer.

Where the sum comes first (see `scanlib.ops.sums_first`), lane `i` is to hold the sum before its own
coefficient acts, so it is composed with the coefficient of the lane before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scanlib.backends.numba.elemwise.bounds import Found
from scanlib.backends.numba.elemwise.vectors import (
    INDEX,
    Vectors,
    fetch,
    halves,
    has_wide_registers,
    lanes_of,
)

GROUP = 8  # how many steps are composed at most
_SIDE_BY_SIDE = 2  # vectors
_WITH_DOUBLES = 4  # vectors, where the state between them is in double precision


@dataclass
class _Kind:
    """What is scanned: `fixed` has one coefficient for all steps, a `product` has no terms."""

    reverse: bool
    fixed: bool = False
    product: bool = False
    sum_first: bool = False


class _Scan:
    """Writes the loop over the vectors of a block."""

    def __init__(self, kind: _Kind, context: Any, builder: Any, signature: Any, arguments: Any):
        self.kind, self.builder = kind, builder
        a, b, h, self.start, self.n, self.state, ahead = arguments
        self.ahead = cgutils.unpack_tuple(builder, ahead)
        a_type, b_type, h_type = signature.args[:3]
        lanes = lanes_of(context, h_type.dtype)
        group = min(lanes, GROUP)
        self.v = v = Vectors(context, builder, h_type.dtype, kind.reverse, lanes, group)
        self.a = a if kind.fixed else v.data(a_type, a)
        self.b, self.h = v.data(b_type, b), v.data(h_type, h)
        self.in_lanes = not kind.fixed or h_type.dtype == types.float64  # where the state is
        self.side_by_side = _SIDE_BY_SIDE if self.in_lanes else _WITH_DOUBLES
        v.prepare_masks()
        self.found = Found(builder, lanes, h_type.dtype.bitwidth)
        if kind.fixed:
            self.prepare_powers()
        if not self.in_lanes:
            self.prepare_groups(context)

    def prepare_powers(self) -> None:
        v, late = self.v, int(self.kind.sum_first)
        self.powers = [ir.Constant(ir.DoubleType(), 1.0)]
        for _ in range(v.group):
            self.powers.append(self.builder.fmul(self.powers[-1], v.widened(self.a)))
        self.factors = v.by_step(lambda step: v.narrowed(self.powers[step + 1 - late]))
        powers = [v.narrowed(power) for power in self.powers]
        self.weights = {half: v.weights(powers, half) for half in v.masks}

    def prepare_groups(self, context: Any) -> None:
        """Make the powers that compose the groups of all vectors, in double precision."""
        groups = self.side_by_side * len(self.v.groups)
        self.doubles = d = Vectors(context, self.builder, types.float64, False, groups, groups)
        powers = [self.powers[0]]
        for _ in range(groups):
            powers.append(self.builder.fmul(powers[-1], self.powers[self.v.group]))
        self.group_weights = {half: d.weights(powers, half) for half in halves(groups)}
        self.group_powers = d.by_step(lambda k: powers[k])
        self.all_groups = d.splat(powers[groups])

    def write(self) -> tuple[Any, Any, Any]:
        """Write the loop; return the state after it, its steps, and whether they are lost."""
        builder, v, word = self.builder, self.v, self.n.type
        size = ir.Constant(word, self.side_by_side * v.lanes)
        count = builder.sdiv(self.n, size)
        own = v if self.in_lanes else self.doubles
        state = cgutils.alloca_once_value(builder, own.splat(self.state))
        with cgutils.for_range(builder, count, intp=word) as loop:
            done = builder.mul(loop.index, size)
            places = []
            for k in range(self.side_by_side):
                place = builder.add(done, ir.Constant(word, k * v.lanes))
                if self.kind.reverse:
                    last = builder.sub(self.n, ir.Constant(word, v.lanes))
                    place = builder.sub(last, place)
                places.append(place)
            lowest = places[-1 if self.kind.reverse else 0]
            fetch(builder, self.ahead, lowest, len(places) * v.lanes, v.size)
            builder.store(self.write_vectors(builder.load(state), places), state)
        after = builder.extract_element(builder.load(state), ir.Constant(INDEX, 0))
        return after, builder.mul(count, size), self.found.anything()

    def write_vectors(self, state: Any, places: list[Any]) -> Any:
        """Write some vectors of steps; return the state after them."""
        v, builder = self.v, self.builder
        if self.kind.fixed:
            own, maps = [v.splat(self.a)] * len(places), self.fixed_maps(places)
        else:
            own = [v.load(self.a, place) for place in places]
            for coefficients in own:
                self.found.coefficients(coefficients)
            maps = self.maps(own, places)
        if self.in_lanes:
            befores = []
            for (a, b), coefficient in zip(maps, own, strict=True):
                before, state = self.states(state, a, b, coefficient)
                befores.append(before)
        else:
            befores, state = self.double_states(state, [b for _, b in maps])
        results = []
        for (a, b), before in zip(maps, befores, strict=True):
            results.append(builder.fmul(a, before) if b is None else v.fused(a, before, b))
        for value, place in zip(results, places, strict=True):
            v.store(value, self.h, builder.add(self.start, place))
            self.found.values(value)
        return state

    def fixed_maps(self, places: list[Any]) -> list[tuple[Any, Any]]:
        """Return the compositions of the first steps of each group up to each, of each vector."""
        v = self.v
        vectors = [v.load(self.b, place) for place in places]
        for half, weight in self.weights.items():
            # Lanes of first halves have the weight zero. What is not finite spreads among lanes,
            # but never gets lost.
            vectors = [v.fused(weight, v.half_before(b, half), b) for b in vectors]
        return [(self.factors, b) for b in vectors]

    def maps(self, own: list[Any], places: list[Any]) -> list[tuple[Any, Any]]:
        """Return the same for coefficients that differ from step to step."""
        v, factors = self.v, own
        if self.kind.sum_first:
            factors = [v.after_first(v.earlier(a, 1), v.constant(1.0)) for a in own]
        terms: list[Any] = [None] * len(places)
        if not self.kind.product:
            terms = [v.load(self.b, place) for place in places]
        for half in v.masks:
            if not self.kind.product:
                sums = [
                    v.fused(a, v.half_before(b, half), b)
                    for a, b in zip(factors, terms, strict=True)
                ]
                terms = self.second_halves(half, sums, terms)
            products = [self.builder.fmul(a, v.half_before(a, half)) for a in factors]
            factors = self.second_halves(half, products, factors)
        return list(zip(factors, terms, strict=True))

    def second_halves(self, half: int, values: list[Any], others: list[Any]) -> list[Any]:
        """Return values in second halves, others in first ones."""
        pairs = zip(values, others, strict=True)
        return [self.v.in_second_half(half, value, other) for value, other in pairs]

    def states(self, state: Any, a: Any, b: Any, coefficient: Any) -> tuple[Any, Any]:
        """Return the states before each group, and after the vector, in all lanes."""
        v, before = self.v, state
        if self.kind.sum_first:
            a, b = self.builder.fmul(coefficient, a), self.builder.fmul(coefficient, b)
        for group in v.groups:
            if group != v.groups[0]:
                before = v.in_group(group, state, before)
            factor = v.splat_last(a, group)
            if b is None:
                state = self.builder.fmul(factor, state)
            else:
                state = v.fused(factor, state, v.splat_last(b, group))
        return before, state

    def double_states(self, state: Any, terms: list[Any]) -> tuple[list[Any], Any]:
        """Return the states before the groups of each vector, and after all, in double precision.

        The terms of all groups come into one vector, are widened, and are composed there.
        """
        v, d, builder = self.v, self.doubles, self.builder
        ends = builder.fpext(v.lasts(terms), d.vector)
        if self.kind.sum_first:
            ends = builder.fmul(d.splat(self.powers[1]), ends)
        for half, weight in self.group_weights.items():
            ends = d.fused(weight, d.half_before(ends, half), ends)
        # Minus zero, so that a sum with it is what is added to it.
        before = d.fused(self.group_powers, state, d.shifted(ends, -0.0))
        after = d.fused(self.all_groups, state, d.splat_last(ends, 0))
        narrow = ir.VectorType(v.scalar, d.lanes)
        return v.spread(builder.fptrunc(before, narrow), len(terms)), after


class _Scalars:
    """Four steps composed without vectors: in float64, for short registers, cheaper than the
    shuffles that these need."""

    def __init__(self, kind: _Kind, context: Any, builder: Any, signature: Any, arguments: Any):
        self.kind, self.context, self.builder = kind, context, builder
        self.arrays = list(zip(signature.args[:3], arguments[:3], strict=True))
        self.start, self.n, self.state, ahead = arguments[3:]
        self.ahead = cgutils.unpack_tuple(builder, ahead)
        self.v = Vectors(context, builder, types.float64, kind.reverse, 4, 4)
        self.found = Found(builder, 4, 64)

    def data(self, which: int) -> Any:
        return self.v.data(*self.arrays[which])

    def load(self, which: int, place: Any) -> Any:
        return self.builder.load(self.builder.gep(self.data(which), [place]))

    def product(self, a: Any, b: Any) -> Any:
        """Write a product; None is one."""
        return a if b is None else self.builder.fmul(a, b)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

    def write(self) -> tuple[Any, Any, Any]:
        builder, word = self.builder, self.n.type
        size = ir.Constant(word, 4)
        count = builder.sdiv(self.n, size)
        state = cgutils.alloca_once_value(builder, self.state)
        with cgutils.for_range(builder, count, intp=word) as loop:
            places = []
            for step in range(4):
                place = builder.add(builder.mul(loop.index, size), ir.Constant(word, step))
                if self.kind.reverse:
                    place = builder.sub(builder.sub(self.n, ir.Constant(word, 1)), place)
                places.append(place)
            fetch(builder, self.ahead, places[-1 if self.kind.reverse else 0], 4, 8)
            builder.store(self.four_steps(builder.load(state), places), state)
        return builder.load(state), builder.mul(count, size), self.found.anything()

    def four_steps(self, state: Any, places: list[Any]) -> Any:
        """Write four steps; return the state after them."""
        builder = self.builder
        own, b = ([self.load(k, place) for place in places] for k in (0, 1))
        # What each step does to what the one before it gives; with the sum first, to its sum.
        a = [None, *own[:3]] if self.kind.sum_first else own
        early = self.product(a[1], a[0]), self.fused(a[1], b[0], b[1])
        late = builder.fmul(a[3], a[2]), self.fused(a[3], b[2], b[3])
        all_four = builder.fmul(late[0], early[0]), self.fused(late[0], early[1], late[1])
        first = builder.fadd(state, b[0]) if a[0] is None else self.fused(a[0], state, b[0])
        second = self.fused(early[0], state, early[1])
        last = self.fused(all_four[0], state, all_four[1])
        after = last
        if self.kind.sum_first:
            factor, term = (builder.fmul(own[3], number) for number in all_four)
            after = self.fused(factor, state, term)
        values = [first, second, self.fused(a[2], second, b[2]), last]
        lowest = places[-1 if self.kind.reverse else 0]
        self.found.coefficients(self.v.load(self.data(0), lowest))
        together = self.v.by_step(lambda step: values[step])
        self.found.values(together)
        self.v.store(together, self.data(2), builder.add(self.start, lowest))
        return after


def _codegen(kind: _Kind) -> Any:
    plain = not (kind.fixed or kind.product)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        short = signature.args[2].dtype == types.float64 and not has_wide_registers(context)
        writer = _Scalars if plain and short else _Scan
        results = writer(kind, context, builder, signature, arguments).write()
        return context.make_tuple(builder, signature.return_type, results)

    return codegen


def scan(reverse: bool, fixed: bool = False, product: bool = False, sum_first: bool = False) -> Any:
    """Return a function, for compiled code, that scans most of a block.

    It takes `(a, b, h, start, n, state, ahead)`, reads the elements of `n` steps, writes the new
    values to ``h[start]`` and after, and returns the state after the steps that it did (in double
    precision if the coefficient is `fixed`), how many these are (a few are left to the caller), and
    whether a coefficient or a value was out of bounds (a coefficient that is `fixed` the caller
    knows). `ahead` are addresses of what the next block reads and writes, see `place_ahead`.
    """
    codegen = _codegen(_Kind(reverse, fixed, product, sum_first))

    @intrinsic
    def several(
        typingctx: Any, a: Any, b: Any, h: Any, start: Any, n: Any, state: Any, ahead: Any
    ) -> Any:
        own = types.float64 if fixed else h.dtype
        results = types.Tuple((own, types.intp, types.boolean))
        first = h.dtype if fixed else a
        return results(first, b, h, types.intp, types.intp, own, ahead), codegen

    return several


def _place_ahead(reverse: bool) -> Any:
    @intrinsic
    def place_ahead(typingctx: Any, rows: Any, n: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            fields = context.make_array(rows)(context, builder, arguments[0])
            place = builder.ptrtoint(fields.data, arguments[1].type)
            move = builder.sub if reverse else builder.add
            return move(place, builder.mul(arguments[1], fields.itemsize))

        return types.intp(rows, types.intp), codegen

    return place_ahead


# Each takes the `n` rows of a block and returns the address of those of the next block, which need
# not be there. By whether the loop walks backwards.
place_ahead = {reverse: _place_ahead(reverse) for reverse in (False, True)}
