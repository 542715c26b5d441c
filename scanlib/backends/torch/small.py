"""Small Ops under PyTorch: where recurrences start, and what truth values and numbers share.

Gradients of comparisons and choices mix truth values with numbers. PyTensor's translation leaves
that to torch, whose rules are narrower than NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify, pytorch_typify
from pytensor.scalar.basic import EQ, Mod, Sub, Switch

from scanlib.backends.torch.portable import torch_dtype
from scanlib.ops.checked_rows import CheckedRows
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.one_row import OneRow
from scanlib.ops.padded_rows import PaddedRows


@pytorch_typify.register(np.random.Generator)
def typify_generator(data: np.random.Generator, **kwargs: Any) -> Any:
    """Say that there are no random draws: PyTensor has no tensor that a generator could be."""
    raise NotImplementedError(
        "PyTensor's PyTorch linker has no generators of random numbers: draw outside of the "
        "function and pass what was drawn as a sequence, or compile in another mode"
    )


@pytorch_funcify.register(OneRow)
def funcify_one_row(op: OneRow, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the first row of an array, zeros if there is none."""

    def one_row(value: Any) -> Any:
        if op.zeros or value.shape[0] == 0:
            return value.new_zeros((1, *value.shape[1:]))
        return value[:1]

    return one_row


@pytorch_funcify.register(PaddedRows)
def funcify_padded_rows(op: PaddedRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return rows and zero rows behind them, up to a length."""

    def padded_rows(rows: Any, length: Any) -> Any:
        missing = int(length) - rows.shape[0]
        if missing == 0:
            return rows
        return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])

    return padded_rows


@pytorch_funcify.register(EQ)
def funcify_eq(op: EQ, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the comparison of elements.

    PyTensor goes by NumPy's name of the function, ``equal``. Torch's function of that name compares
    whole tensors.
    """
    return torch.eq


@pytorch_funcify.register(Sub)
def funcify_sub(op: Sub, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the difference, also of truth values and numbers, which torch refuses."""
    dtype = torch_dtype(node.outputs[0].type.dtype)
    return lambda x, y: torch.sub(torch.as_tensor(x).to(dtype), torch.as_tensor(y).to(dtype))


@pytorch_funcify.register(Mod)
def funcify_mod(op: Mod, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the remainder, which has another name in torch than in NumPy."""
    return torch.remainder


@pytorch_funcify.register(Switch)
def funcify_switch(op: Switch, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the choice, also by numbers, which torch refuses, in the dtype of the result."""
    dtype = torch_dtype(node.outputs[0].type.dtype)

    def switch(condition: Any, yes: Any, no: Any) -> Any:
        values = (torch.as_tensor(value).to(dtype) for value in (yes, no))
        return torch.where(torch.as_tensor(condition) != 0, *values)

    return switch


@pytorch_funcify.register(CheckedRows)
def funcify_checked_rows(op: CheckedRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the check that an array has one row for every step."""

    def checked_rows(rows: Any, steps: Any) -> Any:
        if rows.shape[0] != int(steps):
            raise SequenceLengthError(op.message, rows.shape[0], int(steps))
        return rows

    return checked_rows
