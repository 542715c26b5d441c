"""Where the backward loop finds what the forward loop computed."""

from __future__ import annotations

from dataclasses import replace

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors, toposort

from scanlib.ops.graph import depends_on, is_numeric, is_tensor
from scanlib.ops.loop import Loop, Output, Results, State, past_rows
from scanlib.ops.row_ops.ran_steps import RanSteps, is_mask


class ForwardValues:
    """Forward rows, aligned with the steps of the backward loop.

    They enter the backward loop as sequences that are views of what the forward loop stored.
    If something is needed that it did not store, the same loop is run with more outputs;
    merging makes one loop of the two.

    The steps walked are all that ran, or the last `truncate_gradient` of them.
    """

    def __init__(self, loop: Loop, results: Results) -> None:
        self.loop = loop
        self.results = results
        self.stored_carries: dict[int, int] = {}
        self.stored_cuts: dict[Variable, int] = {}

    def store(self, carries: list[int], cuts: dict[Variable, Variable]) -> None:
        """Run the loop once more, with these carries and body values stored over time.

        `cuts` maps each value that the backward loop reads to what computes it in a step.
        """
        loop = self.loop
        states = [replace(state, taps=dict(state.taps), untraced=False) for state in loop.states]
        for i in carries:
            carry = loop.carries[i]
            self.stored_carries[i] = len(states)
            initial = pt.expand_dims(carry.initial, 0)
            states.append(State(initial, {-1: carry.value}, carry.next, name=carry.name))
        outputs = list(loop.outputs)
        for cut, value in cuts.items():
            self.stored_cuts[cut] = len(outputs)
            outputs.append(Output(value))
        rest = [carry for i, carry in enumerate(loop.carries) if i not in carries]
        self.results = replace(loop, states=states, carries=rest, outputs=outputs).apply()

    # The steps

    @property
    def truncated(self) -> bool:
        return self.loop.truncate_gradient >= 0

    def length(self) -> Variable:
        """Return the number of steps that ran."""
        if self.loop.stop is None:
            return self.loop.length()
        if self.results.outputs:
            return self.results.outputs[0].shape[0]
        return self.results.histories[0].shape[0] - self._depth(0)

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

    def tap(self, state: int, offset: int) -> Variable:
        """Return a state's tap; offset 0 is the next state."""
        history, depth = self.results.histories[state], self._depth(state)
        return self.walk(past_rows(history, depth, -offset, self.loop.reverse))

    def carry(self, i: int) -> Variable:
        """Return the value a stored carry had before each step."""
        return self.tap(self.stored_carries[i], -1)

    def cut(self, value: Variable) -> Variable:
        """Return a stored body value."""
        return self.walk(self.results.outputs[self.stored_cuts[value]])

    def output(self, i: int) -> Variable:
        """Return a stacked output."""
        return self.walk(self.results.outputs[i])

    def ran(self) -> list[Variable]:
        """Return masks of the walked steps, which tell a batch of loops who ran them."""
        if self.loop.stop is None:
            return [self.sequence(p.outer) for p in self.loop.sequences if is_mask(p.outer)]
        from_first = not self.truncated and not self.loop.reverse
        if self.results.outputs:
            return [self.walk(RanSteps(0, from_first)(self.results.outputs[0]))]
        return [self.walk(RanSteps(self._depth(0), from_first)(self.results.histories[0]))]

    def _depth(self, state: int) -> int:
        return self.results.node.op.signature.depths[state]


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
