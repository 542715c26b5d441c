"""From the body of one channel to the recurrence families of its parts.

A part (a state or a carry) depends on another if its next value reads one of the other's past
values. The strongly connected components of that graph, in an order in which each depends on
earlier ones only, are the smallest recurrences a loop consists of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from scanlib.analysis.scalar_body import ScalarLoop
from scanlib.ops.lowered.elemwise_scan import Recurrence
from scanlib.recurrences import FAMILIES, Component, NotInFamilyError


def dependences(
    nexts: Mapping[int, Variable], taps: Mapping[int, Sequence[Variable]]
) -> dict[int, set[int]]:
    """Return, for each part, the parts whose past values its next value reads."""
    part_of = {tap: part for part, reads in taps.items() for tap in reads}
    return {
        part: {part_of[variable] for variable in ancestors([value]) if variable in part_of}
        for part, value in nexts.items()
    }


def components(depends: Mapping[int, set[int]]) -> list[tuple[int, ...]]:
    """Return the strongly connected components, those that others depend on first.

    Parts are in one component if each reaches the other; what a component depends on reaches fewer
    parts than the component does.
    """
    reached = {part: 1 << part for part in depends}  # a bit for each part
    changed = True
    while changed:
        changed = False
        for part, others in depends.items():
            more = reduce(or_, (reached[other] for other in others), reached[part])
            changed |= more != reached[part]
            reached[part] = more
    found: dict[tuple[int, ...], int] = {}
    for part, bits in reached.items():
        mutual = (k for k, back in reached.items() if bits >> k & 1 and back >> part & 1)
        found.setdefault(tuple(sorted(mutual)), bits.bit_count())
    return sorted(found, key=lambda members: found[members])


@dataclass
class Analysis:
    """What was found about the recurrent parts of a loop.

    Recurrences are in an order in which each one's elements depend on earlier ones only; there are
    none if some component is of no family. For each state, then each carry, `notes` has its family,
    or what stands in the way, and `families` its family, "sum over time", "no recurrence" where the
    next value reads no past value of the part itself, or None.
    """

    recurrences: tuple[Recurrence, ...]
    notes: tuple[str, ...]
    families: tuple[str | None, ...] = ()


def analyse(scalar: ScalarLoop) -> Analysis:
    """Return the recurrence families of an elementwise loop."""
    nexts, taps = _parts(scalar)
    names = {
        variable: scalar.loop.recurrent[part].name or f"state {part}"
        for part, by_tap in taps.items()
        for variable in by_tap.values()
    }
    reads = {part: list(by_tap.values()) for part, by_tap in taps.items()}
    depends = dependences(nexts, reads)
    n_parts = len(scalar.loop.recurrent)
    notes = ["a sum over time"] * n_parts
    families: list[str | None] = ["sum over time"] * n_parts
    found: list[Recurrence] = []
    complete = scalar.loop.stop is None
    for parts in components(depends):
        component = Component(
            scalar.inputs,
            {part: nexts[part] for part in parts},
            {part: taps[part] for part in parts},
            names,
        )
        recurrence, note = _recognize(component)
        family = None if recurrence is None else recurrence.family
        if recurrence is not None and len(parts) == 1 and parts[0] not in depends[parts[0]]:
            note, family = "a value that no later step changes", "no recurrence"
        for part in parts:
            notes[part] = note
            families[part] = family
        if recurrence is None:
            complete = False
        else:
            found.append(recurrence)
    return Analysis(tuple(found) if complete else (), tuple(notes), tuple(families))


def _parts(scalar: ScalarLoop) -> tuple[dict[int, Variable], dict[int, dict[int, Variable]]]:
    """Return the next and past values of the recurrent parts; sums are none."""
    loop, layout = scalar.loop, scalar.layout
    signature = loop.signature()
    inner = signature.split_body_inputs(scalar.inputs)
    result = signature.split_body_outputs(scalar.outputs)
    nexts: dict[int, Variable] = dict(enumerate(result.states))
    taps = {
        i: dict(zip(offsets, values, strict=True))
        for i, (offsets, values) in enumerate(zip(signature.taps, inner.taps, strict=True))
    }
    for i, is_sum in enumerate(layout.sums):
        if not is_sum:
            nexts[len(loop.states) + i] = result.carries[i]
            taps[len(loop.states) + i] = {-1: inner.carries[i]}
    return nexts, taps


def _recognize(component: Component) -> tuple[Recurrence | None, str]:
    """Return the first family that fits, with its name, or what the first one objected to."""
    objections = []
    for recognize in FAMILIES:
        try:
            recurrence = recognize(component)
        except NotInFamilyError as objection:
            objections.append(str(objection))
        else:
            return recurrence, recurrence.family
    return None, objections[0]
