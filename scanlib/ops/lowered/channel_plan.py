"""Which results of a step share which loops over channels, and how long these are.

The channels of an elementwise loop (see `ops.lowered.elemwise_scan`) have axes, and a result is
computed for all indices into those it depends on. Results that read some array along the same axis
have as many channels there, and are computed in one loop; results that share nothing may differ in
size and get loops of their own. All backends write what a `ChannelPlan` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors, toposort

from scanlib.ops.signature import BodyInputs, BodyOutputs, Signature

if TYPE_CHECKING:
    from scanlib.ops.lowered.elemwise_scan import Axes, Layout


def depth_of(axes: Axes) -> int:
    """Return how many loops enclose what has these axes."""
    return max((axis + 1 for axis in axes if axis is not None), default=0)


@dataclass(frozen=True)
class Place:
    """An array that a result is computed from or kept in.

    `array` is its name, ``x3`` for the fourth input of the loop. `lead` is the number of its axes
    that are not the channels', `axes` are the others. `owned` is the position of the state whose
    initial rows it holds, if the result is its next value and does not read it: its size is
    checked in words of its own.
    """

    array: str
    lead: int
    axes: Axes
    owned: int | None = None

    def along(self, axis: int) -> int | None:
        """Return which of the array's axes runs along an axis of the channels."""
        return self.axes.index(axis) + self.lead if axis in self.axes else None


@dataclass
class Target:
    """A result of the step: what it is, and where it is computed and written.

    The value is computed inside `inner` loops and written inside `level`. A sum over the axes
    `reduced` is collected in a local variable if it is `collected`, otherwise in memory.
    """

    kind: str
    number: int
    value: Variable
    axes: Axes
    reduced: tuple[int, ...] = ()
    inner: int = 0
    level: int = 0

    @property
    def array(self) -> str:
        letter = {"state": "h", "output": "z"}.get(self.kind, "c")
        return f"{letter}{self.number}"

    @property
    def kept(self) -> list[int]:
        return [axis for axis in self.axes if axis is not None]

    @property
    def adds(self) -> bool:
        return self.kind == "sum" or bool(self.reduced)

    @property
    def collected(self) -> bool:
        """Whether the axes that are summed over lie inside those that are kept."""
        kept = self.kept
        first = kept == list(range(len(kept)))
        return bool(self.reduced) and first and min(self.reduced) >= len(kept)


