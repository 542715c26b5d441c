"""The parts of a joined state, and its results taken apart: see `linear_system`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.raise_op import CheckAndRaise

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.errors import InitialRowsError
from scanlib.ops.loop import Carry, State


@dataclass
class Slot:
    """A part of the joined state: one tap of a state, or a carry."""

    part: State | Carry
    tap: int
    value: Variable
    next: Variable


@dataclass
class Joined:
    """What the results of a joined loop are to the loop it came from."""

    slots: list[Slot]
    state: State | Carry
    sizes: list[Variable]  # of the slots, without batch
    shapes: list[tuple[Variable, ...]]  # of the slots' values, without batch
    batch: int
    parts: list[Any]  # of the old loop, in the order of its results
    others: list[Any]  # the parts of the joined loop after the state
    reverse: bool

    def read(self, read: Sequence[bool]) -> list[bool]:
        """Return which results of the joined loop are read, given those of the old one."""
        by_part = {id(part): flag for part, flag in zip(self.parts, read, strict=True)}
        own = any(by_part[id(slot.part)] for slot in self.slots)
        return [own, *(by_part[id(part)] for part in self.others)]

    def results(
        self, values: Sequence[Variable | None], read: Sequence[bool]
    ) -> list[Variable | None]:
        """Return the results of the old loop, given those of the joined one."""
        state, *rest = values
        other = {id(part): value for part, value in zip(self.others, rest, strict=True)}
        found: list[Variable | None] = []
        for part, flag in zip(self.parts, read, strict=True):
            if not flag:
                found.append(None)
            elif id(part) in other:
                found.append(other[id(part)])
            else:
                assert state is not None
                found.append(self.part_of(part, state))
        return found

    def part_of(self, part: State | Carry, value: Variable) -> Variable:
        """Return the result of one old part."""
        traced = isinstance(self.state, State) and not self.state.untraced
        rows = value if isinstance(self.state, State) else value[None]
        last = rows if not traced else rows[:1] if self.reverse else rows[-1:]
        slots = {slot.tap: k for k, slot in enumerate(self.slots) if slot.part is part}
        if isinstance(part, Carry):
            return self.piece(last, slots[-1])[0]
        taps = sorted(slots, reverse=self.reverse)
        if part.untraced or not traced:
            pieces = [self.piece(last, slots[tap]) for tap in taps]
        elif self.reverse:
            pieces = [self.piece(rows, slots[-1])]
            pieces += [] if len(slots) == 1 else [part.initial[1:]]
        else:
            pieces = [] if len(slots) == 1 else [part.initial[:-1]]
            pieces.append(self.piece(rows, slots[-1]))
        return pieces[0] if len(pieces) == 1 else pt.concatenate(pieces)

    def piece(self, rows: Variable, k: int) -> Variable:
        """Return one slot's values of some rows of the joined state."""
        return piece_of(rows, self.sizes, self.shapes, k, 1 + self.batch)


def piece_of(
    rows: Variable,
    sizes: Sequence[Variable],
    shapes: Sequence[tuple[Variable, ...]],
    k: int,
    lead: int,
) -> Variable:
    start = _total(sizes[:k])
    index: Any = slice(start, _total(sizes[: k + 1])) if shapes[k] else start
    part = rows[(*(slice(None),) * lead, index)]
    if len(shapes[k]) > 1:
        part = part.reshape((*tuple(part.shape)[:lead], *shapes[k]))
    return part


def _total(sizes: Sequence[Variable]) -> Any:
    known = [constant_integer(size) for size in sizes]
    fixed = sum(size for size in known if size is not None)
    unknown = [size for size, value in zip(sizes, known, strict=True) if value is None]
    return pt.add(fixed, *unknown) if unknown else fixed


def slots_of(parts: Sequence[State | Carry]) -> list[Slot]:
    slots = []
    for part in parts:
        if isinstance(part, Carry):
            slots.append(Slot(part, -1, part.value, part.next))
            continue
        following = part.next
        for tap in range(-1, -part.depth - 1, -1):
            value = part.tap(tap)
            slots.append(Slot(part, tap, value, following))
            following = value
    return slots


def initial_of(slot: Slot, reverse: bool) -> Variable:
    part = slot.part
    if isinstance(part, Carry):
        return part.initial
    initial = part.initial
    if initial.type.shape[0] != part.depth:
        message = f"linear scan: a state needs {part.depth} initial rows for its taps"
        check = CheckAndRaise(InitialRowsError, message)
        initial = check(initial, pt.eq(initial.shape[0], part.depth))
    return initial[-slot.tap - 1] if reverse else initial[part.depth + slot.tap]
