"""Axes of the states along which a step computes every item from its own past alone.

An axis `a` of the states is independent if the rows ``h[…, i, …]`` at place `i` of it are computed
from the rows of all states at place `i`, for all `i`: the members of a batch, or the channels of an
elementwise step. The step's Jacobian is then block diagonal, one block for each `i`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import Alloc
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape

from scanlib.ops.kept_axes import Alike, AxisClasses, axes_kept


def independent_axes(states: Sequence[Sequence[Variable]], nexts: Sequence[Variable]) -> list[int]:
    """Return the axes along which a step's states are independent of one another, given the body's
    variables of each state's past values, and its next values."""
    taps = [tap for each in states for tap in each]
    classes, read = AxisClasses(), set(taps)
    for node in toposort(nexts, blockers=taps):
        if not read.isdisjoint(node.inputs) and not isinstance(node.op, Shape | Shape_i):
            read.update(node.outputs)
            classes.join(each for each in _axes_kept(node) if {each[0], each[2]} <= read)
    for each, following in zip(states, nexts, strict=True):
        for tap in each:
            classes.join_all(tap, following)
    classes.keep_apart(taps)
    places = [(tap, axis) for tap in taps for axis in range(tap.type.ndim)]
    found = []
    for axis in range(min((tap.type.ndim for tap in taps), default=0)):
        own = {classes.of(tap, axis) for tap in taps}
        others = {classes.of(tap, other) for tap, other in places if other != axis}
        is_one = {tap.type.broadcastable[axis] for tap in taps}
        if len(is_one) == 1 and None not in own and own.isdisjoint(others):
            found.append(axis)
    return found


def _axes_kept(node: Apply) -> Iterable[Alike]:
    """Return `axes_kept`; that of Ops that are told sizes, too, which are those of all members."""
    if not isinstance(node.op, Alloc | SpecifyShape):
        return axes_kept(node)
    value, out = node.inputs[0], node.outputs[0]
    lead, ones = out.type.ndim - value.type.ndim, value.type.broadcastable
    return [(value, k, out, k + lead) for k, one in enumerate(ones) if not one]
