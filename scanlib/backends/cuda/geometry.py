"""The sizes of a loop, from the shapes of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from scanlib.backends.cuda.printer import LoopWriter
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.errors import StepIndexError, StepShapeError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.positions import has_positions
from scanlib.ops.messages import Messages
from scanlib.ops.signature import Signature

Shape = tuple[int, ...]
DIFFER = "Incompatible Elemwise input shapes inside a scan"


@dataclass(frozen=True)
class Geometry:
    """The sizes of one call.

    Attributes
    ----------
    steps : int
    sizes : tuple of int
        Of the channels' axes.
    outputs : list of Shape
        Of the results, and of what comes after them: the number of steps, where a condition ends
        the loop; for each channel the first step with an index outside of its array, and the
        index, where there are computed places.
    lengths : dict
        Of arrays that are read at computed places.
    """

    steps: int
    sizes: Shape
    outputs: list[Shape]
    lengths: dict[str, int] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        return prod(self.sizes)


def geometry(loop: LoopWriter, shapes: Sequence[Shape], n_steps: int | None = None) -> Geometry:
    """Return the sizes of a loop's results, and check that its arguments agree.

    `shapes` are those of the arguments without the number of steps, which is `n_steps` where it is
    one of them.

    Raises
    ------
    ValueError
        As the loop does on other devices.
    NoCCodeError
        If there is no step, and channels are not as many in all arrays.
    """
    messages = Messages(loop.signature, loop.op.scan.labels, loop.op.scan.name)
    given = {
        array.name: tuple(shape)
        for array, shape in zip(loop.parameters.inputs, shapes, strict=True)
    }
    lengths = [given[name][0] for name in loop.plan.outer.sequences]
    initial_rows = [given[name][0] for name in loop.plan.outer.initials]
    steps = messages.count_steps(n_steps, lengths, initial_rows)
    if steps < loop.signature.required_steps:
        raise IndexError(messages.missing_steps())
    sizes = _sizes(loop, given, steps, messages)
    axes = {} if loop.places is None else loop.places.lengths
    read = {name: given[array][axis] for name, (array, axis) in axes.items()}
    return Geometry(steps, sizes, _outputs(loop, given, steps, sizes), read)


def _sizes(loop: LoopWriter, given: dict[str, Shape], steps: int, messages: Messages) -> Shape:
    found = []
    for level in range(loop.layout.ndim):
        places = loop.plan.group_places(loop.plan.targets, level)
        lengths = [given[place.array][place.lead + place.axes.index(level)] for place in places]
        size = lengths[0] if lengths else 1
        for place, other in zip(places, lengths, strict=True):
            if other == size:
                continue
            if not steps:
                raise NoCCodeError("a loop of no steps whose arrays do not fit has no CUDA kernel")
            if place.owned is None:
                raise ValueError(DIFFER)
            message = messages.state_shape(place.owned, place.axes.index(level))
            raise StepShapeError(message, 0, other, size)
        found.append(size)
    return tuple(found)


def _outputs(loop: LoopWriter, given: dict[str, Shape], steps: int, sizes: Shape) -> list[Shape]:
    outer, signature = loop.plan.outer, loop.signature
    shapes: list[Shape] = []
    for name, depth, untraced in zip(
        outer.initials, signature.depths, signature.untraced, strict=True
    ):
        shapes.append((depth + (0 if untraced else steps), *given[name][1:]))
    shapes += [given[name] for name in outer.carries]
    for axes in loop.layout.outputs:
        shapes.append((steps, *(1 if axis is None else sizes[axis] for axis in axes)))
    if signature.has_stop:
        shapes.append(())  # the number of steps
    if loop.places is not None:
        shapes.append((*sizes, 2))  # an index outside of its array, and its step
    return shapes


def written_rows(signature: Signature, steps: int, taken: int) -> list[slice]:
    """Return which rows of histories, carries and outputs a loop with a condition has written.

    There could be so many `steps`, of which so many are `taken`.
    """
    first = steps - taken if signature.reverse else 0
    everything = slice(None)
    rows = [
        everything if untraced else slice(first, first + taken + depth)
        for untraced, depth in zip(signature.untraced, signature.depths, strict=True)
    ]
    rows += [everything] * signature.n_carries
    return rows + [slice(first, first + taken)] * signature.n_outputs


def raise_wrong_index(op: ElemwiseScan, more: Sequence[Any]) -> None:
    """Raise an error if a computed place lies outside of its array, as loops on other devices do.

    `more` is what the kernel returns after the loop's results: the indices come last.
    """
    if not has_positions(op.body.outputs):
        return
    wrong = np.asarray(more[-1]).reshape(-1, 2)
    wrong = wrong[wrong[:, 0] >= 0]
    if len(wrong):
        messages = Messages(op.signature, op.scan.labels, op.scan.name)
        step, index = wrong[wrong[:, 0].argmin()].tolist()
        raise StepIndexError(messages.index_range(), step, index)
