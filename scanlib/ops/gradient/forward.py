"""Where the backward loop finds what the forward loop computed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors, toposort

from scanlib.ops.graph import depends_on, is_numeric, is_tensor
from scanlib.ops.loop import Carry, Loop, Output, State, past_rows
from scanlib.ops.row_ops.ran_steps import RanSteps, is_mask


class ForwardValues:
    """Forward rows, aligned with the steps of the backward loop.

    They enter the backward loop as sequences that are views of what the forward loop stored.
    If something is needed that it did not store, the same loop is run with more outputs;
    merging makes one loop of the two.

    The steps walked are all that ran, or the last `truncate_gradient` of them.
    """

    def __init__(self, loop: Loop, histories: Sequence[Variable], rows: Sequence[Variable]) -> None:
        self.loop = loop
        # Of states, carries, outputs and values of a step: the history, or the rows.
        self.stored: dict[Any, Variable] = dict(zip(loop.states, histories, strict=True))
        self.stored |= zip(loop.outputs, rows, strict=True)

    def store(self, carries: list[Carry], cuts: dict[Variable, Variable]) -> None:
        """Run the loop once more, with these carries and body values stored over time.

        `cuts` maps each value that the backward loop reads to what computes it in a step.
        """
        loop = self.loop
        states: dict[Any, State] = {
            state: replace(state, taps=dict(state.taps), untraced=False) for state in loop.states
        }
        for carry in carries:
            initial = pt.expand_dims(carry.initial, 0)
            states[carry] = State(initial, carry.taps, carry.next, name=carry.name)
        outputs: dict[Any, Output] = dict(zip(loop.outputs, loop.outputs, strict=True))
        outputs |= {cut: Output(value) for cut, value in cuts.items()}
        rest = [carry for carry in loop.carries if carry not in states]
        again = replace(loop, states=[*states.values()], carries=rest, outputs=[*outputs.values()])
        results = again.results()
        self.stored = {key: results[part] for key, part in (states | outputs).items()}

    # The steps

    @property
    def truncated(self) -> bool:
        return self.loop.truncate_gradient >= 0

    def steps_that_ran(self) -> tuple[Variable, int]:
        """Return rows of all steps that ran, and how many rows stand before them."""
        first, *_ = self.stored
        rows = [key for key in self.stored if not isinstance(key, State | Carry)]
        return (self.stored[rows[0]], 0) if rows else (self.stored[first], first.depth)

    def length(self) -> Variable:
        """Return the number of steps that ran."""
        if self.loop.stop is None:
            return self.loop.length()
        rows, before = self.steps_that_ran()
        return rows.shape[0] - before if before else rows.shape[0]

    def walked(self) -> Variable:
        """Return the number of steps that the backward loop walks."""
        if not self.truncated:
            return self.length()
        return pt.minimum(self.length(), self.loop.truncate_gradient)

    def first_walked(self) -> Variable | int:
        """Return the row, among those of the steps that ran, of the first walked one."""
        if self.loop.reverse or not self.truncated:
            return 0
        return self.length() - self.walked()

    def unread(self) -> Variable:
        """Return how many rows of a sequence no step read: those after `stop`."""
        return self.loop.length() - self.length()

    # Rows, one per walked step

    def walk(self, rows: Variable) -> Variable:
        """Return, of rows that belong to all steps that ran, those of the walked steps."""
        if not self.truncated:
            return rows
        return rows[: self.walked()] if self.loop.reverse else rows[self.first_walked() :]

    def sequence(self, rows: Variable) -> Variable:
        """Return the rows of a forward sequence."""
        if self.loop.stop is not None:
            rows = rows[self.unread() :] if self.loop.reverse else rows[: self.length()]
        return self.walk(rows)

    def tap(self, part: State | Carry, offset: int) -> Variable:
        """Return a tap of a state or of a stored carry; offset 0 is the next value."""
        return self.walk(past_rows(self.stored[part], part.depth, -offset, self.loop.reverse))

    def rows(self, key: State | Output | Variable) -> Variable:
        """Return what the steps computed: the next state, an output, or a stored value."""
        return self.tap(key, 0) if isinstance(key, State) else self.walk(self.stored[key])

    def ran(self) -> list[Variable]:
        """Return masks of the walked steps, which tell a batch of loops who ran them."""
        if self.loop.stop is None:
            return [self.sequence(p.outer) for p in self.loop.sequences if is_mask(p.outer)]
        rows, before = self.steps_that_ran()
        return [self.walk(RanSteps(before, not self.truncated and not self.loop.reverse)(rows))]


def drawn_values(values: list[Variable], inputs: list[Variable]) -> list[Variable]:
    """Return the tensors above `values` that a step computes from something without numbers.

    Random draws are of this kind: computing them again would need the generator's state.
    """
    opaque = [inp for inp in inputs if not is_numeric(inp)]
    if not opaque:
        return []
    dependent = depends_on(values, opaque)
    cuts: list[Variable] = []
    for node in toposort(values, blockers=inputs):
        if any(inp in dependent and not is_numeric(inp) for inp in node.inputs):
            cuts.extend(out for out in node.outputs if is_tensor(out))
    wanted = set(ancestors(values, blockers=cuts))
    return [cut for cut in cuts if cut in wanted]
