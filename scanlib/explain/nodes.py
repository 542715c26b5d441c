"""From the nodes of a graph to explanations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.graph.op import HasInnerGraph

from scanlib._compat import thaw_graph
from scanlib.analysis.recognition import Analysis, analyse
from scanlib.analysis.scalar_body import ScalarLoop, sum_carries
from scanlib.explain import other_loops
from scanlib.explain.data import LoopExplanation, Obstacle
from scanlib.explain.linkers import Setting
from scanlib.explain.loop_parts import elementwise_shapes, general_shapes, memory_of, parts_of
from scanlib.explain.names import name_parts, titled
from scanlib.explain.reasons import why_not_elementwise, why_not_linear
from scanlib.explain.threads import threads_of
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.elemwise_scan import (
    COMPOSED,
    MANY_STEPS,
    ElemwiseScan,
    few_channels,
    schedule,
)
from scanlib.ops.execution import compiled_body
from scanlib.ops.linker_features import data_in
from scanlib.ops.loop import Loop
from scanlib.ops.scan import Scan

# How `schedule` says that an elementwise loop is walked.
SCHEDULES = {
    "blocks": "blocks of steps",
    "by width": "blocks of steps for few channels, else time outside, channels inside",
    "channels": "time outside, channels inside",
    "steps": "step by step in registers",
}


def explain_nodes(nodes: Iterable[Apply], setting: Setting) -> list[LoopExplanation]:
    """Return the loops among nodes, and among the inner graphs of other Ops, in their order."""
    found: list[LoopExplanation] = []
    for node in nodes:
        own = explain_node(node, setting)
        if own is not None:
            found.append(own)
        elif isinstance(node.op, HasInnerGraph):
            inside = setting.within(str(node.op).split("{")[0]).of(node.op.fgraph)
            found += explain_nodes(node.op.fgraph.toposort(), inside)
    return found


def explain_node(node: Apply, setting: Setting) -> LoopExplanation | None:
    """Return the explanation of a loop, None if the node is none."""
    if isinstance(node.op, ElemwiseScan):
        return _elementwise(node, setting)
    if isinstance(node.op, Scan):
        return _scan(node, setting)
    if other_loops.is_legacy(node.op):
        inner = explain_nodes(node.op.fgraph.toposort(), setting)
        return other_loops.legacy(node, setting, tuple(inner))
    if other_loops.is_other_scan(node.op):
        return other_loops.other_scan(node, setting)
    return None


def _common(op: Scan, node: Apply, loop: Loop, setting: Setting) -> dict[str, Any]:
    """Return what a canonical loop and a lowered one have in common."""
    steps = op.steps_of(node).known()
    if steps is None and loop.n_steps is not None:
        steps = constant_integer(loop.n_steps)
    if steps is None and loop.n_steps is None:
        lengths = (part.outer.type.shape[0] for part in loop.sequences)
        steps = next((length for length in lengths if length is not None), None)
    name = op.name or "loop"
    return {
        "name": name,
        "steps": steps,
        "reverse": loop.reverse,
        "until": loop.stop is not None,
        # Derivatives name their loops so; a user's loop of that name would be taken for one.
        "gradient": name == "gradient" or name.endswith("_gradient"),
        "runs": setting.runs(node),
        "inside": setting.inside,
    }


def _elementwise(node: Apply, setting: Setting) -> LoopExplanation:
    op: ElemwiseScan = node.op
    loop = Loop.from_op(op.scan, node.inputs)
    name_parts(loop)
    graph = thaw_graph(op.body)
    analysis = analyse(ScalarLoop(loop, graph.inputs, graph.outputs, op.layout))
    parts = parts_of(loop, elementwise_shapes(loop, op.layout), analysis.families)
    chosen = schedule(op)
    compiled = setting.is_compiled_here(node)
    threads, shares = threads_of(op, chosen) if compiled else (1, None)
    return LoopExplanation(
        op="ElemwiseScan",
        schedule=SCHEDULES[chosen] if compiled else setting.other_schedule(),
        why=_why(chosen, op, loop, analysis) if compiled else "the step is elementwise",
        parts=parts,
        obstacles=tuple(_no_family(loop, analysis, chosen)),
        memory=memory_of(parts),
        threads=threads,
        shares=shares,
        **_common(op.scan, node, loop, setting),
    )


def _why(chosen: str, op: ElemwiseScan, loop: Loop, analysis: Analysis) -> str:
    if chosen == "channels":
        axes = "one axis" if op.layout.ndim == 1 else f"{op.layout.ndim} axes"
        return (
            f"the step is elementwise over rows with {axes} of channels: one pass over memory "
            "without temporaries, in which neighbouring channels are computed together"
        )
    few = (
        "every state and carry belongs to a recurrence family: a block's coefficients are "
        "computed at once, then several steps are composed where that is safe, then what depends "
        "on the states is computed at once"
    )
    if chosen == "by width":
        return (
            f"up to {few_channels(op)} channels take turns where there are at least {MANY_STEPS} "
            f"steps, and {few}; more channels are computed together"
        )
    if chosen == "steps":
        costly = [r.family for r in op.recurrences if r.family not in COMPOSED]
        if loop.stop is not None:
            reason = "`until` may end the loop after any step"
        elif costly:
            reason = f"composing steps of the family {costly[0]} costs more than taking them"
        elif schedule(op) == "blocks":
            reason = "C code has no kernel that composes steps of its families"
        elif None in analysis.families:
            reason = "not every state and carry belongs to a recurrence family"
        else:
            reason = "no step depends on earlier ones, but for sums"
        return f"one channel, and {reason}: values stay in registers from step to step"
    channels = "few channels, which take turns" if op.layout.ndim else "one channel"
    return f"{channels}, and {few}"


def _no_family(loop: Loop, analysis: Analysis, chosen: str) -> list[Obstacle]:
    """Return what keeps states and carries out of all families."""
    parts = [
        *(titled("state", part.name) for part in loop.states),
        *(titled("carry", part.name) for part in loop.carries),
    ]
    found = [
        Obstacle(part, note)
        for part, note, family in zip(parts, analysis.notes, analysis.families, strict=True)
        if family is None
    ]
    if chosen == "steps" and loop.stop is not None:
        found.append(Obstacle("`until`", "steps after the last one must not be computed"))
    return found


def _scan(node: Apply, setting: Setting) -> LoopExplanation:
    op: Scan = node.op
    loop = Loop.from_node(node)
    name_parts(loop)
    families: list[str | None] = [None] * len(loop.states)
    families += ["sum over time" if is_sum else None for is_sum in sum_carries(loop)]
    parts = parts_of(loop, general_shapes(), families)
    common = _common(op, node, loop, setting)
    why, obstacles = _why_not_lowered(node, loop)
    compiled = setting.is_compiled_here(node)
    return LoopExplanation(
        op="Scan",
        schedule="one function for the loop, operation by operation in each step"
        if compiled
        else setting.other_schedule(),
        why=why,
        parts=parts,
        obstacles=tuple(obstacles),
        memory=memory_of(parts),
        inner=tuple(_inner_loops(node, setting, compiled)),
        **common,
    )


def _why_not_lowered(node: Apply, loop: Loop) -> tuple[str, list[Obstacle]]:
    """Return why a loop is still a `Scan`. `loop` is the loop with names; it is edited."""
    again = Loop.from_node(node)
    name_parts(again)
    obstacles = why_not_elementwise(loop)
    if not obstacles:
        why = "the step is elementwise, but the loop was not lowered"
        return why, [_left_out("scanlib_elementwise", "scanlib__lower", config.scanlib__lower)]
    linear = why_not_linear(again)
    if linear:
        return "the step is neither elementwise nor a matrix recurrence", [*obstacles, *linear]
    why = "the step is a matrix recurrence, but the loop was not lowered"
    return why, [_left_out("scanlib_linear", "scanlib__linear", config.scanlib__linear)]


def _left_out(rewrite: str, flag: str, value: bool) -> Obstacle:
    """Return why a rewrite that fits a loop was not applied to it."""
    if not value:
        return Obstacle(None, f"lowering is switched off: the flag {flag} is False")
    return Obstacle(
        None,
        f"the mode leaves out the rewrite {rewrite} (FAST_COMPILE does), or the flag {flag} was "
        "False when the function was compiled",
    )


def _inner_loops(node: Apply, setting: Setting, compiled: bool) -> list[LoopExplanation]:
    """Return the loops inside a step, as they are when the body is compiled."""
    op: Scan = node.op
    found = explain_nodes(op.body.toposort(), setting)
    if not found:
        return found
    if setting.linker == "JAX":
        from scanlib.backends.jax.body import prepared_body

        body = prepared_body(op, node)
        return explain_nodes(body.toposort(), setting.of(body, data_in(body)))
    if not compiled:
        return found
    return explain_nodes(compiled_body(op).toposort(), setting)
