"""How gradients save memory, and how states are computed: what users ask for, and what is found."""

from itertools import pairwise
from typing import Any

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.type import RandomType

from scanlib.frontend.values import brief, shown
from scanlib.ops.checkpoint_schedules import Lengths, Levels, Schedule
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop, Results
from scanlib.ops.lowered.newton_scan import Newton, NewtonScan

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


def read_method(method: Any) -> Newton | None:
    """Return how a loop is solved for all its steps at once, None if it is run step by step;
    `TypeError` or `ValueError` if it is nothing that can be asked for."""
    if isinstance(method, Newton):
        return method
    expected = 'method must be "sequential", "newton" or scanlib.Newton(...)'
    if not isinstance(method, str):
        raise TypeError(f"{expected}, got {shown(method)}")
    if method not in ("sequential", "newton"):
        raise ValueError(f"{expected}, got {method!r}")
    return Newton() if method == "newton" else None


def solve(loop: Loop, newton: Newton, title: str) -> Results:
    """Return the results of a loop that is solved by Newton's method; `TypeError` or `ValueError`
    if it is a loop of another kind."""
    if loop.stop is not None:
        raise ValueError(
            f"{title}: Newton's method solves for a known number of steps, and the step returns "
            "`until`; take it out, or leave out method"
        )
    if loop.checkpoint is not None:
        raise ValueError(
            f"{title}: Newton's method stores all steps; leave out checkpoint or method"
        )
    for carry in loop.carries:
        raise TypeError(
            f"{title}: Newton's method linearizes every step, and {carry.name or carry.initial} "
            f"({carry.initial.type}) is carried from step to step without being a state of real "
            "numbers; draw random numbers before the loop and pass them as a sequence, or leave "
            "out method"
        )
    for i, state in enumerate(loop.states):
        kind = np.dtype(state.next.type.dtype).kind if is_tensor(state.next) else "O"
        if kind != "f":
            raise TypeError(
                f"{title}: Newton's method solves for real numbers, and state "
                f"{state.name or i} is of type {state.next.type}; give a floating-point initial "
                "value, or leave out method"
            )
    if not loop.states:
        return loop.apply()
    plain = loop.apply()
    node = NewtonScan(plain.node.op, newton).make_node(*plain.node.inputs)
    return node.op.results(node.outputs)


def newton_iterations(result: Variable) -> Variable:
    """Return how many iterations a loop took that was solved by Newton's method.

    Parameters
    ----------
    result : TensorVariable
        A result of `scan` with ``method="newton"``, or what was computed from it.

    Returns
    -------
    TensorVariable
        The number of iterations, a scalar of dtype int64: those of the entry of a batch that took
        most.

    Raises
    ------
    ValueError
        If `result` does not depend on such a loop, or on several.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> h, _ = scanlib.scan(lambda x, h: pt.tanh(x + h), x, pt.constant(0.0), method="newton")
    >>> print(pytensor.function([x], scanlib.newton_iterations(h))([0.0, 0.5, 1.0]))
    3
    """
    nodes = {v.owner for v in ancestors([result]) if v.owner and isinstance(v.owner.op, NewtonScan)}
    if len(nodes) != 1:
        raise ValueError(
            f"newton_iterations: {len(nodes)} loops that are solved by Newton's method lead to "
            f"{brief(result)}; pass a result of one scan(..., method='newton')"
        )
    return nodes.pop().outputs[-2]
