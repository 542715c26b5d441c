"""The plain NumPy loop of a `LinearScan`: what every kernel is held against.

It knows the recurrence of `scanlib.ops.lowered.linear_scan` and nothing of how to make it fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from scanlib.ops.errors import InitialRowsError, LoopError, SequenceLengthError, StepCountError

if TYPE_CHECKING:
    from scanlib.ops.lowered.linear_scan import LinearScan, Parts

# Texts shared with the compiled kernels, where the numbers travel beside them.
NEGATIVE_STEPS = "linear scan: n_steps must not be negative, got {}"
MATRIX_ROWS = "linear scan: the matrix has {} rows in time, the recurrence takes {} steps"
OFFSET_ROWS = "linear scan: the offset has {} rows in time, the recurrence takes {} steps"
INITIAL_ROWS = "linear scan: the initial state needs 1 row in time, got {}"
SHAPES = "linear scan: sizes of matrix, offset and initial state differ along one axis: {} and {}"


def missing_steps(required: int) -> str:
    """Return the text of the `IndexError` for rows that no step wrote."""
    return f"a row was read that the loop did not write: it took fewer than {required} step(s)"


def count_steps(op: LinearScan, parts: Parts) -> int:
    """Return the number of steps and check that all inputs have it."""
    given = op.steps(parts)
    steps = len(given.sequences[0]) if given.n_steps is None else int(given.n_steps)
    check_rows(op, parts, steps)
    return steps


def check_rows(op: LinearScan, parts: Parts, steps: int) -> None:
    """Check that all inputs have the rows for a number of steps; those that are None are not."""
    if steps < 0:
        raise StepCountError(NEGATIVE_STEPS, steps)
    matrices = [parts.matrix] if op.coefficient == "steps" else []
    for value in (parts.offset, *matrices):
        if value is not None and len(value) != steps:
            text = OFFSET_ROWS if value is parts.offset else MATRIX_ROWS
            raise SequenceLengthError(text, len(value), steps)
    if len(parts.initial) != 1 and (steps or len(parts.initial) or op.untraced):
        raise InitialRowsError(INITIAL_ROWS, len(parts.initial))
    if steps < op.required_steps:
        raise IndexError(missing_steps(op.required_steps))


def check_shapes(op: LinearScan, parts: Parts) -> None:
    """Raise a `LoopError` if sizes of matrix, offset and initial state differ."""
    row = parts.initial.shape[1:]
    batch = op.batch_rank(parts.initial.ndim)
    size = row[-1] if op.vector or op.side == "right" else row[-2]
    wanted = (size, size)
    if op.matrix_batch_rank(parts.matrix.ndim):
        wanted = (*row[:batch], *wanted)
    found = parts.matrix.shape[1:] if op.coefficient == "steps" else parts.matrix.shape
    pairs = list(zip(found, wanted, strict=True))
    if parts.offset is not None:
        pairs += zip(parts.offset.shape[1:], row, strict=True)
    if parts.mask is not None:
        pairs += zip(parts.mask.shape, (size, size), strict=True)
    for left, right in pairs:
        if left != right:
            raise LoopError(SHAPES, left, right)


Times = Callable[[Any, Any, Any], Any]  # A ⊗ h of a matrix, a state, and a mask of terms or None


def product(semiring: str, matrix: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Return ``A ⊗ h`` for matrices ``(…, d, d)`` and ``(…, d, m)``."""
    if semiring == "real":
        return matrix @ state
    terms = matrix[..., :, :, None] + state[..., None, :, :]
    if semiring == "max":
        return terms.max(axis=-2, initial=-np.inf)
    if semiring == "min":
        return terms.min(axis=-2, initial=np.inf)
    largest = terms.max(axis=-2, initial=-np.inf)
    shift = np.where(np.isinf(largest), 0, largest)
    with np.errstate(divide="ignore", over="ignore"):
        total = np.exp(terms - shift[..., None, :]).sum(axis=-2)
        return shift + np.log(total)


def masked_product(matrix: np.ndarray, state: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return ``A h`` without the terms that the mask leaves out."""
    with np.errstate(invalid="ignore"):
        terms = matrix[..., :, :, None] * state[..., None, :, :]
        return np.where(mask[:, :, None], terms, 0).sum(axis=-2)


def next_state(op: LinearScan, parts: Parts, state: Any, times: Times) -> Any:
    """Return ``A ⊗ h + b`` (``h ⊗ A + b`` on the right side), with the rows of one step."""
    matrix, mask = parts.matrix, parts.mask
    if op.side == "right":
        matrix = matrix.swapaxes(-1, -2)
        mask = None if mask is None else mask.T
    if op.vector:
        new = times(matrix, state[..., None], mask)[..., 0]
    elif op.side == "right":
        new = times(matrix, state.swapaxes(-1, -2), mask).swapaxes(-1, -2)
    else:
        new = times(matrix, state, mask)
    return new if parts.offset is None else new + parts.offset


def walk(op: LinearScan, parts: Parts, times: Times, empty: Callable[[Any], Any]) -> Any:
    """Run the recurrence, one product per step.

    Parameters
    ----------
    op : LinearScan
    parts : Parts
        Arrays of any library whose arrays can be written to.
    times : callable
    empty : callable
        Returns a new array of a shape.
    """
    steps = count_steps(op, parts)
    check_shapes(op, parts)
    if not len(parts.initial):
        return empty(parts.initial.shape)
    timed = ["matrix", "offset"] if op.coefficient == "steps" else ["offset"]
    timed = [name for name in timed if getattr(parts, name) is not None]
    history = empty((steps + 1, *parts.initial.shape[1:]))
    history[steps if op.reverse else 0] = parts.initial[0]
    for i in range(steps):
        t = steps - 1 - i if op.reverse else i
        before, after = (t + 1, t) if op.reverse else (t, t + 1)
        now = parts._replace(**{name: getattr(parts, name)[t] for name in timed})
        history[after] = next_state(op, now, history[before], times)
    if not op.untraced:
        return history
    last = empty(parts.initial.shape)
    last[0] = history[0 if op.reverse else steps]
    return last


def run_in_python(op: LinearScan, parts: Parts) -> np.ndarray:
    """Run the recurrence on arrays of NumPy's."""

    def times(matrix: np.ndarray, state: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        if mask is None:
            return product(op.semiring, matrix, state)
        return masked_product(matrix, state, mask)

    return walk(op, parts, times, lambda shape: np.empty(shape, parts.initial.dtype))
