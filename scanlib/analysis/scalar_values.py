"""Values of an elementwise body as scalars, and the channels' axes they run along.

Every tensor of a body is followed down through broadcasts to the rows, states and non-sequences
it is made of. What is left is one scalar graph, the same for all channels, in which each input
has its place among the channels' axes.

``h[i]`` reads one channel of a row, and ``set_subtensor(h[i], v)`` changes one. Along an axis that
is read at an index, a value has a *position* in the place of the channels' axis (see
`ops.lowered.positions`); positions travel down through elementwise operations as axes do, and the
rows at the bottom are read there. A row with one item replaced is

    h'[c] = v if c = i else h[c]

so that every channel has a formula again. With index arrays, as in ``h[arange(n), i]``, the axes
that are counted through run along with the channels.

`index_places` says what an index means for every axis of the row: an axis that is kept is an axis
of the result; so is one that an index array counts through, as the first of ``h[arange(n), i]``.
Every other axis is read at an index.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import Alloc, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.subtensor import indices_from_subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES, INDEXED_BY_VECTOR
from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm
from scanlib.lengths.numbers import measured
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop
from scanlib.ops.lowered.positions import Channel, Item, Position, inputs_read, node_level
from scanlib.ops.recursion import Task, finished

FULL = slice(None)

# Along every axis of a value: the channels' axis, None where it has length one, or the scalar that
# says where the value is read.
Axes = tuple[Any, ...]


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
class IndexPlace:
    """What an index says of one axis of a row.

    `index` is the variable that the axis is read at, with `along` the axes of the result that the
    index array runs along; without one, `out` is the axis of the result that the axis becomes.
    """

    out: int = -1
    index: Variable | None = None
    along: tuple[int, ...] = ()


@dataclass
class ScalarValues:
    """Turns the values of one body into scalars.

    Attributes
    ----------
    loop : Loop
    memo : dict
        The scalar of each variable, for the channels' axes along which it was asked for.
    ports : dict
        For every input of the body, the axes along which it is read and the scalar read there.
    """

    loop: Loop
    memo: dict[tuple[Variable, Axes], Variable] = field(default_factory=dict)
    ports: dict[Variable, list[tuple[Axes, Variable]]] = field(default_factory=dict)
    positions: list[tuple[Variable, LengthForm, Variable]] = field(default_factory=list)
    # In the value that is written at a position: the channels' axis that lies there.
    same: dict[Variable, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read_whole = set(self.loop.body_inputs())
        self.recurrent = {tap for state in self.loop.states for tap in state.taps.values()}
        self.recurrent |= {carry.value for carry in self.loop.carries}
        self.ndim, self.dropped = self.channel_axes()
        self.sizes = Lengths(sources=self.loop.sources())

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

    def axes_read(self, value: Variable) -> set[int]:
        """Return the axes of the inputs that a scalar depends on."""
        return {axis for _, axis in self.reads(value)}

    def reads(self, value: Variable) -> set[tuple[Variable, int]]:
        """Return the inputs that a scalar depends on, each with each of its axes."""
        read = inputs_read([value])
        return {
            (variable, axis)
            for variable, ports in self.ports.items()
            for axes, scalar in ports
            for hidden in read.get(scalar, ())
            for k, axis in enumerate(axes)
            if axis is not None and (hidden is None or k not in hidden)
        }

    def check_sizes(self, value: Variable, source: Variable, axes: Axes) -> None:
        """Raise unless a scalar reads something along all axes of its variable.

        A value that is the same along an axis says nothing of the number of channels.
        """
        read = self.axes_read(value)
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
        return finished(self.converted(variable, axes))

    def converted(self, variable: Variable, axes: Axes) -> Task:
        """Return the computation that `convert` is: steps may be thousands of operations deep."""
        axes = self.row_axes(variable, axes) if is_tensor(variable) else ()
        key = (variable, axes)
        if key not in self.memo:
            made = self.make(variable, axes)
            self.memo[key] = (yield made) if isinstance(made, Generator) else made
        return self.memo[key]

    def make(self, variable: Variable, axes: Axes) -> Variable | Task:
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
        positions = [axis for axis in axes if isinstance(axis, Variable)]
        if not positions:
            return self.read_along(variable, axes)
        visible = tuple(None if isinstance(axis, Variable) else axis for axis in axes)
        if variable in self.recurrent:
            known, port = self.ports[variable][0]
            for axis, own in zip(axes, known, strict=True):
                if not isinstance(axis, Variable) and axis != own:
                    raise NotElementwiseError(
                        f"{describe(variable)} is read along two different axes"
                    )
        else:
            port = self.read_along(variable, visible)
        places = tuple(
            "at" if isinstance(axis, Variable) else None if axis is None else self.number(axis)
            for axis in axes
        )
        return Item(places).make_node(port, *positions).outputs[0]

    def read_along(self, variable: Variable, axes: Axes) -> Variable:
        for known, scalar in self.ports.get(variable, ()):
            if known == axes:
                return scalar
        if variable in self.recurrent:
            raise NotElementwiseError(f"{describe(variable)} is read along two different axes")
        self.bind(variable, axes)
        return self.ports[variable][-1][1]

    @singledispatchmethod
    def convert_node(self, op: Op, node: Apply, variable: Variable, axes: Axes) -> Variable | Task:
        core = op.core_op if isinstance(op, Blockwise) else op
        if isinstance(core, INDEX_READS):
            return self.convert_read(node, self.places(node)[0], axes)
        if isinstance(core, INDEX_WRITES) and core is op:
            return self.convert_write(node, axes)
        raise NotElementwiseError(f"{op} is no elementwise operation", variable)

    @convert_node.register
    def _elemwise(self, op: Elemwise, node: Apply, variable: Variable, axes: Axes) -> Task:
        if isinstance(op.scalar_op, ps.Second):
            # The first one gives its shape alone.
            return (yield self.converted(node.inputs[1], axes))
        scalars = []
        for inp in node.inputs:
            scalars.append((yield self.converted(inp, axes)))
        made = op.scalar_op.make_node(*scalars)
        for out, scalar in zip(node.outputs, made.outputs, strict=True):
            if out.type.dtype != scalar.type.dtype:
                raise NotElementwiseError(f"{op} computes in another dtype on scalars", variable)
            self.memo[out, self.row_axes(out, axes)] = scalar
        return made.outputs[node.outputs.index(variable)]

    @convert_node.register
    def _dimshuffle(self, op: DimShuffle, node: Apply, variable: Variable, axes: Axes) -> Task:
        return self.converted(node.inputs[0], _before(op.new_order, axes, node))

    @convert_node.register
    def _alloc(self, op: Alloc, node: Apply, variable: Variable, axes: Axes) -> Task:
        value, *sizes = node.inputs
        for axis, size, fixed in zip(axes, sizes, variable.type.shape, strict=True):
            if (
                axis is not None
                and measured(size) is None
                and not any(self.is_size(fixed, variable) for variable in self.loop.body_inputs())
            ):
                raise NotElementwiseError(f"{describe(variable)} has a size of its own", variable)
        return self.converted(value, axes[len(axes) - value.type.ndim :])

    @staticmethod
    def is_size(fixed: int | None, variable: Variable) -> bool:
        """Whether an input is known to have that length along some axis."""
        return fixed is not None and is_tensor(variable) and fixed in variable.type.shape

    @convert_node.register(SpecifyShape)
    @convert_node.register(TensorFromScalar)
    @convert_node.register(ScalarFromTensor)
    def _same(self, op: Op, node: Apply, variable: Variable, axes: Axes) -> Task:
        return self.converted(node.inputs[0], axes)

    @convert_node.register
    def _check(self, op: CheckAndRaise, node: Apply, variable: Variable, axes: Axes) -> Task:
        raise NotElementwiseError(f"{op} checks a condition at every step", variable)

    # Indices

    def places(self, node: Apply) -> tuple[list[IndexPlace], int]:
        """Return the place of every axis of the indexed row, and the rank of the items."""
        return index_places(node, self.sizes)

    # Positions

    def position(self, source: Variable, axis: int, place: IndexPlace, axes: Axes) -> Variable:
        """Return the position at which an axis of a row is read; `axes` are those of the result."""
        assert place.index is not None
        index = self.convert(place.index, tuple(axes[k] for k in place.along))
        leaf, own = self.measured_input(source, axis)
        length = self.sizes.of(leaf, own)
        for known, other, position in self.positions:
            if known is index and self.sizes.agrees(leaf, other, own):
                return position
        position = Position(own).make_node(self.any_port(leaf), index).outputs[0]
        self.positions.append((index, length, position))
        return position

    def any_port(self, leaf: Variable) -> Variable:
        """Return the scalar that stands for an input of which an array is needed."""
        if leaf not in self.ports:
            self.bind(leaf, (None,) * leaf.type.ndim)
        return self.ports[leaf][0][1]

    def measured_input(self, variable: Variable, axis: int) -> tuple[Variable, int]:
        """Return an input of the body and an axis of it that is as long as one of a variable."""
        return finished(self._measured(variable, axis))

    def _measured(self, variable: Variable, axis: int) -> Task:
        if variable in self.read_whole:
            return variable, axis
        node = variable.owner
        op = None if node is None else node.op
        if isinstance(op, DimShuffle) and op.new_order[axis] != "x":
            return (yield self._measured(node.inputs[0], op.new_order[axis]))
        if isinstance(op, (SpecifyShape, *INDEX_WRITES)):
            return (yield self._measured(node.inputs[0], axis))
        if isinstance(op, Elemwise):
            longer = [inp for inp in node.inputs if not inp.type.broadcastable[axis]]
            return (yield self._measured([*longer, node.inputs[0]][0], axis))
        if isinstance(op, Alloc):
            found = measured(node.inputs[1 + axis])
            if found is not None:
                return (yield self._measured(*found))
        if isinstance(op, INDEX_READS):
            places, _ = self.places(node)
            for k, place in enumerate(places):
                if place.out == axis and place.index is None:
                    return (yield self._measured(node.inputs[0], k))
        raise NotElementwiseError(f"the length of {describe(variable)} is not known", variable)

    # Reading

    def convert_read(self, node: Apply, places: list[IndexPlace], axes: Axes) -> Task:
        source = node.inputs[0]
        own: list[Any] = []
        checks = []
        for k, place in enumerate(places):
            if place.index is None:
                own.append(axes[place.out])
                continue
            position = self.position(source, k, place, axes)
            if source.type.broadcastable[k]:
                checks.append(position)
                own.append(None)
            else:
                own.append(self.same.get(position, position))
        value = yield self.converted(source, tuple(own))
        for position in checks:
            value = ps.second(position, value)
        return value

    def rank(self) -> int:
        """Return the number of the channels' axes."""
        return self.ndim - len(self.dropped)

    def renumber(self, axes: Axes) -> Axes:
        """Return axes of the channels as kernels count them; None for those of length one."""
        kept = [axis for axis in range(self.ndim) if axis not in self.dropped]
        return tuple(kept.index(axis) if axis in kept else None for axis in axes)

    def number(self, axis: int) -> int:
        """Return an axis of the channels as kernels count them, without those of length one."""
        return axis - sum(other < axis for other in self.dropped)

    # Writing

    def convert_write(self, node: Apply, axes: Axes) -> Task:
        op, (row, new) = node.op, node.inputs[:2]
        dtype = row.type.dtype
        places, ndim = self.places(node)
        if not op.set_instead_of_inc and dtype == "bool":
            raise NotElementwiseError(f"{op} adds truth values", node.outputs[0])
        inner = _kept_axes(places, axes, ndim)
        covered = {place.out for place in places if place.index is None}
        if any(k not in covered for place in places for k in place.along):
            raise NotElementwiseError(f"{op} writes several items at once", node.outputs[0])
        if _is_diagonal(places):
            raise NotElementwiseError(f"{op} writes a diagonal", node.outputs[0])
        base = yield self.converted(row, axes)
        mask, found = self.chosen(row, places, axes, inner)
        with self.written_at(found, inner):
            start = ndim - new.type.ndim
            value = yield self.converted(new, tuple(inner[start:]))
        if value.type.dtype != dtype:
            value = ps.cast(value, dtype)
        if not op.set_instead_of_inc and not _is_zero(base):
            value = ps.add(base, value)
        if value.type.dtype != dtype:
            raise NotElementwiseError(f"{op} computes in another dtype on scalars")
        return value if mask is None else ps.switch(mask, value, base)

    def chosen(
        self, row: Variable, places: Sequence[IndexPlace], axes: Axes, inner: Sequence[Any]
    ) -> tuple[Variable | None, dict[Variable, int]]:
        """Return whether a channel of a row lies where an index says, None for all of them.

        With that come the positions that are axes of the channels, with these.
        """
        mask: Variable | None = None
        found: dict[Variable, int] = {}
        for k, (place, axis) in enumerate(zip(places, axes, strict=True)):
            if place.index is None:
                continue
            position = self.position(row, k, place, tuple(inner))
            if isinstance(axis, int):
                found[position] = axis
            hit = ps.eq(self.here(axis), position)
            mask = hit if mask is None else ps.and_(mask, hit)
        return mask, found

    def here(self, axis: Any) -> Variable:
        """Return where the channel lies along an axis."""
        if isinstance(axis, Variable):
            return axis
        if axis is None:
            return ps.constant(np.int64(0))
        return Channel(self.number(axis)).make_node().outputs[0]

    @contextmanager
    def written_at(self, found: dict[Variable, int], inner: list[Any]) -> Iterator[None]:
        """Read rows, inside, at the channel where they are read at the position that is written.

        This is for rows of a matrix, ``h[i] = f(h[i])``: what is read lies in the same channels as
        what is written. A single item is read once, outside the loop over channels.
        """
        deepest = max((axis for axis in inner if isinstance(axis, int)), default=-1)
        if not any(axis < deepest for axis in found.values()):
            yield
            return
        before, self.same = self.same, {**self.same, **found}
        memo, self.memo = self.memo, {}
        try:
            yield
        finally:
            self.same, self.memo = before, memo


