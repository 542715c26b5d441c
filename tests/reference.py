"""The plain Python loop that every variant of a scan is held against.

The loop is written to be read, not to be fast, and knows nothing of symbolic graphs. With a
sequence ``x``, a state ``y`` and a non-sequence ``w``, one step computes ::

    y[t], z[t] = step(x[t + k1], x[t + k2], ..., y[t + j1], y[t + j2], ..., w)

with taps ``k`` of any sign and taps ``j < 0``. An initial value for a deepest tap ``-K`` has the
rows ``y[-K], ..., y[-1]``; for the only tap ``-1`` it is that one row, without a time axis.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class SequenceSpec(NamedTuple):
    """A sequence and the taps that the step reads, in the order in which it reads them."""

    values: np.ndarray
    taps: tuple[int, ...]

    @property
    def first(self) -> int:
        """Index of the row that tap 0 reads at time 0."""
        return -min(0, *self.taps)

    @property
    def length(self) -> int:
        """Number of steps for which every tap stays inside the sequence."""
        return max(0, len(self.values) - self.first - max(0, *self.taps))


class StateSpec(NamedTuple):
    """The initial rows of a state, oldest first, and the taps that the step reads."""

    rows: list[np.ndarray]
    taps: tuple[int, ...]


def as_sequence(spec: Any) -> SequenceSpec:
    """Read an array, or a dictionary with the keys ``input`` and ``taps``."""
    if not isinstance(spec, dict):
        return SequenceSpec(np.asarray(spec), (0,))
    taps = spec.get("taps", [0])
    return SequenceSpec(np.asarray(spec["input"]), (taps,) if isinstance(taps, int) else (*taps,))


def as_state(spec: Any) -> StateSpec | None:
    """Read an initial value, a dictionary with ``initial`` and ``taps``, or None for an output."""
    if spec is None:
        return None
    if not isinstance(spec, dict):
        spec = {"initial": spec}
    initial, taps = np.asarray(spec["initial"]), tuple(spec.get("taps", (-1,)))
    depth = -min(taps)
    if taps == (-1,):
        return StateSpec([initial.copy()], taps)
    if len(initial) < depth:
        raise ValueError(f"taps {taps} need {depth} initial rows, got {len(initial)}")
    return StateSpec([row.copy() for row in initial[:depth]], taps)


def number_of_steps(sequences: Sequence[SequenceSpec], n_steps: int | None) -> int:
    """Return ``n_steps``, or else the length of the shortest sequence."""
    if n_steps is None:
        return min(sequence.length for sequence in sequences)
    for sequence in sequences:
        if sequence.length < n_steps:
            raise ValueError(f"a sequence has {sequence.length} steps, fewer than {n_steps}")
    return n_steps


def reference_scan(
    step: Callable,
    sequences: Sequence[Any] = (),
    outputs_info: Sequence[Any] = (),
    non_sequences: Sequence[Any] = (),
    n_steps: int | None = None,
    go_backwards: bool = False,
    until: bool = False,
    rows: Sequence[tuple[tuple[int, ...], Any] | None] | None = None,
) -> list[np.ndarray]:
    """Run a loop and stack what it computes.

    Parameters
    ----------
    step : callable
        Function of NumPy arrays: sequence taps, state taps and non-sequences, in that order. It
        returns one value per entry of `outputs_info`, in a list; with `until`, one more that says
        whether this step is the last.
    sequences : sequence of array or dict
        Arrays, or dictionaries with the keys ``input`` and ``taps``. The shortest one counts.
    outputs_info : sequence of array, dict or None
        Initial values, dictionaries with the keys ``initial`` and ``taps``, or None for an output
        that no later step reads.
    non_sequences : sequence
        Values that every step sees whole.
    n_steps : int, optional
        Number of steps; at most what the sequences allow, which is also the default.
    go_backwards : bool
        Read every sequence from its end. Results stay in the order of iteration.
    until : bool
        Whether `step` returns a condition that ends the loop, after its step, where it is true.
    rows : sequence of (shape, dtype) or None, optional
        Types of the rows, for loops without steps: nothing else can tell them for an output.

    Returns
    -------
    list of ndarray
        One array per entry of `outputs_info`, without initial rows.
    """
    read = [as_sequence(spec) for spec in sequences]
    states = [as_state(spec) for spec in outputs_info]
    steps = number_of_steps(read, n_steps)
    stacked: list[list[np.ndarray]] = [[] for _ in states]

    for i in range(steps):
        arguments: list[Any] = []
        for sequence in read:
            time = sequence.length - 1 - i if go_backwards else i
            arguments += [sequence.values[sequence.first + time + tap] for tap in sequence.taps]
        for state in states:
            if state is not None:
                arguments += [state.rows[tap] for tap in state.taps]
        values = list(step(*arguments, *non_sequences))
        stop = bool(values.pop()) if until else False
        if len(values) != len(states):
            raise ValueError(f"the step returned {len(values)} values, not {len(states)}")
        for value, state, column in zip(values, states, stacked, strict=True):
            row = np.array(value)
            column.append(row)
            if state is not None:
                state.rows.append(row)
        if stop:
            break

    results = []
    for k, (state, column) in enumerate(zip(states, stacked, strict=True)):
        if column:
            results.append(np.stack(column))
            continue
        known = rows[k] if rows is not None else None
        if known is None:
            if state is None:
                raise ValueError("an output of zero steps needs its row type")
            known = (state.rows[0].shape, state.rows[0].dtype)
        results.append(np.empty((0, *known[0]), known[1]))
    return results
