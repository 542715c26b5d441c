"""Which axes of values are worked on side by side: what is at one place of them meets no other.

`axes_kept` says it of the axes of one operation; what is not known here mixes all axes. In a graph,
axes that run alike are a class of `AxisClasses`: the members of a batch, or the channels of an
elementwise step, keep one from the first value to the last.

An axis `a` of the states of a step is *independent* if the rows ``h[…, i, …]`` at place `i` of it
are computed from the rows of all states at place `i`, for all `i`. The step's Jacobian is then
block diagonal, one block for each `i`.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import Alloc, Join, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import TensorType

from scanlib._compat import join_of, sorted_axis, split_of
from scanlib.lengths.numbers import indices_of
from scanlib.ops.graph import core_op

# An axis of an array, None where its places mix, and the axis of an array that it runs along.
Alike = tuple[Variable, int | None, Variable, int]


def axes_kept(node: Apply) -> Iterator[Alike]:
    """Yield which axes of an operation's arrays run along which ones of its results."""
    kept = set(_kept(node))
    for place, i, k in kept:
        yield from ((node.inputs[place], i, result, k) for result in node.outputs)
    own = {(place, i) for place, i, _ in kept if not isinstance(node.inputs[place], Constant)}
    for place, variable in enumerate(node.inputs):
        if isinstance(variable.type, TensorType):
            ones = variable.type.broadcastable
            mixed = (axis for axis, one in enumerate(ones) if not one and (place, axis) not in own)
            yield from ((variable, None, variable, axis) for axis in mixed)
    if not isinstance(node.op, DimShuffle | Elemwise):  # whose other axes are as good as constants
        given = {k for _, _, k in kept}
        for result in node.outputs:
            mixed = (axis for axis in range(getattr(result.type, "ndim", 0)) if axis not in given)
            yield from ((result, None, result, axis) for axis in mixed)


def _kept(node: Apply) -> Iterable[tuple[int, int, int]]:
    """Yield places of inputs, an axis of each, and the axis of the results that it runs along."""
    op, inputs, ndim = node.op, node.inputs, getattr(node.outputs[0].type, "ndim", 0)

    def each(count: int) -> Iterator[tuple[int, int, int]]:
        for place, variable in enumerate(inputs):
            ones = enumerate(getattr(variable.type, "broadcastable", ())[:count])
            yield from ((place, axis, axis) for axis, one in ones if not one)

    if isinstance(op, Elemwise):
        yield from each(ndim)
    elif isinstance(op, DimShuffle):
        yield from ((0, i, k) for k, i in enumerate(op.new_order) if i != "x")
    elif isinstance(op, CAReduce):
        summed = range(inputs[0].type.ndim) if op.axis is None else op.axis
        left = (axis for axis in range(inputs[0].type.ndim) if axis not in summed)
        yield from ((0, axis, k) for k, axis in enumerate(left))
    elif isinstance(op, SortOp | ArgSortOp):
        own = sorted_axis(node)
        yield from ((0, axis, axis) for axis in range(ndim) if own not in (None, axis))
    elif isinstance(op, Softmax | LogSoftmax | CumOp):
        along = op.axis if isinstance(op.axis, tuple) else (op.axis,)
        lost = range(ndim) if None in along else [axis % ndim for axis in along]
        yield from ((0, axis, axis) for axis in range(ndim) if axis not in lost)
    elif isinstance(core_op(node), Dot):
        lead = 0 if isinstance(op, Dot) else op.batch_ndim(node)
        yield from each(lead)
        for place, axis, k in ((0, lead, lead), (1, lead + 1, ndim - 1)):
            if inputs[place].type.ndim - lead == 2:
                yield place, axis, k
    elif isinstance(op, Blockwise):
        yield from each(op.batch_ndim(node))
    elif isinstance(op, Join | Split):
        axis, parts = join_of(node) if isinstance(op, Join) else (split_of(node)[1], inputs[:1])
        others = () if axis is None else (k for k in range(ndim) if k != axis % ndim)
        first = len(inputs) - len(parts) if isinstance(op, Join) else 0
        yield from ((first + n, k, k) for k in others for n in range(len(parts)))
    elif isinstance(op, Subtensor | IncSubtensor):
        yield from _kept_by_index(node, 1 if isinstance(op, Subtensor) else 2)


