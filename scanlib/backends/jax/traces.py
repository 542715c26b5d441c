"""Traces that are arrays of their own, not slices of histories.

A history holds the initial rows before the others, so that the trace is a view of it:
``history[K:]``. XLA has no views: it copies the slice, which takes longer than a compiled loop.
Where nothing else is read of a history, the loop keeps the last `K` rows only (an untraced state)
and stacks its new rows as one more output.
"""

from __future__ import annotations

from dataclasses import replace

import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FrozenFunctionGraph, FunctionGraph
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib._compat import freeze_graph
from scanlib.lengths.numbers import constant_index
from scanlib.ops.lowered.channel_plan import ChannelPlan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan, Layout
from scanlib.ops.scan import Scan
from scanlib.ops.signature import Signature

REASON = "scanlib_stack_traces"


def stack_traces(fgraph: FunctionGraph) -> None:
    """Replace histories of elementwise loops by stacked outputs, where only traces are read."""
    for node in fgraph.toposort():
        if not isinstance(node.op, ElemwiseScan) or node.op.signature.has_stop:
            continue
        signature = node.op.signature
        chosen = [
            i
            for i, untraced in enumerate(signature.untraced)
            if not untraced and _trace_reads(fgraph, node, i) is not None
        ]
        if chosen:
            _replace(fgraph, node, chosen)


def _trace_reads(fgraph: FunctionGraph, node: Apply, i: int) -> dict[Apply, bool] | None:
    """Return the readers of a history and whether they read the trace, and not a last row; None if
    something else is read, or no trace is."""
    depth, reverse = node.op.signature.depths[i], node.op.signature.reverse
    found: dict[Apply, bool] = {}
    for client, position in fgraph.clients[node.outputs[i]]:
        if not isinstance(client.op, Subtensor) or position != 0:
            return None
        first, *rest = indices_from_subtensor(client.inputs[1:], client.op.idx_list)
        if isinstance(first, slice):
            if rest or first.step is not None:
                return None
            bounds = [None if b is None else constant_index(b) for b in (first.start, first.stop)]
            if bounds != ([None, -depth] if reverse else [depth, None]):
                return None
            found[client] = True
        else:
            back = constant_index(first)
            if reverse or back is None or not -depth <= back < 0:
                return None
            found[client] = False
    return found if any(found.values()) else None


def _replace(fgraph: FunctionGraph, node: Apply, chosen: list[int]) -> None:
    new = with_stacked(node.op, chosen).make_node(*node.inputs)
    for i in chosen:
        trace = new.outputs[len(node.outputs) + chosen.index(i)]
        for client, reads_trace in (_trace_reads(fgraph, node, i) or {}).items():
            value = trace
            if not reads_trace:
                value = client.op.make_node(new.outputs[i], *client.inputs[1:]).outputs[0]
            old = client.outputs[0]
            fgraph.replace(old, old.type.filter_variable(value), reason=REASON)
    for i, (old, out) in enumerate(zip(node.outputs, new.outputs, strict=False)):
        if i not in chosen and fgraph.clients.get(old):
            fgraph.replace(old, out, reason=REASON)


def with_stacked(op: ElemwiseScan, chosen: list[int]) -> ElemwiseScan:
    """Return the loop with some states untraced and stacked as further outputs."""
    old = op.signature
    signature = replace(
        old,
        untraced=tuple(u or i in chosen for i, u in enumerate(old.untraced)),
        n_outputs=old.n_outputs + len(chosen),
    )
    labels = op.scan.labels
    scan = Scan(
        signature,
        _with_outputs(old, op.scan.body, chosen),
        truncate_gradient=op.scan.truncate_gradient,
        name=op.scan.name,
        labels=labels._replace(outputs=labels.outputs + tuple(labels.states[i] for i in chosen)),
    )
    layout = replace(
        op.layout,
        outputs=op.layout.outputs + tuple(op.layout.states[i] for i in chosen),
        output_reductions=op.layout.output_reductions + ((),) * len(chosen),
    )
    body = _with_outputs(old, op.body, chosen, op.layout)
    return ElemwiseScan(scan, body, layout, op.recurrences, op.notes)


def _with_outputs(
    signature: Signature, body: FrozenFunctionGraph, chosen: list[int], layout: Layout | None = None
) -> FrozenFunctionGraph:
    """Return a body that has states' next values as outputs as well.

    With a `layout`, it is one of scalars.
    """
    parts = signature.split_body_outputs(body.outputs)
    stop = [] if parts.stop is None else [parts.stop]
    stacked = [parts.states[i] for i in chosen]
    if layout is not None:
        stacked = [_with_size(i, signature, body, layout) for i in chosen]
    values = [*parts.states, *parts.carries, *parts.outputs, *stacked, *stop]
    return freeze_graph(list(body.inputs), values)


def _with_size(i: int, signature: Signature, body: FrozenFunctionGraph, layout: Layout) -> Variable:
    """Return the next value of a state, which tells an output how many channels it has.

    The initial rows tell the state. A value that is the same in all channels reads the state here.
    """
    inner = signature.split_body_inputs(body.inputs)
    result = signature.split_body_outputs(body.outputs)
    plan = ChannelPlan(signature, layout, inner, result)
    target = next(t for t in plan.targets if t.kind == "state" and t.number == i)
    read = {axis for place in plan.places(target) if place.owned is None for axis in place.axes}
    value = result.states[i]
    return value if read.issuperset(target.kept) else ps.second(inner.taps[i][0], value)