def _values(outputs: list[Variable]) -> set[Variable]:
    """Return the tensors that outputs are computed from; sizes of arrays do not count."""
    found: set[Variable] = set()
    pending = list(outputs)
    while pending:
        variable = pending.pop()
        if variable in found:
            continue
        found.add(variable)
        if variable.owner is not None:
            op, inputs = variable.owner.op, variable.owner.inputs
            core = op.core_op if isinstance(op, Blockwise) else op
            if isinstance(core, INDEX_READS):
                inputs = inputs[1:]  # a table that is read has more axes than what is read of it
            pending += inputs[:1] if isinstance(op, Alloc) else inputs
    return {variable for variable in found if is_tensor(variable)}


def _before(new_order: tuple, axes: Axes, node: Apply) -> Axes:
    """Return the axes of a dimshuffle's input from those of its output."""
    inner: list[int | None] = [None] * node.inputs[0].type.ndim
    for axis, old in zip(axes, new_order, strict=True):
        if old != "x":
            inner[old] = axis
    return tuple(inner)


def index_places(node: Apply, sizes: Lengths) -> tuple[list[IndexPlace], int]:
    """Return the place of every axis of the row that a node indexes, and the rank of the items.

    Parameters
    ----------
    node : Apply
        Reads or writes some items of its first input.
    sizes : Lengths
        Tells which index arrays count through an axis.

    Raises
    ------
    NotElementwiseError
        If the index is anything but whole numbers, arrays of these side by side, and full slices.
    """
    op = node.op
    batch = op.batch_ndim(node) if isinstance(op, Blockwise) else 0
    source = node.inputs[0]
    indices = _indices(node, batch)
    places = [IndexPlace(out=k) for k in range(batch)]
    advanced = [k for k, index in enumerate(indices) if not isinstance(index, slice)]
    joint = max([*(_ndim(indices[k]) - batch for k in advanced), 0])
    together = not advanced or advanced == list(range(advanced[0], advanced[-1] + 1))
    if joint and (batch or not together):
        raise NotElementwiseError(f"{op} mixes slices and index arrays", node.outputs[0])
    out = start = batch
    for k, index in enumerate(indices):
        if isinstance(index, slice):
            places.append(IndexPlace(out=out))
            out += 1
            continue
        if k == advanced[0]:
            start, out = out, out + joint
        last = start + joint
        along = range(batch) if batch else range(last - _ndim(index), last)
        place = IndexPlace(index=index, along=tuple(along))
        places.append(_counted(source, batch + k, place, sizes) or place)
    return places, out


