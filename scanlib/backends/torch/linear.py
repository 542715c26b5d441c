"""Matrix recurrences on tensors, for devices without a compiled kernel.

``h_t = A_t ⊗ h_{t-1} + b_t`` in the semirings of `ops.lowered.linear_scan`: a walk of one batched
product per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scanlib.backends.torch.operator import Run
from scanlib.ops.lowered.linear_loop import check_shapes, count_steps
from scanlib.ops.lowered.linear_scan import LinearScan


def linear_rows(op: LinearScan) -> Run:
    """Return the function of tensors that runs a matrix recurrence."""

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [_walk(op, op.parts(inputs))]

    return run


def _walk(op: LinearScan, parts: Any) -> torch.Tensor:
    steps = count_steps(op, parts)
    check_shapes(op, parts)
    initial = parts.initial
    if not len(initial):
        return initial.clone()
    history = initial.new_empty((steps + 1, *initial.shape[1:]))
    history[steps if op.reverse else 0] = initial[0]
    for i in range(steps):
        t = steps - 1 - i if op.reverse else i
        before, after = (t + 1, t) if op.reverse else (t, t + 1)
        matrix = parts.matrix[t] if op.coefficient == "steps" else parts.matrix
        if op.side == "both":
            right = parts.right[t] if op.coefficient == "steps" else parts.right
            new = matrix @ history[before] @ right
        else:
            new = _applied(op, matrix, history[before], parts.mask)
        history[after] = new if parts.offset is None else new + parts.offset[t]
    if not op.untraced:
        return history
    last = 0 if op.reverse else steps
    return history[last : last + 1].clone()


def _applied(
    op: LinearScan, matrix: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    if op.side == "right":
        matrix = matrix.mT
        mask = None if mask is None else mask.T
    if op.vector:
        return _masked(op.semiring, matrix, state[..., None], mask)[..., 0]
    if op.side == "left":
        return _masked(op.semiring, matrix, state, mask)
    return _masked(op.semiring, matrix, state.mT, mask).mT


def _masked(
    semiring: str, matrix: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return ``A ⊗ h`` without the terms that a mask leaves out."""
    if mask is None:
        return _product(semiring, matrix, state)
    terms = matrix[..., :, :, None] * state[..., None, :, :]
    return torch.where(mask[:, :, None], terms, torch.zeros_like(terms)).sum(dim=-2)


def _product(semiring: str, matrix: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    if semiring == "real":
        return matrix @ state
    terms = matrix[..., :, :, None] + state[..., None, :, :]
    if semiring == "log":
        return torch.logsumexp(terms, dim=-2)
    if terms.shape[-2] == 0:
        nothing = float("-inf") if semiring == "max" else float("inf")
        return terms.new_full((*terms.shape[:-2], terms.shape[-1]), nothing)
    return terms.amax(dim=-2) if semiring == "max" else terms.amin(dim=-2)
