"""Which parts of a loop depend on which: the components that must run together.

A part (a state or a carry) depends on another if its next value reads one of the other's past
values. The strongly connected components of that graph, in an order in which each depends on
earlier ones only, are the smallest recurrences a loop consists of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytensor.graph.basic import Variable

from scanlib.ops.lowered.positions import inputs_read
from scanlib.ops.recursion import Task, finished


def dependences(
    nexts: Mapping[int, Variable], taps: Mapping[int, Sequence[Variable]]
) -> dict[int, set[int]]:
    """Return, for each part, the parts whose past values its next value reads."""
    part_of = {tap: part for part, reads in taps.items() for tap in reads}
    return {
        part: {
            part_of[variable]
            for variable, ways in inputs_read([value]).items()
            if ways and variable in part_of
        }
        for part, value in nexts.items()
    }


def components(depends: Mapping[int, set[int]]) -> list[tuple[int, ...]]:
    """Return the strongly connected components, those that others depend on first.

    Found by Tarjan's algorithm (R. Tarjan, "Depth-first search and linear graph algorithms",
    1972), which finishes a component after all that it depends on.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    waiting: set[int] = set()  # what the stack holds
    found: list[tuple[int, ...]] = []

    def visit(part: int) -> Task:
        index[part] = low[part] = len(index)
        stack.append(part)
        waiting.add(part)
        for other in sorted(depends[part]):
            if other not in index:
                yield visit(other)
                low[part] = min(low[part], low[other])
            elif other in waiting:
                low[part] = min(low[part], index[other])
        if low[part] == index[part]:
            own = [stack.pop()]
            while own[-1] != part:
                own.append(stack.pop())
            waiting.difference_update(own)
            found.append(tuple(sorted(own)))

    for part in depends:
        if part not in index:
            finished(visit(part))
    return found
