"""Elementwise bodies as graphs of scalars.

A body of elementwise operations computes the same function on every channel. `scalar_loop` finds
the channels' axes, follows every value down through broadcasts, and returns the step of one
channel with the layout that says how rows are laid over the channels. It also takes sums over
channels, where their results go into accumulators and outputs alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import singledispatchmethod

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Add, Cast, ScalarType
from pytensor.tensor.basic import Alloc, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape

from scanlib._compat import freeze_graph
from scanlib.ops.elemwise_scan import Axes, Layout
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Sequence


class NotElementwiseError(Exception):
    """Something in a body is no elementwise operation; the message names it.

    `variable` is the value in the body that stands in the way, where it is one value.
    """

    def __init__(self, message: str, variable: Variable | None = None) -> None:
        super().__init__(message)
        self.variable = variable


@dataclass
class ScalarLoop:
    """An elementwise loop: the canonical loop (its inputs possibly read in several places, each
    an input of its own), the body of one channel, and the layout."""

    loop: Loop
    inputs: list[Variable]
    outputs: list[Variable]
    layout: Layout

    def freeze(self):
        """Return the frozen body."""
        return freeze_graph(self.inputs, self.outputs)


def scalar_loop(loop: Loop) -> ScalarLoop:
    """Return the elementwise form of a loop. The loop is edited: equal in what it computes.

    Raises
    ------
    NotElementwiseError
        If the body holds anything but elementwise operations on the channels.
    """
    _constants_to_non_sequences(loop)
    return _Scalarizer(loop).run()


def sum_carries(loop: Loop) -> list[bool]:
    """Return, for each carry, whether a step only adds to it and nothing else reads it."""
    scalarizer = _Scalarizer(loop)
    return [scalarizer.is_sum(carry) for carry in loop.carries]


def describe(variable: Variable) -> str:
    """Return how messages name a variable of a body."""
    if variable.name:
        return f"'{variable.name}'"
    return "an input" if variable.owner is None else f"the result of {variable.owner.op}"


def _constants_to_non_sequences(loop: Loop) -> None:
    """Give constant arrays a place among the non-sequences."""
    replacements: dict[Variable, Variable] = {}
    for variable in ancestors(loop.body_outputs()):
        if isinstance(variable, Constant) and is_tensor(variable) and _is_array(variable):
            inner = variable.type()
            loop.non_sequences.append(NonSequence(variable, inner))
            replacements[variable] = inner
    if replacements:
        loop.substitute(replacements)


def _is_array(variable: Constant) -> bool:
    return np.asarray(variable.data).size != 1


def _scalar(dtype: str) -> Variable:
    return ps.get_scalar_type(dtype)()


@dataclass
class _Scalarizer:
    loop: Loop
    memo: dict[tuple[Variable, Axes], Variable] = field(default_factory=dict)
    ports: dict[Variable, list[tuple[Axes, Variable]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read_whole = set(self.loop.body_inputs())
        self.ndim, self.dropped = self.channel_axes()

    def channel_axes(self) -> tuple[int, set[int]]:
        """Return the rank of the channels, and which of their axes have length one."""
        values = list(self.loop.body_outputs())
        values += [v for v in ancestors(values) if is_tensor(v)]
        ndim = max((v.type.ndim for v in values if is_tensor(v)), default=0)
        full = [v for v in values if is_tensor(v) and v.type.ndim == ndim]
        dropped = {axis for axis in range(ndim) if all(v.type.broadcastable[axis] for v in full)}
        return ndim, dropped

    # Parts

    def run(self) -> ScalarLoop:
        loop = self.loop
        states = [self.own_axes(next(iter(state.taps.values()))) for state in loop.states]
        for state, axes in zip(loop.states, states, strict=True):
            for tap in state.taps.values():
                self.bind(tap, axes)
        sums = [self.is_sum(carry) for carry in loop.carries]
        carries = [self.carry_axes(*pair) for pair in zip(loop.carries, sums, strict=True)]
        values = [
            self.convert(state.next, self.row_axes(state.next, axes))
            for state, axes in zip(loop.states, states, strict=True)
        ]
        reductions: list[tuple[int, ...]] = []
        for i, (carry, is_sum) in enumerate(zip(loop.carries, sums, strict=True)):
            if is_sum:
                value, carries[i], reduced = self.contribution(carry, carries[i])
            else:
                value = self.convert(carry.next, self.row_axes(carry.next, carries[i]))
                reduced = ()
            values.append(value)
            reductions.append(reduced)
        results = [self.output(output) for output in loop.outputs]
        values += [value for value, _, _ in results]
        if loop.stop is not None:
            values.append(self.convert(loop.stop, ()))
        sequences, row_ports = self.split_ports_of_sequences()
        non_sequences, whole_ports = self.split_ports_of_non_sequences()
        inputs = [
            *row_ports,
            *(self.port(tap) for state in loop.states for tap in state.taps.values()),
            *(self.port(carry.value) for carry in loop.carries),
            *whole_ports,
        ]
        groups = (sequences, states, carries, non_sequences, [axes for _, axes, _ in results])
        layout = Layout(
            self.ndim - len(self.dropped),
            *(tuple(map(self.renumber, group)) for group in groups),
            sums=tuple(sums),
            carry_reductions=tuple(map(self.renumber_reduced, reductions)),
            output_reductions=tuple(self.renumber_reduced(axes) for _, _, axes in results),
        )
        check_layout(layout)
        return ScalarLoop(loop, inputs, values, layout)

    def renumber_reduced(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis for axis in self.renumber(axes) if axis is not None)

    def carry_axes(self, carry: Carry, is_sum: bool) -> Axes:
        if not is_tensor(carry.value):
            raise NotElementwiseError(f"the carry {describe(carry.value)} is no tensor")
        axes = self.own_axes(carry.value)
        if not is_sum:
            self.bind(carry.value, axes)
        return axes

    def renumber(self, axes: Axes) -> Axes:
        kept = [axis for axis in range(self.ndim) if axis not in self.dropped]
        return tuple(kept.index(axis) if axis in kept else None for axis in axes)

    def own_axes(self, variable: Variable) -> Axes:
        """Return the channels' axes of a state or carry: all of them, or none."""
        ndim = variable.type.ndim
        axes: Axes = tuple(range(self.ndim - ndim, self.ndim))
        return self.row_axes(variable, axes)

    def row_axes(self, variable: Variable, axes: Axes) -> Axes:
        """Return `axes` without those along which the variable is broadcast."""
        return tuple(
            None if one or axis in self.dropped else axis
            for axis, one in zip(axes, variable.type.broadcastable, strict=True)
        )

    def bind(self, variable: Variable, axes: Axes) -> None:
        self.ports.setdefault(variable, []).append((axes, _scalar(variable.type.dtype)))

    def port(self, variable: Variable) -> Variable:
        """Return the scalar of a state or carry; one that nothing reads gets one, too."""
        if variable not in self.ports:
            return _scalar(variable.type.dtype)
        return self.ports[variable][0][1]

    def is_sum(self, carry: Carry) -> bool:
        """Whether a step only adds to a carry, and nothing else reads it."""
        terms = _terms_of_sum(carry.next)
        if carry.value not in terms or not is_tensor(carry.value):
            return False
        others = [term for term in terms if term is not carry.value]
        if len(others) != len(terms) - 1 or not others:
            return False
        rest = [out for out in self.loop.body_outputs() if out is not carry.next]
        shared = carry.next in rest or sum(o is carry.next for o in self.loop.body_outputs()) > 1
        return not shared and carry.value not in ancestors([*others, *rest])

    def contribution(self, carry: Carry, own: Axes) -> tuple[Variable, Axes, tuple[int, ...]]:
        """Return what a step adds to an accumulator, the channels' axes of the accumulator, and
        those that are summed over."""
        total: Variable | None = None
        found: set[tuple[Axes, tuple[int, ...]]] = set()
        for term in _terms_of_sum(carry.next):
            if term is carry.value:
                continue
            value, axes, reduced = self.summed(term, carry.value.type.ndim)
            if reduced and any(
                axis is None and not one
                for axis, one in zip(axes, carry.value.type.broadcastable, strict=True)
            ):
                raise NotElementwiseError(f"{describe(carry.value)} broadcasts a sum")
            value = _cast(value, carry.value.type.dtype)
            found.add((axes, reduced) if reduced else (own, ()))
            total = value if total is None else ps.add(total, value)
        if len(found) > 1:
            raise NotElementwiseError(
                f"the accumulator {describe(carry.value)} adds sums over different axes"
            )
        assert total is not None
        axes, reduced = found.pop()
        return total, axes, reduced

    def output(self, output: Output) -> tuple[Variable, Axes, tuple[int, ...]]:
        if not is_tensor(output.value):
            raise NotElementwiseError(f"the output {describe(output.value)} is no dense tensor")
        return self.summed(output.value, output.value.type.ndim)

    def summed(self, variable: Variable, ndim: int) -> tuple[Variable, Axes, tuple[int, ...]]:
        """Return a value that may be a sum over channels: the summand, the axes of the result,
        and the channels' axes that are summed over."""
        order: list[int | None] = list(range(ndim))
        inner, rounded = variable, False
        while inner.owner is not None:
            node = inner.owner
            if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Cast):
                rounded = rounded or np.dtype(inner.type.dtype).kind not in "fc"
            elif isinstance(node.op, DimShuffle):
                order = [_before(node.op.new_order, axis) for axis in order]
            elif isinstance(node.op, CAReduce) and isinstance(node.op.scalar_op, Add):
                if rounded:
                    break
                return self.reduction(variable, node, order)
            else:
                break
            inner = node.inputs[0]
        axes = self.row_axes(variable, self.frame(variable))
        return self.convert(variable, axes), axes, ()

    def reduction(
        self, variable: Variable, node: Apply, order: list[int | None]
    ) -> tuple[Variable, Axes, tuple[int, ...]]:
        """Return the summand of a sum; `order` says which of its axes each axis of `variable` is."""
        source = node.inputs[0]
        ndim = source.type.ndim
        axes = range(ndim) if node.op.axis is None else [axis % ndim for axis in node.op.axis]
        kept = [axis for axis in range(ndim) if axis not in axes]
        whole = self.row_axes(source, self.frame(source))
        lost = tuple(sorted(whole[axis] for axis in axes if whole[axis] is not None))
        result = tuple(None if axis is None else whole[kept[axis]] for axis in order)
        return _cast(self.convert(source, whole), variable.type.dtype), result, lost

    def frame(self, variable: Variable) -> Axes:
        """Return the channels' axes of a variable whose place is not known: the last ones."""
        return tuple(range(self.ndim - variable.type.ndim, self.ndim))

    # Values

    def convert(self, variable: Variable, axes: Axes) -> Variable:
        """Return the scalar of a variable whose axes are `axes` of the channels."""
        axes = self.row_axes(variable, axes) if is_tensor(variable) else ()
        key = (variable, axes)
        if key not in self.memo:
            self.memo[key] = self.make(variable, axes)
        return self.memo[key]

    def make(self, variable: Variable, axes: Axes) -> Variable:
        if isinstance(variable, Constant):
            dtype = getattr(variable.type, "dtype", None)
            if dtype is None:
                raise NotElementwiseError(f"{variable} is no number")
            item = np.asarray(variable.data, dtype=dtype).reshape(-1)[0]
            return ps.ScalarConstant(ps.get_scalar_type(dtype), item)
        if variable in self.read_whole:
            return self.read(variable, axes)
        assert variable.owner is not None
        return self.convert_node(variable.owner.op, variable.owner, variable, axes)

    def read(self, variable: Variable, axes: Axes) -> Variable:
        if not is_tensor(variable) and not isinstance(variable.type, ScalarType):
            raise NotElementwiseError(f"{describe(variable)} is no tensor")
        for known, scalar in self.ports.get(variable, ()):
            if known == axes:
                return scalar
        if any(variable is tap for state in self.loop.states for tap in state.taps.values()) or any(
            variable is carry.value for carry in self.loop.carries
        ):
            raise NotElementwiseError(f"{describe(variable)} is read along two different axes")
        self.bind(variable, axes)
        return self.ports[variable][-1][1]

    @singledispatchmethod
    def convert_node(self, op: Op, node: Apply, variable: Variable, axes: Axes) -> Variable:
        raise NotElementwiseError(f"{op} is no elementwise operation", variable)

    @convert_node.register
    def _elemwise(self, op: Elemwise, node: Apply, variable: Variable, axes: Axes) -> Variable:
        if isinstance(op.scalar_op, ps.Second):
            return self.convert(node.inputs[1], axes)  # the first one gives its shape alone
        scalars = [self.convert(inp, axes) for inp in node.inputs]
        made = op.scalar_op.make_node(*scalars)
        for out, scalar in zip(node.outputs, made.outputs, strict=True):
            if out.type.dtype != scalar.type.dtype:
                raise NotElementwiseError(f"{op} computes in another dtype on scalars", variable)
            self.memo[out, self.row_axes(out, axes)] = scalar
        return made.outputs[node.outputs.index(variable)]

    @convert_node.register
    def _dimshuffle(self, op: DimShuffle, node: Apply, variable: Variable, axes: Axes) -> Variable:
        inner: list[int | None] = [None] * node.inputs[0].type.ndim
        for axis, old in zip(axes, op.new_order, strict=True):
            if old != "x":
                inner[old] = axis
        return self.convert(node.inputs[0], tuple(inner))

    @convert_node.register
    def _alloc(self, op: Alloc, node: Apply, variable: Variable, axes: Axes) -> Variable:
        value = node.inputs[0]
        lead = len(axes) - value.type.ndim
        return self.convert(value, axes[lead:])

    @convert_node.register(SpecifyShape)
    @convert_node.register(TensorFromScalar)
    @convert_node.register(ScalarFromTensor)
    def _same(self, op: Op, node: Apply, variable: Variable, axes: Axes) -> Variable:
        return self.convert(node.inputs[0], axes)

    @convert_node.register
    def _check(self, op: CheckAndRaise, node: Apply, variable: Variable, axes: Axes) -> Variable:
        raise NotElementwiseError(f"{op} checks a condition at every step", variable)

    # Inputs that are read in several places

    def split_ports_of_sequences(self) -> tuple[list[Axes], list[Variable]]:
        parts, axes, scalars = [], [], []
        for part in self.loop.sequences:
            ports = self.ports.get(part.row) or [
                (self.row_axes(part.row, self.frame(part.row)), _scalar(part.row.type.dtype))
            ]
            for i, (own, scalar) in enumerate(ports):
                copy = part if i == 0 else Sequence(part.outer, part.row.type(), part.name)
                parts.append(copy)
                axes.append(own)
                scalars.append(scalar)
        self.loop.sequences = parts
        return axes, scalars

    def split_ports_of_non_sequences(self) -> tuple[list[Axes], list[Variable]]:
        parts, axes, scalars = [], [], []
        for part in self.loop.non_sequences:
            ports = self.ports.get(part.inner)
            if not ports:
                continue  # read for its shape alone, if at all
            for i, (own, scalar) in enumerate(ports):
                copy = part if i == 0 else NonSequence(part.outer, part.inner.type(), part.name)
                parts.append(copy)
                axes.append(own)
                scalars.append(scalar)
        self.loop.non_sequences = parts
        return axes, scalars


