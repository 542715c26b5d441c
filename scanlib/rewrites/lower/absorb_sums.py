"""Sums of what a loop computes move into the loop.

A cost is nearly always a sum over time of an expression of the trace. Inside an elementwise loop
it takes no pass over memory of its own, and if nothing else reads the trace, the history
need not be stored at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Add
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.subtensor import Subtensor

from scanlib.ops.graph import row_type
from scanlib.ops.loop import Carry, Loop, NonSequence
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.rewrites.edit import results_by_part
from scanlib.rewrites.lower.lower_elementwise import is_elementwise
from scanlib.rewrites.simplify.last_rows import is_loop, tap_of_view
from scanlib.rewrites.simplify.simplify import replace


class SumsIntoLoops(LoopRewrite):
    """Add an accumulator to an elementwise loop for every sum over all it computes."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not (config.scanlib__lower and config.scanlib__simplify):
            return
        loops = [node for node in fgraph.toposort() if is_loop(node)]
        sums = [(total, _loops_below(total)) for total in _total_sums(fgraph)] if loops else []
        for node in loops:
            found = [total for total, below in sums if node in below]
            if not found or node.op.signature.has_stop or not is_elementwise(Loop.from_node(node)):
                continue
            with self.attempt(fgraph, node):
                replace(fgraph, _fuse(fgraph, node, found), "scanlib_sums")


def _total_sums(fgraph: FunctionGraph) -> list[Apply]:
    """Return the sums over all axes of elementwise expressions."""
    found = []
    for node in fgraph.toposort():
        if isinstance(node.op, CAReduce) and isinstance(node.op.scalar_op, Add):
            source = node.inputs[0]
            whole = node.op.axis is None or len(node.op.axis) == source.type.ndim
            if whole and source.type.ndim:
                found.append(node)
    return found


def _loops_below(total: Apply) -> set[Apply]:
    """Return the loops whose results an elementwise expression reads directly."""
    loops: set[Apply] = set()
    pending = [total.inputs[0]]
    while pending:
        node = pending.pop().owner
        if node is None:
            continue
        if isinstance(node.op, Elemwise | Subtensor):
            pending.extend(node.inputs[:1] if isinstance(node.op, Subtensor) else node.inputs)
        elif is_loop(node):
            loops.add(node)
    return loops


def _fuse(fgraph: FunctionGraph, node: Apply, totals: list[Apply]) -> dict[Variable, Variable]:
    """Return what replaces the loop's results and those of the sums that it can compute."""
    loop = Loop.from_node(node)
    parts = [*loop.states, *loop.carries, *loop.outputs]
    known = _results(loop, node)
    carries: dict[Variable, Carry] = {}
    for total in totals:
        if total not in fgraph.apply_nodes:
            continue
        rows = _Rows(fgraph, loop, known)
        row = rows.of(total.inputs[0], total)
        if row is None or not rows.reads_results:
            continue
        outer = [part.outer for part in rows.non_sequences]
        if set(ancestors(outer)).intersection(node.outputs):
            continue
        loop.non_sequences += rows.non_sequences
        dtype = getattr(total.op, "acc_dtype", None) or total.outputs[0].type.dtype
        value = pt.scalar(dtype=dtype)
        step = pt.sum(row, dtype=dtype, acc_dtype=dtype) if row.type.ndim else pt.cast(row, dtype)
        carry = Carry(pt.constant(np.zeros((), dtype)), value, value + step, "sum")
        loop.carries.append(carry)
        carries[total.outputs[0]] = carry
    if not carries:
        return {}
    new = results_by_part(loop, loop.apply())
    replacements = {old: new[id(part)] for part, old in zip(parts, node.outputs, strict=True)}
    for out, carry in carries.items():
        replacements[out] = pt.cast(new[id(carry)], out.type.dtype)
    return replacements


def _results(loop: Loop, node: Apply) -> dict[Variable, tuple[Variable, int | None]]:
    """Return the body's value whose rows each result holds, and the initial rows of histories."""
    outputs = node.op.signature.split_outputs(node.outputs)
    found: dict[Variable, tuple[Variable, int | None]] = {}
    for part, out in zip(loop.outputs, outputs.outputs, strict=True):
        found[out] = part.value, None
    for state, history in zip(loop.states, outputs.histories, strict=True):
        if not state.untraced:
            found[history] = state.next, state.depth
    return found


@dataclass
class _Rows:
    """One row of an expression over whole traces, in terms of the body."""

    fgraph: FunctionGraph
    loop: Loop
    results: dict[Variable, tuple[Variable, int | None]]
    non_sequences: list[NonSequence] = field(default_factory=list)
    reads_results: bool = False

    def of(self, variable: Variable, reader: Apply) -> Variable | None:
        """Return the row of a variable that only `reader` reads, None if it has none."""
        known = self.result(variable)
        if known is not None:
            self.reads_results = True
            return known
        for part in self.loop.sequences:
            if part.outer is variable:
                return part.row
        if isinstance(variable, Constant) and variable.data.size == 1:
            return pt.constant(variable.data.reshape((1,) * max(variable.type.ndim - 1, 0)))
        if variable.type.broadcastable[0]:
            inner = row_type(variable)()
            self.non_sequences.append(NonSequence(variable[0], inner))
            return inner
        producer = variable.owner
        if producer is None or not isinstance(producer.op, Elemwise):
            return None
        clients = [client for client, _ in self.fgraph.clients[variable]]
        if len(producer.outputs) > 1 or any(client is not reader for client in clients):
            return None
        rows = [self.of(inp, producer) for inp in producer.inputs]
        if any(row is None for row in rows):
            return None
        value = producer.op(*rows)
        return value if value.type.dtype == variable.type.dtype else None

    def result(self, variable: Variable) -> Variable | None:
        """Return the body's value that a stacked output or a trace holds."""
        value, depth = self.results.get(variable, (None, None))
        if value is not None and depth is None:
            return value
        view = variable.owner
        if view is None or not isinstance(view.op, Subtensor):
            return None
        value, depth = self.results.get(view.inputs[0], (None, None))
        if depth is None or tap_of_view(view, depth, self.loop.reverse) != 0:
            return None
        return value