class ChannelPlan:
    """Where the results of a step, a graph of scalars, are computed: inside which loops over
    channels.

    `levels` says how many loops must enclose each value; `targets` are the results: states,
    carries, outputs.
    """

    def __init__(
        self, signature: Signature, layout: Layout, inner: BodyInputs, result: BodyOutputs
    ) -> None:
        self.layout = layout
        self.inner = inner
        count = int(signature.has_n_steps) + sum(signature.input_sizes)
        self.outer = signature.split_inputs([f"x{k}" for k in range(count)])
        taps = [tap for own in inner.taps for tap in own]
        variables = [*inner.rows, *taps, *inner.carries, *inner.non_sequences]
        levels = map(depth_of, layout.of_body_inputs(signature))
        self.levels = self._levels(dict(zip(variables, levels, strict=True)), result)
        self.targets = list(self._targets(result))
        for target in self.targets:
            axes = [depth_of(target.axes), *(axis + 1 for axis in target.reduced)]
            target.inner = max(self.levels.get(target.value, 0), *axes)
            target.level = len(target.kept) if target.collected else target.inner

    @staticmethod
    def _levels(levels: dict[Variable, int], result: BodyOutputs) -> dict[Variable, int]:
        stop = [] if result.stop is None else [result.stop]
        values = [*result.states, *result.carries, *result.outputs, *stop]
        for node in toposort(values):
            level = max((levels.get(inp, 0) for inp in node.inputs), default=0)
            levels.update(dict.fromkeys(node.outputs, level))
        return levels

    def _targets(self, result: BodyOutputs) -> Iterator[Target]:
        layout = self.layout
        for i, value in enumerate(result.states):
            yield Target("state", i, value, layout.states[i])
        for i, value in enumerate(result.carries):
            kind = "sum" if layout.sums[i] else "carry"
            yield Target(kind, i, value, layout.carries[i], layout.carry_reductions[i])
        for i, value in enumerate(result.outputs):
            yield Target("output", i, value, layout.outputs[i], layout.output_reductions[i])

    def arrays(self) -> Iterator[tuple[str, str, int, Axes]]:
        """Yield name, dtype, how many axes come before the channels', and these, inputs first."""
        layout, inner, outer = self.layout, self.inner, self.outer
        for names, variables, lead, axes in (
            (outer.initials, [taps[0] for taps in inner.taps], 1, layout.states),
            (outer.sequences, inner.rows, 1, layout.sequences),
            (outer.carries, inner.carries, 0, layout.carries),
            (outer.non_sequences, inner.non_sequences, 0, layout.non_sequences),
        ):
            for name, variable, own in zip(names, variables, axes, strict=True):
                yield name, variable.type.dtype, lead, own
        for target in self.targets:
            lead = int(target.kind in ("state", "output"))
            yield target.array, target.value.type.dtype, lead, target.axes

    def places(self, target: Target) -> list[Place]:
        """Return the arrays that a result is computed from or kept in."""
        layout, inner, outer = self.layout, self.inner, self.outer
        above = set(ancestors([target.value]))
        rows = zip(inner.rows, outer.sequences, layout.sequences, strict=True)
        whole = zip(inner.non_sequences, outer.non_sequences, layout.non_sequences, strict=True)
        found = [Place(array, 1, axes) for row, array, axes in rows if row in above]
        found += [Place(array, 0, axes) for variable, array, axes in whole if variable in above]
        for i, taps in enumerate(inner.taps):
            read = not above.isdisjoint(taps)
            if read or (target.kind == "state" and target.number == i):
                own = None if read else i
                found.append(Place(outer.initials[i], 1, layout.states[i], own))
        for i, carry in enumerate(inner.carries):
            if carry in above or (target.kind in ("carry", "sum") and target.number == i):
                found.append(Place(outer.carries[i], 0, layout.carries[i]))
        return found

    def groups(self, targets: Sequence[Target], level: int) -> list[list[Target]]:
        """Return the results inside `level` loops that share the next one."""
        inside = [target for target in targets if target.inner > level]
        arrays = [{(p.array, p.along(level)) for p in self.places(target)} for target in inside]
        groups = in_groups([{key for key in own if key[1] is not None} for own in arrays])
        return [[inside[position] for position in group] for group in groups]

    def group_places(self, targets: Sequence[Target], level: int) -> list[Place]:
        """Return the arrays that give a loop its length, one place each.

        Those whose size is checked in words of their own come last, unless nothing else does.
        """
        places = [place for target in targets for place in self.places(target)]
        owned = {place.array for place in places if place.owned is not None}
        found: dict[tuple[str, int], Place] = {}
        for place in sorted(places, key=lambda place: (place.array in owned, place.owned is None)):
            own = place.along(level)
            if own is not None:
                found.setdefault((place.array, own), place)
        return list(found.values())

    def is_independent(self) -> bool:
        """Whether one channel after the other may be walked through time.

        Every result then belongs to every channel, or sums over some of their axes and over time;
        and all have the same channels.
        """
        sums_late = all(t.kind == "sum" for t in self.targets if t.reduced)
        return sums_late and self.has_same_channels()

    def has_same_channels(self) -> bool:
        """Whether every result belongs to all channels, or sums over some of their axes."""
        every = set(range(self.layout.ndim))
        return all({*t.kept, *t.reduced} == every for t in self.targets) and all(
            len(self.groups(self.targets, level)) == 1 for level in every
        )


def in_groups(sets: Sequence[Set[Any]]) -> list[list[int]]:
    """Return the places of sets in groups, of those that share an item, or do by way of others."""
    groups: list[tuple[Set[Any], list[int]]] = []
    for place, own in enumerate(sets):
        joined = [group for group in groups if not own.isdisjoint(group[0])]
        groups = [group for group in groups if group not in joined]
        places = [*(k for _, others in joined for k in others), place]
        groups.append((set(own).union(*(items for items, _ in joined)), sorted(places)))
    return sorted(places for _, places in groups)
