r"""Eight or sixteen steps of a first-order affine recurrence in vector registers.

With four lanes and ``(a, b)`` for a step, a scan by doubling (P. Kogge and H. Stone, "A parallel
algorithm for the efficient solution of a general class of recurrence equations", 1973) composes
each lane with the one before, then with the two before:

    b ← a · shift(b, k) + b,    a ← a · shift(a, k),    k = 1, 2

after which lane `i` takes the state before the four steps to the state after step `i`. Two such
vectors are composed by their last lanes, so that only one multiplication and one addition of
eight steps wait for the state before them. LLVM has vectors of any length on every machine and
maps them to the registers that there are.

With one coefficient for all steps, the state between vectors is kept in double precision: single
precision is rounded in sums of four terms only, which leaves a fraction of the error of rounding
at every step, and powers that are rounded would change the coefficient.

Registers of 512 bits hold sixteen numbers in single precision: two groups of eight steps, composed
at once, each within its half. Lanes that have no earlier one to be composed with keep their values
by a mask, which costs nothing there; shifting zeros in takes several times as long as rotating.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 4
STEPS = 2 * LANES
_INDEX = ir.IntType(32)
_FUSED = ("contract",)


class _Vectors:
    """Instructions on vectors of one dtype."""

    def __init__(
        self,
        context: Any,
        builder: Any,
        dtype: Any,
        reverse: bool,
        state_type: Any,
        lanes: int = LANES,
    ) -> None:
        self.context, self.builder, self.dtype = context, builder, dtype
        self.reverse, self.state_type = reverse, state_type
        self.lanes = lanes
        is_real = isinstance(dtype, types.Float)
        self.scalar = context.get_data_type(dtype)
        self.vector = ir.VectorType(self.scalar, lanes)
        self.zeros = ir.Constant(self.vector, [0.0 if is_real else 0] * lanes)
        self.ones = ir.Constant(self.vector, [1.0 if is_real else 1] * lanes)

    def pointer(self, array_type: Any, array: Any, offset: Any) -> Any:
        data = self.context.make_array(array_type)(self.context, self.builder, array).data
        return self.builder.bitcast(self.builder.gep(data, [offset]), self.vector.as_pointer())

    def load(self, array_type: Any, array: Any, offset: Any) -> Any:
        value = self.builder.load(self.pointer(array_type, array, offset))
        value.align = self.context.get_abi_sizeof(self.scalar)
        return value

    def store(self, value: Any, array_type: Any, array: Any, offset: Any) -> None:
        stored = self.builder.store(value, self.pointer(array_type, array, offset))
        stored.align = self.context.get_abi_sizeof(self.scalar)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """Return ``a * b + c``."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)

    def shifted(self, value: Any, by: int, fill: Any) -> Any:
        """Return the lanes moved to later steps, those that enter taken from `fill`."""
        places = [lane - by if lane >= by else LANES + lane for lane in range(LANES)]
        if self.reverse:
            places = [lane + by if lane + by < LANES else LANES + lane for lane in range(LANES)]
        mask = ir.Constant(ir.VectorType(_INDEX, LANES), places)
        return self.builder.shuffle_vector(value, fill, mask)

    def earlier(self, value: Any, by: int) -> Any:
        """Return, in each lane, the one `by` steps before it, or itself where there is none."""
        back = by if self.reverse else -by
        places = [i + back if 0 <= i + back < self.lanes else i for i in range(self.lanes)]
        mask = ir.Constant(ir.VectorType(_INDEX, self.lanes), places)
        return self.builder.shuffle_vector(value, value, mask)

    def splat(self, value: Any) -> Any:
        one = self.builder.insert_element(self.zeros, value, ir.Constant(_INDEX, 0))
        mask = ir.Constant(ir.VectorType(_INDEX, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, self.zeros, mask)

    def last(self, value: Any) -> Any:
        lane = 0 if self.reverse else LANES - 1
        return self.builder.extract_element(value, ir.Constant(_INDEX, lane))

    def wide_last(self, value: Any) -> Any:
        return self.widened(self.last(value))

    def widened(self, value: Any) -> Any:
        """Return a number in the precision of the state between vectors."""
        if self.dtype == self.state_type:
            return value
        return self.builder.fpext(value, ir.DoubleType())

    def narrowed(self, value: Any) -> Any:
        if self.dtype == self.state_type:
            return value
        return self.builder.fptrunc(value, self.scalar)

    def fourth_power(self, value: Any) -> Any:
        square = self.builder.fmul(value, value)
        return self.builder.fmul(square, square)

    def scan(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Return the compositions of the first lanes up to each."""
        by = 1
        while by < LANES:
            b = self.fused(a, self.shifted(b, by, self.zeros), b)
            a = self.builder.fmul(a, self.shifted(a, by, self.ones))
            by *= 2
        return a, b


class _Groups(_Vectors):
    """Groups of eight steps in one vector, one or two."""

    def choose(self, lanes: list[bool], value: Any, otherwise: Any) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(1), self.lanes), lanes)
        return self.builder.select(mask, value, otherwise)

    def rotated(self, value: Any, by: int) -> Any:
        """Return the lanes of each group moved to later steps, the last ones to its beginning."""
        turn = by if self.reverse else -by
        places = [i // STEPS * STEPS + (i + turn) % STEPS for i in range(self.lanes)]
        mask = ir.Constant(ir.VectorType(_INDEX, self.lanes), places)
        return self.builder.shuffle_vector(value, value, mask)

    def scan(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Return the compositions of the first lanes of each group up to each of its lanes."""
        by = 1
        while by < STEPS:
            first, end = (0, STEPS - by) if self.reverse else (by, STEPS)
            composed = [first <= i % STEPS < end for i in range(self.lanes)]
            b = self.choose(composed, self.fused(a, self.rotated(b, by), b), b)
            a = self.choose(composed, self.builder.fmul(a, self.rotated(a, by)), a)
            by *= 2
        return a, b

    def steps(self, signature: Any, arguments: Any) -> Any:
        """Write the steps of one vector; return the state after them."""
        a_array, b_array, state, out, offset, place = arguments
        a_type, b_type, _, out_type = signature.args[:4]
        a, b = self.load(a_type, a_array, offset), self.load(b_type, b_array, offset)
        a, b = self.scan(a, b)
        before = self.splat(state)
        groups = range(self.lanes // STEPS)
        for group in reversed(groups) if self.reverse else groups:
            own = [i // STEPS == group for i in range(self.lanes)]
            before = self.choose(own, self.splat(state), before)
            last = ir.Constant(_INDEX, group * STEPS + (0 if self.reverse else STEPS - 1))
            factor, constant = (self.builder.extract_element(v, last) for v in (a, b))
            state = self.fused(factor, state, constant)
        self.store(self.fused(a, before, b), out_type, out, place)
        return state


class _Scalars:
    """Four steps composed without vectors: for float64 cheaper than the shuffles they need."""

    def __init__(self, context: Any, builder: Any, signature: Any, reverse: bool) -> None:
        self.context, self.builder, self.signature = context, builder, signature
        self.reverse = reverse

    def pointer(self, which: int, array: Any, offset: Any, step: int) -> Any:
        array_type = self.signature.args[which]
        data = self.context.make_array(array_type)(self.context, self.builder, array).data
        distance = ir.Constant(offset.type, STEPS - 1 - step if self.reverse else step)
        return self.builder.gep(data, [self.builder.add(offset, distance)])

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)

    def four_steps(self, arguments: Any, first: int) -> Any:
        """Write the steps from `first` on; return the state after them."""
        a_array, b_array, state, out, offset, place = arguments
        a, b = (
            [self.builder.load(self.pointer(k, array, offset, first + u)) for u in range(4)]
            for k, array in ((0, a_array), (1, b_array))
        )
        early = self.builder.fmul(a[1], a[0]), self.fused(a[1], b[0], b[1])
        late = self.builder.fmul(a[3], a[2]), self.fused(a[3], b[2], b[3])
        all_four = self.builder.fmul(late[0], early[0]), self.fused(late[0], early[1], late[1])
        second = self.fused(early[0], state, early[1])
        last = self.fused(all_four[0], state, all_four[1])
        values = [self.fused(a[0], state, b[0]), second, self.fused(a[2], second, b[2]), last]
        for u, value in enumerate(values):
            self.builder.store(value, self.pointer(3, out, place, first + u))
        return last


def _codegen(fixed: bool, reverse: bool) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, state, out, offset, place = arguments
        if signature.args[1].dtype == types.float64 and not fixed:
            scalars = _Scalars(context, builder, signature, reverse)
            middle = scalars.four_steps(arguments, 0)
            return scalars.four_steps([a, b, middle, out, offset, place], 4)
        a_type, b_type, state_type, out_type = signature.args[:4]
        dtype = b_type.dtype
        vectors = _Vectors(context, builder, dtype, reverse, state_type)
        halves, places = [], []
        for half in (1, 0) if reverse else (0, 1):
            distance = ir.Constant(offset.type, half * LANES)
            start = builder.add(offset, distance)
            own_a = vectors.splat(a) if fixed else vectors.load(a_type, a, start)
            halves.append(vectors.scan(own_a, vectors.load(b_type, b, start)))
            places.append(builder.add(place, distance))
        (a1, b1), (a2, b2) = halves
        a1_last, b1_last = vectors.wide_last(a1), vectors.wide_last(b1)
        a2_last, b2_last = vectors.wide_last(a2), vectors.wide_last(b2)
        if fixed and dtype != types.float64:
            # The powers of a coefficient, each rounded, would change it for all steps.
            a1_last = a2_last = vectors.fourth_power(vectors.widened(a))
        middle = vectors.fused(a1_last, state, b1_last)
        after_a = builder.fmul(a2_last, a1_last)
        after = vectors.fused(after_a, state, vectors.fused(a2_last, b1_last, b2_last))
        for (own_a, own_b), before, target in zip(halves, (state, middle), places, strict=True):
            values = vectors.fused(own_a, vectors.splat(vectors.narrowed(before)), own_b)
            vectors.store(values, out_type, out, target)
        return after

    return codegen


def _has_wide_registers(context: Any) -> bool:
    """Whether code is compiled for a processor with vector registers of 512 bits."""
    _, _, features = context.codegen().magic_tuple()
    return "+avx512f" in features.split(",")


def _sixteen_codegen(reverse: bool) -> Any:
    eight = _codegen(False, reverse)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, state, out, offset, place = arguments
        dtype = signature.args[1].dtype
        wide = _has_wide_registers(context)
        if wide and dtype == types.float32:
            groups = _Groups(context, builder, dtype, reverse, dtype, lanes=2 * STEPS)
            return groups.steps(signature, arguments)
        # The first lane is taken out of a register at no cost, the last one with two instructions.
        in_lanes = wide and reverse and dtype == types.float64
        for first in (STEPS, 0) if reverse else (0, STEPS):
            distance = ir.Constant(offset.type, first)
            start, target = builder.add(offset, distance), builder.add(place, distance)
            those = [a, b, state, out, start, target]
            if in_lanes:
                group = _Groups(context, builder, dtype, reverse, dtype, lanes=STEPS)
                state = group.steps(signature, those)
            else:
                state = eight(context, builder, signature, those)
        return state

    return codegen


def _extreme_codegen(largest: bool, reverse: bool) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        b_array, state, out, offset, place = arguments
        dtype = signature.args[0].dtype
        scalar = context.get_data_type(dtype)
        size = context.get_abi_sizeof(scalar)
        lanes = min(2 * STEPS, (64 if _has_wide_registers(context) else 32) // size)
        vectors = _Vectors(context, builder, dtype, reverse, dtype, lanes)

        def pick(a: Any, b: Any) -> Any:
            sign = ">" if largest else "<"
            if isinstance(dtype, types.Float):
                is_first = builder.fcmp_ordered(sign, a, b)
            elif getattr(dtype, "signed", False):
                is_first = builder.icmp_signed(sign, a, b)
            else:
                is_first = builder.icmp_unsigned(sign, a, b)
            return builder.select(is_first, a, b)

        state = context.get_value_as_data(builder, dtype, state)
        last = ir.Constant(_INDEX, 0 if reverse else lanes - 1)
        starts = range(0, 2 * STEPS, lanes)
        for first in reversed(starts) if reverse else starts:
            distance = ir.Constant(offset.type, first)
            values = vectors.load(signature.args[0], b_array, builder.add(offset, distance))
            by = 1
            while by < lanes:  # lanes without an earlier one are compared with themselves
                values = pick(vectors.earlier(values, by), values)
                by *= 2
            results = pick(values, vectors.splat(state))
            vectors.store(results, signature.args[2], out, builder.add(place, distance))
            state = pick(builder.extract_element(values, last), state)
        return context.data_model_manager[dtype].from_data(builder, state)

    return codegen


def _make_extreme(largest: bool, reverse: bool) -> Any:
    @intrinsic
    def sixteen_extremes(
        typingctx: Any, b: Any, state: Any, out: Any, offset: Any, place: Any
    ) -> Any:
        signature = b.dtype(b, b.dtype, out, types.intp, types.intp)
        return signature, _extreme_codegen(largest, reverse)

    return sixteen_extremes


def _make(codegen: Any, fixed: bool = False) -> Any:
    @intrinsic
    def several_steps(
        typingctx: Any, a: Any, b: Any, state: Any, out: Any, offset: Any, place: Any
    ) -> Any:
        first = b.dtype if fixed else a
        wide = types.float64 if fixed else b.dtype
        return wide(first, b, wide, out, types.intp, types.intp), codegen

    return several_steps


# Each takes `(a, b, state, out, offset, place)`, reads the elements at `offset` and after, writes
# the new states to `place` and after, and returns the latest. The backward ones start at the end.
eight_steps = _make(_codegen(fixed=False, reverse=False))
eight_steps_backward = _make(_codegen(fixed=False, reverse=True))
eight_steps_fixed = _make(_codegen(fixed=True, reverse=False), fixed=True)
eight_steps_fixed_backward = _make(_codegen(fixed=True, reverse=True), fixed=True)
sixteen_steps = _make(_sixteen_codegen(reverse=False))
sixteen_steps_backward = _make(_sixteen_codegen(reverse=True))
# The same without coefficients: each takes `(b, state, out, offset, place)`. By whether they look
# for the largest value, and whether they start at the end.
sixteen_extremes = {
    (largest, reverse): _make_extreme(largest, reverse)
    for largest in (True, False)
    for reverse in (False, True)
}
