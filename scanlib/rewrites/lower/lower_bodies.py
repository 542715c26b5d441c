"""Steps of loops that stay: slices a derivative writes into zeros are joined, loops inside lowered.

A kernel of a loop calls the kernels of the loops in its step (`scanlib.schedules.inner_loops`), so
the step gets all rewrites up to here, as what stands around loops does: what leaves an inner loop
is computed by the step, and an inner loop and its gradient share what both compute. What an inner
loop adds up starts from what the loop around has, so that no step makes zeros and adds those.

A kernel takes memory before its first step, for the largest array that a step makes. Where sizes,
or numbers of steps, are rows of a sequence, the step is told between which numbers all of them are
(`bound_sizes`).
"""

from collections.abc import Iterable

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import Add
from pytensor.tensor.basic import Alloc, ARange
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import IncSubtensor
from pytensor.tensor.type import integer_dtypes

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.execution import LoopOp
from scanlib.ops.gradient.cotangents import is_zeros
from scanlib.ops.graph import applies, is_integer
from scanlib.ops.loop import Carry, Loop, NonSequence
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.ops.scan import Scan
from scanlib.rewrites.edit import replace
from scanlib.rewrites.lower.canonical_loop import additions_as_sums, split_sums
from scanlib.rewrites.over_time.written_rows import join_slices
from scanlib.rewrites.pytensor_rewrites import BodyRewrite, run_query

POSITION = 1.6665  # of this rewrite among PyTensor's
INNER_POSITION = 1.6667  # of the last one that the steps get
_LOWERING = RewriteDatabaseQuery(
    include=["fast_run"], exclude=["inplace"], position_cutoff=INNER_POSITION + 1e-6
)


@node_rewriter([Elemwise])
def start_sums(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable] | None:
    """Let an inner loop add to what its sum is added to."""
    for total in node.inputs if applies(node, Add) else ():
        inner = total.owner
        if inner is None or not isinstance(inner.op, Scan) or len(fgraph.clients[total]) > 1:
            continue
        others = [inp for inp in node.inputs if inp is not total]
        start = pt.add(*others) if len(others) > 1 else others[0]
        if start.type.broadcastable != total.type.broadcastable:
            continue
        above = (variable.owner for variable in ancestors([start]))
        if start.type.dtype != total.type.dtype or inner in above:
            continue
        loop, place = Loop.from_node(inner), inner.outputs.index(total)
        part = loop.parts[place]
        if not isinstance(part, Carry) or not is_zeros(part.initial):
            continue
        additions_as_sums(loop)
        if split_sums(loop, [part])[0]:
            loop = Loop.from_node(inner)
            loop.recurrent[place].initial = start
            new = loop.apply().node.outputs
            return {**dict(zip(inner.outputs, new, strict=True)), node.outputs[0]: new[place]}
    return None


