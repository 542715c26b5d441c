"""Adoption: loops of `pytensor.scan` become canonical loops.

It comes before PyTensor's own rewrites of scans, which know nothing of canonical loops and leave
buffers behind that no longer say what they are. Gradients taken over a loop of `pytensor.scan`
are loops of its own too, so they are adopted in the same way; so are loops inside the steps of
others. A loop that cannot be adopted stays as it is, and `AdoptionRecord` remembers why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.features import Feature, ReplaceValidate
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.basic import join
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib._compat import features, is_legacy_scan
from scanlib.lengths.arrays import Lengths, joined_parts, slice_of
from scanlib.lengths.forms import Symbol
from scanlib.ops.gradient.cotangents import is_zeros
from scanlib.ops.loop_rewrite import LoopRewrite, RewriteFailure
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt.adopt_batches import adopt_batches, is_batch
from scanlib.rewrites.adopt.adopt_loop import NotAdoptableError, adopt_node, loop_name
from scanlib.rewrites.edit import rewrite_step
from scanlib.rewrites.simplify.simplify import replace


class Adopted(NamedTuple):
    """What became of a loop of `pytensor.scan`: `reason` is why it stayed, None if it did not."""

    name: str
    reason: str | None = None


@dataclass(eq=False)
class AdoptionRecord(Feature):
    """What adoption did in a graph, kept with the graph for `scanlib.explain`."""

    loops: list[Adopted] = field(default_factory=list)

    def note(self, op: object, reason: str | None = None) -> None:
        """Remember what became of a loop: `reason` is why it stayed, None if it did not."""
        entry = Adopted(legacy_name(op), reason)
        if reason is None or entry not in self.loops:
            self.loops.append(entry)

    def note_failure(self, fgraph: FunctionGraph, failure: RewriteFailure) -> None:
        """Remember that a loop stayed because adoption failed."""
        reason = f"of an error in scanlib, which is worth a report: {failure.error}"
        self.loops.append(Adopted(loop_name(failure.loop) or "loop", reason))


def legacy_name(op: object) -> str:
    """Return the name by which explanations call a loop of `pytensor.scan`."""
    return loop_name(getattr(op, "name", None)) or "loop"


def adoption_record(fgraph: FunctionGraph) -> AdoptionRecord | None:
    """Return what adoption did in a graph, None if it did not look at it."""
    return next(iter(features(fgraph, AdoptionRecord)), None)


class AdoptLoops(LoopRewrite):
    """Replace loops of `pytensor.scan` by canonical loops.

    Parameters
    ----------
    when_enabled : bool
        Whether to do nothing unless adoption is switched on for the whole process.
    """

    def __init__(self, when_enabled: bool) -> None:
        self.when_enabled = when_enabled

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if self.when_enabled and not config.scanlib__adopt:
            return
        if not _holds_legacy(fgraph):
            return
        record = adoption_record(fgraph)
        if record is None:
            record = AdoptionRecord()
            fgraph.attach_feature(record)
        self.adopt_all(fgraph, record)

    def adopt_all(self, fgraph: FunctionGraph, record: AdoptionRecord) -> None:
        """Adopt the loops of a graph, in the order in which they are computed."""

        def inside(body: FunctionGraph) -> None:
            if _holds_legacy(body):
                body.attach_feature(ReplaceValidate())
                self.adopt_all(body, record)

        with self.attempt(fgraph):
            for found in adopt_batches(fgraph, inside):
                replace(fgraph, found, "scanlib_adopt")
        known: dict[Symbol, int] = {}
        visited: set[Apply] = set()
        for node in fgraph.toposort():
            if node not in fgraph.apply_nodes:
                continue
            if is_legacy_scan(node.op):
                with self.attempt(fgraph, node, record.note_failure):
                    Lengths(known=known).learn_from(node.inputs, visited)
                    try:
                        replacements = adopt_node(fgraph, node, inside, known)
                    except NotAdoptableError as error:
                        record.note(node.op, str(error))
                        continue
                    replace(fgraph, replacements, "scanlib_adopt")
                    record.note(node.op)
            elif isinstance(node.op, Scan) and _holds_legacy(node.op.body):
                with self.attempt(fgraph, node):
                    replace(fgraph, rewrite_step(node, inside), "scanlib_adopt")
        tidy(fgraph)


def _holds_legacy(graph: FunctionGraph) -> bool:
    """Whether there are loops of `pytensor.scan` in a graph, or in the steps of its loops."""
    return any(
        is_legacy_scan(node.op)
        or is_batch(node.op)
        or (isinstance(node.op, Scan) and _holds_legacy(node.op.body))
        for node in graph.apply_nodes
    )


def tidy(fgraph: FunctionGraph) -> None:
    """Take slices of slices together, and leave out those that cut nothing.

    What reads a buffer of PyTensor's cuts and reverses it step by step. The rewrites that look
    for reads of a history, or of its last row, know one slice of it.
    """
    rows = Lengths()
    for node in fgraph.toposort():
        if node not in fgraph.apply_nodes:
            continue
        new = None
        if isinstance(node.op, Subtensor):
            new = _end_of_joined(node, rows)
            if new is None:
                new = _one_slice(node, rows)
        elif isinstance(node.op, IncSubtensor):
            new = _all_rows_set(node, rows)
        if new is not None:
            replace(fgraph, {node.outputs[0]: new}, "scanlib_adopt_tidy")


def _end_of_joined(node: Apply, rows: Lengths) -> Variable | None:
    """Return what a slice reads of joined parts at either end, if numbers tell that.

    So the derivatives of initial rows are read, which stand in front of all others. The lengths
    of all parts together may be unknown: of a slice that may be empty, for example.
    """
    index = slice_of(node)
    parts = joined_parts(node.inputs[0].owner)
    if index is None or index.step is not None or not parts:
        return None
    if (index.start is None) == (index.stop is None):
        return None
    at_front = index.start is None
    end = rows.integer(index.stop if at_front else index.start).constant
    if end is None or (end > 0) != at_front or end == 0:
        return None
    left = abs(end)
    taken: list[Variable] = []
    for part in parts if at_front else reversed(parts):
        length = rows.of(part).constant
        if length is None or left == 0:
            break
        used = min(left, length)
        left -= used
        if used < length:
            part = part[:used] if at_front else part[-used:]
        taken.append(part)
    if left:
        return None
    if len(taken) == 1:
        return taken[0]
    return join(0, *(taken if at_front else reversed(taken)))


def _one_slice(node: Apply, rows: Lengths) -> Variable | None:
    """Return what a slice of a slice, of a reversal or of joined parts reads, if that is known."""
    out = node.outputs[0]
    if slice_of(node) is None:
        return None
    view = rows.view(out)
    if view.base is out or not rows.is_simple(view):
        return None
    source = node.inputs[0]
    if view.base is source and not view.is_whole and not view.flipped:
        return None
    if view.base is source and view.is_whole and view.flipped:
        return None
    return rows.read(view)


def _all_rows_set(node: Apply, rows: Lengths) -> Variable | None:
    """Return the value of an array of zeros all rows of which are set."""
    base, value = node.inputs[:2]
    index = slice_of(node)
    if index is None or value.type.broadcastable != base.type.broadcastable:
        return None
    if not (node.op.set_instead_of_inc or is_zeros(base)):
        return None
    cut = rows.cut(rows.of(base), index)
    if cut is None or not (cut[0].is_zero and cut[1].is_zero):
        return None
    if rows.of(value) != rows.of(base) or value.type.dtype != base.type.dtype:
        return None
    return value[::-1] if cut[2] else value
