"""The parts of a canonical loop as data."""

from __future__ import annotations

from collections.abc import Sequence

from pytensor.graph.basic import Variable

from scanlib.explain.data import Part
from scanlib.ops.graph import is_numeric, is_tensor
from scanlib.ops.loop import Loop

Shape = tuple[int | None, ...]


def parts_of(loop: Loop, recurrences: Sequence[str | None]) -> tuple[Part, ...]:
    """Return the parts of a loop with names (`names.name_parts`) in the signature's order.

    `recurrences` has one entry for every state, then for every carry.
    """
    found = [make_part("sequence", s.name, s.row, row_of(s.outer)) for s in loop.sequences]
    own = iter(recurrences)
    for state in loop.states:
        tap = next(iter(state.taps.values()))
        stored = "last rows" if state.untraced else "history"
        part = make_part("state", state.name, tap, row_of(state.initial), stored, next(own))
        found.append(Part(**{**vars(part), "taps": tuple(sorted(state.taps))}))
    for carry in loop.carries:
        shape = getattr(carry.initial.type, "shape", None)
        found.append(make_part("state", carry.name, carry.value, shape, "last value", next(own)))
    for item in loop.non_sequences:
        shape = getattr(item.outer.type, "shape", None)
        found.append(make_part("non-sequence", item.name, item.inner, shape))
    found += [make_part("output", o.name, o.value, stored="rows") for o in loop.outputs]
    return tuple(found)


def row_of(variable: Variable) -> Shape:
    """Return the static shape of one row of a stacked variable."""
    return tuple(variable.type.shape[1:])


def make_part(
    role: str,
    name: str | None,
    variable: Variable,
    shape: Shape | None = None,
    stored: str | None = None,
    recurrence: str | None = None,
) -> Part:
    """Return a part; `variable` has its dtype (or its type, where that is no tensor).

    A size is known where its own type or `shape` tells it.
    """
    dtype = variable.type.dtype if is_numeric(variable) else type(variable.type).__name__
    sizes = None
    if is_tensor(variable):
        own = variable.type.shape
        given = shape if shape is not None and len(shape) == len(own) else own
        sizes = tuple(a if a is not None else b for a, b in zip(own, given, strict=True))
    return Part(role, name or role, dtype, sizes, (), stored, recurrence)
