"""The parts of a canonical loop as data, and the memory they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pytensor.graph.basic import Variable

from scanlib.explain.data import Bytes, History, MemoryUse, Part, Size
from scanlib.ops.elemwise_scan import Axes, Layout
from scanlib.ops.graph import is_numeric, is_tensor
from scanlib.ops.loop import Loop

Families = Sequence[str | None]


class SizeNames:
    """Names for sizes that are not known before the function runs."""

    def __init__(self) -> None:
        self.count = 0

    def shape(self, *types: Any) -> tuple[Size, ...] | None:
        """Return the sizes that types of one value agree on; unknown ones get a new name."""
        if any(not hasattr(type, "shape") for type in types):
            return None
        shape: list[Size] = []
        for sizes in zip(*(type.shape for type in types), strict=True):
            known = next((size for size in sizes if size is not None), None)
            if known is None:
                shape.append(f"n{self.count}")
                self.count += 1
            else:
                shape.append(known)
        return tuple(shape)


def channel_sizes(loop: Loop, layout: Layout) -> list[Size]:
    """Return the sizes of an elementwise loop's channels, or names for them."""
    known: dict[int, int] = {}
    groups: list[tuple[list, int, tuple[Axes, ...]]] = [
        ([part.outer for part in loop.sequences], 1, layout.sequences),
        ([part.initial for part in loop.states], 1, layout.states),
        ([part.initial for part in loop.carries], 0, layout.carries),
        ([part.outer for part in loop.non_sequences], 0, layout.non_sequences),
    ]
    for variables, lead, places in groups:
        for variable, axes in zip(variables, places, strict=True):
            for size, axis in zip(variable.type.shape[lead:], axes, strict=True):
                if axis is not None and size is not None:
                    known[axis] = size
    names = ["c"] if layout.ndim == 1 else [f"c{axis}" for axis in range(layout.ndim)]
    return [known.get(axis, name) for axis, name in enumerate(names)]


Shapes = Callable[[str, int, Sequence], "tuple[Size, ...] | None"]


def elementwise_shapes(loop: Loop, layout: Layout) -> Shapes:
    """Return what gives the row shapes of an elementwise loop's parts."""
    sizes, others = channel_sizes(loop, layout), SizeNames()
    groups = {
        "sequence": layout.sequences,
        "state": layout.states,
        "carry": layout.carries,
        "non-sequence": layout.non_sequences,
        "output": layout.outputs,
    }

    def shape(role: str, i: int, types: Sequence) -> tuple[Size, ...]:
        # Along an axis that is read at an index, no channel lies.
        own = others.shape(*types) or ()
        return tuple(
            sizes[axis] if axis is not None else own[k] if k < len(own) else 1
            for k, axis in enumerate(groups[role][i])
        )

    return shape


def general_shapes() -> Shapes:
    """Return what gives the row shapes of any loop's parts."""
    sizes = SizeNames()
    return lambda role, i, types: sizes.shape(*types)


class RowOf:
    """The type of one row of a stacked variable, as far as its shape goes."""

    def __init__(self, variable: Variable) -> None:
        self.shape = variable.type.shape[1:]


def parts_of(loop: Loop, shapes: Shapes, families: Families) -> tuple[Part, ...]:
    """Return the parts of a loop with names (`names.name_parts`) in the signature's order.

    `families` has one entry for every state, then for every carry.
    """
    found = [
        make_part("sequence", part.name, part.row, shapes("sequence", i, [RowOf(part.outer)]))
        for i, part in enumerate(loop.sequences)
    ]
    for i, state in enumerate(loop.states):
        tap = next(iter(state.taps.values()))
        found.append(
            make_part(
                *("state", state.name, tap),
                shapes("state", i, [RowOf(state.initial), tap.type]),
                taps=tuple(sorted(state.taps)),
                stored="last rows" if state.untraced else "history",
                family=families[i],
            )
        )
    for i, carry in enumerate(loop.carries):
        found.append(
            make_part(
                *("carry", carry.name, carry.value),
                shapes("carry", i, [carry.initial.type, carry.value.type]),
                stored="last value",
                family=families[len(loop.states) + i],
            )
        )
    for i, part in enumerate(loop.non_sequences):
        shape = shapes("non-sequence", i, [part.outer.type])
        found.append(make_part("non-sequence", part.name, part.inner, shape))
    for i, output in enumerate(loop.outputs):
        shape = shapes("output", i, [output.value.type])
        found.append(make_part("output", output.name, output.value, shape, stored="rows"))
    return tuple(found)


def make_part(
    role: str,
    name: str | None,
    variable: Variable,
    shape: tuple[Size, ...] | None,
    taps: tuple[int, ...] = (),
    stored: str | None = None,
    family: str | None = None,
) -> Part:
    """Return a part; `variable` has its dtype (or its type, where that is no tensor)."""
    dtype = variable.type.dtype if is_numeric(variable) else type(variable.type).__name__
    shape = shape if is_tensor(variable) else None
    return Part(role, name or role, dtype, shape, taps, stored, family)


def row_bytes(part: Part) -> Bytes:
    """Return the bytes of one row of a part; none for what is no tensor."""
    return Bytes() if part.shape is None else Bytes.of(np.dtype(part.dtype).itemsize, part.shape)


def memory_of(parts: Sequence[Part]) -> MemoryUse:
    """Return what a loop of these parts reads and writes."""
    read = written = whole = Bytes()
    histories = []
    for part in parts:
        row = row_bytes(part)
        if part.role == "sequence":
            read += row
        elif part.role == "non-sequence":
            whole += row if part.shape else Bytes()
        elif part.stored == "rows":
            written += row
        elif part.stored == "history":
            written += row
            histories.append(History(part.name, -min(part.taps), row))
    return MemoryUse(read, written, whole, tuple(histories))
