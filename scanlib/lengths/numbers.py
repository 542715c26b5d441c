"""Numbers that say how long things are: integers of a graph, and what loops say of lengths.

An Op that is a loop has a method ``steps_of(node)`` that returns `Steps`. That is all that is known
here of loops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.scalar.basic import Cast, Identity
from pytensor.tensor.basic import (
    Alloc,
    ARange,
    ScalarFromTensor,
    TensorFromScalar,
    get_scalar_constant_value,
)
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib._compat import INDEX_WRITES


def constant_integer(variable: Any) -> int | None:
    """Return the value of an integer that is known when the graph is built, else None."""
    try:
        value = get_scalar_constant_value(variable)
    except NotScalarConstantError:
        return None
    return int(value) if np.asarray(value).dtype.kind in "iub" else None


def is_range(rows: Variable) -> bool:
    """Whether rows are integers that follow one another."""
    if not isinstance(rows.type, TensorType) or rows.type.ndim != 1:
        return False
    if rows.type.dtype not in integer_dtypes:
        return False
    if isinstance(rows, Constant):
        return bool(rows.data.size and np.all(np.diff(rows.data) == 1))
    node = rows.owner
    return (
        node is not None and isinstance(node.op, ARange) and constant_integer(node.inputs[2]) == 1
    )


def indices_of(node: Apply, places: list[Variable] | None = None) -> list[Any]:
    """Return the indices at which a node, or a batch of it, reads or writes; made of `places`, if
    they are given, in place of its own inputs."""
    op = getattr(node.op, "core_op", node.op)
    first = 2 if isinstance(op, INDEX_WRITES) else 1
    own = node.inputs[first:] if places is None else places
    return list(indices_from_subtensor(own, op.idx_list))


def only_cut(node: Apply) -> tuple[int, Any] | None:
    """Return the axis along which a node reads or writes a part, and the index; None if not one."""
    cuts = [(axis, index) for axis, index in enumerate(indices_of(node)) if index != slice(None)]
    return cuts[0] if len(cuts) == 1 else None


def constant_place(node: Apply) -> tuple[Any, ...] | None:
    """Return the integers and slices of a node's index, None if not all are constants."""
    place = []
    for index in indices_of(node):
        ends = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
        known = [None if end is None else constant_index(end) for end in ends]
        if any(k is None and end is not None for k, end in zip(known, ends, strict=True)):
            return None
        place.append(slice(*known) if isinstance(index, slice) else known[0])
    return tuple(place)


def constant_index(index: Any) -> int | None:
    """Return a constant index, looking through conversions between tensors and scalars."""
    if isinstance(index, int | np.integer):
        return int(index)
    if isinstance(index, Constant):
        return int(np.asarray(index.data).item())
    owner = getattr(index, "owner", None)
    if owner is not None and isinstance(owner.op, ScalarFromTensor | TensorFromScalar):
        return constant_index(owner.inputs[0])
    return None


def measured(size: Variable) -> tuple[Variable, int] | None:
    """Return the variable and the axis whose length a number is; None if it is none."""
    node = size.owner
    if node is None or not node.inputs:
        return None
    op, source = node.op, node.inputs[0]
    if isinstance(op, Shape_i):
        return source, op.i
    if isinstance(op, Subtensor) and source.type.ndim == 1 and not size.type.ndim:
        place = constant_index(indices_of(node)[0])
        return None if place is None else _measured_item(source, place)
    if isinstance(op, DimShuffle) and not size.type.ndim and source.owner is not None:
        # The shape of a vector, without its axis.
        return (source.owner.inputs[0], 0) if isinstance(source.owner.op, Shape) else None
    is_same = isinstance(op, TensorFromScalar | ScalarFromTensor)
    if is_same or isinstance(getattr(op, "scalar_op", op), Cast | Identity):
        return measured(source)
    return None


def _measured_item(sizes: Variable, place: int) -> tuple[Variable, int] | None:
    """Return the array and the axis whose length an item of a vector of sizes is; `vectorize_graph`
    cuts off those of the batch and repeats the others."""
    node = sizes.owner
    if node is None or not node.inputs:
        return None
    source = node.inputs[0]
    if isinstance(node.op, Shape):
        return source, place % source.type.ndim
    if isinstance(node.op, Alloc) and source.type.broadcastable == (False,):
        return _measured_item(source, place)
    if isinstance(node.op, Subtensor) and source.type.ndim == 1:
        (rest,) = indices_of(node)
        first = constant_index(rest.start)
        if rest == slice(rest.start, None) and first is not None and first >= 0:
            return _measured_item(source, place + first if place >= 0 else place)
    return None


class Rows(NamedTuple):
    """The rows of a result: so many, and one more for each step if `each_step`."""

    others: int
    each_step: bool


@dataclass(frozen=True)
class Steps:
    """What a loop says of lengths.

    `n_steps` is the number of steps, the greatest one of a loop that may stop; None if the
    sequences tell, which have one row for each step. `rows` has, for each result, those of its axis
    of time if it has one, and `like` an array that has the same axes, but for time, or None.
    """

    n_steps: Variable | None
    sequences: list[Variable]
    rows: Sequence[Rows | None]
    like: Sequence[Variable | None]
    may_stop: bool = False

    def known(self) -> int | None:
        """Return the number of steps where it is known when the graph is built."""
        return None if self.may_stop else self.most()

    def least(self) -> int | None:
        """Return a number of steps that the loop surely takes: one, if it may stop then."""
        most = self.most()
        return min(most, 1) if self.may_stop and most is not None else most

    def most(self) -> int | None:
        """Return the number of steps that the loop takes if it does not stop, if it is known.

        Where a number of steps is given, sequences do not tell: they may have another length,
        which is an error when the loop runs.
        """
        if self.n_steps is not None:
            return constant_integer(self.n_steps)
        lengths = (sequence.type.shape[0] for sequence in self.sequences)
        return next((length for length in lengths if length is not None), None)


def steps_of(node: Apply) -> Steps | None:
    """Return what a node says of lengths if it is a loop."""
    method = getattr(node.op, "steps_of", None)
    return None if method is None else method(node)
