"""Ops of a step that are written as graphs of others, where a loop is built.

Their own derivatives, and batches of them, are slow to compile or have no kernel: those of
``pt.pad(x, 1, mode="reflect")`` hold loops of `pytensor.scan`. Those of the graphs here are short.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable, equal_computations
from pytensor.graph.traversal import toposort, walk
from pytensor.scalar.basic import Add, Cast, Mul, Neg, Second, Sub, Switch
from pytensor.tensor.basic import Join
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.einsum import Einsum
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.extra_ops import FillDiagonal, FillDiagonalOffset
from pytensor.tensor.linalg.constructors import BlockDiagonal
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.math import Dot, Sum
from pytensor.tensor.pad import Pad
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import float_dtypes

from scanlib._compat import INDEX_READS, INDEX_WRITES, IfElse, inline_ofg_node, join_of
from scanlib.lengths.numbers import constant_index, indices_of, only_cut
from scanlib.ops.batching import batch_of
from scanlib.ops.graph import applies, substitute


def _fill_diagonal(node: Apply) -> list[Variable] | None:
    x, value, *offset = node.inputs
    if x.type.ndim > 2:
        return None
    rows, columns = pt.arange(x.shape[0])[:, None], pt.arange(x.shape[1])
    return [pt.switch(pt.eq(sum(offset, rows), columns), value, x)]


def _block_diagonal(node: Apply) -> list[Variable]:
    shapes = [matrix.shape for matrix in node.inputs]
    sizes = [sum((shape[axis] for shape in shapes[1:]), shapes[0][axis]) for axis in (0, 1)]
    found, row, column = pt.zeros(sizes, dtype=node.outputs[0].type.dtype), 0, 0
    for matrix, (rows, columns) in zip(node.inputs, shapes, strict=True):
        found = found[row : row + rows, column : column + columns].set(matrix)
        row, column = row + rows, column + columns
    return [found]


# Where an array that goes on beyond its ends, `n` items of it, has the item of a place outside.
_PLACES: dict[str, Callable[[Any, Any], Variable]] = {
    "edge": lambda i, n: pt.clip(i, 0, n - 1),
    "wrap": lambda i, n: i % n,
    "symmetric": lambda i, n: pt.minimum(i % (2 * n), 2 * n - 1 - i % (2 * n)),
    "reflect": lambda i, n: pt.abs((i + n - 1) % pt.maximum(2 * n - 2, 1) - (n - 1)),
}


def _pad(node: Apply) -> list[Variable]:
    x, widths, *_ = node.inputs
    places = _PLACES.get(node.op.pad_mode)
    if places is None or not isinstance(widths, Constant):
        return inline_ofg_node(node)
    for axis, (before, after) in enumerate(np.broadcast_to(widths.data, (x.type.ndim, 2))):
        n, whole = x.shape[axis], (slice(None),) * axis
        outside = pt.arange(-before, 0), pt.arange(after) + n
        first, last = (x[(*whole, places(i, n))] for i in outside)
        x = pt.concatenate([first, x, last], axis=axis)
    return [x]


def _write_at_mask(node: Apply) -> list[Variable] | None:
    """Write where a mask of the leading axes says: one number, or what the same mask selects of
    other arrays. Of several numbers only the run tells how many there must be."""
    x, value, *_ = node.inputs
    mask, *others = indices_of(node)
    if others or getattr(mask, "dtype", "") != "bool":
        return None
    whole = _at_all_places(value, mask, x.type.ndim)
    if whole is None:
        return None
    mask = pt.shape_padright(mask, x.type.ndim - mask.type.ndim)
    made = whole if node.op.set_instead_of_inc else x + whole
    return [pt.switch(mask, pt.cast(made, x.type.dtype), x)]


def _at_all_places(value: Variable, mask: Variable, ndim: int) -> Variable | None:
    """Return what is computed of a mask's items for all items, None where it is of others.

    Items that the mask leaves out may be missing, and a gradient multiplies what is computed from
    them by zero: zeros stand for them, and where an operation need not be finite there, a half.
    """
    if all(value.type.broadcastable):
        return value.dimshuffle()
    node = value.owner
    if value.type.broadcastable[0] and value.type.ndim == ndim - mask.type.ndim + 1:
        return value.squeeze(0)
    if node is None:
        return None
    padded = pt.shape_padright(mask, ndim - mask.type.ndim)
    if isinstance(node.op, INDEX_READS):
        x, places = node.inputs[0], indices_of(node)
        if len(places) > 1 or x.type.ndim != ndim or not isinstance(places[0], Variable):
            return None
        if not equal_computations(places, [mask]):
            return None
        return pt.switch(padded, x, np.zeros((), x.type.dtype))
    if not isinstance(node.op, Elemwise):
        return None
    found = [_at_all_places(inp, mask, ndim) for inp in node.inputs]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found):
        return None
    if not applies(node, (Add, Cast, Mul, Neg, Second, Sub)):
        halves = [_half(part) for part in parts]
        if not _is_finite(node, halves):
            return None
        pairs = zip(parts, halves, strict=True)
        parts = [p if isinstance(p, Constant) else pt.switch(padded, p, half) for p, half in pairs]
    return node.op(*parts)


def _half(part: Variable) -> np.ndarray:
    """Return what stands for items that are left out: the number itself of a constant."""
    if isinstance(part, Constant):
        return part.data
    return np.asarray(0.5 if part.type.dtype in float_dtypes else 1, part.type.dtype)


def _is_finite(node: Apply, given: list[np.ndarray]) -> bool:
    """Whether an elementwise operation has a finite result of some numbers."""
    try:
        with np.errstate(all="ignore"):
            result = node.op.scalar_op.impl(*given)
    except (NotImplementedError, TypeError, ValueError):
        return False
    return bool(np.all(np.isfinite(result)))


def _selected(value: Variable) -> tuple[Variable, Variable] | None:
    """Return all items of what is computed of those that a mask of the leading axes selects, and
    the mask; None where nothing is."""

    def parts(variable: Variable) -> list[Variable]:
        node = variable.owner
        return node.inputs if node is not None and isinstance(node.op, Elemwise) else []

    for read in walk([value], parts):
        if read.owner is not None and isinstance(read.owner.op, INDEX_READS):
            (mask, *_), ndim = indices_of(read.owner), read.owner.inputs[0].type.ndim
            if getattr(mask, "dtype", "") == "bool":
                whole = _at_all_places(value, mask, ndim)
                return None if whole is None else (whole, mask)
    return None


def _sum_of_selected(node: Apply) -> list[Variable] | None:
    """Sum what a mask selects as all items, with zeros for the others."""
    (value,), axes = node.inputs, node.op.axis
    axes = range(value.type.ndim) if axes is None else axes
    found = _selected(value) if 0 in axes else None
    if found is None:
        return None
    whole, mask = found
    rank = mask.type.ndim
    padded = pt.shape_padright(mask, whole.type.ndim - rank)
    chosen = pt.switch(padded, whole, np.zeros((), whole.type.dtype))
    axes = [*range(rank), *(axis + rank - 1 for axis in axes if axis)]
    return [node.op.clone(axis=axes)(chosen)]


def _sizes_of_selected(node: Apply) -> list[Variable] | None:
    """Count what a mask selects."""
    found = _selected(node.inputs[0]) if node.inputs[0].type.ndim else None
    if found is None:
        return None
    whole, mask = found
    return [pt.stack([mask.sum(dtype="int64"), *list(whole.shape)[mask.type.ndim :]])]


def _choice_of_writes(node: Apply) -> list[Variable] | None:
    """Choose what is written into an array, not one of two arrays that differ in what is written.

    ``switch(c, h[i].set(x), h)`` is ``h[i].set(switch(c, x, h[i]))``, which leaves the rest alone.
    """
    if not applies(node, Switch):
        return None
    condition, *arrays = node.inputs
    one, other = chains = [_written(array) for array in arrays]
    base = next((array for array in one if array in other), None)
    if base is None or len(one) == len(other) == 1 or not all(condition.type.broadcastable):
        return None
    condition, made = pt.neq(condition.dimshuffle(), 0), base
    for chain, chosen in zip(chains, (condition, ~condition), strict=True):
        for array in chain[: chain.index(base)][::-1]:
            write = array.owner
            _, value, *index = write.inputs
            kept = Subtensor(write.op.idx_list)(made, *index)
            kept = kept if write.op.set_instead_of_inc else pt.zeros((), kept.type.dtype)
            made = write.op(made, pt.switch(chosen, value, kept), *index)
    return [node.outputs[0].type.filter_variable(made, allow_convert=True)]


def _written(array: Variable) -> list[Variable]:
    """Return an array, and what it was before each of the writes into it, the last one first."""
    found = [array]
    while array.owner is not None and type(array.owner.op) is IncSubtensor:
        array = array.owner.inputs[0]
        found.append(array)
    return found


def _rotation(node: Apply) -> list[Variable] | None:
    """Read ``join(x[k:], x[:k])``, an array rotated by a number that data decide, item by item:
    JAX knows no slices of such lengths, and those of a batch make no array."""
    axis, parts = join_of(node)
    reads = [part.owner for part in parts if part.owner and isinstance(part.owner.op, Subtensor)]
    cuts = [cut for read in reads if (cut := only_cut(read)) is not None and cut[0] == axis]
    if axis is None or len(parts) != 2 or len(cuts) != 2:
        return None
    x, (front, back) = reads[0].inputs[0], [index for _, index in cuts]
    if x is not reads[1].inputs[0] or not isinstance(front, slice) or not isinstance(back, slice):
        return None
    first, last = front.start, back.stop
    if front != slice(first, None) or constant_index(back.start) not in (None, 0) or back.step:
        return None
    if not (_is_data(first) and equal_computations([first], [last])):
        return None
    whole = (slice(None),) * axis
    n = x.shape[axis]
    first = pt.clip(pt.as_tensor(first), -n, n)
    places = pt.arange(n) + pt.switch(first > 0, first - n, first)
    return [node.outputs[0].type.filter_variable(x[(*whole, places)], allow_convert=True)]


def _is_data(number: Any) -> bool:
    """Whether a number is computed from others than sizes and constants."""

    def computed_from(variable: Variable) -> list[Variable]:
        node = variable.owner
        return [] if node is None or isinstance(node.op, Shape | Shape_i) else node.inputs

    return isinstance(number, Variable) and any(
        found.owner is None and not isinstance(found, Constant)
        for found in walk([number], computed_from)
    )


def _choice(node: Apply) -> list[Variable]:
    condition, *values = node.inputs
    half = len(node.outputs)
    return [pt.switch(condition, *pair) for pair in zip(values[:half], values[half:], strict=True)]


def _of_one_dtype(node: Apply) -> list[Variable] | None:
    """Cast what a product or solve takes to the dtype that it makes.

    There is no kernel for several; the cast of a matrix that all steps have leaves the loop.
    """
    dtype = node.outputs[0].type.dtype
    if all(inp.type.dtype == dtype for inp in node.inputs):
        return None
    return [node.op(*(pt.cast(inp, dtype) for inp in node.inputs))]


COMPOSITES: dict[type, Callable[[Apply], list[Variable] | None]] = {
    **dict.fromkeys((FillDiagonal, FillDiagonalOffset), _fill_diagonal),
    **dict.fromkeys((Dot, BatchedDot, Solve, SolveTriangular, CholeskySolve), _of_one_dtype),
    BlockDiagonal: _block_diagonal,
    Elemwise: _choice_of_writes,
    Einsum: inline_ofg_node,
    INDEX_WRITES[1]: _write_at_mask,
    Join: _rotation,
    Pad: _pad,
    Shape: _sizes_of_selected,
    Sum: _sum_of_selected,
}
BATCHES = COMPOSITES | {IfElse: _choice}  # of an `IfElse` PyTensor cannot compute a batch


def written_out(node: Apply) -> list[Variable] | None:
    """Return the outputs of a node, or of a batch of such, by other Ops; None if it stays."""
    if isinstance(node.op, Blockwise):
        write = BATCHES.get(type(node.op.core_op))
        return None if write is None else batch_of(node, write)
    write = COMPOSITES.get(type(node.op))
    return None if write is None else write(node)


def composites(
    outputs: Sequence[Variable], inputs: Sequence[Variable] = ()
) -> dict[Variable, Variable]:
    """Return what takes the place of results of such Ops above some variables, up to `inputs`."""
    found: dict[Variable, Variable] = {}
    for node in toposort(outputs, blockers=inputs):
        made = written_out(node)
        if made is not None:
            made = substitute(made, composites(made, node.inputs))
            found |= zip(node.outputs, substitute(made, found), strict=True)
    return found
