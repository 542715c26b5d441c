"""Scalar operations that read a row at a computed place, in the body of an elementwise loop.

The body of an `ElemwiseScan` is a graph of scalars, one channel at a time. Three Ops step out of
the channel:

    Channel(a)                 c_a, where the channel lies along axis `a`
    Position(v, i; k)          i mod n, where n is the length of axis `k` of the row `v`
    Item(v, p_1 … p_m)         v[…], at positions along some axes, at the channel along the others

`v` is an input of the body that stands for the whole row: a kernel reads the array it comes from,
and never loads the item of its own channel for it. An index is a number from ``-n`` to ``n - 1``;
anything else raises an IndexError at the step that computes it, as NumPy's indexing does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import walk

Hidden = frozenset[int]


class PositionalOp(Op):
    """An operation on scalars whose code needs the arrays behind its inputs."""

    def do_constant_folding(self, fgraph: Any, node: Apply) -> bool:
        return False

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        raise NotImplementedError(f"{self} has a meaning only in the body of an ElemwiseScan")


class Channel(PositionalOp):
    """Where the channel lies along one axis of the channels."""

    __props__ = ("axis",)

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def make_node(self) -> Apply:
        return Apply(self, [], [ps.int64()])


class Position(PositionalOp):
    """An index into one axis of a row, counted from its start and checked.

    Parameters
    ----------
    axis : int
        The axis of the row.
    """

    __props__ = ("axis",)

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def make_node(self, row: Variable, index: Variable) -> Apply:
        return Apply(self, [row, index], [ps.int64()])


class Item(PositionalOp):
    """An item of a row.

    Parameters
    ----------
    places : tuple of (int or str or None)
        For every axis of the row: the channels' axis it runs along, None for an axis of length one,
        or ``"at"`` for an axis that is read at a position. The positions are inputs in that order.
    """

    __props__ = ("places",)

    def __init__(self, places: tuple[int | str | None, ...]) -> None:
        self.places = places

    def make_node(self, row: Variable, *positions: Variable) -> Apply:
        if len(positions) != self.places.count("at"):
            raise ValueError(f"{self} takes {self.places.count('at')} positions")
        return Apply(self, [row, *positions], [row.type()])

    @property
    def hidden(self) -> Hidden:
        """The axes of the row that are read at positions."""
        return frozenset(k for k, place in enumerate(self.places) if place == "at")

    def depth(self) -> int:
        """Return how many loops over channels must enclose the read, apart from the positions'."""
        return max((a + 1 for a in self.places if isinstance(a, int)), default=0)


def node_level(node: Apply, levels: Mapping[Variable, int]) -> int:
    """Return how many loops over channels must enclose an operation.

    `levels` has the levels of its inputs; those of rows count for what is read of them only.
    """
    if isinstance(node.op, Channel):
        return node.op.axis + 1
    first = 1 if isinstance(node.op, PositionalOp) else 0
    own = node.op.depth() if isinstance(node.op, Item) else 0
    return max([own, *(levels.get(inp, 0) for inp in node.inputs[first:])])


def inputs_read(outputs: Iterable[Variable]) -> dict[Variable, set[Hidden | None]]:
    """Return what scalars read of the inputs they depend on.

    Returns
    -------
    dict
        For each variable without owner, how it is read: None where the item of the channel is
        loaded, else the axes of the row that are read at positions. A `Position` alone needs a
        length and reads nothing.
    """
    found: dict[Variable, set[Hidden | None]] = {}

    def inputs_of(variable: Variable) -> list[Variable]:
        node = variable.owner
        if node is None:
            found.setdefault(variable, set()).add(None)
            return []
        if not isinstance(node.op, PositionalOp):
            return node.inputs
        if node.inputs:
            reads = found.setdefault(node.inputs[0], set())
            if isinstance(node.op, Item):
                reads.add(node.op.hidden)
        return node.inputs[1:]

    for _ in walk(outputs, inputs_of):
        pass
    return found


def loaded(outputs: Iterable[Variable]) -> set[Variable]:
    """Return the inputs whose item of the channel is loaded."""
    return {variable for variable, reads in inputs_read(outputs).items() if None in reads}


def places_compared(condition: Variable) -> dict[int, Variable]:
    """Return, for axes of the channels, the position that a condition compares the channel with.

    Empty if the condition is anything but a conjunction of such comparisons.
    """
    node = condition.owner
    if node is None:
        return {}
    if isinstance(node.op, ps.AND):
        left, right = (places_compared(inp) for inp in node.inputs)
        return {**left, **right} if left and right else {}
    if isinstance(node.op, ps.EQ):
        channel, position = node.inputs
        if channel.owner is not None and isinstance(channel.owner.op, Channel):
            return {channel.owner.op.axis: position}
    return {}


def only_place(value: Variable, kept: Variable | int | None, axis: int) -> Variable | None:
    """Return the only position along an axis where a step may change something.

    Parameters
    ----------
    value : Variable
        A next value, or what is added to a sum. ``v if c_a = p else w`` is `w` but for the channel
        at position `p` along axis `a`.
    kept : Variable or int or None
        The value that `w` must be for nothing to change: the past value, or zero; None if what is
        not changed has to be written as well.
    axis : int
        An axis of the channels.

    Returns
    -------
    Variable or None
        The position, None if all channels may change.
    """
    node = value.owner
    if kept is None or node is None or not isinstance(node.op, ps.Switch):
        return None
    other = node.inputs[2]
    if isinstance(kept, Variable):
        same = other is kept
    else:
        same = isinstance(other, Constant) and other.data == kept
    return places_compared(node.inputs[0]).get(axis) if same else None


def has_positions(outputs: Iterable[Variable]) -> bool:
    """Whether scalars are computed with any `PositionalOp`."""
    return any(
        variable.owner is not None and isinstance(variable.owner.op, PositionalOp)
        for variable in walk(outputs, lambda v: None if v.owner is None else v.owner.inputs)
    )
