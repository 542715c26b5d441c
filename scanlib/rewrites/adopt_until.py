"""Loops that take the steps which a loop of `pytensor.scan` with `until` ran: its gradients.

Such a loop is given a mask among its sequences, `RanSteps` of a result of the loop with `until`.
Nothing reads it and rewrites drop it, but in a batch every member ends by itself, while the number
of steps is one for all. See `scanlib.ops.ran_steps`.
"""

from __future__ import annotations

from pytensor.graph.basic import Variable

from scanlib.ops.gradient.cotangents import split_output
from scanlib.ops.ran_steps import RanSteps
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt_forms import Form, minimum
from scanlib.rewrites.adopt_rows import Rows, View


def ran_steps(steps: Form, rows: Rows) -> tuple[Form, Variable | None]:
    """Return a number of steps, and which of them a loop with `until` ran that has as many.

    The number is made the simplest expression of it. None if there is no such loop.
    """
    forms = [steps, *(form for least, _ in steps.minima() for form in least)]
    for form in forms:
        for (kind, stacked), _ in form.terms:
            loop = stacked.owner if kind == "rows" else None
            if loop is None or not isinstance(loop.op, Scan) or not loop.op.signature.has_stop:
                continue
            signature, position = loop.op.signature, loop.outputs.index(stacked)
            depth = signature.depths[position] if position < signature.n_states else 0
            if form != Form.of("rows", stacked) - depth:
                continue
            inputs = signature.split_inputs(loop.inputs)
            most = [rows.of(sequence) for sequence in inputs.sequences]
            if inputs.n_steps is not None:
                most.append(rows.integer(inputs.n_steps))
            if steps == minimum([form, *most]) or form == steps:
                return form, RanSteps(depth)(stacked)
            return steps, RanSteps(depth, from_first=False)(stacked)[-steps.variable() :]
    return steps, None


def no_batch_of(ran: Variable) -> Variable:
    """Return a mask of which there is no batch."""
    return RanSteps(0, from_first=False)(ran)


def end_of(view: View) -> tuple[Variable, Variable | None] | None:
    """Return the cotangent of the last row, and that of other rows, whose sum the view reads.

    None if it has no part that is for the last row alone.
    """
    if not view.is_whole:
        return None
    parts = split_output(view.base)
    if parts.last is None:
        return None
    rest = parts.rows
    return parts.last, rest[::-1] if rest is not None and view.flipped else rest
