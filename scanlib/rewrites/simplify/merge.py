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
from scanlib.rewrites.simplify.redundant import assumed, equal_inputs, equal_states


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
    if a.stop is not None and not _stop_together(merged, b):
        return None
    new = results_by_part(merged, merged.apply())
    replacements = {}
    for loop, node in ((a, first), (b, second)):
        parts = [*loop.states, *loop.carries, *loop.outputs]
        replacements.update(
            {old: new[id(part)] for part, old in zip(parts, node.outputs, strict=True)}
        )
    return replacements


def _stop_together(merged: Loop, other: Loop) -> bool:
    """Whether the conditions of two loops are one, given what is equal in both."""
    same = equal_inputs(merged)
    recurrent = equal_states(merged, same)
    conditions = substitute([merged.stop, other.stop], same | assumed(recurrent))
    one, two = freeze_graph(merged.body_inputs(), conditions).outputs
    return one is two


def merge_loops(fgraph: FunctionGraph, nodes: list[Apply]) -> dict[Variable, Variable] | None:
    """Merge the first pair of loops that can be merged; return the replacements."""
    for i, first in enumerate(nodes):
        for second in nodes[i + 1 :]:
            if mergeable(first, second) and independent(first, second):
                replacements = merge(first, second)
                if replacements is not None:
                    return replacements
    return None
