"""Matrix recurrences with the loops that they stand for: see `ops.lowered.checked_linear`."""

from __future__ import annotations

from dataclasses import dataclass

from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from scanlib.ops.graph import substitute
from scanlib.ops.loop import Loop, Sequence, State
from scanlib.ops.lowered.checked_linear import CheckedLinearScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.rewrites.lower.linear_roles import Roles, value_of
from scanlib.rewrites.over_time.peel import OverTime


@dataclass
class BesideLoop:
    """Builds recurrences whose matrix no step computes, from the parts of a loop."""

    loop: Loop
    parts: Roles
    over_time: OverTime

    def checked(self, op: LinearScan, inputs: list[Variable], initial: Variable) -> Variable:
        """Return the history of a recurrence.

        Parameters
        ----------
        op : LinearScan
            The recurrence.
        inputs : list of Variable
            Its inputs.
        initial : Variable
            Its initial row.
        """
        following = self.parts.recurrent.next
        read = set(ancestors([following]))
        rows = [sequence for sequence in self.loop.sequences if sequence.row in read]
        return self._made(op, inputs, initial, following, rows, self.loop.length())

    def checked_shifted(
        self,
        op: LinearScan,
        inputs: list[Variable],
        initial: Variable,
        later: slice,
        earlier: slice,
    ) -> Variable:
        """Return the history of ``u = c + g``; see `linear_roles.shifted`.

        A step reads the rows `earlier` of the loop, and the `g` of `later` ones.
        """
        following, shift = self.parts.recurrent.next, self.parts.shift
        assert shift is not None
        read, added = set(ancestors([following])), set(ancestors([shift]))
        rows: list[Sequence] = []
        own: dict[Variable, Variable] = {}
        for sequence in self.loop.sequences:
            if sequence.row in read:
                rows.append(Sequence(sequence.outer[earlier], sequence.row))
            if sequence.row in added:
                own[sequence.row] = sequence.row.type()
                rows.append(Sequence(sequence.outer[later], own[sequence.row]))
        following = following + substitute([shift], own)[0]
        return self._made(op, inputs, initial, following, rows, self.loop.length() - 1)

    def _made(
        self,
        op: LinearScan,
        inputs: list[Variable],
        initial: Variable,
        following: Variable,
        rows: list[Sequence],
        length: Variable,
    ) -> Variable:
        loop, part, read = self.loop, self.parts.recurrent, set(ancestors([following]))
        alone = Loop(
            n_steps=length if loop.n_steps is not None or not rows else None,
            sequences=rows,
            states=[
                State(
                    initial,
                    {-1: value_of(part)},
                    following,
                    name=part.name,
                    untraced=op.untraced,
                )
            ],
            non_sequences=[whole for whole in loop.non_sequences if whole.inner in read],
            reverse=loop.reverse,
            required_steps=op.required_steps,
            name=loop.name,
            function=loop.function,
        )
        exact = alone.apply().node
        factors = [self.over_time.value(factor)[0] for factor in self.parts.factors]
        made = CheckedLinearScan(exact.op, len(factors), op.options)
        return made(*inputs, *factors, *exact.inputs)
