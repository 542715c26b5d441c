"""Elementwise bodies as graphs of scalars.

A body of elementwise operations computes the same function on every channel. `scalar_loop` finds
the channels' axes, follows every value down through broadcasts, and returns the step of one
channel with the layout that says how rows are laid over the channels. It also takes sums over
channels, where their results go into accumulators and outputs alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar.basic import Add, Cast
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape

from scanlib.analysis.scalar_values import NotElementwiseError, ScalarValues, describe, new_scalar
from scanlib.ops.graph import Readers, applies, is_tensor, readers_of, room_for_calls, taken_apart
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, State
from scanlib.ops.lowered.elemwise_scan import Axes, Layout
from scanlib.recurrences.form import cast


def is_sum_of_converted(before: str, after: str) -> bool:
    """Whether a sum in one dtype, converted to another, is the sum of the converted terms.

    It is not where the sum is rounded, or where sums of small integers wrap around.
    """
    wraps = np.dtype(before).kind in "biu" and np.dtype(before).itemsize < 8
    return before == after or (np.can_cast(before, after) and not wraps)


@dataclass
class ScalarLoop:
    """An elementwise loop: the canonical loop (its inputs possibly read in several places, each
    an input of its own), the body of one channel, and the layout."""

    loop: Loop
    inputs: list[Variable]
    outputs: list[Variable]
    layout: Layout

    def axes(self) -> dict[Variable, Axes]:
        """Return the channels' axes of the inputs."""
        axes = self.layout.of_body_inputs(self.loop.signature())
        return dict(zip(self.inputs, axes, strict=True))


class Summed(NamedTuple):
    """A value, perhaps to be summed over channels.

    `value` is the scalar that is summed, `axes` are the channels' axes of the result and `reduced`
    those that are summed over; there are none if the value is no sum.
    """

    value: Variable
    axes: Axes
    reduced: tuple[int, ...]


def scalar_loop(loop: Loop) -> ScalarLoop:
    """Return the elementwise form of a loop. The loop is edited: equal in what it computes.

    `NotElementwiseError` if the body holds anything but elementwise operations on the channels.
    """
    _constants_to_non_sequences(loop)
    with room_for_calls(len(list(toposort(loop.body_outputs())))):
        return _Scalarizer(loop).run()


# Sums over time. Additions in another dtype are no part of one: small integers wrap around.


def summands(part: State | Carry, readers: Readers) -> list[Variable] | None:
    """Return what a step adds to a part that only adds up and is not stored, else None; `readers`
    are what `readers_of` returns for the body."""
    if isinstance(part, State) and (not part.untraced or set(part.taps) != {-1}):
        return None
    total, added = part.tap(-1), list[Variable]()
    if not is_tensor(total) or readers[part.next] != [None]:
        return None
    while total is not part.next:
        node = readers[total][0] if len(readers[total]) == 1 else None
        if node is None:
            return None
        others = [inp for inp in node.inputs if inp is not total]
        if applies(node, ps.Sub) and node.inputs[0] is total:
            added += [-pt.cast(inp, part.type.dtype) for inp in others]  # -(-128) is no int8
        elif applies(node, ps.Add):
            added += others
        elif not isinstance(node.op, SpecifyShape):
            return None
        total = node.outputs[0]
        if total.type.dtype != part.type.dtype:
            return None
    return added or None


def terms_of_sum(variable: Variable, dtype: str) -> list[Variable]:
    """Return the terms of nested additions in a dtype; shape checks are looked through."""

    def parts(term: Variable) -> Sequence[Variable] | None:
        node = term.owner
        if node is None or not is_tensor(term) or term.type.dtype != dtype:
            return None
        if applies(node, ps.Add):
            return node.inputs
        return node.inputs[:1] if isinstance(node.op, SpecifyShape) else None

    return taken_apart(variable, parts)


def sum_carries(loop: Loop) -> list[bool]:
    """Return, for each carry, whether a step only adds to it and nothing else reads it."""
    readers = readers_of(loop.body_outputs())
    return [summands(carry, readers) is not None for carry in loop.carries]


def _constants_to_non_sequences(loop: Loop) -> None:
    """Give constant arrays a place among the non-sequences."""
    replacements: dict[Variable, Variable] = {}
    for variable in ancestors(loop.body_outputs()):
        is_constant = isinstance(variable, Constant) and is_tensor(variable)
        if is_constant and np.asarray(variable.data).size != 1:
            inner = variable.type()
            loop.non_sequences.append(NonSequence(variable, inner))
            replacements[variable] = inner
    if replacements:
        loop.substitute(replacements)


