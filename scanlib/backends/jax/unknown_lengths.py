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
from pytensor.tensor.extra_ops import Repeat, SearchsortedOp
from pytensor.tensor.math import Argmax
from pytensor.tensor.shape import Reshape, Shape_i
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib.backends.jax.along_time import time_after
from scanlib.backends.jax.masks import MaskPlaces
from scanlib.backends.jax.rows import KNOWN
from scanlib.backends.jax.static import AtMost, StaticNumber, StaticRange, StaticSplit
from scanlib.ops.associative_scan import AssociativeScan
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.linker_features import countable_scalars
from scanlib.ops.padded_rows import PaddedRows
from scanlib.ops.scan import Scan

LOOPS = (Scan, ElemwiseScan, LinearScan)
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
        if isinstance(op, LOOPS):
            n_steps, sequences = steps_and_sequences(node)
            if any(s in unknown for s in sequences) or not found.has(n_steps):
                loops.add(node)
            if follows or node in loops or _may_stop(op):
                unknown.update(out for out in node.outputs if getattr(out.type, "ndim", 0))
        elif isinstance(op, AtMost | MaskPlaces):
            unknown.update(node.outputs)
        elif follows and isinstance(op, Shape_i):
            unknown.update(node.outputs if op.i == times.get(node.inputs[0], 0) else [])
        elif (follows and isinstance(op, FOLLOWED)) or _makes_unknown(op, node, found):
            time = _time_of(op, node, found, times)
            if time is not None:
                unknown.update(node.outputs)
                times.update(dict.fromkeys(node.outputs, time) if time else {})
    return found


def _may_stop(op: Any) -> bool:
    return not isinstance(op, LinearScan) and op.signature.has_stop


def steps_and_sequences(node: Apply) -> tuple[Variable | None, list[Variable]]:
    """Return the number of steps of a loop, and what it has one row of for each step."""
    op = node.op
    if not isinstance(op, LinearScan):
        outer = op.signature.split_inputs(node.inputs)
        return outer.n_steps, outer.sequences
    parts = op.parts(node.inputs)
    timed = [parts.offset]
    if op.coefficient == "steps":
        timed += [parts.matrix, parts.right]
    return parts.n_steps, [part for part in timed if part is not None]


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
    if isinstance(op, Reshape):
        shape = node.inputs[1]
        sizes = shape.owner.inputs if shape.owner is not None else list(getattr(shape, "data", []))
        unknown = [k for k, size in enumerate(sizes) if _is_open(size, found)]
        return unknown[0] if unknown else time
    if isinstance(op, Repeat):
        return op.axis
    if isinstance(op, SearchsortedOp):
        return times.get(node.inputs[1], 0) if node.inputs[1] in found.unknown else None
    if isinstance(op, Subtensor):
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        if node.inputs[0] not in found.unknown:
            time = _sliced_axis(indices, found) or 0
        if not all(isinstance(index, slice) for index in indices[time : time + 1]):
            return None
        return sum(isinstance(index, slice) for index in indices[:time])
    return time


def _is_open(size: Any, found: KnownLengths) -> bool:
    """Whether an axis gets its size from the others, or has one that is not known."""
    if isinstance(size, Constant):
        size = size.data
    return size in found.unknown if isinstance(size, Variable) else int(size) == -1


def _makes_unknown(op: Any, node: Apply, found: KnownLengths) -> bool:
    """Whether an Op fills, reads or writes rows whose number JAX cannot know."""
    if isinstance(op, Alloc | AllocEmpty):
        sizes = node.inputs[int(isinstance(op, Alloc)) :]
        return any(not isinstance(size, Constant) and size not in found.known for size in sizes[:1])
    if isinstance(op, StaticRange):
        return not found.has(node.inputs[2])
    if isinstance(op, Repeat):
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
