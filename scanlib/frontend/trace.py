"""One call of a step function, and names: of what it is called with, and of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.variable import TensorVariable

from scanlib.frontend.arguments import OutputArgument, SequenceArgument
from scanlib.frontend.step_function import StepResult, step_name
from scanlib.ops.graph import index_text, is_tensor
from scanlib.ops.loop import Carry, Sequence, State


@dataclass
class Trace:
    """One call of the step function, with the variables it was called with."""

    rows: list[Sequence] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    carries: dict[int, Carry] = field(default_factory=dict)
    shared: dict[SharedVariable, Carry] = field(default_factory=dict)
    result: StepResult | None = None

    def placeholders(self) -> list[Variable]:
        return [
            *(part.row for part in self.rows),
            *(tap for state in self.states.values() for tap in state.taps.values()),
            *(carry.value for carry in self.carries.values()),
            *(carry.value for carry in self.shared.values()),
        ]

    def row_shapes(self) -> list[list[Variable] | None]:
        """Return the sizes of what the step was called with, None for what has none."""
        return [
            *(list(part.outer.shape)[1:] for part in self.rows),
            *(list(state.initial.shape)[1:] for state in self.states.values() for _ in state.taps),
            *(None for _ in self.carries),
        ]


def tap_name(name: str | None, tap: int) -> str | None:
    """Return the name of the row that a tap of a variable reads."""
    return None if name is None else f"{name}{_at(tap)}"


def _at(tap: int) -> str:
    return "[t]" if tap == 0 else f"[t{tap:+d}]"


def describe_row(sequence: SequenceArgument, tap: int) -> str:
    """Return what a step is given of a sequence, for messages."""
    if sequence.taps != [0]:
        return f"{sequence.name or 'row'}{_at(tap)} (tap {tap} of {sequence.argument})"
    row = f"row of {sequence.argument}"
    return f"{sequence.name} ({row})" if sequence.name else row


def describe_state(output: OutputArgument, tap: int) -> str:
    """Return what a step is given of an output, for messages."""
    if output.name is None:
        return f"{output.argument} at t{tap:+d}"
    return f"{output.name}{_at(tap)} ({output.argument})"


def describe_whole(name: str | None, argument: str) -> str:
    """Return the name of an argument and the caller's name for it, for messages."""
    return f"{name} ({argument})" if name else argument


def check_count(
    fn: Callable[..., Any], result: StepResult, outputs: list[OutputArgument], title: str
) -> None:
    """Raise if a step returns another number of outputs than `outputs_info` describes."""
    if outputs and len(result.outputs) != len(outputs):
        described = ", ".join(describe_whole(output.name, output.argument) for output in outputs)
        number = f"{len(outputs)} output{'s' if len(outputs) > 1 else ''}"
        raise ValueError(
            f"{title}: outputs_info describes {number}, {described}; "
            f"{step_name(fn)} returned {len(result.outputs)}; give one entry per output, None for "
            "those that no step reads"
        )


class LoopResult(TensorVariable):
    """What comes out of a loop. Rows that are read of it are named after it: ``balance[-1]``."""

    def __getitem__(self, index: Any) -> Variable:
        rows = super().__getitem__(index)
        node = rows.owner
        is_part = node is not None and isinstance(node.op, Subtensor) and node.inputs[0] is self
        if self.name and is_part and rows.name is None:
            name_result(rows, f"{self.name}[{index_text(node)}]")
        return rows

    def __str__(self) -> str:
        node = self.owner
        if self.name is None and node is not None and isinstance(node.op, Subtensor):
            return str(node.inputs[0])
        return super().__str__()


def name_result(result: Variable, name: str | None) -> None:
    """Name a result of a loop that was just built."""
    if is_tensor(result):
        result.__class__ = LoopResult
    result.name = name
