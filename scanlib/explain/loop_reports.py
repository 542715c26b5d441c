"""From the nodes of a graph to explanations: what each loop is made of, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pytensor.graph.basic import Apply
from pytensor.graph.op import HasInnerGraph, Op

from scanlib._compat import is_legacy_scan, thaw_graph
from scanlib.analysis.recognition import analyse
from scanlib.analysis.scalar_body import ScalarLoop, sum_carries
from scanlib.explain.data import (
    NOTHING,
    PARALLEL,
    LoopExplanation,
    Obstacle,
    Part,
    Picture,
)
from scanlib.explain.linkers import Setting
from scanlib.explain.names import describe_outer, name_parts, titled
from scanlib.explain.parts import parts_of, row_of
from scanlib.explain.pictures import step_picture
from scanlib.explain.reasons import listed, obstacles_of
from scanlib.explain.threads import threads_of
from scanlib.explain.verdicts import of_elementwise, of_general, of_legacy, of_linear, of_newton
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.execution import compiled_body
from scanlib.ops.linker_features import data_in
from scanlib.ops.loop import Loop
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.lowered.newton_scan import is_newton
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt.adopt import legacy_name
from scanlib.schedules.selection import schedule

# The order in which an elementwise loop is computed, by what `schedule` says.
SCHEDULES = {
    "blocks": "blocks of steps",
    "by width": "blocks of steps for few channels, else time outside, channels inside",
    "channels": "time outside, channels inside",
    "steps": "step by step in registers",
}
_RECURRENCES = {
    "real": "matrix affine",
    "log": "matrix affine over (logaddexp, +)",
    "max": "matrix affine over (max, +)",
    "min": "matrix affine over (min, +)",
}

Found = tuple[Apply, LoopExplanation]


def explain_nodes(nodes: Iterable[Apply], setting: Setting) -> list[Found]:
    """Return the loops among nodes, and among the inner graphs of other Ops, in their order."""
    found: list[Found] = []
    for node in nodes:
        for kind, explain_node in _KINDS:
            if isinstance(node.op, kind):
                found.append((node, explain_node(node, setting)))
                break
        else:
            if is_legacy_scan(node.op):
                found.append((node, _legacy(node, setting)))
            elif isinstance(node.op, HasInnerGraph):
                where = [*filter(None, [setting.inside]), str(node.op).split("{")[0]]
                within = replace(setting, inside=" > ".join(where)).of(node.op.fgraph)
                found += explain_nodes(node.op.fgraph.toposort(), within)
    return found


def _elementwise(node: Apply, setting: Setting) -> LoopExplanation:
    op: ElemwiseScan = node.op
    loop = Loop.from_op(op.scan, node.inputs)
    name_parts(loop)
    graph = thaw_graph(op.body)
    analysis = analyse(ScalarLoop(loop, graph.inputs, graph.outputs, op.layout))
    names = [part.name for part in loop.states] + [part.name for part in loop.carries]
    titles = [titled("state", name) for name in names]
    obstacles = [
        Obstacle(title, note)
        for title, note, recurrence in zip(titles, analysis.notes, analysis.families, strict=True)
        if recurrence is None
    ]
    chosen = schedule(op)
    if chosen == "steps" and loop.stop is not None:
        obstacles.append(Obstacle("`until`", "steps after the last one must not be computed"))
    compiled = setting.is_compiled_here(node)
    threads, shares = threads_of(op, chosen) if compiled else (1, None)
    count = len(graph.toposort())
    return LoopExplanation(
        op="ElemwiseScan",
        work="elementwise arithmetic",
        schedule=SCHEDULES[chosen] if compiled else setting.other_schedule(),
        parts=parts_of(loop, analysis.families),
        obstacles=tuple(obstacles),
        threads=threads,
        shares=shares,
        after=step_picture(node, f"{count} operations fused"),
        **of_elementwise(op, chosen, analysis.families, titles, setting.other(node)),
        **_common(op.scan, node, setting),
    )


def _scan(node: Apply, setting: Setting) -> LoopExplanation:
    op: Scan = node.op
    loop = Loop.from_node(node)
    name_parts(loop)
    recurrences: list[str | None] = [None] * len(loop.states)
    recurrences += ["sum over time" if is_sum else None for is_sum in sum_carries(loop)]
    obstacles, nouns = obstacles_of(node)
    compiled = setting.is_compiled_here(node)
    inner = tuple(_inner_loops(node, setting, compiled))
    if is_newton(op):
        verdict = of_newton(constant_integer(loop.n_steps))
        obstacles, nouns = [], ["one Newton iteration for all steps"]
    else:
        verdict = of_general(obstacles, nouns, setting.other(node))
    return LoopExplanation(
        op="Scan",
        work=listed(nouns, 3) if nouns else "array operations",
        schedule="one function for the loop, operation by operation in each step"
        if compiled
        else setting.other_schedule(),
        parts=parts_of(loop, recurrences),
        obstacles=tuple(obstacles),
        inner=inner,
        after=step_picture(node),
        **verdict,
        **_common(op, node, setting),
    )


def _common(op: Scan, node: Apply, setting: Setting) -> dict[str, Any]:
    """Return what a canonical loop and a lowered one have in common."""
    loop = Loop.from_op(op, node.inputs)
    steps = op.steps_of(node).known()
    if steps is None and loop.n_steps is not None:
        steps = constant_integer(loop.n_steps)
    if steps is None and loop.n_steps is None:
        lengths = (part.outer.type.shape[0] for part in loop.sequences)
        steps = next((length for length in lengths if length is not None), None)
    named = _named(op.name, node, setting)
    runs, until = setting.runs(node), loop.stop is not None
    return {"steps": steps, "until": until, "runs": runs, **named, "reverse": loop.reverse}


def _named(name: str | None, node: Apply, setting: Setting) -> dict[str, Any]:
    # Derivatives name their loops so; a user's loop of that name would be taken for one.
    name = name or "loop"
    gradient = name == "gradient" or name.endswith("_gradient") or name.startswith("grad_of")
    reverse = bool(getattr(node.op, "reverse", False))
    return {"name": name, "gradient": gradient, "reverse": reverse, "inside": setting.inside}


def _inner_loops(node: Apply, setting: Setting, compiled: bool) -> list[LoopExplanation]:
    """Return the loops inside a step, as they are when the body is compiled."""
    op: Scan = node.op
    found = explain_nodes(op.body.toposort(), setting)
    if found and setting.linker == "JAX":
        from scanlib.backends.jax.body import prepared_body

        body = prepared_body(op, node)
        found = explain_nodes(body.toposort(), setting.of(body, data_in(body)))
    elif found and compiled:
        found = explain_nodes(compiled_body(op).toposort(), setting)
    return [loop for _, loop in found]


def _linear(node: Apply, setting: Setting) -> LoopExplanation:
    op: LinearScan = node.op
    inputs = op.parts(node.inputs)
    timed = op.coefficient == "steps"
    role = "sequence" if timed else "non-sequence"
    parts, row = [], row_of(inputs.initial)
    for matrix, name in ((inputs.matrix, "the matrix"), (inputs.right, "the matrix at the right")):
        if matrix is not None:
            shape = row_of(matrix) if timed else matrix.type.shape
            parts.append(_outer(role, describe_outer(matrix) or name, matrix, shape))
    if inputs.offset is not None:
        name = describe_outer(inputs.offset) or "the offset"
        shape = row_of(inputs.offset)
        if len(shape) == len(row):
            shape = tuple(a if a is not None else b for a, b in zip(shape, row, strict=True))
        parts.append(_outer("sequence", name, inputs.offset, shape))
    stored = "last rows" if op.untraced else "history"
    dtype = inputs.initial.type.dtype
    parts.append(Part("state", "state 0", dtype, row, (-1,), stored, _RECURRENCES[op.semiring]))
    steps = None if inputs.n_steps is None else constant_integer(inputs.n_steps)
    for variable in (inputs.offset, inputs.matrix if timed else None):
        if steps is None and variable is not None:
            steps = variable.type.shape[0]
    compiled = setting.is_compiled_here(node)
    return LoopExplanation(
        op="LinearScan",
        work="a matrix times the state" + " (a vector)" * op.vector,
        steps=steps,
        schedule="a kernel for matrix recurrences" if compiled else setting.other_schedule(),
        parts=tuple(parts),
        after=_kernel_picture(parts, "matrix recurrence"),
        **of_linear(timed, setting.other(node)),
        runs=setting.runs(node),
        **_named(op.name or "linear recurrence", node, setting),
    )


def _outer(role: str, name: str, variable: Any, shape: Any) -> Part:
    """Return the part of an outer variable, of which `shape` is one row or the whole."""
    dtype = getattr(variable.type, "dtype", type(variable.type).__name__)
    return Part(role, name, dtype, shape)


def _kernel_picture(parts: Sequence[Part], label: str) -> Picture:
    """Return the picture of a step that one kernel computes from what it is given."""
    nodes = [(p.name, "state" if p.role == "state" else "input", 0) for p in parts]
    count = len(nodes)
    nodes += [(label, "operation", 1), ("state", "next", 2)]
    edges = [(i, count) for i in range(count)]
    return Picture(tuple(nodes), (*edges, (count, count + 1)))


def _associative(node: Apply, setting: Setting) -> LoopExplanation:
    """Return the explanation of rows that are combined in a tree."""
    op: AssociativeScan = node.op
    loop = Loop.from_op(op.scan, node.inputs)
    name_parts(loop)
    parts = parts_of(loop, [None] * len(loop.states))
    return LoopExplanation(
        op="AssociativeScan",
        work="an associative function of two rows",
        grade=PARALLEL,
        because="the function is promised to be associative, so rows combine in a tree",
        action=NOTHING,
        schedule=setting.other_schedule(),
        parts=parts,
        after=_kernel_picture(parts, "associative"),
        **_common(op.scan, node, setting),
    )


def _legacy(node: Apply, setting: Setting) -> LoopExplanation:
    """Return the explanation of a loop of `pytensor.scan`: what it is, and no more."""
    op = node.op
    verdict = of_legacy(setting.reasons.get(legacy_name(op)))
    return LoopExplanation(
        op="pytensor.scan",
        work="PyTensor's own loop",
        steps=constant_integer(node.inputs[0]),
        until=op.info.as_while,
        schedule="chosen by PyTensor",
        parts=(),
        obstacles=(Obstacle(None, verdict["because"]),),
        inner=tuple(own for _, own in explain_nodes(op.fgraph.toposort(), setting)),
        after=step_picture(node),
        runs=f"by PyTensor's own code for the {setting.linker} linker",
        **verdict,
        **_named(op.name, node, setting),
    )


# What explains nodes of an Op; the first that fits.
_KINDS: tuple[tuple[type[Op], Callable[[Apply, Setting], LoopExplanation]], ...] = (
    (ElemwiseScan, _elementwise),
    (Scan, _scan),
    (LinearScan, _linear),
    (AssociativeScan, _associative),
)
