"""What nobody reads goes: outputs, states, carries, and then inputs."""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import ancestors

from scanlib.ops.loop import Carry, State
from scanlib.ops.row_ops.ran_steps import RanSteps, is_mask, steps_of
from scanlib.rewrites.edit import LoopEdit


def drop_unread_results(edit: LoopEdit) -> None:
    """Drop outputs nobody reads, and states and carries that serve only themselves."""
    loop = edit.loop
    for output in list(loop.outputs):
        if not edit.is_read(output):
            edit.drop(output)
    recurrent: list[State | Carry] = [*loop.states, *loop.carries]
    live = [part for part in recurrent if edit.is_read(part)]
    roots: list[Variable] = [output.value for output in loop.outputs]
    if loop.stop is not None:
        roots.append(loop.stop)
    while True:
        needed = set(ancestors([*roots, *(part.next for part in live)]))
        more = [
            part
            for part in recurrent
            if not any(part is known for known in live) and needed.intersection(_reads(part))
        ]
        if not more:
            break
        live += more
    for part in recurrent:
        if not any(part is known for known in live):
            edit.drop(part)


def _reads(part: State | Carry) -> list[Variable]:
    return list(part.taps.values()) if isinstance(part, State) else [part.value]


def drop_unread_inputs(edit: LoopEdit) -> None:
    """Drop sequences and non-sequences that no step reads, and taps nobody needs."""
    loop = edit.loop
    read = set(ancestors(loop.body_outputs()))
    for state in loop.states:
        farthest = -state.depth
        unread = [tap for tap, var in state.taps.items() if var not in read and tap != farthest]
        for tap in unread:
            del state.taps[tap]
            edit.changed = True
    non_sequences = [part for part in loop.non_sequences if part.inner in read]
    sequences = [part for part in loop.sequences if part.row in read]
    if len(non_sequences) < len(loop.non_sequences):
        loop.non_sequences = non_sequences
        edit.changed = True
    if len(sequences) < len(loop.sequences):
        if not sequences and loop.n_steps is None:
            masks = [part.outer for part in loop.sequences if is_mask(part.outer)]
            if masks:
                loop.n_steps = steps_of(masks[0])
            elif len(loop.sequences) == 1:
                return  # it still gives the number of steps, at no cost
            else:
                sequences = loop.sequences[:1]
        loop.sequences = sequences
        edit.changed = True


@node_rewriter([RanSteps])
def fill_mask(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    """Write a mask that no rewrite dropped with PyTensor's own Ops."""
    return [pt.ones(steps_of(node.outputs[0]), dtype="bool")]
