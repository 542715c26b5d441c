"""Slices with negative steps, which tensors do not have.

``x[::-1]`` stands in every program that walks a series backwards. PyTensor refuses such slices
under PyTorch; here the axis is flipped and sliced forward::

    x[start:stop:-s] = flip(x)[n-1-start : n-1-stop : s]

All other indices stay PyTensor's own business. Arrays that come with a negative stride, like a
series that the caller reversed, are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify, pytorch_typify
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES

_subtensor = pytorch_funcify.dispatch(Subtensor)
_inc_subtensor = pytorch_funcify.dispatch(IncSubtensor)
_typify = pytorch_typify.dispatch(np.ndarray)


@pytorch_typify.register(np.ndarray)
def typify_array(data: np.ndarray, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """Return an array as a tensor; torch warns of arrays that are not to be written to."""
    is_constant = isinstance(kwargs.get("variable"), Constant)
    if (is_constant and not data.flags.writeable) or min(data.strides, default=0) < 0:
        data = data.copy()
    return _typify(data, dtype=dtype, **kwargs)


def _flipped(x: torch.Tensor, indices: Any) -> tuple[list[int], list[Any]]:
    """Return the axes to flip, and indices with positive steps."""
    axes, found = [], []
    for axis, index in enumerate(indices):
        if isinstance(index, slice) and index.step is not None and int(index.step) < 0:
            size = x.shape[axis]
            first, last = (None if b is None else int(b) for b in (index.start, index.stop))
            start, stop, step = slice(first, last, int(index.step)).indices(size)
            axes.append(axis)
            # An empty slice may have its stop behind its start.
            index = slice(size - 1 - start, max(size - 1 - stop, size - 1 - start), -step)
        found.append(index)
    return axes, found


def _has_negative_step(op: Any, indices: list[Any]) -> bool:
    values = [int(i.data) if isinstance(i, Constant) else None for i in indices]
    return any(
        isinstance(entry, slice) and (entry.step is not None and (entry.step or 0) < 0)
        for entry in indices_from_subtensor(values, op.idx_list)
    )


def with_places(rule: Callable[..., Any], arrays: int) -> Callable[..., Any]:
    """Return the conversion of an Op whose inputs after the first `arrays` ones are indices.

    Those that are known are numbers: `torch.compile` follows these, and no numbers in tensors.
    Torch takes uint8 for masks, and refuses other small integers.
    """

    def convert(op: Any, node: Apply, **kwargs: Any) -> Callable[..., Any]:
        function = rule(op, node=node, **kwargs)
        indices = list(enumerate(node.inputs))[arrays:]
        known = {k: int(inp.data) for k, inp in indices if _is_known(inp)}
        small = {k for k, inp in indices if _is_small(inp)}
        if not known and not small:
            return function

        def place(k: int, value: Any) -> Any:
            return torch.as_tensor(value).long() if k in small else known.get(k, value)

        def indexed(*inputs: Any) -> Any:
            return function(*(place(k, value) for k, value in enumerate(inputs)))

        return indexed

    return convert


def _is_known(index: Variable) -> bool:
    """Whether an index is a whole number that is known."""
    kind = np.dtype(getattr(index.type, "dtype", float)).kind
    return isinstance(index, Constant) and kind in "iu" and np.ndim(index.data) == 0


def _is_small(index: Variable) -> bool:
    dtype = getattr(index.type, "dtype", None)
    return not isinstance(index, Constant) and dtype not in (None, "bool", "int64")


def funcify_subtensor(op: Subtensor, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return a function that slices a tensor, also backwards."""
    if not _has_negative_step(op, list(node.inputs[1:])):
        return _subtensor(op, node=node, **kwargs)

    def subtensor(x: torch.Tensor, *indices: Any) -> torch.Tensor:
        axes, forward = _flipped(x, indices_from_subtensor(indices, op.idx_list))
        return torch.flip(x, axes)[tuple(forward)]

    return subtensor


def funcify_inc_subtensor(op: IncSubtensor, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return a function that sets or increments a slice of a tensor, also backwards."""
    if not _has_negative_step(op, list(node.inputs[2:])):
        return _inc_subtensor(op, node=node, **kwargs)

    def inc_subtensor(x: torch.Tensor, y: torch.Tensor, *indices: Any) -> torch.Tensor:
        axes, forward = _flipped(x, indices_from_subtensor(indices, op.idx_list))
        changed = torch.flip(x, axes)
        if op.set_instead_of_inc:
            changed[tuple(forward)] = y
        else:
            changed[tuple(forward)] += y
        return torch.flip(changed, axes)

    return inc_subtensor


_OWN = {Subtensor: funcify_subtensor, IncSubtensor: funcify_inc_subtensor}
for kinds, arrays in ((INDEX_READS, 1), (INDEX_WRITES, 2)):
    for kind in kinds:
        rule = _OWN.get(kind, pytorch_funcify.dispatch(kind))
        pytorch_funcify.register(kind)(with_places(rule, arrays))
