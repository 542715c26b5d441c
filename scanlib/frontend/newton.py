"""Loops that are solved by Newton's method: what users ask for, and what is found."""

from __future__ import annotations

from typing import Any

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from scanlib.frontend.values import brief
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop, Results
from scanlib.ops.lowered.newton_scan import Newton, NewtonScan


def read_method(method: Any) -> Newton | None:
    """Return how a loop is solved for all its steps at once, None if it is run step by step;
    `TypeError` or `ValueError` if it is nothing that can be asked for."""
    if isinstance(method, Newton):
        return method
    if not isinstance(method, str):
        raise TypeError(
            f'method must be "sequential", "newton" or scanlib.Newton(...), got {brief(method)} of '
            f"type {type(method).__name__}"
        )
    if method not in ("sequential", "newton"):
        raise ValueError(
            f'method must be "sequential", "newton" or scanlib.Newton(...), got {method!r}'
        )
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
    loop.conform_body()
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
