"""Matrix recurrences on tensors, for devices without a compiled kernel.

``h_t = A_t ⊗ h_{t-1} + b_t`` in the semirings of `ops.lowered.linear_scan`: a walk of one batched
product per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scanlib.backends.torch.operator import Run
from scanlib.ops.lowered.linear_loop import walk
from scanlib.ops.lowered.linear_scan import LinearScan


def linear_rows(op: LinearScan) -> Run:
    """Return the function of tensors that runs a matrix recurrence."""

    def times(matrix: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if mask is None:
            return _product(op.semiring, matrix, state)
        terms = matrix[..., :, :, None] * state[..., None, :, :]
        return torch.where(mask[:, :, None], terms, torch.zeros_like(terms)).sum(dim=-2)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = op.parts(inputs)
        return [walk(op, parts, times, parts.initial.new_empty)]

    return run


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
