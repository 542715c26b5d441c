"""Values of an elementwise body as scalars, and the channels' axes they run along.

Every tensor of a body is followed down through broadcasts to the rows, states and non-sequences
it is made of. What is left is one scalar graph, the same for all channels, in which each input
has its place among the channels' axes.
"""

from dataclasses import dataclass, field

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, walk
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import Alloc, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape

from scanlib.lengths.numbers import measured
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop
from scanlib.recurrences.form import constant

# What is followed down to the inputs of a step.
FOLLOWED = (Alloc, DimShuffle, Elemwise, ScalarFromTensor, SpecifyShape, TensorFromScalar)

# Along every axis of a value: the channels' axis, None where it has length one.
Axes = tuple[int | None, ...]


class NotElementwiseError(Exception):
    """Something in a body is no elementwise operation; the message names it.

    `variable` is the value in the body that stands in the way, where it is one value.
    """

    def __init__(self, message: str, variable: Variable | None = None) -> None:
        super().__init__(message)
        self.variable = variable


def describe(variable: Variable) -> str:
    """Return how messages name a variable of a body."""
    if variable.name:
        return f"'{variable.name}'"
    return "an input" if variable.owner is None else f"the result of {variable.owner.op}"


def new_scalar(dtype: str) -> Variable:
    """Return a scalar input of a dtype."""
    return ps.get_scalar_type(dtype)()


