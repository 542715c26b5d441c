"""Matrix recurrences on tensors, for devices without a compiled kernel.

``h_t = A_t ⊗ h_{t-1} + b_t`` in the semirings of `scanlib.ops.linear_scan`: a walk of one batched
product per step. Composing steps would turn a product of a matrix and a vector into products of
matrices, `d` times the work, and ``log2 T`` times that; it pays where `d` is small and the device
large, which is why recurrences of channels are composed (`scanlib.backends.torch.parallel`) and
these are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scanlib.backends.torch.operator import Run
from scanlib.ops.linear_loop import check_shapes, count_steps
from scanlib.ops.linear_scan import LinearScan


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
        new = _applied(op, matrix, history[before])
        history[after] = new if parts.offset is None else new + parts.offset[t]
    if not op.untraced:
        return history
    last = 0 if op.reverse else steps
    return history[last : last + 1].clone()


def _applied(op: LinearScan, matrix: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    if op.vector:
        matrix = matrix if op.side == "left" else matrix.mT
        return _product(op.semiring, matrix, state[..., None])[..., 0]
    if op.side == "left":
        return _product(op.semiring, matrix, state)
    return _product(op.semiring, matrix.mT, state.mT).mT


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
