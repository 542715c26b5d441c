"""Checkpoints: what users ask for, and `scan_checkpoints` with its classic signature."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from pytensor.tensor.random.type import RandomType

from scanlib.frontend.values import read_flag
from scanlib.ops.checkpoints import Lengths, Levels, Schedule
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop

_EXPECTED = (
    'checkpoint takes a segment length, a sequence of lengths, "sqrt", scanlib.Levels or '
    "scanlib.Memory"
)


def read_checkpoint(checkpoint: Any) -> Schedule | None:
    """Return the schedule that a user asks for, None where steps are stored.

    Raises
    ------
    TypeError, ValueError
        If it is nothing that can be asked for.
    """
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

    Raises
    ------
    TypeError
        If it carries what cannot be stored where a segment starts, naming the value.
    ValueError
        If there are sure to be too few bytes.
    """
    if loop.checkpoint is None:
        return
    loop.checkpoint.check(loop)
    for carry in loop.carries:
        if not is_tensor(carry.value) and not isinstance(carry.value.type, RandomType):
            raise TypeError(
                f"{title}: checkpoints store tensors and random generators at the start of a "
                f"segment, but {carry.name or 'a carried value'} has type {carry.value.type}; "
                "leave out `checkpoint`"
            )


def scan_checkpoints(
    fn: Callable[..., Any],
    sequences: Any = None,
    outputs_info: Any = None,
    non_sequences: Any = None,
    name: str | None = "checkpointscan_fn",
    n_steps: Any = None,
    save_every_N: int = 10,  # noqa: N803
    padding: bool = True,
    return_updates: bool = True,
) -> Any:
    """Build a loop whose gradient stores every `save_every_N`-th step and computes the others anew.

    The call of `pytensor.scan_checkpoints`, without its limits: sequences may have taps and
    different lengths, outputs may have taps, `n_steps` may be less than the sequences allow and
    need not be a multiple of `save_every_N`, the step may update shared variables, draw random
    numbers and return `until`.

    Parameters
    ----------
    fn, sequences, outputs_info, non_sequences, name, n_steps, return_updates
        As in `scan`.
    save_every_N : int, optional
        The number of steps in a segment.
    padding : bool, optional
        Accepted for compatibility. The steps that fill no segment run as a shorter one; nothing
        is ever padded or copied.

    Returns
    -------
    outputs : variable, list of variable, or None
        The outputs of all steps, of shape ``(steps, …)``. `pytensor.scan_checkpoints` returns
        those at the ends of segments alone, which are
        ``outputs[save_every_N - 1 :: save_every_N]`` and the last one.
    updates : dict
        As in `scan`.

    Raises
    ------
    TypeError, ValueError
        As `scan` does; also if `save_every_N` is no positive integer.

    Notes
    -----
    T. Chen et al., "Training deep nets with sublinear memory cost", 2016. ``scan(…,
    checkpoint=…)`` has more schedules.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> h = pt.vector("h")
    >>> trace = scanlib.scan_checkpoints(
    ...     lambda h: h * (1.0 - 0.1 * h),
    ...     outputs_info=h,
    ...     n_steps=95,
    ...     save_every_N=10,
    ...     return_updates=False,
    ... )
    >>> gradient = pytensor.function([h], pytensor.grad(trace[-1].sum(), h))
    >>> gradient([1.0]).round(6)
    array([0.007822])
    """
    from scanlib.frontend.scan import scan

    read_flag("scan_checkpoints", "padding", padding)
    if not isinstance(save_every_N, int | np.integer) or isinstance(save_every_N, bool):
        raise TypeError(f"scan_checkpoints: save_every_N must be an integer, got {save_every_N!r}")
    if save_every_N < 1:
        raise ValueError(f"scan_checkpoints: save_every_N must be at least 1, got {save_every_N}")
    return scan(
        fn,
        sequences=sequences,
        outputs_info=outputs_info,
        non_sequences=non_sequences,
        n_steps=n_steps,
        name=name,
        return_updates=return_updates,
        checkpoint=save_every_N,
    )
