"""One call of a step function, and the names of what it is called with."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable

from scanlib.frontend.step import StepResult
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


def tap_name(name: str | None, tap: int) -> str | None:
    """Return the name of the row that a tap of a variable reads."""
    if name is None:
        return None
    return f"{name}[t]" if tap == 0 else f"{name}[t{tap:+d}]"
