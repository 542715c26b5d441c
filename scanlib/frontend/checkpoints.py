"""Checkpoints: what users ask for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from pytensor.tensor.random.type import RandomType

from scanlib.ops.checkpoint_schedules import Lengths, Levels, Schedule
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop

_EXPECTED = (
    'checkpoint takes a segment length, a sequence of lengths, "sqrt", scanlib.Levels or '
    "scanlib.Memory"
)


def read_checkpoint(checkpoint: Any) -> Schedule | None:
    """Return the schedule that a user asks for, None where steps are stored; `TypeError` or
    `ValueError` if it is nothing that can be asked for."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, Schedule):
        return None if checkpoint == Levels(1) else checkpoint
    if isinstance(checkpoint, str):
        if checkpoint != "sqrt":
            raise ValueError(f"{_EXPECTED}, got {checkpoint!r}")
        return Levels(2)
    given = checkpoint if isinstance(checkpoint, list | tuple) else [checkpoint]
    if not given:
        raise ValueError(f"{_EXPECTED}, got {checkpoint!r}")
    for length in given:
        if not isinstance(length, int | np.integer) or isinstance(length, bool):
            raise TypeError(f"{_EXPECTED}, got {checkpoint!r}")
        if length < 1:
            raise ValueError(
                f"checkpoint must be a length of at least 1 step, got {checkpoint!r}; leave it out "
                "to store every step"
            )
    lengths = tuple(int(length) for length in given)
    if any(inner >= outer for outer, inner in pairwise(lengths)):
        raise ValueError(
            f"checkpoint={checkpoint!r}: nested segments get shorter from the outermost to the "
            "innermost"
        )
    return Lengths(lengths)


def check_checkpoint(loop: Loop, title: str) -> None:
    """Raise if a loop cannot be checkpointed as its user asks for.

    A `TypeError` if it carries what cannot be stored where a segment starts, a `ValueError` if
    there are sure to be too few bytes, or the gradient is truncated.
    """
    if loop.checkpoint is None:
        return
    if loop.truncate_gradient >= 0:
        raise ValueError(
            f"{title}: a gradient of the last {loop.truncate_gradient} steps has no checkpoints; "
            "leave out `checkpoint` or `truncate_gradient`, or take the steps before in a loop of "
            "their own and pass its last values on by pytensor.gradient.disconnected_grad"
        )
    loop.checkpoint.check(loop)
    for carry in loop.carries:
        if not is_tensor(carry.value) and not isinstance(carry.value.type, RandomType):
            raise TypeError(
                f"{title}: checkpoints store tensors and random generators at the start of a "
                f"segment, but {carry.name or 'a carried value'} has type {carry.value.type}; "
                "leave out `checkpoint`"
            )