def _kept_by_index(node: Apply, arrays: int) -> Iterator[tuple[int, int, int]]:
    indices = indices_of(node)
    indices += [slice(None)] * (node.inputs[0].type.ndim - len(indices))
    left = [axis for axis, index in enumerate(indices) if isinstance(index, slice)]
    whole = {axis for axis in left if indices[axis] == slice(None)}
    if arrays == 1:
        yield from ((0, axis, k) for k, axis in enumerate(left) if axis in whole)
        return
    yield from ((0, axis, axis) for axis in whole)
    ones = node.inputs[1].type.broadcastable
    for k, axis in enumerate(left[len(left) - len(ones) :]):
        if axis in whole and not ones[k]:
            yield 1, k, axis


class AxisClasses:
    """Axes of variables in classes, of those that run alike; None is that of mixed ones."""

    def __init__(self) -> None:
        self._parents: dict[Any, Any] = {}

    def of(self, variable: Variable, axis: int) -> Any:
        """Return the class of an axis."""
        return self._root((variable, axis))

    def _root(self, axis: Any) -> Any:
        while axis in self._parents:
            axis = self._parents[axis]
        return axis

    def join(self, alike: Iterable[Alike]) -> None:
        """Put axes that run alike into one class."""
        for a, i, b, j in alike:
            one, other = self._root(None if i is None else (a, i)), self._root((b, j))
            if one != other:
                one, other = (one, other) if one is None else (other, one)
                self._parents[other] = one

    def join_all(self, one: Variable, other: Variable) -> None:
        """Say that all axes of two variables run alike."""
        self.join((one, axis, other, axis) for axis in range(getattr(one.type, "ndim", 0)))

    def keep_apart(self, variables: Iterable[Variable]) -> None:
        """Say that two axes of a variable mix if they run alike, as those of ``h + h.T``."""
        for variable in variables:
            for one, other in combinations(range(getattr(variable.type, "ndim", 0)), 2):
                if self.of(variable, one) == self.of(variable, other):
                    self.join([(variable, None, variable, one)])


def independent_axes(states: Sequence[Sequence[Variable]], nexts: Sequence[Variable]) -> list[int]:
    """Return the axes along which a step's states are independent of one another, given the body's
    variables of each state's past values, and its next values."""
    taps = [tap for each in states for tap in each]
    classes, read = AxisClasses(), set(taps)
    for node in toposort(nexts, blockers=taps):
        if not read.isdisjoint(node.inputs) and not isinstance(node.op, Shape | Shape_i):
            read.update(node.outputs)
            classes.join(each for each in _axes_kept_or_told(node) if {each[0], each[2]} <= read)
    for each, following in zip(states, nexts, strict=True):
        for tap in each:
            classes.join_all(tap, following)
    classes.keep_apart(taps)
    places = [(tap, axis) for tap in taps for axis in range(tap.type.ndim)]
    found = []
    for axis in range(min((tap.type.ndim for tap in taps), default=0)):
        own = {classes.of(tap, axis) for tap in taps}
        others = {classes.of(tap, other) for tap, other in places if other != axis}
        is_one = {tap.type.broadcastable[axis] for tap in taps}
        if len(is_one) == 1 and None not in own and own.isdisjoint(others):
            found.append(axis)
    return found


def _axes_kept_or_told(node: Apply) -> Iterable[Alike]:
    """Return `axes_kept`; that of Ops that are told sizes, too, which are those of all members."""
    if not isinstance(node.op, Alloc | SpecifyShape):
        return axes_kept(node)
    value, out = node.inputs[0], node.outputs[0]
    lead, ones = out.type.ndim - value.type.ndim, value.type.broadcastable
    return [(value, k, out, k + lead) for k, one in enumerate(ones) if not one]
