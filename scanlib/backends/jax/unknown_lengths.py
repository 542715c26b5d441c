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
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.math import Argmax
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.backends.jax.along_time import takes_time
from scanlib.backends.jax.rows import KNOWN
from scanlib.backends.jax.static import AtMost, StaticNumber, StaticRange, StaticSplit
from scanlib.ops.associative_scan import AssociativeScan
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.padded_rows import PaddedRows
from scanlib.ops.scan import Scan
from scanlib.ops.whole_loops import countable_scalars

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
class Lengths:
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


def lengths_in(fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> Lengths:
    """Return what is known of lengths in a graph.

    Parameters
    ----------
    fgraph : FunctionGraph
    data : sequence of Variable, optional
        Inputs that are not known, though they may be integers: what changes from step to step,
        where the graph is a step.
    """
    found = Lengths(countable_scalars(fgraph, data, (StaticNumber,)), set(), set())
    unknown, loops = found.unknown, found.loops
    for node in fgraph.toposort():
        op = getattr(node.op, "core", node.op)
        follows = any(inp in unknown for inp in node.inputs)
        if isinstance(op, LOOPS):
            n_steps, sequences = steps_and_sequences(node)
            if any(s in unknown for s in sequences) or not found.has(n_steps):
                loops.add(node)
            if follows or node in loops or _may_stop(op):
                unknown.update(out for out in node.outputs if getattr(out.type, "ndim", 0))
        elif isinstance(op, AtMost):
            unknown.update(node.outputs)
        elif follows and isinstance(op, Shape_i):
            unknown.update(node.outputs if op.i == 0 else [])
        elif follows and _leaves_time(op, node):
            continue
        elif (follows and isinstance(op, FOLLOWED)) or _makes_unknown(op, node, found.known):
            unknown.update(node.outputs)
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


def _leaves_time(op: Any, node: Apply) -> bool:
    """Whether what an Op makes of rows has no row for each of them."""
    if isinstance(op, CAReduce | Argmax):
        return takes_time(op.axis, node.inputs[0].type.ndim)
    return isinstance(op, Subtensor) and bool(op.idx_list) and not isinstance(op.idx_list[0], slice)


def _makes_unknown(op: Any, node: Apply, known: set[Variable]) -> bool:
    """Whether an Op fills, reads or writes rows whose number JAX cannot know."""
    if isinstance(op, Alloc | AllocEmpty):
        sizes = node.inputs[int(isinstance(op, Alloc)) :]
        return any(not isinstance(size, Constant) and size not in known for size in sizes[:1])
    if not isinstance(op, Subtensor | IncSubtensor) or not op.idx_list:
        return False
    first = op.idx_list[0]
    if not isinstance(first, slice):
        return False
    lead = 2 if isinstance(op, IncSubtensor) else 1
    count = sum(bound is not None for bound in (first.start, first.stop, first.step))
    bounds = node.inputs[lead : lead + count]
    return any(not isinstance(b, Constant) and b not in known for b in bounds)
