r"""Scans of the steps of a block: what composes them, for every class of one state.

A class gives two formulas on the numbers that select its functions: `compose`, the function that
does one and then another, and `apply`, what a function makes of a state. The function of a step is
in each lane of a vector register. A scan by halves (J. Sklansky, "Conditional-sum addition logic",
1960) composes the second lane of each pair with the first, then the second pair of each four with
the last lane of the first pair, and so on; after which lane `i` takes the state before the vector
to the state after step `i`, and only one `apply` of a vector waits for the state before it. Two
vectors are composed side by side: the instructions of one fill the waits of the other. No more than
eight steps are composed where products of their elements have to stay in range, so a vector of
sixteen numbers holds two groups.

A block is scanned while the memory waits: the elements before and the results after are computed
faster than they are read and written. So the scan asks for what the next block reads and writes
(`StepBlock.ahead`): a million steps of a gradient take half the time then, and short loops no
longer.

Every scan returns whether all its values can be trusted. They cannot where composing steps could
lose what one step after the other keeps, or keep what it loses: where an element or a value is out
of the bounds that the class gives, or the state before is NaN. The caller then takes the steps of
the block one after the other.

The lanes of a vector are in the order of memory; a loop that walks backwards takes the last one
first. Lanes that are not composed with an earlier one keep their values by a mask, which costs
nothing where registers have 512 bits. A compiler must not know the masks: it makes shuffles of
constant ones, of which a scan has more than enough, and in shorter registers takes lanes that a
constant mask hides from the register of the state, so that shuffles wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scanlib.kernels.lanes import vector_of
from scanlib.kernels.language import BOOL, INT64, Type, Value, Writer
from scanlib.kernels.processor import register_bytes, shuffled_bytes
from scanlib.kernels.scalars import times_plus
from scanlib.kernels.spans import LINE, Span, walk
from scanlib.recurrences.trust import Found, Test, is_moderate, is_nan

Function = tuple[Any, ...]  # the numbers that select a function of a class
GROUP = 8  # how many steps are composed at most: products of coefficients, sums of shifts
SIDE_BY_SIDE = 2  # vectors


class Arithmetic:
    """What formulas are written with, as statements of a kernel; for arrays, `jax.numpy` is."""

    def __init__(self, w: Writer) -> None:
        self.w = w

    def maximum(self, a: Value, b: Value) -> Value:
        """Return the larger number, the second one where neither is."""
        return self._choose(a, b, lambda a, b: a > b)

    def minimum(self, a: Value, b: Value) -> Value:
        return self._choose(a, b, lambda a, b: a < b)

    def _choose(self, a: Value, b: Value, test: Callable[[Value, Value], Value]) -> Value:
        wide = (a, b)
        if a.type.dtype == "bool":
            wide = (self.w.cast(a, "int8"), self.w.cast(b, "int8"))
        return self.w.select(test(*wide), a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return times_plus(self.w, a, b, c)


@dataclass(frozen=True)
class Formulas:
    """A class of functions of one state, closed under composition.

    `compose` makes of an arithmetic, a function and a later one the function that does both,
    `apply` of a function and a state the state after it; `identity` has the numbers of the function
    that changes nothing, for a dtype. `idempotent`: a function composed with itself is itself.
    """

    compose: Callable[[Any, Function, Function], Function]
    apply: Callable[[Any, Function, Any], Any]
    identity: Callable[[str], tuple[float, ...]]
    idempotent: bool = False


@dataclass(frozen=True)
class History:
    """The values of a part during a block, in the order of memory.

    Those before the block, as many as `depth`, are in front, or behind where the loop walks
    backwards.
    """

    values: Span
    depth: int
    reverse: bool

    def at(self, offset: int) -> Span:
        """Return the values `offset` steps after each step of the block."""
        return self.values.moved(-offset if self.reverse else self.depth + offset)


@dataclass(frozen=True)
class Steps:
    """The steps of one block: `elements` are the numbers that select a function at each step, None
    where a recurrence has none; new values go to `h`, `before` is the state before the block.

    `old` is where the value before each step is, in the order of memory; `buffer` returns memory
    for as many numbers as the block has steps.
    """

    elements: tuple[Any, ...]
    h: Span
    before: Value
    old: Span | None = None
    buffer: Callable[[], Span] | None = None


@dataclass(frozen=True)
class StepBlock:
    """The `size` steps that are scanned, in `reverse` from the last one in memory on. `ahead` is
    what the next block reads and writes, and need not exist: it is asked for on the way."""

    writer: Writer
    size: Value
    reverse: bool
    ahead: tuple[Span, ...] = ()

    def step(self, k: Value) -> Value:
        """Return where step `k` is in memory."""
        return self.size - 1 - k if self.reverse else k

    def for_all(self, lanes: int, write: Callable[[Value, int], None]) -> None:
        """Write what is done for all steps: for so many at once, then singly; `write` takes a place
        and how many steps there are."""
        several = [lanes] if lanes > 1 else []
        walk(self.writer, self.writer.constant(0, INT64), self.size, several, write)

    def fetch(self, place: Value, items: int) -> None:
        """Ask for what lies at some places of the next block."""
        for span in self.ahead:
            start = span.place(place)
            for line in range(0, items * span.itemsize, LINE):
                self.writer.prefetch(span.pointer, start + line if line else start)


def halves(lanes: int) -> list[int]:
    """Return how many lanes the first halves have in a scan by halves."""
    return [half for half in (1, 2, 4, 8) if half < lanes]


class Lanes:
    """Writes what moves numbers between steps; `group` of the `lanes` belong together."""

    def __init__(self, w: Writer, dtype: str, reverse: bool, lanes: int, group: int) -> None:
        self.w, self.dtype, self.reverse = w, dtype, reverse
        self.lanes, self.group = lanes, group
        self.type = Type(dtype, lanes)
        self.groups = list(range(lanes // group))
        if reverse:
            self.groups.reverse()
        self.masks: dict[int, Value] = {}

    def _step(self, lane: int) -> int:
        place = lane % self.group
        return self.group - 1 - place if self.reverse else place

    def _lane(self, group: int, step: int) -> int:
        place = self.group - 1 - step if self.reverse else step
        return group * self.group + place

    def _shuffled(self, value: Value, places: list[int]) -> Value:
        return self.w.shuffle(value, value, places)

    def splat_last(self, value: Value, group: int) -> Value:
        """Return the last step of a group in all lanes."""
        return self._shuffled(value, [self._lane(group, self.group - 1)] * self.lanes)

    def lasts(self, several: list[Value]) -> Value:
        """Return the last steps of the groups of two or four vectors, the earliest first."""
        lanes = [self._lane(group, self.group - 1) for group in self.groups]
        parts = self._joined(several, [*lanes, *(self.lanes + lane for lane in lanes)])
        while len(parts) > 1:
            parts = self._joined(parts, list(range(2 * parts[0].type.lanes)))
        return parts[0]

    def _joined(self, parts: list[Value], places: list[int]) -> list[Value]:
        """Return, for each pair of vectors, a vector of what they hold at some places."""
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [self.w.shuffle(one, other, places) for one, other in pairs]

    def spread(self, value: Value, count: int) -> list[Value]:
        """Return so many vectors, in the lanes of whose groups are the numbers of a short one."""
        order = [self.groups.index(lane // self.group) for lane in range(self.lanes)]
        several = len(self.groups)
        return [
            self._shuffled(value, [k * several + place for place in order]) for k in range(count)
        ]

    def shifted(self, value: Value, first: float) -> Value:
        """Return, in each lane, what the step before it has, and a number in first steps."""
        places = []
        for lane in range(self.lanes):
            step = self._step(lane)
            places.append(self._lane(lane // self.group, step - 1) if step else self.lanes)
        return self.w.shuffle(value, self.w.constant(first, self.type), places)

    def by_step(self, number: Callable[[int], Value | None]) -> Value:
        """Return the vector whose lanes hold a number for their steps, None being zero."""
        zero = self.w.constant(0.0, Type(self.dtype))
        found = (number(self._step(lane)) for lane in range(self.lanes))
        return vector_of(self.w, [zero if value is None else value for value in found])

    def weights(self, powers: list[Value], half: int) -> Value:
        """Return, for second halves, the power that the last step of the first counts with."""
        return self.by_step(lambda step: powers[step % half + 1] if step & half else None)

    def half_before(self, value: Value, half: int) -> Value:
        """Return, in the second half of `2 * half` lanes, the last of the first; else the same."""
        places = []
        for lane in range(self.lanes):
            step = self._step(lane)
            earlier = step // half * half - 1 if step & half else step
            places.append(self._lane(lane // self.group, earlier))
        return self._shuffled(value, places)

    # Masks

    def prepare_masks(self) -> None:
        """Make the masks of second halves, before the loop that uses them: compilers know nothing
        of them."""
        w, word = self.w, self.type.of(f"int{8 * self.type.itemsize}")
        # The bit of its step becomes the sign of a lane: a test that is compiled as it is.
        highest = 8 * word.itemsize - 1
        own = [highest - self._step(lane) for lane in range(self.lanes)]
        for half in halves(self.group):
            bits = sum(1 << step for step in range(self.group) if step & half)
            given = w.cast(w.apply("opaque", w.constant(bits, INT64)), word.dtype)
            self.masks[half] = (w.splat(given, self.lanes) << w.constant(own, word)) < 0

    def in_group(self, group: int, value: Value, otherwise: Value) -> Value:
        """Return `value` in the lanes of a group."""
        own = [lane // self.group == group for lane in range(self.lanes)]
        return self.w.select(self.w.constant(own, self.type.of("bool")), value, otherwise)


class LaneScan:
    """Writes the scan of a block in vectors. What can be trusted is no number for which a test of
    its element holds, no value above `most`."""

    side_by_side = SIDE_BY_SIDE

    def __init__(
        self,
        block: StepBlock,
        formulas: Formulas,
        steps: Steps,
        tests: Sequence[Test | None],
        most: float | None = None,
    ) -> None:
        self.block, self.formulas, self.steps = block, formulas, steps
        self.tests, self.most = tests, most
        self.w, self.dtype = block.writer, steps.h.dtype
        self.arithmetic = Arithmetic(self.w)
        size = register_bytes() if formulas.idempotent else shuffled_bytes()
        lanes = min(16, size // steps.h.itemsize)
        group = lanes if formulas.idempotent else min(lanes, GROUP)
        self.v = Lanes(self.w, self.dtype, block.reverse, lanes, group)

    # The block

    def write(self) -> tuple[Value, Value]:
        """Write the scan; return the state after the block, and whether values can be trusted."""
        w, n, steps = self.w, self.block.size, self.steps
        trusted = w.local(False, BOOL)
        self.state = w.local(self.first_state())
        with w.when(self.is_fine()):
            self.found = Found(w, self.v.type, self.most)
            rest = Found(w, Type(self.dtype), self.most)
            done = self.write_vectors()
            lost = self.found.anything()
            with w.loop(done, n) as k:
                j = self.block.step(k)
                function = tuple(items.real(j) for items in steps.elements)
                for number, test in zip(function, self.tests, strict=True):
                    rest.look(number, test)
                state, stored = self.one_step(function, w.copy(self.state))
                w.assign(self.state, state)
                steps.h.store(j, stored)
                rest.values(stored)
            w.assign(trusted, ~(lost | rest.anything()))
        return w.cast(w.copy(self.state), self.dtype), w.copy(trusted)

    def first_state(self) -> Value:
        return self.steps.before

    def is_fine(self) -> Value:
        """Return whether the block can be scanned at all."""
        before = self.steps.before
        if self.most is None:
            return ~is_nan(self.w, before)
        return is_moderate(self.w, before)

    def one_step(self, function: Function, state: Value) -> tuple[Value, Value]:
        """Write one step: return the next state, and what is stored."""
        value = self.formulas.apply(self.arithmetic, function, state)
        return value, value

    # Vectors

    def write_vectors(self) -> Value:
        """Write the loop over vectors; return how many steps it takes."""
        w, v, n = self.w, self.v, self.block.size
        if not self.formulas.idempotent:
            v.prepare_masks()
        self.prepare()
        size = self.side_by_side * v.lanes
        done = n & -size
        state = w.local(self.spread(w.copy(self.state)))
        with w.loop(0, done, size) as first:
            places = []
            for k in range(self.side_by_side):
                place = first + k * v.lanes if k else first
                places.append(n - v.lanes - place if self.block.reverse else place)
            self.block.fetch(places[-1 if self.block.reverse else 0], size)
            w.assign(state, self.write_several(w.copy(state), places))
        w.assign(self.state, w.lane(w.copy(state), 0))
        return done

    def prepare(self) -> None:
        """Write what is computed once."""

    def spread(self, state: Value) -> Value:
        """Return the state between vectors in lanes."""
        return self.w.splat(state, self.v.lanes)

    def write_several(self, state: Value, places: list[Value]) -> Value:
        """Write some vectors of steps; return the state after them."""
        own = [self.functions_at(place) for place in places]
        maps = self.composed(own)
        befores, state = self.states(state, self.onward(maps, own))
        for function, before, place in zip(maps, befores, places, strict=True):
            value = self.formulas.apply(self.arithmetic, function, before)
            self.steps.h.store(place, value)
            self.found.values(value)
        return state

    def functions_at(self, place: Value) -> Function:
        function = tuple(items.real(place, self.v.lanes) for items in self.steps.elements)
        for numbers, test in zip(function, self.tests, strict=True):
            self.found.look(numbers, test)
        return function

    def composed(self, several: list[Function]) -> list[Function]:
        """Return the compositions of the first steps of each group up to each, of each vector."""
        return [self.scanned(function) for function in several]

    def scanned(self, function: Function) -> Function:
        v = self.v
        for half in halves(v.group):
            first = tuple(v.half_before(numbers, half) for numbers in function)
            both = self.formulas.compose(self.arithmetic, first, function)
            if not self.formulas.idempotent:
                pairs = zip(both, function, strict=True)
                both = tuple(self.w.select(v.masks[half], new, old) for new, old in pairs)
            function = both
        return function

    def onward(self, maps: list[Function], own: list[Function]) -> list[Function]:
        """Return the functions in whose last lanes is what leads to the states after groups."""
        return maps

    def states(self, state: Value, functions: list[Function]) -> tuple[list[Value], Value]:
        """Return the states before the groups of each vector, and after all, in all lanes."""
        v, befores = self.v, []
        for function in functions:
            before = state
            for group in v.groups:
                if group != v.groups[0]:
                    before = v.in_group(group, state, before)
                last = tuple(v.splat_last(numbers, group) for numbers in function)
                state = self.formulas.apply(self.arithmetic, last, state)
            befores.append(before)
        return befores, state
