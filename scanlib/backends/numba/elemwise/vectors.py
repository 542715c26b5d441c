"""Vector instructions for scans in registers: lanes that move to later steps, and groups of lanes.

LLVM has vectors of any length on every machine and maps them to the registers that there are. The
lanes of a vector are in the order of memory; `reverse` says that the last one is the first step.
Lanes may be taken in *groups*, each of which is composed for itself.

Lanes that are not composed with an earlier one keep their values by a mask, which costs nothing
where registers have 512 bits. LLVM must not know the masks: it makes shuffles of constant ones, of
which a scan has more than enough, and in shorter registers takes lanes that a constant mask hides
from the register of the state, so that shuffles wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

INDEX = ir.IntType(32)
DOUBLE = ir.DoubleType()
_BIT = ir.IntType(1)
_FUSED = ("contract",)
LINE = 64  # bytes that are fetched together


def has_wide_registers(context: Any) -> bool:
    """Whether code is compiled for a processor with vector registers of 512 bits."""
    _, _, features = context.codegen().magic_tuple()
    return "+avx512f" in features.split(",")


def lanes_of(context: Any, dtype: Any) -> int:
    """Return how many numbers of a dtype a register holds, or half of one that is too short."""
    size = context.get_abi_sizeof(context.get_data_type(dtype))
    return (64 if has_wide_registers(context) else 32) // size


def halves(lanes: int) -> list[int]:
    """Return how many lanes the first halves have in a scan by halves."""
    return [half for half in (1, 2, 4, 8) if half < lanes]


def fetch(builder: Any, addresses: list[Any], place: Any, items: int, size: int) -> None:
    """Ask for `items` of `size` bytes from a place on, in the first-level cache.

    `addresses` are those of the arrays, which need not exist.
    """
    pointer, word = ir.IntType(8).as_pointer(), place.type
    for address in addresses:
        start = builder.add(address, builder.mul(place, ir.Constant(word, size)))
        for line in range(0, items * size, LINE):
            where = builder.inttoptr(builder.add(start, ir.Constant(word, line)), pointer)
            fetch_line(builder, where)


def fetch_line(builder: Any, pointer: Any) -> None:
    """Ask for the `LINE` bytes that an address is one of, which need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, INDEX, INDEX, INDEX])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    options = [ir.Constant(INDEX, value) for value in (0, 3, 1)]  # to read, first level, data
    builder.call(function, [pointer, *options])


