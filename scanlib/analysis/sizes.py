"""Which axes have the same length, as far as it can be told without values.

A length has several names: the number it is known to be, or an axis of an array that it was taken
from. Two lengths that share a name are equal. Nothing is said of lengths that share none.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.scalar.basic import Cast
from pytensor.tensor.basic import Alloc, ARange, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib._compat import INDEX_WRITES
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.graph import constant_index, is_tensor
from scanlib.ops.loop import Loop
from scanlib.ops.scan import Scan

Names = frozenset[Hashable]


def measured(size: Variable) -> tuple[Variable, int] | None:
    """Return the variable and the axis whose length a number is; None if it is none."""
    node = size.owner
    if node is None:
        return None
    if isinstance(node.op, Shape_i):
        return node.inputs[0], node.op.i
    if isinstance(node.op, Subtensor) and node.inputs[0].owner is not None:
        shape = node.inputs[0].owner
        index = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
        if isinstance(shape.op, Shape) and len(index) == 1 and not isinstance(index[0], slice):
            known = constant_index(index[0])
            if known is not None:
                return shape.inputs[0], known % shape.inputs[0].type.ndim
    if isinstance(node.op, DimShuffle) and not size.type.ndim and node.inputs[0].owner is not None:
        shape = node.inputs[0].owner  # the shape of a vector, without its axis
        return (shape.inputs[0], 0) if isinstance(shape.op, Shape) else None
    if isinstance(node.op, TensorFromScalar | ScalarFromTensor) or (
        isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Cast)
    ):
        return measured(node.inputs[0])
    return None


def number_names(size: Variable) -> Names:
    """Return the names of a length that is given as a number."""
    if isinstance(size, Constant):
        return frozenset([int(np.asarray(size.data).item())])
    found = measured(size)
    if found is not None:
        return axis_names(*found)
    node = size.owner
    if node is not None and isinstance(node.op, TensorFromScalar | ScalarFromTensor):
        return number_names(node.inputs[0])
    return frozenset([("number", size)])


def axis_names(variable: Variable, axis: int) -> Names:
    """Return the names of the length of an array along an axis."""
    own: set[Hashable] = {("axis", variable, axis)}
    fixed = variable.type.shape[axis]
    if fixed is not None:
        own.add(fixed)
    node = variable.owner
    if node is not None:
        own |= _from_node(node, variable, axis)
    return frozenset(own)


def _from_node(node: Apply, variable: Variable, axis: int) -> Names:
    op, none = node.op, frozenset[Hashable]()
    if isinstance(op, DimShuffle):
        old = op.new_order[axis]
        return none if old == "x" else axis_names(node.inputs[0], old)
    if isinstance(op, (SpecifyShape, *INDEX_WRITES)):
        return axis_names(node.inputs[0], axis)
    if isinstance(op, Alloc):
        return number_names(node.inputs[1 + axis])
    if isinstance(op, Elemwise):
        longer = [inp for inp in node.inputs if not inp.type.broadcastable[axis]]
        return none.union(*(axis_names(inp, axis) for inp in longer))
    if isinstance(op, Subtensor):
        return _from_view(node, axis)
    if isinstance(op, Scan | ElemwiseScan):
        parts = op.signature.split_inputs(node.inputs)
        position = node.outputs.index(variable)
        initials = [*parts.initials, *parts.carries]
        is_time = position < len(parts.initials) and axis == 0
        if position < len(initials) and is_tensor(initials[position]) and not is_time:
            return axis_names(initials[position], axis)
    return none


def _from_view(node: Apply, axis: int) -> Names:
    """Return the names of an axis that an index leaves as it is."""
    left = -1
    indices = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    for k in range(node.inputs[0].type.ndim):
        index = indices[k] if k < len(indices) else slice(None)
        if not isinstance(index, slice):
            continue
        left += 1
        if left == axis:
            return axis_names(node.inputs[0], k) if index == slice(None) else frozenset()
    return frozenset()


def range_names(variable: Variable) -> Names | None:
    """Return the names of `n` if a variable is ``0, 1, …, n-1``; None if it may be otherwise."""
    if isinstance(variable, Constant):
        data = np.asarray(variable.data)
        plain = data.ndim == 1 and data.dtype.kind in "iu"
        counts = plain and np.array_equal(data, np.arange(len(data)))
        return frozenset([len(data)]) if counts else None
    node = variable.owner
    if node is None or not isinstance(node.op, ARange):
        return None
    start, stop, step = node.inputs
    if not (_is_number(start, 0) and _is_number(step, 1)):
        return None
    return number_names(stop)


def _is_number(variable: Variable, number: int) -> bool:
    return isinstance(variable, Constant) and np.asarray(variable.data).item() == number


class BodyLengths:
    """Lengths of arrays in the body of a loop, named by what the loop is applied to."""

    def __init__(self, loop: Loop) -> None:
        self.outer: dict[Variable, tuple[Variable, int]] = {}
        for sequence in loop.sequences:
            self.outer[sequence.row] = (sequence.outer, 1)
        for state in loop.states:
            self.outer.update((tap, (state.initial, 1)) for tap in state.taps.values())
        for carry in loop.carries:
            self.outer[carry.value] = (carry.initial, 0)
        for part in loop.non_sequences:
            self.outer[part.inner] = (part.outer, 0)

    def of_axis(self, variable: Variable, axis: int) -> Names:
        """Return the names of the length of an array of the body along an axis."""
        return self._outside(axis_names(variable, axis))

    def of_range(self, variable: Variable) -> Names | None:
        """Return the names of `n` if a variable of the body is ``0, 1, …, n-1``."""
        if variable in self.outer:
            outer, lead = self.outer[variable]
            return None if lead else range_names(outer)
        found = range_names(variable)
        return None if found is None else self._outside(found)

    def _outside(self, names: Names) -> Names:
        found: set[Hashable] = set(names)
        for name in names:
            if isinstance(name, tuple) and name[1] in self.outer:
                outer, lead = self.outer[name[1]]
                if name[0] == "axis" and is_tensor(outer) and name[2] + lead < outer.type.ndim:
                    found |= axis_names(outer, name[2] + lead)
                elif name[0] == "number":
                    found |= number_names(outer)
        return frozenset(found)
