r"""Eight steps of a first-order affine recurrence in vector registers.

With four lanes and ``(a, b)`` for a step, a scan by doubling (P. Kogge and H. Stone, "A parallel
algorithm for the efficient solution of a general class of recurrence equations", 1973) composes
each lane with the one before, then with the two before:

    b ← a · shift(b, k) + b,    a ← a · shift(a, k),    k = 1, 2

after which lane `i` takes the state before the four steps to the state after step `i`. Two such
vectors are composed by their last lanes, so that only one multiplication and one addition of
eight steps wait for the state before them. LLVM has vectors of any length on every machine and
maps them to the registers that there are.
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

    def __init__(self, context: Any, builder: Any, dtype: Any) -> None:
        self.context, self.builder, self.dtype = context, builder, dtype
        self.scalar = context.get_data_type(dtype)
        self.vector = ir.VectorType(self.scalar, LANES)
        self.zeros = ir.Constant(self.vector, [0.0] * LANES)
        self.ones = ir.Constant(self.vector, [1.0] * LANES)

    def pointer(self, array_type: Any, array: Any, offset: Any) -> Any:
        data = self.context.make_array(array_type)(self.context, self.builder, array).data
        return self.builder.bitcast(self.builder.gep(data, [offset]), self.vector.as_pointer())

    def load(self, array_type: Any, array: Any, offset: Any) -> Any:
        value = self.builder.load(self.pointer(array_type, array, offset))
        value.align = self.dtype.bitwidth // 8
        return value

    def store(self, value: Any, array_type: Any, array: Any, offset: Any) -> None:
        stored = self.builder.store(value, self.pointer(array_type, array, offset))
        stored.align = self.dtype.bitwidth // 8

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """Return ``a * b + c``."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)

    def shifted(self, value: Any, by: int, fill: Any) -> Any:
        """Return the lanes moved up, those that enter taken from `fill`."""
        places = [lane - by if lane >= by else LANES + lane for lane in range(LANES)]
        mask = ir.Constant(ir.VectorType(_INDEX, LANES), places)
        return self.builder.shuffle_vector(value, fill, mask)

    def splat(self, value: Any) -> Any:
        one = self.builder.insert_element(self.zeros, value, ir.Constant(_INDEX, 0))
        mask = ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES)
        return self.builder.shuffle_vector(one, self.zeros, mask)

    def last(self, value: Any) -> Any:
        return self.builder.extract_element(value, ir.Constant(_INDEX, LANES - 1))

    def scan(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Return the compositions of the first lanes up to each."""
        by = 1
        while by < LANES:
            b = self.fused(a, self.shifted(b, by, self.zeros), b)
            a = self.builder.fmul(a, self.shifted(a, by, self.ones))
            by *= 2
        return a, b


def _codegen(fixed: bool) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, state, out, offset, place = arguments
        a_type, b_type, dtype, out_type = signature.args[:4]
        vectors = _Vectors(context, builder, dtype)
        halves = []
        for half in range(2):
            start = builder.add(offset, ir.Constant(offset.type, half * LANES))
            own_a = vectors.splat(a) if fixed else vectors.load(a_type, a, start)
            halves.append(vectors.scan(own_a, vectors.load(b_type, b, start)))
        (a1, b1), (a2, b2) = halves
        a1_last, b1_last = vectors.last(a1), vectors.last(b1)
        a2_last, b2_last = vectors.last(a2), vectors.last(b2)
        middle = vectors.fused(a1_last, state, b1_last)
        after_a = builder.fmul(a2_last, a1_last)
        after = vectors.fused(after_a, state, vectors.fused(a2_last, b1_last, b2_last))
        next_place = builder.add(place, ir.Constant(place.type, LANES))
        vectors.store(vectors.fused(a1, vectors.splat(state), b1), out_type, out, place)
        vectors.store(vectors.fused(a2, vectors.splat(middle), b2), out_type, out, next_place)
        return after

    return codegen


@intrinsic
def eight_steps(typingctx: Any, a: Any, b: Any, state: Any, out: Any, offset: Any, place: Any):
    """Write ``out[place + i] = a[offset + i] * h + b[offset + i]`` for 8 steps; return the last."""
    dtype = b.dtype
    signature = dtype(a, b, dtype, out, types.intp, types.intp)
    return signature, _codegen(fixed=False)


@intrinsic
def eight_steps_fixed(
    typingctx: Any, a: Any, b: Any, state: Any, out: Any, offset: Any, place: Any
):
    """The same with one coefficient for all steps."""
    dtype = b.dtype
    signature = dtype(dtype, b, dtype, out, types.intp, types.intp)
    return signature, _codegen(fixed=True)
