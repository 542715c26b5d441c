"""Small Ops under PyTorch: where recurrences start, choices, and checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytensor.graph.basic import Apply
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify
from pytensor.scalar.basic import Switch

from scanlib._compat import IfElse
from scanlib.backends.torch.portable import torch_dtype
from scanlib.ops.errors import ConvergenceError, SequenceLengthError
from scanlib.ops.row_ops.checked_convergence import CheckedConvergence
from scanlib.ops.row_ops.checked_rows import CheckedRows
from scanlib.ops.row_ops.one_row import OneRow
from scanlib.ops.row_ops.padded_rows import PaddedRows


@pytorch_funcify.register(OneRow)
def funcify_one_row(op: OneRow, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the first row of an array, zeros if there is none."""

    def one_row(value: Any) -> Any:
        if value.shape[0] == 0:
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


@pytorch_funcify.register(Switch)
def funcify_switch(op: Switch, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the choice, also by numbers, which torch refuses, in the dtype of the result."""
    dtype = torch_dtype(node.outputs[0].type.dtype)

    def switch(condition: Any, yes: Any, no: Any) -> Any:
        values = (torch.as_tensor(value).to(dtype) for value in (yes, no))
        return torch.where(torch.as_tensor(condition) != 0, *values)

    return switch


@pytorch_funcify.register(IfElse)
def funcify_if_else(op: IfElse, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the chosen values; PyTensor returns a tuple also where there is one."""
    n = op.n_outs

    def if_else(condition: Any, *values: Any) -> Any:
        chosen = values[:n] if condition else values[n:]
        return chosen[0] if n == 1 else chosen

    return if_else


@pytorch_funcify.register(CheckedConvergence)
def funcify_checked_convergence(
    op: CheckedConvergence, node: Apply, **kwargs: Any
) -> Callable[..., Any]:
    """Return the check that iterations have converged."""

    def checked_convergence(rows: Any, failed: Any, *numbers: Any) -> Any:
        if failed:
            raise ConvergenceError(op.message, *(number.item() for number in numbers))
        return rows

    return checked_convergence


@pytorch_funcify.register(CheckedRows)
def funcify_checked_rows(op: CheckedRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the check that an array has one row for every step."""

    def checked_rows(rows: Any, steps: Any) -> Any:
        if rows.shape[0] != int(steps):
            raise SequenceLengthError(op.message, rows.shape[0], int(steps))
        return rows

    return checked_rows
