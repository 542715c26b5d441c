"""Which parts of a loop depend on which: the components that must run together.

A part (a state or a carry) depends on another if its next value reads one of the other's past
values. The strongly connected components of that graph, in an order in which each depends on
earlier ones only, are the smallest recurrences a loop consists of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytensor.graph.basic import Variable

from scanlib.ops.positions import inputs_read


def dependences(
    nexts: Mapping[int, Variable], taps: Mapping[int, Sequence[Variable]]
) -> dict[int, set[int]]:
    """Return, for each part, the parts whose past values its next value reads."""
    result = {}
    for part, value in nexts.items():
        above = {variable for variable, ways in inputs_read([value]).items() if ways}
        result[part] = {other for other, reads in taps.items() if above.intersection(reads)}
    return result


def components(depends: Mapping[int, set[int]]) -> list[tuple[int, ...]]:
    """Return the strongly connected components, those that others depend on first.

    Found by Tarjan's algorithm (R. Tarjan, "Depth-first search and linear graph algorithms",
    1972), which finishes a component after all that it depends on.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[tuple[int, ...]] = []

    def visit(part: int) -> None:
        index[part] = low[part] = len(index)
        stack.append(part)
        for other in sorted(depends[part]):
            if other not in index:
                visit(other)
                low[part] = min(low[part], low[other])
            elif other in stack:
                low[part] = min(low[part], index[other])
        if low[part] == index[part]:
            position = stack.index(part)
            found.append(tuple(sorted(stack[position:])))
            del stack[position:]

    for part in depends:
        if part not in index:
            visit(part)
    return found
