"""Recursion over graphs as deep as they get: Python's stack holds no more than a thousand calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pytensor.graph.basic import Variable

MOST_TERMS = 10_000
CALLS_OF_A_NODE = 4  # of PyTensor's `grad`, which calls itself


@contextmanager
def room_for_calls(nodes: int) -> Iterator[None]:
    """Let functions of PyTensor call themselves as often as a graph of so many nodes takes.

    Calls between Python functions take memory, and no part of the stack of the C library.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, before + CALLS_OF_A_NODE * nodes))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


Task = Generator[Any, Any, Any]
"""A computation that yields the computations whose results it needs, and is sent the results."""


def finished(task: Task) -> Any:
    """Run a computation, and all that it asks for, and return its result.

    ::

        def depth(variable):
            inputs = variable.owner.inputs if variable.owner else []
            found = []
            for inp in inputs:
                found.append((yield depth(inp)))
            return 1 + max(found, default=0)

        finished(depth(variable))

    What a computation that was asked for raises is raised where it was asked for.
    """
    waiting = [task]
    result: Any = None
    error: Exception | None = None
    while waiting:
        try:
            asked = waiting[-1].send(result) if error is None else waiting[-1].throw(error)
        except StopIteration as stop:
            waiting.pop()
            result, error = stop.value, None
        except Exception as raised:
            waiting.pop()
            result, error = None, raised
        else:
            waiting.append(asked)
            result, error = None, None
    if error is not None:
        raise error
    return result


def taken_apart(
    variable: Variable, parts: Callable[[Variable], Sequence[Variable] | None]
) -> list[Variable]:
    """Return the terms of nested sums in their order; `parts` are those of one sum, else None.

    A sum of more than `MOST_TERMS` is left whole: doubling thirty times makes a billion.
    """
    found: list[Variable] = []
    pending = [variable]
    while pending:
        term = pending.pop()
        inside = parts(term)
        if inside is None:
            found.append(term)
        else:
            pending += reversed(inside)
        if len(found) + len(pending) > MOST_TERMS:
            return [variable]
    return found
