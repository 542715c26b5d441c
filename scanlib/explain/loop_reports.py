"""From the nodes of a graph to explanations: what each loop is made of, and what runs it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import ancestors

from scanlib._compat import LegacyScan, thaw_graph
from scanlib.analysis.recognition import analyse
from scanlib.analysis.scalar_body import NotElementwiseError, ScalarLoop, sum_carries
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
from scanlib.ops.execution import BROUGHT
from scanlib.ops.graph import before_writes, is_numeric, is_tensor
from scanlib.ops.linker_features import data_in
from scanlib.ops.loop import Carry, Loop, State
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.lowered.newton_scan import is_newton
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt.adopt import legacy_name
from scanlib.rewrites.lower.lower_elementwise import lower_elementwise
from scanlib.rewrites.lower.single_items import items_apart
from scanlib.schedules.selection import (
    MANY_STEPS,
    can_chunk,
    can_slice,
    few_channels,
    has_complex,
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

_NARROW = (
    "compute in float32, as all its data are: a Python number such as 0.1 makes a step compute in "
    "float64, which takes twice as long, and so do integers of more than 16 bits; write "
    'np.float32(0.1), or set pytensor.config.floatX to float32, and k.astype("float32")'
)
_SIZES = (
    "where arrays are small and their sizes never change, say so, as in pt.tensor(shape=(None, 3)) "
    "for rows of three numbers, or with freeze_dims_and_data in PyMC: more is recognized then"
)

Found = tuple[Apply, LoopExplanation]
# Recurrence classes of all states, then of all carries, and what else an explanation holds.
Report = tuple[Sequence[str | None], dict[str, Any]]


def explain_nodes(nodes: Iterable[Apply], setting: Setting) -> list[Found]:
    """Return the loops among nodes, and among the inner graphs of other Ops, in their order."""
    found: list[Found] = []
    for node in nodes:
        if isinstance(node.op, tuple(_KINDS)):
            found.append((node, _explain(node, setting)))
        elif isinstance(node.op, LegacyScan):
            found.append((node, _legacy(node, setting)))
        elif isinstance(node.op, HasInnerGraph):
            where = [*filter(None, [setting.inside]), str(node.op).split("{")[0]]
            within = replace(setting, inside=" > ".join(where)).of(node.op.fgraph)
            found += explain_nodes(node.op.fgraph.toposort(), within)
    return found


def _explain(node: Apply, setting: Setting) -> LoopExplanation:
    """Return the explanation of a loop, canonical or lowered."""
    scan: Scan = getattr(node.op, "scan", node.op)
    loop = Loop.from_op(scan, node.inputs)
    if isinstance(node.op, LinearScan):  # it calls its parts by their roles
        parts: list[Any] = [*loop.sequences, *loop.states, *loop.non_sequences]
        for part in parts:
            part.name = None
    name_parts(loop)
    kind, explain = next(pair for pair in _KINDS.items() if isinstance(node.op, pair[0]))
    recurrences, found = explain(node, loop, setting)
    if _is_widened(node):
        actions = [*filter(NOTHING.__ne__, [found["action"]]), _NARROW]
        found["action"] = "; ".join(actions)
    return LoopExplanation(
        op=kind.__name__,
        steps=scan.steps_of(node).most(),
        until=loop.stop is not None,
        reverse=loop.reverse,
        parts=_parts(loop, recurrences),
        step=step_formulas(loop),
        **_named(loop.name, setting),
        **found,
    )


def _has_unknown_sizes(loop: Loop) -> bool:
    """Whether steps of a state work on arrays, other than those into which they write, whose sizes
    are known when the loop runs."""
    written = {before_writes(part.next) for part in loop.recurrent}
    rows = [*loop.body_inputs(), *(part.next for part in loop.recurrent)]
    shapes = [
        row.type.shape
        for row in rows
        if is_tensor(row) and row not in written and before_writes(row) is row
    ]
    return bool(loop.recurrent) and any(None in shape for shape in shapes)


def _is_widened(node: Apply) -> bool:
    """Whether a loop computes in double precision from nothing but single precision."""
    dtypes = {getattr(out.type, "dtype", None) for out in node.outputs}
    if not dtypes & {"float64", "complex128"}:
        return False
    roots = [root for root in ancestors(node.inputs) if root.owner is None and is_tensor(root)]
    arrays = (r for r in roots if not isinstance(r, Constant) or np.size(r.data) > 1)
    data = {array.type.dtype for array in arrays}
    return "float32" in data and not data & {"float64", "complex128"}


def _named(name: str | None, setting: Setting) -> dict[str, Any]:
    # Derivatives name their loops so; a user's loop of that name would be taken for one.
    name = name or "loop"
    gradient = name == "gradient" or name.endswith("_gradient") or name.startswith("grad_of")
    return {"name": name, "gradient": gradient, "inside": setting.inside}


def _elementwise(node: Apply, loop: Loop, setting: Setting) -> Report:
    op: ElemwiseScan = node.op
    graph = thaw_graph(op.body)
    analysis = analyse(ScalarLoop(loop, graph.inputs, graph.outputs, op.layout))
    parts: list[State | Carry] = [*loop.states, *loop.carries]
    notes = {
        titled("state", part.name): note
        for part, note, family in zip(parts, analysis.notes, analysis.families, strict=True)
        if family is None
    }
    grade = _grade_elementwise(op, analysis.families, list(notes))
    obstacles = [Obstacle(*pair) for pair in notes.items()]
    chosen = schedule(op)
    if chosen == "steps" and loop.stop is not None:
        obstacles.append(Obstacle("`until`", "steps after the last one must not be computed"))
    running = setting.running(node, SCHEDULES[chosen], grade)
    if not setting.runs(node)[1]:
        running |= _threads(op, chosen)
    found = {"work": "elementwise arithmetic", "obstacles": tuple(obstacles), **running}
    return analysis.families, found


def _scan(node: Apply, loop: Loop, setting: Setting) -> Report:
    recurrences: list[str | None] = [None] * len(loop.states)
    recurrences += ["sum over time" if is_sum else None for is_sum in sum_carries(loop)]
    order = "one function for the loop, operation by operation in each step"
    if (items := _but_for_items(node, setting)) is not None:
        grade = {key: items.pop(key) for key in ("grade", "because", "action")}
        return recurrences, items | setting.running(node, order, grade)
    obstacles, nouns = obstacles_of(node, setting.rewrites)
    grade = _grade_general(obstacles, nouns, is_map=not loop.recurrent)
    if grade["action"] == NOTHING and _has_unknown_sizes(loop):
        grade["action"] = _SIZES
    running = setting.running(node, order, grade)
    if is_newton(node.op):
        running |= _grade_newton(constant_integer(loop.n_steps))
        obstacles, nouns = [], ["one Newton iteration for all steps"]
    work = listed(nouns, 3) if nouns else "array operations"
    inner = tuple(_inner_loops(node, setting))
    return recurrences, {"work": work, "obstacles": tuple(obstacles), "inner": inner, **running}


def _but_for_items(node: Apply, setting: Setting) -> dict[str, Any] | None:
    """Return what there is to say of a loop that would be elementwise if it read no single items
    of arrays, and gains nothing by it; None for others."""
    apart = items_apart(node)
    if apart is None:
        return None
    try:
        lowered = lower_elementwise(apart)
    except NotElementwiseError:
        return None
    loop = Loop.from_node(lowered)
    name_parts(loop)
    _, found = _elementwise(lowered, loop, setting)
    return None if found["grade"] == PARALLEL else found


def _inner_loops(node: Apply, setting: Setting) -> list[LoopExplanation]:
    """Return the loops inside a step, as they are when the body is compiled."""
    op: Scan = node.op
    found = explain_nodes(op.body.toposort(), setting)
    if found and setting.linker == "JAX":
        from scanlib.backends.jax.loops import prepared_body

        body = prepared_body(op, node)
        found = explain_nodes(body.toposort(), setting.of(body, data_in(body)))
    elif found and not setting.runs(node)[1]:
        found = explain_nodes(BROUGHT["body"](op).fgraph.toposort(), setting)
    return [loop for _, loop in found]


def _linear(node: Apply, loop: Loop, setting: Setting) -> Report:
    op: LinearScan = node.op
    matrix = "a matrix for each step" if op.coefficient == "steps" else "one matrix for all steps"
    why = f"the next state is linear in the state, with {matrix}: one kernel runs all steps"
    running = setting.running(node, "a kernel for matrix recurrences", verdict(FUSED, why))
    work = "a matrix times the state" + " (a vector)" * op.vector
    return [_RECURRENCES[op.semiring]], {"work": work, **running}


def _associative(node: Apply, loop: Loop, setting: Setting) -> Report:
    why = "the function is promised to be associative, so rows combine in a tree"
    running = verdict(PARALLEL, why) | {"schedule": setting.other_schedule()}
    running |= {"work": "an associative function of two rows", "runs": setting.runs(node)[0]}
    return [None] * len(loop.states), running


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


# What reports on nodes of an Op, with names in their loop.
_KINDS: dict[type[Op], Callable[[Apply, Loop, Setting], Report]] = {
    ElemwiseScan: _elementwise,
    Scan: _scan,
    LinearScan: _linear,
    AssociativeScan: _associative,
}


# Parts


def _parts(loop: Loop, recurrences: Sequence[str | None]) -> tuple[Part, ...]:
    """Return the parts of a loop with names (`names.name_parts`) in the signature's order.

    `recurrences` has one entry for every state, then for every carry.
    """
    own = iter(recurrences)
    found = [_part("sequence", part, part.outer, 1) for part in loop.sequences]
    for state in loop.states:
        stored, taps = "last rows" if state.untraced else "history", tuple(sorted(state.taps))
        found.append(_part("state", state, state.initial, 1, stored, next(own), taps))
    for carry in loop.carries:
        found.append(_part("state", carry, carry.initial, 0, "last value", next(own)))
    found += [_part("non-sequence", part, part.outer, 0) for part in loop.non_sequences]
    found += [_part("output", part, part.value, 0, "rows") for part in loop.outputs]
    return tuple(found)


def _part(role: str, part: Any, variable: Variable, lead: int, *others: Any) -> Part:
    """Return a part of a loop; a row of it is what `lead` axes leave of a variable."""
    shape = tuple(variable.type.shape[lead:]) if is_tensor(variable) else None
    dtype = variable.type.dtype if is_numeric(variable) else type(variable.type).__name__
    return Part(role, part.name or role, dtype, shape, *others)


# How good what runs is, why it is no better, and what the author of the loop can do


def _grade_elementwise(
    op: ElemwiseScan, recurrences: Sequence[str | None], of_no_class: list[str]
) -> dict[str, Any]:
    """Return the verdict on an elementwise loop; some states are of no recurrence class."""
    chosen = schedule(op)
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
    if op.signature.has_stop:
        why = "`until` may end the loop after any step, so steps run one at a time"
    elif of_no_class:
        why = f"steps of {listed(of_no_class)} cannot be combined, so they run in order"
    elif has_complex(op):
        why = "combining steps of complex numbers takes longer than running them in order"
    else:
        why = "a row is one number, and what combines over steps is at most a sum"
    return verdict(FUSED, f"{why}, with all values in registers")


def _grade_general(
    obstacles: Sequence[Obstacle], nouns: Sequence[str], is_map: bool
) -> dict[str, Any]:
    """Return the verdict on a loop that runs operation by operation; of a map, no step reads what
    another one computed."""
    actions = list(dict.fromkeys(own.action for own in obstacles if own.action))
    # Draws leave an elementwise step behind them, unless the step does other things as well.
    if len(nouns) > 1 and DRAWS in nouns:
        actions = [action for action in actions if not action.startswith("draw ")]
    action = "; ".join(actions) or NOTHING
    if not nouns:
        return verdict(IN_ORDER, str(obstacles[0]), action)
    why = f"each step does {listed(list(nouns), 3)}"
    why += " by itself" if is_map else " with the result of the step before"
    return verdict(IN_ORDER, why, action)


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


def _threads(op: ElemwiseScan, chosen: str) -> dict[str, Any]:
    """Return how many threads a loop may use, and the share of each where there are several.

    `chosen` is the schedule of the compiled code; see `scanlib.schedules.selection.schedule`.
    """
    threads = wanted_threads()
    if threads > 1 and chosen in ("channels", "by width") and can_slice(op):
        shares = (
            f"each for some of the channels: {config.scanlib__parallel_channels:,} channels times "
            f"steps, and {least_row(op):,} channels, at least"
        )
    elif threads > 1 and chosen == "blocks" and can_chunk(op):
        shares = (
            f"each for some of the steps, {config.scanlib__parallel_steps:,} at least, if "
            "coefficients decay: a few steps before give a thread its first value"
        )
    else:
        return {}
    return {"threads": threads, "shares": shares}
