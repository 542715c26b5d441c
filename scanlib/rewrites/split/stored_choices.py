"""What a loop chose is stored as truth values, where another loop would compare numbers again.

The derivative of ``h_t = max(h_{t-1}, x_t)`` asks at every step which of the two it was: it reads
both, sixteen bytes, to find out one bit. Long loops of this kind are as fast as the memory, and the
forward loop has both numbers in its registers. So it stores the answer, one byte, and the backward
loop reads that. The history is not stored at all where nothing else reads it.

A truth value is moved if it reads nothing but rows, and past or next values, of the first loop, and
if fewer bytes are moved then. It must come out the same: so it holds comparisons, choices and logic
only, of numbers that are stored as they are. A next value is, if it is a running extreme; kernels
round others as they like, and ``max(h, x) = h`` would not hold for what they stored.
"""

from __future__ import annotations

import numpy as np
import pytensor.scalar as ps
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors, toposort, walk
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from scanlib.analysis.scalar_body import NotElementwiseError
from scanlib.ops.graph import depends_on, merge_equal, substitute
from scanlib.ops.loop import Carry, Loop, Sequence, State
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.rewrites.edit import Part
from scanlib.rewrites.lower.lower_elementwise import lower_elementwise
from scanlib.rewrites.simplify.simplify import replace
from scanlib.rewrites.split.reuse import output_of, same_rows, serve_readers

# What rounds nothing: results are one of the operands, or truth values.
_EXACT = (
    *(ps.LogicalComparison, ps.IsNan, ps.IsInf, ps.Identity, ps.Switch, ps.Second),
    *(ps.ScalarMaximum, ps.ScalarMinimum, ps.AND, ps.OR, ps.XOR, ps.Invert),
)


class StoreChoices(LoopRewrite):
    """Let loops read what others have compared; see the module's text."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not (config.scanlib__lower and config.scanlib__simplify):
            return
        loops = [node for node in fgraph.toposort() if isinstance(node.op, ElemwiseScan)]
        serve_readers(fgraph, loops, _keeps_extremes, _store)


def _keeps_extremes(node: Apply) -> bool:
    """Whether a loop has running extremes, all steps of which run, and is not to run again."""
    op = node.op
    return bool(_extremes(op)) and not op.signature.has_stop and not op.scan.recompute


def _extremes(op: ElemwiseScan) -> list[int]:
    """Return the states and carries that are running extremes, by their place among the results."""
    return [r.parts[0] for r in op.recurrences if r.family in ("maximum", "minimum")]


def _store(fgraph: FunctionGraph, maker: Apply, reader: Apply) -> Apply | None:
    """Store truth values in one loop that another one needs; return the first one's new node."""
    source, target = (Loop.from_op(node.op.scan, node.inputs) for node in (maker, reader))
    places = same_rows(maker, source, target)
    chosen = _chosen(maker.op, source, target, places) if places else {}
    if not chosen:
        return None
    unread = _unread(target, chosen)
    if not _is_worth_it(source, chosen, unread):
        return None
    parts: list[Part] = [*source.states, *source.carries, *source.outputs]
    stored = {value: output_of(source, twin) for value, twin in chosen.items()}
    _forget_histories(fgraph, maker, source, reader, [part.outer for part in unread])
    try:
        made = lower_elementwise(source)
    except NotElementwiseError:
        return None
    _replace(fgraph, maker, parts, made)
    target.replace_outer(dict(zip(target.outer_inputs(), reader.inputs, strict=True)))
    rows = {value: value.type() for value in chosen}
    target.substitute(rows)
    target.sequences = [part for part in target.sequences if part not in unread]
    for value, row in rows.items():
        target.sequences.append(Sequence(made[id(stored[value])], row))
    read = set(ancestors(target.body_outputs()))
    target.non_sequences = [part for part in target.non_sequences if part.inner in read]
    last: list[Part] = [*target.states, *target.carries, *target.outputs]
    _replace(fgraph, reader, last, lower_elementwise(target))
    return made[id(parts[_extremes(maker.op)[0]])].owner


def _replace(
    fgraph: FunctionGraph, node: Apply, parts: list[Part], made: dict[int, Variable]
) -> None:
    pairs = zip(parts, node.outputs, strict=True)
    replace(fgraph, {old: made[id(part)] for part, old in pairs}, "scanlib_choices")


def _chosen(
    op: ElemwiseScan, source: Loop, target: Loop, places: dict[Variable, Variable]
) -> dict[Variable, Variable]:
    """Return truth values of the reader's body, and what they are in the maker's."""
    roots = target.body_outputs()
    own = depends_on(roots, [inp for inp in target.body_inputs() if inp not in places])

    def is_choice(value: Variable) -> bool:
        return value.owner is not None and value.type.dtype == "bool" and value not in own

    def inputs_of(value: Variable) -> list[Variable]:
        return [] if value.owner is None or is_choice(value) else value.owner.inputs

    found = [value for value in walk(roots, inputs_of, bfs=False) if is_choice(value)]
    if not found:
        return {}
    count = len(source.body_outputs())
    merged = merge_equal([*source.body_outputs(), *substitute(found, places)])
    source.set_body_outputs(merged[:count])
    extremes = _extremes(op)
    parts: list[State | Carry] = [*source.states, *source.carries]
    exact = {part.next for k, part in enumerate(parts) if k in extremes}
    pairs = zip(found, merged[count:], strict=True)
    return {value: twin for value, twin in pairs if _is_exact(twin, exact)}


def _is_exact(value: Variable, known: set[Variable]) -> bool:
    """Whether a value depends on no rounding, if those that are `known` do not."""
    return all(
        isinstance(node.op, DimShuffle)
        or (isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, _EXACT))
        for node in toposort([value], blockers=list(known))
    )


def _unread(target: Loop, chosen: dict[Variable, Variable]) -> list[Sequence]:
    """Return the sequences of the reader that it does not need any more."""
    rows = [part.row for part in target.sequences]
    read = set(ancestors(target.body_outputs(), blockers=[*chosen, *rows]))
    return [part for part in target.sequences if part.row not in read]


def _is_worth_it(source: Loop, chosen: dict[Variable, Variable], unread: list[Sequence]) -> bool:
    """Whether fewer bytes are read than the truth values take, which are written and read."""
    kinds = {value.type.broadcastable for value in chosen}
    if len(kinds) > 1 or any(isinstance(twin, Constant) for twin in chosen.values()):
        return False
    saved = sum(
        np.dtype(part.row.type.dtype).itemsize
        for part in unread
        if part.row.type.broadcastable in kinds
    )
    return saved > 2 * len(chosen)


def _forget_histories(
    fgraph: FunctionGraph, maker: Apply, source: Loop, reader: Apply, unread: list[Variable]
) -> None:
    """Mark the states whose histories nobody else reads."""
    if source.reverse:
        return
    histories = maker.op.signature.split_outputs(maker.outputs).histories
    for state, history in zip(source.states, histories, strict=True):
        views = [client for client, _ in fgraph.clients[history]]
        if state.untraced or not views:
            continue
        if all(
            len(view.outputs) == 1
            and view.outputs[0] in unread
            and all(client is reader for client, _ in fgraph.clients[view.outputs[0]])
            for view in views
        ):
            state.untraced = True
