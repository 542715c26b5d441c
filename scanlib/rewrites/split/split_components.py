"""Recurrences that can be lowered on their own get a loop of their own.

The recurrent parts of a loop (states and carries) fall into strongly connected components
(`scanlib.analysis.dependence`), each of which depends on earlier ones only. A component whose step
is elementwise or a matrix recurrence, given the values of those it depends on, needs no general
loop. Those that depend on no general component run before it, those on which none depends after
it; what is left runs alone, and reads the values of the earlier ones as sequences.

By the cost rule (`over_time.split_cost`), a component leaves only if what others read of
it, or it reads of others, is stored anyway, is a scalar a step, or feeds a product, which then
becomes one product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.features import Feature
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors

from scanlib._compat import features
from scanlib.analysis.dependence import components, dependences
from scanlib.ops.graph import conform, depends_on, is_tensor, row_type
from scanlib.ops.loop import Carry, Loop, Output, Sequence, State
from scanlib.rewrites.edit import Part, past_values, results_by_part
from scanlib.rewrites.lower.canonical_loop import canonical_loop, sizes_from_outside
from scanlib.rewrites.lower.lower_elementwise import is_elementwise
from scanlib.rewrites.lower.lower_linear import explain_linear
from scanlib.rewrites.over_time.split_cost import PRODUCT
from scanlib.rewrites.split.split_parts import SplitParts


@dataclass(frozen=True)
class SplitNote:
    """What left one loop.

    Attributes
    ----------
    loop : str
        The loop's name, "loop" if it has none.
    before, after : int
        Values evaluated for all steps before the loop, and outputs evaluated after it.
    sums : int
        Accumulators that became sums over rows or matrix products.
    stored : int
        Values that the loop stores for what comes after it.
    loops : int
        Loops it was divided into; 1 if one remains, 0 if none does.
    """

    loop: str
    before: int = 0
    after: int = 0
    sums: int = 0
    stored: int = 0
    loops: int = 1

    def __str__(self) -> str:
        if self.loops > 1:
            return f"{self.loops} loops, of which one can be lowered to a kernel at least"
        said = []
        if self.before:
            said.append(f"{_count(self.before, 'value')} computed for all steps before the loop")
        if self.after:
            where = " after the loop" if self.loops else ""
            said.append(f"{_count(self.after, 'output')} computed for all steps{where}")
        if self.sums:
            said.append(f"{_count(self.sums, 'sum')} taken over all steps at once")
        if self.stored:
            said.append(f"{_count(self.stored, 'value')} stored for that")
        if not self.loops:
            said.append("no loop remains")
        return "; ".join(said)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class SplitRecord(Feature):
    """The notes of a graph, in the order in which loops were taken apart.

    `whole` are loops, each with its inputs, that are known to stay one loop.
    """

    def __init__(self) -> None:
        self.notes: list[SplitNote] = []
        self.whole: set[tuple[Any, ...]] = set()


def record(fgraph: FunctionGraph, note: SplitNote) -> None:
    """Add a note to a graph."""
    record_of(fgraph).notes.append(note)


def notes_of(fgraph: FunctionGraph) -> list[SplitNote]:
    """Return what splitting did to the loops of a graph."""
    return [note for record in features(fgraph, SplitRecord) for note in record.notes]


def record_of(fgraph: FunctionGraph) -> SplitRecord:
    """Return the record of a graph, which has one from then on."""
    found = next(iter(features(fgraph, SplitRecord)), None)
    if found is None:
        found = SplitRecord()
        fgraph.attach_feature(found)
    return found


ELEMENTWISE, MATRIX, GENERAL = "elementwise", "matrix", "general"


def separate(node: Apply) -> tuple[list[Variable | None], SplitNote] | None:
    """Return what replaces the outputs of a loop, None if it stays one loop."""
    signature = node.op.signature
    if signature.has_stop or signature.n_states + signature.n_carries < 2:
        return None
    loop = canonical_loop(node)
    sizes_from_outside(loop)
    groups = _Components(SplitParts(loop, False)).groups()
    if len(groups) < 2:
        return None
    note = SplitNote(loop.name or "loop", loops=len(groups))
    return _Distribution(loop, groups).values(), note


@dataclass
class _Component:
    parts: list[State | Carry]
    kind: str
    reads: set[int]


class _Components:
    """The components of a loop, and the loops that they go into."""

    def __init__(self, plan: SplitParts) -> None:
        self.plan = plan
        self.loop = plan.loop
        nexts = {i: part.next for i, part in enumerate(plan.recurrent)}
        past = {i: past_values(part) for i, part in enumerate(plan.recurrent)}
        depends = dependences(nexts, past)
        found = components(depends)
        place = {i: k for k, members in enumerate(found) for i in members}
        self.found = [
            _Component(
                [plan.recurrent[i] for i in members],
                GENERAL,
                {place[j] for i in members for j in depends[i]} - {k},
            )
            for k, members in enumerate(found)
        ]

    def groups(self) -> list[list[State | Carry]]:
        """Return the recurrent parts of each loop, in an order in which they can run."""
        if len(self.found) < 2:
            return [self.plan.recurrent]
        for component in self.found:
            component.kind = self._kind(component)
        first: list[int] = []
        for k, component in enumerate(self.found):
            if component.kind != GENERAL and component.reads <= set(first) and self._may_lead(k):
                first.append(k)
        last: list[int] = []
        for k in reversed(range(len(self.found))):
            readers = {j for j, other in enumerate(self.found) if k in other.reads}
            lowers = self.found[k].kind != GENERAL and k not in first
            if lowers and readers <= set(last) and self._may_follow(k):
                last.insert(0, k)
        middle = [k for k in range(len(self.found)) if k not in first and k not in last]
        runs = [*self._runs(first), *([middle] if middle else []), *self._runs(last)]
        return [[part for k in run for part in self.found[k].parts] for run in runs]

    def _runs(self, members: list[int]) -> list[list[int]]:
        """Put elementwise components that follow one another into one loop."""
        runs: list[list[int]] = []
        for k in members:
            kind = self.found[k].kind
            if runs and kind == ELEMENTWISE and self.found[runs[-1][-1]].kind == ELEMENTWISE:
                runs[-1].append(k)
            else:
                runs.append([k])
        return runs

    def _kind(self, component: _Component) -> str:
        alone, _ = sub_loop(self.loop, component.parts)
        others = [p for p in self.plan.recurrent if not _among(p, component.parts)]
        read = set(ancestors(alone.body_outputs()))
        for value in (v for part in others for v in past_values(part) if v in read):
            if not is_tensor(value):
                return GENERAL
            rows = value.type.clone(shape=(None, *value.type.shape))()
            alone.sequences.append(Sequence(rows, value))
        drop_unread(alone)
        try:
            node = alone.apply().node
            if explain_linear(node) is None:
                return MATRIX
            return ELEMENTWISE if is_elementwise(Loop.from_node(node)) else GENERAL
        except NotImplementedError:
            return GENERAL

    def _may_lead(self, k: int) -> bool:
        """Whether what others read of a component costs no memory, or feeds a product."""
        values = [v for part in self.found[k].parts for v in known_values(part)]
        mine = {id(part) for part in self.found[k].parts}
        others = [p.next for p in self.plan.recurrent if id(p) not in mine]
        read = set(ancestors(others)).intersection(values)
        if not read or all(self._is_stored(part) for part in self.found[k].parts):
            return True
        if all(value.type.ndim == 0 for value in read):
            return True
        below = depends_on(others, read)
        rest = [
            v for part in self.plan.recurrent if id(part) not in mine for v in past_values(part)
        ]
        bound = depends_on(others, rest)
        products = [n.outputs[0] for n, kind in self.plan.kinds.items() if kind == PRODUCT]
        return any(product in below and product not in bound for product in products)

    def _may_follow(self, k: int) -> bool:
        """Whether what a component reads of others is stored anyway, or is scalars."""
        mine = {id(part) for part in self.found[k].parts}
        above = set(ancestors([part.next for part in self.found[k].parts]))
        for part in self.plan.recurrent:
            if id(part) in mine or not above.intersection(past_values(part)):
                continue
            if not self._is_stored(part) and any(v.type.ndim for v in known_values(part)):
                return False
        return True

    @staticmethod
    def _is_stored(part: State | Carry) -> bool:
        return isinstance(part, State) and not part.untraced


def known_values(part: State | Carry) -> list[Variable]:
    """Return the values of a part that later loops may read, if they are tensors."""
    return [value for value in past_values(part) if is_tensor(value)]


def sub_loop(loop: Loop, parts: Iterable[Part]) -> tuple[Loop, dict[int, Any]]:
    """Return a loop of copies of some parts of another, and these by the `id` of a part."""
    twins: dict[int, Any] = {id(part): replace(part) for part in parts}
    for twin in twins.values():
        if isinstance(twin, State):
            twin.taps = dict(twin.taps)

    def kept(own: Iterable[Part]) -> list[Any]:
        return [twins[id(part)] for part in own if id(part) in twins]

    made = replace(
        loop,
        sequences=list(loop.sequences),
        states=kept(loop.states),
        carries=kept(loop.carries),
        non_sequences=list(loop.non_sequences),
        outputs=kept(loop.outputs),
    )
    return made, twins


def drop_unread(loop: Loop) -> None:
    """Drop sequences and non-sequences that no step reads."""
    read = set(ancestors(loop.body_outputs()))
    loop.non_sequences = [part for part in loop.non_sequences if part.inner in read]
    kept = [part for part in loop.sequences if part.row in read]
    loop.sequences = kept if kept or loop.n_steps is not None else loop.sequences[:1]


class _Distribution:
    """Builds one loop per group, each after those it depends on."""

    def __init__(self, loop: Loop, groups: list[list[State | Carry]]) -> None:
        self.loop = loop
        self.groups = groups
        self.result: dict[int, Variable] = {}
        self.rows: dict[Variable, Variable] = {}

    def values(self) -> list[Variable | None]:
        loop = self.loop
        recurrent = {id(part) for group in self.groups for part in group}
        parts: list[State | Carry] = [*loop.states, *loop.carries]
        sums = [part for part in parts if id(part) not in recurrent]
        homes = {id(part): self._home(part.next) for part in sums}
        homes |= {id(part): self._home(part.value) for part in loop.outputs}
        for k, group in enumerate(self.groups):
            own = [part for part in sums if homes[id(part)] == k]
            outputs = [part for part in loop.outputs if homes[id(part)] == k]
            self._run(group, own, outputs)
        every: list[State | Carry | Output] = [*loop.states, *loop.carries, *loop.outputs]
        return [self.result[id(part)] for part in every]

    def _home(self, value: Variable) -> int:
        """Return the last group that a value depends on."""
        above = set(ancestors([value]))
        depends = [
            k
            for k, group in enumerate(self.groups)
            if any(above.intersection(past_values(part)) for part in group)
        ]
        return max(depends, default=len(self.groups) - 1)

    def _run(
        self, group: list[State | Carry], sums: list[State | Carry], outputs: list[Output]
    ) -> None:
        part_loop, twins = sub_loop(self.loop, [*group, *sums, *outputs])
        old = list(twins)
        finals: list[tuple[State | Carry, Callable[[Variable], Variable]]] = []
        later = self._read_later(group)
        for part in later:
            twins[id(part)] = self._trace(part_loop, part, twins[id(part)], finals)
        rows = {value: row_type(values)() for value, values in self.rows.items()}
        part_loop.sequences += [Sequence(self.rows[v], row) for v, row in rows.items()]
        part_loop.substitute(rows)
        drop_unread(part_loop)
        made = results_by_part(part_loop, part_loop.apply())
        self.result |= {part: made[id(twins[part])] for part in old}
        for part in later:
            history = made[id(twins[id(part)])]
            depth = part.depth if isinstance(part, State) else 1
            taps = part.taps if isinstance(part, State) else {-1: part.value}
            for offset, tap in taps.items():
                self.rows[tap] = rows_of_tap(history, depth, offset, self.loop.reverse)
        for part, final in finals:
            self.result[id(part)] = final(self.result[id(part)])

    def _read_later(self, group: list[State | Carry]) -> list[State | Carry]:
        """Return the parts of a group of which other loops may read past values."""
        parts: list[State | Carry] = [*self.loop.states, *self.loop.carries]
        rest = [part.next for part in parts if not _among(part, group)]
        rest += [part.value for part in self.loop.outputs]
        above = set(ancestors(rest))
        return [part for part in group if above.intersection(known_values(part))]

    def _trace(
        self,
        loop: Loop,
        part: State | Carry,
        twin: State | Carry | Output,
        finals: list[tuple[State | Carry, Callable[[Variable], Variable]]],
    ) -> State | Carry | Output:
        """Let a loop store a part, and say how its old result comes from the history."""
        reverse = self.loop.reverse
        if isinstance(twin, State):
            if twin.untraced:
                twin.untraced, depth = False, twin.depth
                finals.append((part, lambda rows: rows[:depth] if reverse else rows[-depth:]))
            return twin
        assert isinstance(twin, Carry)
        state = State(twin.initial[None], {-1: twin.value}, twin.next, name=twin.name)
        loop.carries = [other for other in loop.carries if other is not twin]
        loop.states.append(state)
        kind = twin.value.type
        finals.append((part, lambda rows: conform(rows[0] if reverse else rows[-1], kind)))
        return state


def _among(part: State | Carry, parts: list[State | Carry]) -> bool:
    return any(part is other for other in parts)


def rows_of_tap(history: Variable, depth: int, offset: int, reverse: bool) -> Variable:
    """Return the values of a tap at all steps; offset 0 is the next value."""
    before = depth + offset
    first, last = (-offset, before) if reverse else (before, -offset)
    return history[first or None : -last if last else None]