class Vectors:
    """Instructions on vectors of one dtype, with `group` lanes of `lanes` that belong together."""

    def __init__(
        self, context: Any, builder: Any, dtype: Any, reverse: bool, lanes: int, group: int
    ) -> None:
        self.context, self.builder, self.dtype = context, builder, dtype
        self.reverse, self.lanes, self.group = reverse, lanes, group
        self.scalar = context.get_data_type(dtype)
        self.size = context.get_abi_sizeof(self.scalar)
        self.vector = ir.VectorType(self.scalar, lanes)
        self.groups = list(range(lanes // group))
        if reverse:
            self.groups.reverse()
        self.masks: dict[int, Any] = {}

    # Memory

    def data(self, array_type: Any, array: Any) -> Any:
        return self.context.make_array(array_type)(self.context, self.builder, array).data

    def _at(self, data: Any, offset: Any) -> Any:
        pointer = self.builder.gep(data, [offset])
        return self.builder.bitcast(pointer, self.vector.as_pointer())

    def load(self, data: Any, offset: Any) -> Any:
        value = self.builder.load(self._at(data, offset))
        value.align = self.size
        return value

    def store(self, value: Any, data: Any, offset: Any) -> None:
        stored = self.builder.store(value, self._at(data, offset))
        stored.align = self.size

    # Lanes

    def _step(self, lane: int) -> int:
        """Return which step of its group a lane is."""
        place = lane % self.group
        return self.group - 1 - place if self.reverse else place

    def _shuffled(self, value: Any, places: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(INDEX, len(places)), places)
        return self.builder.shuffle_vector(value, value, mask)

    def _lane(self, group: int, step: int) -> int:
        place = self.group - 1 - step if self.reverse else step
        return group * self.group + place

    def constant(self, value: Any) -> Any:
        return ir.Constant(self.vector, [value] * self.lanes)

    def splat(self, value: Any) -> Any:
        """Return a number in all lanes."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.Constant(INDEX, 0))
        return self._shuffled(one, [0] * self.lanes)

    def splat_last(self, value: Any, group: int) -> Any:
        """Return the last step of a group in all lanes."""
        return self._shuffled(value, [self._lane(group, self.group - 1)] * self.lanes)

    def last(self, value: Any, group: int) -> Any:
        """Return the number of the last step of a group."""
        lane = ir.Constant(INDEX, self._lane(group, self.group - 1))
        return self.builder.extract_element(value, lane)

    def lasts(self, several: list[Any]) -> Any:
        """Return the last steps of the groups of two or four vectors, the earliest first."""
        lanes = [self._lane(group, self.group - 1) for group in self.groups]
        places = [*lanes, *(self.lanes + lane for lane in lanes)]
        parts = self._joined(several, places)
        while len(parts) > 1:
            parts = self._joined(parts, list(range(2 * parts[0].type.count)))
        return parts[0]

    def _joined(self, parts: list[Any], places: list[int]) -> list[Any]:
        """Return, for each pair of vectors, a vector of what they hold at some places."""
        mask = ir.Constant(ir.VectorType(INDEX, len(places)), places)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [self.builder.shuffle_vector(one, other, mask) for one, other in pairs]

    def spread(self, value: Any, count: int) -> list[Any]:
        """Return so many vectors, in the lanes of whose groups are the numbers of a short one."""
        order = [self.groups.index(lane // self.group) for lane in range(self.lanes)]
        several = len(self.groups)
        return [
            self._shuffled(value, [k * several + place for place in order]) for k in range(count)
        ]

    def shifted(self, value: Any, first: float) -> Any:
        """Return, in each lane, the one before it, and a number in the first."""
        places = [self.lanes, *range(self.lanes - 1)]
        mask = ir.Constant(ir.VectorType(INDEX, self.lanes), places)
        return self.builder.shuffle_vector(value, self.constant(first), mask)

    def by_step(self, number: Callable[[int], Any]) -> Any:
        """Return the vector whose lanes hold a number for their steps, None being zero."""
        result = self.constant(0.0)
        for lane in range(self.lanes):
            value = number(self._step(lane))
            if value is not None:
                result = self.builder.insert_element(result, value, ir.Constant(INDEX, lane))
        return result

    def weights(self, powers: list[Any], half: int) -> Any:
        """Return, for second halves, the power that the last step of the first counts with."""
        return self.by_step(lambda step: powers[step % half + 1] if step & half else None)

    def earlier(self, value: Any, by: int) -> Any:
        """Return, in each lane, the one `by` steps before it; the first ones get the last ones."""
        places = []
        for lane in range(self.lanes):
            step = (self._step(lane) - by) % self.group
            places.append(self._lane(lane // self.group, step))
        return self._shuffled(value, places)

    def half_before(self, value: Any, half: int) -> Any:
        """Return, in the second half of `2 * half` lanes, the last of the first; else the same."""
        places = []
        for lane in range(self.lanes):
            step = self._step(lane)
            earlier = step // half * half - 1 if step & half else step
            places.append(self._lane(lane // self.group, earlier))
        return self._shuffled(value, places)

    def earlier_or_same(self, value: Any, by: int) -> Any:
        """Return, in each lane, the one `by` steps before it, or itself where there is none."""
        places = []
        for lane in range(self.lanes):
            step = self._step(lane) - by
            places.append(lane if step < 0 else self._lane(lane // self.group, step))
        return self._shuffled(value, places)

    # Masks

    def prepare_masks(self) -> None:
        """Make the masks of some lanes, before the loop that uses them."""
        steps = [self._step(lane) for lane in range(self.lanes)]
        for half in halves(self.group):
            self.masks[half] = self._hidden([bool(step & half) for step in steps])
        self.behind = self._hidden([step > 0 for step in steps])

    def _known(self, lanes: list[bool]) -> Any:
        return ir.Constant(ir.VectorType(_BIT, self.lanes), lanes)

    def _hidden(self, lanes: list[bool]) -> Any:
        """Return a mask of which LLVM knows nothing: an empty instruction may have changed it."""
        bits = ir.Constant(INDEX, sum(1 << lane for lane, chosen in enumerate(lanes) if chosen))
        same = ir.FunctionType(INDEX, [INDEX])
        bits = self.builder.asm(same, "", "=r,0", [bits], side_effect=False)
        bits = self.builder.trunc(bits, ir.IntType(self.lanes))
        return self.builder.bitcast(bits, ir.VectorType(_BIT, self.lanes))

    def in_second_half(self, half: int, value: Any, otherwise: Any) -> Any:
        """Return `value` in the second half of `2 * half` lanes."""
        return self.builder.select(self.masks[half], value, otherwise)

    def after_first(self, value: Any, otherwise: Any) -> Any:
        """Return `value` in all lanes but those of first steps."""
        return self.builder.select(self.behind, value, otherwise)

    def in_group(self, group: int, value: Any, otherwise: Any) -> Any:
        """Return `value` in the lanes of a group."""
        own = self._known([lane // self.group == group for lane in range(self.lanes)])
        return self.builder.select(own, value, otherwise)

    # Arithmetic

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """Return ``a * b + c``."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)

    def widened(self, value: Any) -> Any:
        """Return a number in double precision."""
        return value if self.dtype == types.float64 else self.builder.fpext(value, DOUBLE)

    def narrowed(self, value: Any) -> Any:
        """Return a number of double precision in that of the vectors."""
        return value if self.dtype == types.float64 else self.builder.fptrunc(value, self.scalar)
