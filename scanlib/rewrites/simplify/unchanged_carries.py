"""Carries that no step changes are no carries.

What later steps owe to an accumulator is the same at every step, so the gradient of a sum carries
a value that never changes. As a non-sequence it does not stand in the way of evaluating the loop
for all steps at once.
"""

from __future__ import annotations

from scanlib.ops.loop import Carry, NonSequence, State
from scanlib.rewrites.edit import LoopEdit


def forward_constants(edit: LoopEdit) -> None:
    """Turn carries, and states that are not stored, into non-sequences where nothing changes."""
    loop = edit.loop
    parts: list[State | Carry] = [*loop.states, *loop.carries]
    for part in parts:
        if isinstance(part, State):
            if not part.untraced or set(part.taps) != {-1} or part.next is not part.taps[-1]:
                continue
            if loop.required_steps:
                continue  # the check that there are steps belongs to the state
            old, outer = part.taps[-1], part.initial[0]
        elif part.next is part.value:
            old, outer = part.value, part.initial
        else:
            continue
        if len(loop.body_outputs()) == 1:
            continue  # nothing else is computed: who reads the number of steps needs the loop
        inner = old.type()
        loop.non_sequences.append(NonSequence(outer, inner, part.name))
        edit.redirect(part, part.initial)
        loop.substitute({old: inner})