def _indices(node: Apply, batch: int) -> list[Any]:
    """Return one index for every axis: a variable or a full slice."""
    core = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    given = node.inputs[2 if isinstance(core, INDEX_WRITES) else 1 :]
    if isinstance(core, INDEXED_BY_VECTOR):
        indices: Sequence[Any] = given
    else:
        indices = indices_from_subtensor(given, core.idx_list)
    rank = node.inputs[0].type.ndim - batch
    indices = [*indices, *[FULL] * (rank - len(indices))]
    if len(indices) != rank:
        raise NotElementwiseError(f"{node.op} adds axes to what it reads", node.outputs[0])
    for index in indices:
        if isinstance(index, slice):
            if index != FULL:
                raise NotElementwiseError(f"{node.op} takes a part of a row", node.outputs[0])
        elif np.dtype(getattr(index.type, "dtype", bool)).kind not in "iu":
            raise NotElementwiseError(f"{node.op} adds or selects axes", node.outputs[0])
    return indices


def _ndim(index: Variable) -> int:
    return getattr(index.type, "ndim", 0)


def _counted(source: Variable, axis: int, place: IndexPlace, sizes: Lengths) -> IndexPlace | None:
    """Return the place of an axis that an index array counts through, None if it does not."""
    index, along = place.index, place.along
    if index is None or not along:
        return None
    node = index.owner
    if node is not None and isinstance(node.op, DimShuffle) and node.inputs[0].type.ndim == 1:
        along = (along[node.op.new_order.index(0)],)
        index = node.inputs[0]
    if index.type.ndim != 1:
        return None
    counted = sizes.of_range(index)
    if counted is None or not sizes.agrees(source, counted, axis):
        return None
    return IndexPlace(out=along[0])


