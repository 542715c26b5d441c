"""Which parts of a loop depend on which: the components that must run together.

A part (a state or a carry) depends on another if its next value reads one of the other's past
values. The strongly connected components of that graph, in an order in which each depends on
earlier ones only, are the smallest recurrences a loop consists of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytensor.graph.basic import Variable

from scanlib.ops.lowered.positions import inputs_read


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

    Parts are in one component if each reaches the other; what a component depends on reaches fewer
    parts than the component does.
    """
    reached = {part: {part, *others} for part, others in depends.items()}
    changed = True
    while changed:
        changed = False
        for part, others in reached.items():
            more = others.union(*(reached[other] for other in others))
            changed |= len(more) > len(others)
            reached[part] = more
    found: dict[tuple[int, ...], int] = {}
    for part, others in reached.items():
        own = tuple(sorted(other for other in others if part in reached[other]))
        found.setdefault(own, len(others))
    return sorted(found, key=lambda members: found[members])