@dataclass
class ScalarValues:
    """Turns the values of one body into scalars.

    `memo` has the scalar of each variable, for the channels' axes along which it was asked for;
    `ports`, for every input of the body, the axes along which it is read and the scalar read there.
    """

    loop: Loop
    memo: dict[tuple[Variable, Axes], Variable] = field(default_factory=dict)
    ports: dict[Variable, list[tuple[Axes, Variable]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read_whole = set(self.loop.body_inputs())
        self.recurrent = {tap for state in self.loop.states for tap in state.taps.values()}
        self.recurrent |= {carry.value for carry in self.loop.carries}
        self.ndim, self.dropped = self.channel_axes()

    # Axes

    def channel_axes(self) -> tuple[int, set[int]]:
        """Return the rank of the channels, and which of their axes have length one."""
        values = list(_values(self.loop.body_outputs()))
        ndim = max((v.type.ndim for v in values), default=0)
        long = {
            ndim - v.type.ndim + axis
            for v in values
            for axis, one in enumerate(v.type.broadcastable)
            if not one
        }
        return ndim, set(range(ndim)) - long

    def frame(self, variable: Variable) -> Axes:
        """Return the channels' axes of a variable whose place is not known.

        The last ones, as in broadcasting, if these are the first ones as well but for axes of
        length one. Otherwise the first ones, without those of length one: a kernel computes a
        result as far outside as its axes allow.
        """
        kept = [axis for axis in range(self.ndim) if axis not in self.dropped]
        last = tuple(range(self.ndim - variable.type.ndim, self.ndim))
        own = [axis for axis in self.row_axes(variable, last) if axis is not None]
        if own == kept[: len(own)]:
            return last
        first = iter(kept)
        return tuple(None if one else next(first) for one in variable.type.broadcastable)

    def own_axes(self, variable: Variable) -> Axes:
        """Return the channels' axes of a part by itself."""
        return self.row_axes(variable, self.frame(variable))

    def row_axes(self, variable: Variable, axes: Axes) -> Axes:
        """Return `axes` without those along which the variable is broadcast."""
        return tuple(
            None if one or axis in self.dropped else axis
            for axis, one in zip(axes, variable.type.broadcastable, strict=True)
        )

    def reads(self, value: Variable) -> set[tuple[Variable, int]]:
        """Return the inputs that a scalar depends on, each with each of its axes."""
        above = set(ancestors([value]))
        return {
            (variable, axis)
            for variable, ports in self.ports.items()
            for axes, scalar in ports
            for axis in axes
            if axis is not None and scalar in above
        }

    def check_sizes(self, value: Variable, source: Variable, axes: Axes) -> None:
        """Raise unless a scalar reads something along all axes of its variable.

        A value that is the same along an axis says nothing of the number of channels.
        """
        read = {axis for _, axis in self.reads(value)}
        if any(axis is not None and axis not in read for axis in self.row_axes(source, axes)):
            raise NotElementwiseError("no input tells how many channels there are", source)

    # Ports

    def bind(self, variable: Variable, axes: Axes) -> None:
        self.ports.setdefault(variable, []).append((axes, new_scalar(variable.type.dtype)))

    def port(self, variable: Variable) -> Variable:
        """Return the scalar of a state or carry; one that nothing reads gets one, too."""
        if variable not in self.ports:
            return new_scalar(variable.type.dtype)
        return self.ports[variable][0][1]

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
            return constant(np.asarray(variable.data).reshape(-1)[0], dtype)
        if variable in self.read_whole:
            return self.read(variable, axes)
        node = variable.owner
        assert node is not None
        if isinstance(node.op, Elemwise):
            return self.elemwise(node, variable, axes)
        if isinstance(node.op, Alloc):
            return self.alloc(node, variable, axes)
        if isinstance(node.op, CheckAndRaise):
            raise NotElementwiseError(f"{node.op} checks a condition at every step", variable)
        if not isinstance(node.op, FOLLOWED):
            raise NotElementwiseError(f"{node.op} is no elementwise operation", variable)
        if isinstance(node.op, DimShuffle):
            axes = _before(node.op.new_order, axes, node)
        return self.convert(node.inputs[0], axes)

    def read(self, variable: Variable, axes: Axes) -> Variable:
        if not is_tensor(variable) and not isinstance(variable.type, ScalarType):
            raise NotElementwiseError(f"{describe(variable)} is no tensor")
        for known, scalar in self.ports.get(variable, ()):
            if known == axes:
                return scalar
        if variable in self.recurrent:
            raise NotElementwiseError(f"{describe(variable)} is read along two different axes")
        self.bind(variable, axes)
        return self.ports[variable][-1][1]

    def elemwise(self, node: Apply, variable: Variable, axes: Axes) -> Variable:
        if isinstance(node.op.scalar_op, ps.Second):
            return self.convert(node.inputs[1], axes)  # the first one gives its shape alone
        made = node.op.scalar_op.make_node(*[self.convert(inp, axes) for inp in node.inputs])
        for out, scalar in zip(node.outputs, made.outputs, strict=True):
            if out.type.dtype != scalar.type.dtype:
                text = f"{node.op} computes in another dtype on scalars"
                raise NotElementwiseError(text, variable)
            self.memo[out, self.row_axes(out, axes)] = scalar
        return made.outputs[node.outputs.index(variable)]

    def alloc(self, node: Apply, variable: Variable, axes: Axes) -> Variable:
        value, *sizes = node.inputs
        known = {n for v in filter(is_tensor, self.loop.body_inputs()) for n in v.type.shape}
        for axis, size, fixed in zip(axes, sizes, variable.type.shape, strict=True):
            if axis is not None and measured(size) is None and fixed not in known - {None}:
                raise NotElementwiseError(f"{describe(variable)} has a size of its own", variable)
        return self.convert(value, axes[len(axes) - value.type.ndim :])

    def rank(self) -> int:
        """Return the number of the channels' axes."""
        return self.ndim - len(self.dropped)

    def renumber(self, axes: Axes) -> Axes:
        """Return axes of the channels as kernels count them; None for those of length one."""
        kept = [axis for axis in range(self.ndim) if axis not in self.dropped]
        return tuple(kept.index(axis) if axis in kept else None for axis in axes)


def _values(outputs: list[Variable]) -> set[Variable]:
    """Return the tensors that outputs are computed from; sizes of arrays do not count."""

    def inputs_of(variable: Variable) -> list[Variable]:
        node = variable.owner
        inputs = [] if node is None else node.inputs
        return inputs[:1] if inputs and isinstance(node.op, Alloc) else inputs

    return set(filter(is_tensor, walk(outputs, inputs_of)))


def _before(new_order: tuple, axes: Axes, node: Apply) -> Axes:
    """Return the axes of a dimshuffle's input from those of its output."""
    inner: list[int | None] = [None] * node.inputs[0].type.ndim
    for axis, old in zip(axes, new_order, strict=True):
        if old != "x":
            inner[old] = axis
    return tuple(inner)
