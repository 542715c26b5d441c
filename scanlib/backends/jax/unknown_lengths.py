"""Which arrays of a graph have a length that JAX does not know when it compiles.

Such are the traces of loops that end by a condition, and of those whose number of steps is computed
from data; slices by bounds that are computed; and what is made of these row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, AllocEmpty, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle
from pytensor.tensor.extra_ops import Repeat
from pytensor.tensor.math import Argmax
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib.backends.jax.masks import MaskPlaces
from scanlib.backends.jax.rows import KNOWN, time_after
from scanlib.backends.jax.static import StaticNumber, StaticRange, StaticSplit
from scanlib.lengths.known import countable_scalars
from scanlib.lengths.steps import steps_of
from scanlib.ops.associative_scan import AssociativeScan
from scanlib.ops.padded_rows import PaddedRows

FOLLOWED = (
    *KNOWN,
    AssociativeScan,
    CheckAndRaise,
    PaddedRows,
    ScalarFromTensor,
    StaticNumber,
    StaticRange,
    StaticSplit,
    TensorFromScalar,
)


@dataclass(frozen=True)
class KnownLengths:
    """What is known of lengths in a graph when JAX compiles it.

    Attributes
    ----------
    known : set of Variable
        Numbers that are known then, unless they are in `unknown`.
    unknown : set of Variable
        Arrays that may be `Bounded`, and numbers computed from their lengths.
    loops : set of Apply
        Loops whose number of steps is not known; of those that may end by a condition, the greatest
        number.
    """

    known: set[Variable]
    unknown: set[Variable]
    loops: set[Apply]

    def has(self, number: Variable | None) -> bool:
        """Whether a number is known, or not needed."""
        if number is None or isinstance(number, Constant):
            return True
        return number in self.known and number not in self.unknown


def lengths_in(fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> KnownLengths:
    """Return what is known of lengths in a graph.

    Parameters
    ----------
    fgraph : FunctionGraph
    data : sequence of Variable, optional
        Inputs that are not known, though they may be integers: what changes from step to step,
        where the graph is a step.
    """
    found = KnownLengths(countable_scalars(fgraph, data, (StaticNumber,)), set(), set())
    unknown, loops = found.unknown, found.loops
    times: dict[Variable, int] = {}  # of arrays that have time as another axis than the first
    for node in fgraph.toposort():
        op = getattr(node.op, "core", node.op)
        follows = any(inp in unknown for inp in node.inputs)
        steps = steps_of(node)
        if steps is not None:
            if any(s in unknown for s in steps.sequences) or not found.has(steps.n_steps):
                loops.add(node)
            if follows or node in loops or steps.may_stop:
                unknown.update(out for out in node.outputs if getattr(out.type, "ndim", 0))
        elif isinstance(op, MaskPlaces):
            unknown.update(node.outputs)
        elif follows and isinstance(op, Shape_i):
            unknown.update(node.outputs if op.i == times.get(node.inputs[0], 0) else [])
        elif (follows and isinstance(op, FOLLOWED)) or _makes_unknown(op, node, found):
            time = _time_of(op, node, found, times)
            if time is not None:
                unknown.update(node.outputs)
                times.update(dict.fromkeys(node.outputs, time) if time else {})
    return found


def _time_of(op: Any, node: Apply, found: KnownLengths, times: dict[Variable, int]) -> int | None:
    """Return which axis of an Op's results has an unknown length, None if none has."""
    time = next((times.get(inp, 0) for inp in node.inputs if inp in found.unknown), 0)
    if isinstance(op, CAReduce | Argmax):
        return time_after(op.axis, node.inputs[0].type.ndim, time)
    if isinstance(op, DimShuffle):
        return op.new_order.index(time) if time in op.new_order else None
    if isinstance(op, Alloc):
        value, *sizes = node.inputs
        if value in found.unknown:
            return times.get(value, 0) + len(sizes) - value.type.ndim
        return next((k for k, size in enumerate(sizes) if size in found.unknown), 0)
    if isinstance(op, Subtensor):
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        if node.inputs[0] not in found.unknown:
            time = _sliced_axis(indices, found) or 0
        if not all(isinstance(index, slice) for index in indices[time : time + 1]):
            return None
        return sum(isinstance(index, slice) for index in indices[:time])
    return time


def _makes_unknown(op: Any, node: Apply, found: KnownLengths) -> bool:
    """Whether an Op fills, reads or writes rows whose number JAX cannot know."""
    if isinstance(op, Alloc | AllocEmpty):
        sizes = node.inputs[int(isinstance(op, Alloc)) :]
        return any(not isinstance(size, Constant) and size not in found.known for size in sizes[:1])
    if isinstance(op, StaticRange):
        return not found.has(node.inputs[2])
    if isinstance(op, Repeat):  # which is an error, if the numbers are not known
        return not isinstance(node.inputs[1], Constant)
    if not isinstance(op, Subtensor | IncSubtensor):
        return False
    lead = 2 if isinstance(op, IncSubtensor) else 1
    return _sliced_axis(indices_from_subtensor(node.inputs[lead:], op.idx_list), found) is not None


def _sliced_axis(indices: Sequence[Any], found: KnownLengths) -> int | None:
    """Return the first axis that is sliced by bounds that are not known, None if none is."""
    for axis, index in enumerate(indices):
        bounds = [index.start, index.stop, index.step] if isinstance(index, slice) else []
        if not all(map(found.has, bounds)):
            return axis
    return None