def _terms_of_sum(variable: Variable) -> list[Variable]:
    """Return the terms of nested additions (shape checks looked through)."""
    node = variable.owner
    if node is None:
        return [variable]
    if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Add):
        return [term for inp in node.inputs for term in _terms_of_sum(inp)]
    if isinstance(node.op, SpecifyShape):
        return _terms_of_sum(node.inputs[0])
    return [variable]


def _before(new_order: tuple, axis: int | None) -> int | None:
    """Return which axis of a dimshuffle's input an axis of its output is."""
    if axis is None or new_order[axis] == "x":
        return None
    return new_order[axis]


def check_layout(layout: Layout) -> None:
    """Raise if a result does not have the first axes of the channels.

    A kernel walks the axes one inside the other, and computes each result as far outside as
    its axes allow. A state of the last axes alone would be computed, and changed, several times.
    """
    free = [*layout.states]
    free += [
        axes
        for axes, reduced in zip(layout.carries, layout.carry_reductions, strict=True)
        if not reduced
    ]
    free += [
        axes
        for axes, reduced in zip(layout.outputs, layout.output_reductions, strict=True)
        if not reduced
    ]
    for axes in free:
        own = [axis for axis in axes if axis is not None]
        if own != list(range(len(own))):
            raise NotElementwiseError("a result lacks the first axes of the channels")
    known = {
        axis
        for group in (layout.sequences, layout.states, layout.carries)
        for axes in group
        for axis in axes
    }
    known |= {axis for axes in layout.non_sequences for axis in axes}
    if any(axis not in known for axis in range(layout.ndim)):
        raise NotElementwiseError("no input tells how many channels there are")


def _cast(value: Variable, dtype: str) -> Variable:
    return value if value.type.dtype == dtype else ps.cast(value, dtype)