class _Scalarizer:
    """Reads the parts of a loop: what they are, which axes they have, what is summed."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.values = ScalarValues(loop)
        self.sums: dict[Variable, Summed | None] = {}

    def run(self) -> ScalarLoop:
        loop = self.loop
        states = [self.values.own_axes(state.tap(-state.depth)) for state in loop.states]
        for state, axes in zip(loop.states, states, strict=True):
            for tap in state.taps.values():
                self.values.bind(tap, axes)
        readers = readers_of(loop.body_outputs() if loop.carries else [])
        added = [summands(carry, readers) for carry in loop.carries]
        carries = [self.carry_axes(*pair) for pair in zip(loop.carries, added, strict=True)]
        values = [
            self.values.convert(state.next, self.values.row_axes(state.next, axes))
            for state, axes in zip(loop.states, states, strict=True)
        ]
        reductions: list[tuple[int, ...]] = []
        for i, (carry, terms) in enumerate(zip(loop.carries, added, strict=True)):
            if terms is not None:
                value, carries[i], reduced = self.contribution(carry, terms, carries[i])
            else:
                value = self.values.convert(
                    carry.next, self.values.row_axes(carry.next, carries[i])
                )
                reduced = ()
            values.append(value)
            reductions.append(reduced)
        results = [self.output(output) for output in loop.outputs]
        values += [value for value, _, _ in results]
        if loop.stop is not None:
            values.append(self.values.convert(loop.stop, ()))
        # The canonical body still needs what is read for its shape alone.
        needed = {*filter(is_tensor, ancestors(loop.body_outputs())), *self.values.ports}
        kept = [part for part in loop.non_sequences if part.inner in needed]
        loop.sequences, sequences, row_ports = self.split_ports(loop.sequences, attrgetter("row"))
        loop.non_sequences, non_sequences, whole_ports = self.split_ports(kept, attrgetter("inner"))
        inputs = [
            *row_ports,
            *(self.values.port(tap) for state in loop.states for tap in state.taps.values()),
            *(self.values.port(carry.value) for carry in loop.carries),
            *whole_ports,
        ]
        layout = Layout(
            ndim=self.values.rank(),
            sequences=tuple(map(self.values.renumber, sequences)),
            states=tuple(map(self.values.renumber, states)),
            carries=tuple(map(self.values.renumber, carries)),
            non_sequences=tuple(map(self.values.renumber, non_sequences)),
            outputs=tuple(self.values.renumber(axes) for _, axes, _ in results),
            sums=tuple(terms is not None for terms in added),
            carry_reductions=tuple(map(self.renumber_reduced, reductions)),
            output_reductions=tuple(self.renumber_reduced(axes) for _, _, axes in results),
        )
        check_layout(layout)
        return ScalarLoop(loop, inputs, values, layout)

    def renumber_reduced(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis for axis in self.values.renumber(axes) if axis is not None)

    def carry_axes(self, carry: Carry, added: list[Variable] | None) -> Axes:
        if not is_tensor(carry.value):
            raise NotElementwiseError(f"the carry {describe(carry.value)} is no tensor")
        axes = self.values.own_axes(carry.value)
        if added is None:
            self.values.bind(carry.value, axes)
        return axes

    def contribution(self, carry: Carry, added: list[Variable], own: Axes) -> Summed:
        """Return what a step adds to an accumulator; the axes are those of the accumulator."""
        dtype = carry.value.type.dtype
        terms = [term for each in added for term in terms_of_sum(each, dtype)]
        found = [self.summed(term, own) for term in terms]
        places = {(axes, reduced) if reduced else (own, ()) for _, axes, reduced in found}
        if len(places) > 1:
            raise NotElementwiseError(
                f"the accumulator {describe(carry.value)} adds sums over different axes"
            )
        axes, reduced = places.pop()
        if reduced:
            if any(
                axis is None and not one
                for axis, one in zip(axes, carry.value.type.broadcastable, strict=True)
            ):
                raise NotElementwiseError(f"{describe(carry.value)} broadcasts a sum")
            self.check_same_sizes([value for value, _, _ in found], reduced)
        values = [cast(value, dtype) for value, _, _ in found]
        # One sum, as a body has it that adds the same terms for another use.
        return Summed(values[0] if len(values) == 1 else ps.add(*values), axes, reduced)

    def check_same_sizes(self, values: list[Variable], axes: tuple[int, ...]) -> None:
        """Raise if sums over `axes` may run over different numbers of channels."""
        for axis in axes:
            linked = {read for read in self.values.reads(values[0]) if read[1] == axis}
            for value in values[1:]:
                own = {read for read in self.values.reads(value) if read[1] == axis}
                if linked.isdisjoint(own):
                    raise NotElementwiseError("an accumulator adds sums of different lengths")
                linked |= own

    def output(self, output: Output) -> Summed:
        if not is_tensor(output.value):
            raise NotElementwiseError(f"the output {describe(output.value)} is no dense tensor")
        value, axes, reduced = self.summed(output.value, self.values.own_axes(output.value))
        if not reduced:
            self.values.check_sizes(value, output.value, axes)
        return Summed(value, axes, reduced)

    def summed(self, variable: Variable, own: Axes) -> Summed:
        """Return a value that may be a sum over channels; `own` are the axes of what is none."""
        found = self.sum_inside(variable)
        if found is not None:
            return found
        return Summed(self.values.convert(variable, own), self.values.row_axes(variable, own), ())

    def sum_inside(self, variable: Variable) -> Summed | None:
        """Return what a variable sums over channels; None if it is no sum."""
        if variable not in self.sums:
            self.sums[variable] = self.find_sum(variable)
        return self.sums[variable]

    def find_sum(self, variable: Variable) -> Summed | None:
        node = variable.owner
        if node is None:
            return None
        if isinstance(node.op, CAReduce):
            return self.reduction(node) if isinstance(node.op.scalar_op, Add) else None
        if isinstance(node.op, DimShuffle):
            found = self.sum_inside(node.inputs[0])
            if found is None:
                return None
            axes = tuple(None if old == "x" else found.axes[old] for old in node.op.new_order)
            return found._replace(axes=axes)
        if not isinstance(node.op, Elemwise):
            return None
        op, before = node.op.scalar_op, node.inputs[0].type.dtype
        if isinstance(op, Cast):
            if not is_sum_of_converted(before, op.o_type.dtype):
                return None
            found = self.sum_inside(node.inputs[0])
            return found and found._replace(value=cast(found.value, op.o_type.dtype))
        if isinstance(op, ps.Neg) and before[0] in "fc":
            found = self.sum_inside(node.inputs[0])
            return found and found._replace(value=ps.neg(found.value))
        return None  # a factor of a sum is none of its terms, which may overflow where it does not

    def reduction(self, node: Apply) -> Summed:
        """Return the summand of a sum, the axes of the result and those that are summed over."""
        source = node.inputs[0]
        ndim = source.type.ndim
        axes = range(ndim) if node.op.axis is None else [axis % ndim for axis in node.op.axis]
        whole = self.values.own_axes(source)
        reduced = tuple(sorted(axis for axis in (whole[i] for i in axes) if axis is not None))
        result = tuple(whole[axis] for axis in range(ndim) if axis not in axes)
        value = self.values.convert(source, whole)
        self.values.check_sizes(value, source, whole)
        return Summed(cast(value, node.outputs[0].type.dtype), result, reduced)

    # Inputs that are read in several places

    def split_ports(
        self, parts: Sequence[Any], inner: Callable[[Any], Variable]
    ) -> tuple[list[Any], list[Axes], list[Variable]]:
        """Return a part for each place where an input is read, its axes and the scalar there."""
        found = [
            (part if i == 0 else type(part)(part.outer, inner(part).type(), part.name), *port)
            for part in parts
            for i, port in enumerate(self.values.ports.get(inner(part)) or [_unread(inner(part))])
        ]
        return [p for p, _, _ in found], [axes for _, axes, _ in found], [v for _, _, v in found]


def _unread(variable: Variable) -> tuple[Axes, Variable]:
    """Return how an input is read that no value needs."""
    return (None,) * variable.type.ndim, new_scalar(variable.type.dtype)


def check_layout(layout: Layout) -> None:
    """Raise if a result does not have the first axes of the channels.

    A kernel walks the axes one inside the other, and computes each result as far outside as
    its axes allow. A state of the last axes alone would be computed, and changed, several times.
    """
    results: list[tuple[Axes, tuple[int, ...]]] = [(axes, ()) for axes in layout.states]
    results += zip(layout.carries, layout.carry_reductions, strict=True)
    results += zip(layout.outputs, layout.output_reductions, strict=True)
    for axes, reduced in results:
        own = [axis for axis in axes if axis is not None]
        order = own if not reduced else sorted([*own, *reduced])
        if order != list(range(len(order))):
            raise NotElementwiseError("a result lacks the first axes of the channels")
