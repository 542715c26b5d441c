"""Loops of the same length over the same data become one loop."""

from __future__ import annotations

from dataclasses import replace

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors

from scanlib._compat import freeze_graph
from scanlib.ops.graph import substitute
from scanlib.ops.loop import Loop
from scanlib.rewrites.edit import results_by_part


def mergeable(first: Apply, second: Apply) -> bool:
    """Whether two loops run for the same number of steps and read some of the same data."""
    a, b = first.op.signature, second.op.signature
    if a.reverse != b.reverse or a.has_stop != b.has_stop:
        return False
    if first.op.truncate_gradient != second.op.truncate_gradient:
        return False
    if first.op.checkpoint != second.op.checkpoint or first.op.recompute != second.op.recompute:
        return False
    return _same_length(first, second) and bool(_data(first) & _data(second))


def _same_length(first: Apply, second: Apply) -> bool:
    a = first.op.signature.split_inputs(first.inputs)
    b = second.op.signature.split_inputs(second.inputs)
    if a.n_steps is not None and a.n_steps is b.n_steps:
        return True
    if a.n_steps is None and b.n_steps is None and set(a.sequences) & set(b.sequences):
        return True
    if first.op.signature.has_stop:
        return False
    mine, theirs = first.op.steps_of(first).known(), second.op.steps_of(second).known()
    return mine is not None and mine == theirs


def _data(node: Apply) -> set[Variable]:
    groups = node.op.signature.split_inputs(node.inputs)
    data = [*groups.sequences, *groups.initials, *groups.carries, *groups.non_sequences]
    return {variable for variable in data if not isinstance(variable, Constant)}


def independent(first: Apply, second: Apply) -> bool:
    """Whether neither loop reads what the other computes."""
    above_first = set(ancestors(first.inputs))
    above_second = set(ancestors(second.inputs))
    return not above_first.intersection(second.outputs) and not above_second.intersection(
        first.outputs
    )


def merge(first: Apply, second: Apply) -> dict[Variable, Variable] | None:
    """Return what replaces the outputs of two loops by those of one, None if that fails.

    Loops with `until` merge only if they stop at the same step, so their conditions must be
    the same expression of the same inputs.
    """
    a, b = Loop.from_node(first), Loop.from_node(second)
    if a.stop is not None and not _same_stop(a, b):
        return None
    named = b if b.name and not a.name else a
    merged = replace(
        a,
        n_steps=a.n_steps if a.n_steps is not None else b.n_steps,
        sequences=[*a.sequences, *b.sequences],
        states=[*a.states, *b.states],
        carries=[*a.carries, *b.carries],
        non_sequences=[*a.non_sequences, *b.non_sequences],
        outputs=[*a.outputs, *b.outputs],
        required_steps=max(a.required_steps, b.required_steps),
        name=named.name,
        function=named.function,
        associative=a.associative and b.associative,
    )
    new = results_by_part(merged, merged.apply())
    replacements = {}
    for loop, node in ((a, first), (b, second)):
        parts = [*loop.states, *loop.carries, *loop.outputs]
        replacements.update(
            {old: new[id(part)] for part, old in zip(parts, node.outputs, strict=True)}
        )
    return replacements


def _same_stop(a: Loop, b: Loop) -> bool:
    """Whether the conditions are equal when equal outer inputs are, which needs that all
    states they depend on are equal: the parts of both loops are matched by what they start
    from, and the match must survive a step."""
    pairs: dict[Variable, Variable] = {}
    outer = {part.outer: part.row for part in a.sequences}
    pairs.update({p.row: outer[p.outer] for p in b.sequences if p.outer in outer})
    whole = {part.outer: part.inner for part in a.non_sequences}
    pairs.update({p.inner: whole[p.outer] for p in b.non_sequences if p.outer in whole})
    states = {(state.initial, tuple(sorted(state.taps))): state for state in a.states}
    matched = []
    for state in b.states:
        mine = states.get((state.initial, tuple(sorted(state.taps))))
        if mine is not None:
            matched.append((mine.next, state.next))
            pairs.update({state.taps[tap]: mine.taps[tap] for tap in state.taps})
    carries = {carry.initial: carry for carry in a.carries}
    for carry in b.carries:
        own = carries.get(carry.initial)
        if own is not None:
            matched.append((own.next, carry.next))
            pairs[carry.value] = own.value
    assert a.stop is not None
    assert b.stop is not None
    mine_out = [a.stop, *(left for left, _ in matched)]
    theirs = substitute([b.stop, *(right for _, right in matched)], pairs)
    inputs = a.body_inputs() + [v for v in b.body_inputs() if v not in pairs]
    frozen = freeze_graph(inputs, [*mine_out, *theirs])
    half = len(mine_out)
    return all(
        left is right
        for left, right in zip(frozen.outputs[:half], frozen.outputs[half:], strict=True)
    )


def merge_loops(fgraph: FunctionGraph, nodes: list[Apply]) -> dict[Variable, Variable] | None:
    """Merge the first pair of loops that can be merged; return the replacements."""
    for i, first in enumerate(nodes):
        for second in nodes[i + 1 :]:
            if mergeable(first, second) and independent(first, second):
                replacements = merge(first, second)
                if replacements is not None:
                    return replacements
    return None
