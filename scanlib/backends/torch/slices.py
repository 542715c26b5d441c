"""Slices with negative steps, which tensors do not have.

``x[::-1]`` stands in every program that walks a series backwards. PyTensor refuses such slices
under PyTorch; here the axis is flipped and sliced forward::

    x[start:stop:-s] = flip(x)[n-1-start : n-1-stop : s]

All other indices stay PyTensor's own business. Arrays that come with a negative stride, like a
series that the caller reversed, are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify, pytorch_typify
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

_subtensor = pytorch_funcify.dispatch(Subtensor)
_inc_subtensor = pytorch_funcify.dispatch(IncSubtensor)
_typify = pytorch_typify.dispatch(np.ndarray)


@pytorch_typify.register(np.ndarray)
def typify_array(data: np.ndarray, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """Return an array as a tensor."""
    if any(stride < 0 for stride in data.strides):
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


def _constants(indices: Sequence[Variable]) -> list[int] | None:
    """Return indices as numbers if all are known: `torch.compile` follows those."""
    if all(isinstance(index, Constant) for index in indices):
        return [int(index.data) for index in indices]
    return None


@pytorch_funcify.register(Subtensor)
def funcify_subtensor(op: Subtensor, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return a function that slices a tensor, also backwards."""
    if not _has_negative_step(op, list(node.inputs[1:])):
        return _subtensor(op, node=node, **kwargs)
    known = _constants(node.inputs[1:])

    def subtensor(x: torch.Tensor, *indices: Any) -> torch.Tensor:
        axes, forward = _flipped(x, indices_from_subtensor(known or indices, op.idx_list))
        return torch.flip(x, axes)[tuple(forward)]

    return subtensor


@pytorch_funcify.register(IncSubtensor)
def funcify_inc_subtensor(op: IncSubtensor, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return a function that sets or increments a slice of a tensor, also backwards."""
    if not _has_negative_step(op, list(node.inputs[2:])):
        return _inc_subtensor(op, node=node, **kwargs)
    known = _constants(node.inputs[2:])

    def inc_subtensor(x: torch.Tensor, y: torch.Tensor, *indices: Any) -> torch.Tensor:
        axes, forward = _flipped(x, indices_from_subtensor(known or indices, op.idx_list))
        changed = torch.flip(x, axes)
        if op.set_instead_of_inc:
            changed[tuple(forward)] = y
        else:
            changed[tuple(forward)] += y
        return torch.flip(changed, axes)

    return inc_subtensor