def _kept_axes(places: Sequence[IndexPlace], axes: Axes, ndim: int) -> list[Any]:
    """Return the channels' axes of the items that an index picks, of its kept axes."""
    inner: list[Any] = [None] * ndim
    for place, axis in zip(places, axes, strict=True):
        if place.index is None:
            inner[place.out] = axis
    return inner


def _is_diagonal(places: Sequence[IndexPlace]) -> bool:
    """Whether several axes of a row become one axis of the items."""
    kept = [place.out for place in places if place.index is None]
    return len(set(kept)) < len(kept)


def _is_zero(value: Variable) -> bool:
    return isinstance(value, Constant) and not np.asarray(value.data).any()


def check_order(
    outputs: Sequence[Variable], axes: Mapping[Variable, Axes], recurrent: Set[Variable]
) -> None:
    """Raise if an item of a past value may be read after its channel has been overwritten.

    Kernels overwrite rows in place, channel by channel. An item read inside the loop over the axis
    that it is picked from would be old or new, as it comes.

    Parameters
    ----------
    outputs : sequence of Variable
        The results of a step, scalars.
    axes : mapping of Variable to Axes
        The channels' axes of the inputs.
    recurrent : set of Variable
        The past values among the inputs.

    Raises
    ------
    NotElementwiseError
    """
    levels = {
        port: max((axis + 1 for axis in own if axis is not None), default=0)
        for port, own in axes.items()
    }
    for node in toposort(outputs):
        level = node_level(node, levels)
        levels.update(dict.fromkeys(node.outputs, level))
        if not isinstance(node.op, Item) or node.inputs[0] not in recurrent:
            continue
        own = axes[node.inputs[0]]
        if any(own[k] is not None and own[k] < level for k in node.op.hidden):
            raise NotElementwiseError("a step reads a row at a place that it may have overwritten")
