"""Recursion over graphs as deep as they get: Python's stack holds no more than a thousand calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pytensor.graph.basic import Variable

MOST_TERMS = 10_000
CALLS_OF_A_NODE = 4  # of PyTensor's `grad`, which calls itself, and of `ScalarValues.convert`


@contextmanager
def room_for_calls(nodes: int) -> Iterator[None]:
    """Let functions call themselves as often as a graph of so many nodes takes.

    Calls between Python functions take memory, and no part of the stack of the C library.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, before + CALLS_OF_A_NODE * nodes))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


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
