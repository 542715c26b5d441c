"""From the nodes of a graph to explanations: what each loop is made of, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import HasInnerGraph, Op

from scanlib._compat import is_legacy_scan, thaw_graph
from scanlib.analysis.recognition import analyse
from scanlib.analysis.scalar_body import ScalarLoop, sum_carries
from scanlib.explain.data import (
    FUSED,
    IN_ORDER,
    NOTHING,
    PARALLEL,
    LoopExplanation,
    Obstacle,
    Part,
    verdict,
)
from scanlib.explain.linkers import Setting
from scanlib.explain.names import name_parts, step_formulas, titled
from scanlib.explain.reasons import DRAWS, listed, obstacles_of
from scanlib.kernels.thread_parts import wanted_threads
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.execution import compiled_body
from scanlib.ops.graph import is_numeric, is_tensor
from scanlib.ops.linker_features import data_in
from scanlib.ops.loop import Loop
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.lowered.newton_scan import is_newton
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt.adopt import legacy_name
from scanlib.schedules.selection import (
    MANY_STEPS,
    can_chunk,
    can_slice,
    few_channels,
    least_row,
    schedule,
)

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
    threads, shares = (1, None) if setting.runs(node)[1] else _threads(op, chosen)
    grade = _grade_elementwise(op, chosen, analysis.families, titles)
    return LoopExplanation(
        op="ElemwiseScan",
        work="elementwise arithmetic",
        parts=_parts(loop, analysis.families),
        obstacles=tuple(obstacles),
        threads=threads,
        shares=shares,
        step=step_formulas(loop),
        **setting.running(node, SCHEDULES[chosen], grade),
        **_common(op.scan, node, setting),
    )


def _scan(node: Apply, setting: Setting) -> LoopExplanation:
    op: Scan = node.op
    loop = Loop.from_node(node)
    name_parts(loop)
    recurrences: list[str | None] = [None] * len(loop.states)
    recurrences += ["sum over time" if is_sum else None for is_sum in sum_carries(loop)]
    obstacles, nouns = obstacles_of(node)
    inner = tuple(_inner_loops(node, setting, compiled=not setting.runs(node)[1]))
    order = "one function for the loop, operation by operation in each step"
    running = setting.running(node, order, _grade_general(obstacles, nouns))
    if is_newton(op):
        running |= _grade_newton(constant_integer(loop.n_steps))
        obstacles, nouns = [], ["one Newton iteration for all steps"]
    return LoopExplanation(
        op="Scan",
        work=listed(nouns, 3) if nouns else "array operations",
        parts=_parts(loop, recurrences),
        obstacles=tuple(obstacles),
        inner=inner,
        step=step_formulas(loop),
        **running,
        **_common(op, node, setting),
    )


def _common(op: Scan, node: Apply, setting: Setting) -> dict[str, Any]:
    """Return what a canonical loop and a lowered one have in common."""
    return {
        "steps": replace(op.steps_of(node), may_stop=False).known(),
        "until": op.signature.has_stop,
        "reverse": op.signature.reverse,
        **_named(op.name, setting),
    }


def _named(name: str | None, setting: Setting) -> dict[str, Any]:
    # Derivatives name their loops so; a user's loop of that name would be taken for one.
    name = name or "loop"
    gradient = name == "gradient" or name.endswith("_gradient") or name.startswith("grad_of")
    return {"name": name, "gradient": gradient, "inside": setting.inside}


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
    loop = Loop.from_op(op.scan, node.inputs)
    parts: list[Any] = [*loop.sequences, *loop.states, *loop.non_sequences]
    for part in parts:
        part.name = None  # in the loop it is called by its role
    name_parts(loop)
    return LoopExplanation(
        op="LinearScan",
        work="a matrix times the state" + " (a vector)" * op.vector,
        parts=_parts(loop, [_RECURRENCES[op.semiring]]),
        step=step_formulas(loop),
        **setting.running(
            node, "a kernel for matrix recurrences", _grade_linear(op.coefficient == "steps")
        ),
        **_common(op.scan, node, setting),
    )


def _associative(node: Apply, setting: Setting) -> LoopExplanation:
    """Return the explanation of rows that are combined in a tree."""
    op: AssociativeScan = node.op
    loop = Loop.from_op(op.scan, node.inputs)
    name_parts(loop)
    return LoopExplanation(
        op="AssociativeScan",
        work="an associative function of two rows",
        schedule=setting.other_schedule(),
        runs=setting.runs(node)[0],
        **verdict(
            PARALLEL, "the function is promised to be associative, so rows combine in a tree"
        ),
        parts=_parts(loop, [None] * len(loop.states)),
        step=step_formulas(loop),
        **_common(op.scan, node, setting),
    )


def _legacy(node: Apply, setting: Setting) -> LoopExplanation:
    """Return the explanation of a loop of `pytensor.scan`: what it is, and no more."""
    op = node.op
    grade = _grade_legacy(setting.reasons.get(legacy_name(op)))
    return LoopExplanation(
        op="pytensor.scan",
        work="PyTensor's own loop",
        steps=constant_integer(node.inputs[0]),
        until=op.info.as_while,
        schedule="chosen by PyTensor",
        parts=(),
        obstacles=(Obstacle(None, grade["because"]),),
        inner=tuple(own for _, own in explain_nodes(op.fgraph.toposort(), setting)),
        **grade,
        reverse=False,
        runs=f"by PyTensor's own code for the {setting.linker} linker",
        **_named(op.name, setting),
    )


# What explains nodes of an Op; the first that fits.
_KINDS: tuple[tuple[type[Op], Callable[[Apply, Setting], LoopExplanation]], ...] = (
    (ElemwiseScan, _elementwise),
    (Scan, _scan),
    (LinearScan, _linear),
    (AssociativeScan, _associative),
)


# Parts


def _parts(loop: Loop, recurrences: Sequence[str | None]) -> tuple[Part, ...]:
    """Return the parts of a loop with names (`names.name_parts`) in the signature's order.

    `recurrences` has one entry for every state, then for every carry.
    """
    found = [_part("sequence", s.name, s.row, _row(s.outer)) for s in loop.sequences]
    own = iter(recurrences)
    for state in loop.states:
        tap = next(iter(state.taps.values()))
        stored = "last rows" if state.untraced else "history"
        part = _part("state", state.name, tap, _row(state.initial), stored, next(own))
        found.append(replace(part, taps=tuple(sorted(state.taps))))
    for carry in loop.carries:
        shape = getattr(carry.initial.type, "shape", None)
        found.append(_part("state", carry.name, carry.value, shape, "last value", next(own)))
    for item in loop.non_sequences:
        shape = getattr(item.outer.type, "shape", None)
        found.append(_part("non-sequence", item.name, item.inner, shape))
    found += [_part("output", o.name, o.value, stored="rows") for o in loop.outputs]
    return tuple(found)


def _row(variable: Variable) -> tuple[int | None, ...]:
    """Return the static shape of one row of a stacked variable."""
    return tuple(variable.type.shape[1:])


def _part(
    role: str,
    name: str | None,
    variable: Variable,
    shape: tuple[int | None, ...] | None = None,
    stored: str | None = None,
    recurrence: str | None = None,
) -> Part:
    """Return a part; `variable` has its dtype (or its type, where that is no tensor).

    A size is known where its own type or `shape` tells it.
    """
    dtype = variable.type.dtype if is_numeric(variable) else type(variable.type).__name__
    sizes = None
    if is_tensor(variable):
        own = variable.type.shape
        given = shape if shape is not None and len(shape) == len(own) else own
        sizes = tuple(a if a is not None else b for a, b in zip(own, given, strict=True))
    return Part(role, name or role, dtype, sizes, (), stored, recurrence)


# How good what runs is, why it is no better, and what the author of the loop can do


def _grade_elementwise(
    op: ElemwiseScan,
    chosen: str,
    recurrences: Sequence[str | None],
    titles: Sequence[str],
) -> dict[str, Any]:
    """Return the verdict on an elementwise loop; `chosen` is its schedule."""
    known = [name for name in dict.fromkeys(recurrences) if name and name != "no recurrence"]
    known = [name for name in known if name != "sum over time" or len(known) == 1] or ["none"]
    combined = (
        f"steps of this kind (recurrence class: {listed(known)}) can be combined, so several "
    )
    combined += "are computed at once"
    if chosen == "blocks":
        return verdict(PARALLEL, combined)
    if chosen == "by width":
        few = f"up to {few_channels(op)} columns with at least {MANY_STEPS} steps: {combined}"
        return verdict(PARALLEL, f"{few}; more columns: each step computes all columns at once")
    if op.layout.ndim:
        return verdict(
            FUSED, "each step computes all columns of a row at once, without temporaries"
        )
    open_ = [title for title, own in zip(titles, recurrences, strict=True) if own is None]
    if op.signature.has_stop:
        why = "`until` may end the loop after any step, so steps run one at a time"
    elif open_:
        why = f"steps of {listed(open_)} cannot be combined, so they run in order"
    else:
        why = "a row is one number, and what combines over steps is at most a sum"
    return verdict(FUSED, f"{why}, with all values in registers")


def _grade_general(obstacles: Sequence[Obstacle], nouns: Sequence[str]) -> dict[str, Any]:
    """Return the verdict on a loop that runs operation by operation."""
    actions = list(dict.fromkeys(own.action for own in obstacles if own.action))
    # Draws leave an elementwise step behind them, unless the step does other things as well.
    if len(nouns) > 1 and DRAWS in nouns:
        actions = [action for action in actions if not action.startswith("draw ")]
    action = "; ".join(actions) or NOTHING
    if not nouns:
        return verdict(IN_ORDER, str(obstacles[0]), action)
    why = f"each step does {listed(list(nouns), 3)} with the result of the step before"
    return verdict(IN_ORDER, why, action)


def _grade_linear(timed: bool) -> dict[str, Any]:
    """Return the verdict on a matrix recurrence; `timed` says whether each step has a matrix."""
    matrix = "a matrix for each step" if timed else "one matrix for all steps"
    why = f"the next state is linear in the state, with {matrix}: one kernel runs all steps"
    return verdict(FUSED, why)


def _grade_legacy(reason: str | None) -> dict[str, Any]:
    """Return the verdict on a loop of `pytensor.scan`, with the reason if it was not adopted."""
    if reason is not None:
        action = "build the loop with scanlib.scan, or remove what keeps it from being adopted"
        return verdict(IN_ORDER, f"PyTensor runs it: it was not adopted: {reason}", action)
    action = "call scanlib.enable() before pytensor.function, or build it with scanlib.scan"
    return verdict(
        IN_ORDER, "pytensor.scan made the loop, and scanlib does not look into it", action
    )


def _grade_newton(most: int | None) -> dict[str, Any]:
    """Return the verdict on Newton's iterations, of which there are `most` at most."""
    return verdict(
        PARALLEL,
        f"Newton's method computes all steps of a loop at once, in up to {most} iterations; each "
        "costs what the loop's steps cost with their Jacobians, and one linear recurrence over all "
        "steps",
        "compare with method='sequential', which is less work: on a CPU it is usually faster",
    )


def _threads(op: ElemwiseScan, chosen: str) -> tuple[int, str | None]:
    """Return how many threads a loop may use, and the share of each where there are several.

    `chosen` is the schedule of the compiled code; see `scanlib.schedules.selection.schedule`.
    """
    threads = wanted_threads()
    if threads == 1:
        return 1, None
    if chosen in ("channels", "by width") and can_slice(op):
        least = config.scanlib__parallel_channels
        return threads, (
            f"each for some of the channels: {least:,} channels times steps, and "
            f"{least_row(op):,} channels, at least"
        )
    if chosen != "blocks" or not can_chunk(op):
        return 1, None
    return threads, (
        f"each for some of the steps, {config.scanlib__parallel_steps:,} at least, if coefficients "
        "decay: a few steps before give a thread its first value"
    )
