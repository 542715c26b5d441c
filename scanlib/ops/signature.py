"""Who stands where: the order of a loop's inputs and outputs.

A canonical loop is applied to flat lists of variables. `Signature` is the only place that
knows their order; everybody else asks it to split a flat list into named groups, or to
flatten the groups again.

Outer order::

    Scan(signature, body)([n_steps], *sequences, *initials, *carries, *non_sequences)
        -> *histories, *final carries, *stacked outputs

Body order::

    (*sequence rows, *state taps, *carries, *non_sequences)
        -> (*next states, *next carries, *outputs, [stop])
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from scanlib.lengths.numbers import Rows, Steps


class OuterInputs(NamedTuple):
    """The inputs of a loop, by role. `n_steps` is None where the sequences give the length."""

    n_steps: Any
    sequences: list
    initials: list
    carries: list
    non_sequences: list


class OuterOutputs(NamedTuple):
    """The outputs of a loop, by role."""

    histories: list
    carries: list
    outputs: list


class BodyInputs(NamedTuple):
    """The inputs of one step, by role; `taps` holds one list per state."""

    rows: list
    taps: list[list]
    carries: list
    non_sequences: list


class BodyOutputs(NamedTuple):
    """The outputs of one step, by role. `stop` is None for loops that run to their end."""

    states: list
    carries: list
    outputs: list
    stop: Any


class Labels(NamedTuple):
    """Names of a loop's parts, for messages only. They do not take part in equality.

    `function` is the one that the user called for the loop.
    """

    sequences: tuple[str | None, ...] = ()
    states: tuple[str | None, ...] = ()
    carries: tuple[str | None, ...] = ()
    non_sequences: tuple[str | None, ...] = ()
    outputs: tuple[str | None, ...] = ()
    function: str = "scan"

    def result(self, position: int) -> str:
        """Return the name of a result, or its role and number."""
        names = [name or f"state {i}" for i, name in enumerate((*self.states, *self.carries))]
        names += [name or f"output {i}" for i, name in enumerate(self.outputs)]
        return names[position]


def _split(flat: Sequence, *sizes: int) -> list[list]:
    if len(flat) != sum(sizes):
        raise ValueError(f"expected {sum(sizes)} variables for {sizes}, got {len(flat)}")
    groups, start = [], 0
    for size in sizes:
        groups.append(list(flat[start : start + size]))
        start += size
    return groups


@dataclass(frozen=True)
class Signature:
    """The shape of a canonical loop's interface.

    `taps` are those that the body reads of each state, all negative: ``-k`` is the value `k` steps
    before the current one, in the order of iteration; of `untraced` states only the last rows are
    returned. Without `has_n_steps` the sequences give the number of steps; with `has_stop` the last
    output of the body ends the loop; a `reverse` loop walks from the last row to the first. A loop
    must take the `required_steps` for what is read of it to exist: fewer are an `IndexError`; a
    rewrite sets it, never the user.
    """

    n_sequences: int = 0
    taps: tuple[tuple[int, ...], ...] = ()
    untraced: tuple[bool, ...] = ()
    n_carries: int = 0
    n_non_sequences: int = 0
    n_outputs: int = 0
    has_n_steps: bool = False
    has_stop: bool = False
    reverse: bool = False
    required_steps: int = 0
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.taps) != len(self.untraced):
            raise ValueError("a signature needs one `untraced` flag per state")
        for taps in self.taps:
            if not taps or any(tap >= 0 for tap in taps) or len(set(taps)) != len(taps):
                raise ValueError(f"taps of a state are distinct and negative, got {taps}")
        if not self.has_n_steps and not self.n_sequences:
            raise ValueError("a loop without sequences needs its number of steps")
        # How many past rows each state keeps: its farthest tap.
        object.__setattr__(self, "depths", tuple(-min(taps) for taps in self.taps))

    @property
    def n_states(self) -> int:
        return len(self.taps)

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """How many inputs a loop has of each role, but for the number of steps."""
        return self.n_sequences, self.n_states, self.n_carries, self.n_non_sequences

    def split_inputs(self, flat: Sequence) -> OuterInputs:
        """Split the flat inputs of a loop."""
        n_steps, *groups = _split(flat, int(self.has_n_steps), *self.input_sizes)
        return OuterInputs(n_steps[0] if n_steps else None, *groups)

    def join_inputs(self, groups: OuterInputs) -> list:
        """Flatten the inputs of a loop."""
        n_steps, *others = groups
        return [*[n_steps] * self.has_n_steps, *chain(*others)]

    def of_body_inputs(self, groups: OuterInputs) -> list:
        """Return what belongs to each input of one step, given what belongs to those of a loop."""
        pairs = zip(groups.initials, self.taps, strict=True)
        of_taps = [value for value, taps in pairs for _ in taps]
        return [*groups.sequences, *of_taps, *groups.carries, *groups.non_sequences]

    def split_outputs(self, flat: Sequence) -> OuterOutputs:
        """Split the flat outputs of a loop."""
        return OuterOutputs(*_split(flat, self.n_states, self.n_carries, self.n_outputs))

    def carried(self, inputs: Sequence, outputs: Sequence) -> list[tuple]:
        """Return the first and the last value of each carry of a loop."""
        first, last = self.split_inputs(inputs).carries, self.split_outputs(outputs).carries
        return list(zip(first, last, strict=True))

    def steps_of(self, flat: Sequence) -> Steps:
        """Return what a loop on these inputs says of lengths."""
        outer = self.split_inputs(flat)
        histories = (
            Rows(depth, each_step=not untraced)
            for depth, untraced in zip(self.depths, self.untraced, strict=True)
        )
        rows = [*histories, *[None] * self.n_carries, *[Rows(0, each_step=True)] * self.n_outputs]
        like = [*outer.initials, *outer.carries, *[None] * self.n_outputs]
        return Steps(outer.n_steps, outer.sequences, rows, like, self.has_stop)

    def split_body_inputs(self, flat: Sequence) -> BodyInputs:
        """Split the flat inputs of one step."""
        rows, taps, carries, non_sequences = _split(
            flat, self.n_sequences, sum(map(len, self.taps)), self.n_carries, self.n_non_sequences
        )
        return BodyInputs(rows, _split(taps, *map(len, self.taps)), carries, non_sequences)

    def split_body_outputs(self, flat: Sequence) -> BodyOutputs:
        """Split the flat outputs of one step."""
        states, carries, outputs, stop = _split(
            flat, self.n_states, self.n_carries, self.n_outputs, int(self.has_stop)
        )
        return BodyOutputs(states, carries, outputs, stop[0] if stop else None)

    def describe_input(self, position: int) -> str:
        """Return the role of one flat input, for messages and printing."""
        roles = ("sequence", "initial state", "carry", "non-sequence")
        pairs = zip(roles, self.input_sizes, strict=True)
        names = ([f"{role} {i}" for i in range(size)] for role, size in pairs)
        return self.join_inputs(OuterInputs("n_steps", *names))[position]