@node_rewriter([Scan])
def count_steps(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable] | None:
    """Let an inner loop over a range count: what is left in a step may be ranges of another length
    each time, which would be made and read."""
    loop = Loop.from_node(node)
    if loop.n_steps is not None or loop.stop is not None:
        return None
    parts, changed = loop.parts, False
    for part in list(loop.sequences):
        view, dtype = Lengths(sure=True).view(part.outer), part.row.type.dtype
        made = view.base.owner
        if made is None or not isinstance(made.op, ARange) or not view.is_whole:
            continue
        start, stop, by = (pt.cast(number, "int64") for number in made.inputs)
        if constant_integer(by) is None or dtype not in integer_dtypes:
            continue
        # Sizes are bounded where they are sums.
        span = stop - start if constant_integer(by) == 1 else -((start - stop) // by)
        steps = pt.maximum(span, 0)
        first, by = (start + (steps - 1) * by, -by) if loop.reverse != view.flipped else (start, by)
        loop.carries.append(Carry(pt.cast(first, dtype), part.row, part.row + pt.cast(by, dtype)))
        loop.sequences.remove(part)
        loop.n_steps, changed = None if loop.sequences else steps, True
    if not changed:
        return None
    found = dict(zip(loop.parts, loop.apply().node.outputs, strict=True))
    return {old: found[part] for old, part in zip(node.outputs, parts, strict=True)}


def bound_sizes(loop: Loop) -> bool:
    """Tell a step between which numbers the integers are of which it makes sizes, where they are
    rows of a sequence: memory is taken for the largest."""
    above, limited = _above_sizes(toposort(loop.body_outputs())), {}
    for part in loop.sequences:
        row = part.row
        if row not in above or not is_integer(row):
            continue
        limits = _limits(part.outer)
        inner = [limit.type() for limit in limits]
        loop.non_sequences += map(NonSequence, limits, inner)
        limited[row] = pt.clip(row, *inner)
    loop.substitute(limited)
    return bool(limited)


def _above_sizes(nodes: Iterable[Apply]) -> set[Variable]:
    """Return what the sizes of arrays, and numbers of steps, are computed from.

    A loop of which a shape is read has sizes of its own; its values do not tell the shape.
    """
    nodes = list(nodes)
    sizes = [size for node in nodes for size in _sizes(node)]
    shapes = (node for node in nodes if isinstance(node.op, Shape | Shape_i))
    of_loops = [node.outputs[0] for node in shapes if _is_loop(node.inputs[0].owner)]
    return set(ancestors(sizes, blockers=of_loops)) if sizes else set()


def _is_loop(node: Apply | None) -> bool:
    return node is not None and isinstance(node.op, LoopOp)


def _sizes(node: Apply) -> list[Variable]:
    """Return the integers by which a node makes arrays, or takes steps."""
    if isinstance(node.op, LoopOp):
        signature, body = node.op.scan.signature, node.op.scan.body
        above = _above_sizes(body.apply_nodes)
        given = signature.split_inputs(node.inputs).non_sequences
        pairs = zip(given, signature.split_body_inputs(body.inputs).non_sequences, strict=True)
        return [*node.inputs[: signature.has_n_steps], *(v for v, own in pairs if own in above)]
    if isinstance(node.op, Alloc):
        return node.inputs[1:]
    return node.inputs if isinstance(node.op, ARange) else []


def _limits(rows: Variable) -> tuple[Variable, Variable]:
    """Return numbers between which all of some integers are."""
    made, dtype = Lengths(sure=True).view(rows).base.owner, rows.type.dtype
    is_plain = made is not None and isinstance(made.op, ARange) and dtype == "int64"
    by = constant_integer(made.inputs[2]) if is_plain else None
    if by:
        first, end, _ = made.inputs
        last = end - int(by > 0) + int(by < 0)
        lowest, largest = (first, last) if by > 0 else (last, first)
    else:
        some = pt.concatenate([rows.flatten(), np.zeros(1, dtype)])
        lowest, largest = pt.min(some), pt.max(some)
    return pt.cast(lowest, dtype), pt.cast(largest, dtype)


_join_slices = dfs_rewriter(join_slices)
_start_sums = dfs_rewriter(start_sums)
_count_steps = dfs_rewriter(count_steps)


def _lower_body(body: FunctionGraph) -> None:
    if any(isinstance(inner.op, Scan) for inner in body.apply_nodes):
        run_query(_LOWERING, body)
        _start_sums.rewrite(body)
        _count_steps.rewrite(body)


def _lower_derivative(body: FunctionGraph) -> None:
    _join_slices.rewrite(body)
    _lower_body(body)


# By whether the loop is a derivative: what a user writes to a slice may be repeated there.
_LOWER = {
    False: BodyRewrite(_lower_body, settles=True),
    True: BodyRewrite(_lower_derivative, settles=True),
}


class LowerBodies(LowersLoops):
    """Join slices, lower loops and bound sizes in the steps of loops."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        is_derivative = node.op.signature.reverse
        kinds = Scan | Alloc | ARange | (IncSubtensor if is_derivative else Scan)
        if not any(isinstance(n.op, kinds) for n in node.op.body.apply_nodes):
            return False
        loop = Loop.from_node(node)
        changed = _LOWER[is_derivative](loop)
        if not bound_sizes(loop) and not changed:
            return False
        loop.drop_unread_inputs()
        new = dict(zip(node.outputs, loop.apply().node.outputs, strict=True))
        replace(fgraph, new, "scanlib_lower_bodies")
        return True
