"""Loops that take the steps which a loop of `pytensor.scan` with `until` ran: its gradients.

Such a loop is given a mask among its sequences, `RanSteps` of a result of the loop with `until`.
Nothing reads it and rewrites drop it, but in a batch every member ends by itself, while the number
of steps is one for all. See `scanlib.ops.row_ops.ran_steps`.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib.lengths.arrays import Lengths, View
from scanlib.lengths.forms import LengthForm, minimum, number
from scanlib.lengths.numbers import constant_index
from scanlib.ops.gradient.cotangents import split_history, split_output
from scanlib.ops.row_ops.ran_steps import RanSteps, is_mask
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt.adopt_buffers import placements


def ran_steps(steps: LengthForm, rows: Lengths) -> tuple[LengthForm, Variable | None]:
    """Return a number of steps, and which of them a loop with `until` ran that has as many.

    The number is made the simplest expression of it. None if there is no such loop.
    """
    forms = [steps, *(form for least, _ in steps.minima() for form in least)]
    for form in forms:
        for (kind, what), _ in form.terms:
            stacked = what[0] if kind == "axis" else None
            loop = None if stacked is None else stacked.owner
            if loop is None or not isinstance(loop.op, Scan) or not loop.op.signature.has_stop:
                continue
            signature, position = loop.op.signature, loop.outputs.index(stacked)
            depth = signature.depths[position] if position < signature.n_states else 0
            if form != LengthForm.of_axis(stacked) - depth:
                continue
            inputs = signature.split_inputs(loop.inputs)
            most = [rows.of(sequence) for sequence in inputs.sequences]
            if inputs.n_steps is not None:
                most.append(rows.integer(inputs.n_steps))
            if steps == minimum([form, *most]) or form == steps:
                return form, RanSteps(depth)(stacked)
            return steps, RanSteps(depth, from_first=False)(stacked)[-steps.variable() :]
    return steps, None


def last_step(ran: Variable) -> Variable:
    """Return a mask that is true for the last of the steps that ran."""
    ended = pt.join(0, pt.invert(ran[1:]), pt.ones((1,), dtype="bool"))
    return pt.and_(ran, ended)


def end_of(view: View) -> tuple[Variable, Variable | None] | None:
    """Return the cotangent of the last row, and that of other rows, whose sum the view reads.

    None if it has no part that is for the last row alone.
    """
    skipped = view.front.constant
    if skipped is None or not view.back.is_zero:
        return None
    parts = split_history(view.base, skipped, reverse=False) if skipped else split_output(view.base)
    if parts.last is None or parts.ends is not None:
        return None
    rest = parts.rows
    return parts.last, rest[::-1] if rest is not None and view.flipped else rest


@node_rewriter([Subtensor])
def read_last_step(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Read the last row that a derivative stacked where the loop ended.

    In a batch, rows behind it are zeros.
    """
    indices = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    if len(indices) != 1 or isinstance(indices[0], slice) or constant_index(indices[0]) != -1:
        return None
    array = node.inputs[0]
    length = Lengths().of(array)
    rows = Lengths(length)
    terms, found = [], False
    for placed in placements(array, length, rows):
        behind = length - placed.start - placed.rows
        if not behind.is_zero:
            if number(1).at_most(behind):
                continue
            return None
        view = rows.view(placed.value)
        ran = _mask_of(view.base) if view.is_whole and not view.flipped else None
        if ran is None:
            terms.append(placed.value[-1])
            continue
        at_end = pt.expand_dims(last_step(ran), tuple(range(1, view.base.type.ndim)))
        terms.append(pt.switch(at_end, view.base, pt.zeros_like(view.base)).sum(axis=0))
        found = True
    return [sum(terms[1:], terms[0])] if found else None


def _mask_of(stacked: Variable) -> Variable | None:
    """Return which steps ran of a loop that stacks an output forwards, if a mask says so."""
    node = stacked.owner
    if node is None or not isinstance(node.op, Scan) or node.op.signature.reverse:
        return None
    signature = node.op.signature
    if stacked not in signature.split_outputs(node.outputs).outputs:
        return None
    masks = filter(is_mask, signature.split_inputs(node.inputs).sequences)
    return next(masks, None)


read_last_steps = dfs_rewriter(read_last_step)
