"""What a step makes of sums over channels leaves an elementwise loop.

A kernel adds up what a step computes for every channel. A factor of the sum, ``f_t Σ_c h_t[c]``, is
no factor of its terms: ``f h`` may overflow, or be NaN, where ``f Σ h`` is a number, and the other
way round. So the loop stores the sums, and a second loop over their rows, which has the axes of the
sums alone, does the rest as the step does it: factors, and accumulators ``s ← s + f_t Σ_c h_t[c]``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib.analysis.channel_sums import multiple_of_sum, terms_of_sum
from scanlib.analysis.scalar_body import sum_carries
from scanlib.ops.graph import depends_on, substitute
from scanlib.ops.loop import Carry, Loop, Output, Sequence


@dataclass
class SumsApart:
    """The second loop.

    Attributes
    ----------
    parts : list of (Carry or Output)
        The parts of the loop that are computed from sums, which have left it.
    stored : list of (Output, Variable)
        What the loop stores for them, with the row that takes its place in the second loop.
    rest : Loop
        The second loop but for these rows.
    """

    parts: list[Carry | Output]
    stored: list[tuple[Output, Variable]]
    rest: Loop

    def loop(self, results: dict[int, Variable]) -> Loop:
        """Return the second loop, given the results of the first by their part."""
        rows = [Sequence(results[id(output)], row) for output, row in self.stored]
        self.rest.sequences = [*rows, *self.rest.sequences]
        return self.rest


def take_sums_apart(loop: Loop) -> SumsApart | None:
    """Take what is computed from sums out of a loop; return it, None if there is nothing."""
    found = _parts_with_multiples(loop)
    if not found:
        return None
    parts = [part for part, _ in found]
    sums = {total for _, totals in found for total in totals}
    own = {part.value for part in parts if isinstance(part, Carry)}
    values = [_value(part) for part in parts]
    above = depends_on(values, [*sums, *own])
    taken = {id(part) for part in parts}
    loop.carries = [carry for carry in loop.carries if id(carry) not in taken]
    loop.outputs = [output for output in loop.outputs if id(output) not in taken]
    rows = _rows(loop, values, sums, own, above)
    stored = []
    for value, row in rows.items():
        output = next((known for known in loop.outputs if known.value is value), None)
        if output is None:
            output = Output(value)
            loop.outputs.append(output)
        stored.append((output, row))
    for part, value in zip(parts, substitute(values, rows), strict=True):
        if isinstance(part, Carry):
            part.next = value
        else:
            part.value = value
    return SumsApart(parts, stored, _rest(loop, parts))


def _rest(loop: Loop, parts: list[Carry | Output]) -> Loop:
    """Return the second loop without the rows that the first one stores."""
    read = set(ancestors([_value(part) for part in parts]))
    return Loop(
        n_steps=None if loop.stop is not None else loop.n_steps,
        sequences=[
            Sequence(part.outer, part.row, part.name) for part in loop.sequences if part.row in read
        ],
        carries=[part for part in parts if isinstance(part, Carry)],
        non_sequences=[part for part in loop.non_sequences if part.inner in read],
        outputs=[part for part in parts if isinstance(part, Output)],
        reverse=loop.reverse,
        name=loop.name,
        function=loop.function,
    )


def _value(part: Carry | Output) -> Variable:
    return part.next if isinstance(part, Carry) else part.value


def _parts_with_multiples(loop: Loop) -> list[tuple[Carry | Output, list[Variable]]]:
    """Return accumulators and outputs that have a multiple of a sum, each with its sums."""
    found: list[tuple[Carry | Output, list[Variable]]] = []
    is_sum: list[bool] | None = None
    for k, carry in enumerate(loop.carries):
        terms = [
            multiple_of_sum(term) for term in terms_of_sum(carry.next) if term is not carry.value
        ]
        sums = [term for term in terms if term is not None]
        if any(term.scaled for term in sums):
            is_sum = sum_carries(loop) if is_sum is None else is_sum
            if is_sum[k]:
                found.append((carry, [term.total for term in sums]))
    for output in loop.outputs:
        term = multiple_of_sum(output.value)
        if term is not None and term.scaled:
            found.append((output, [term.total]))
    return found


def _rows(
    loop: Loop,
    values: list[Variable],
    sums: set[Variable],
    own: set[Variable],
    above: set[Variable],
) -> dict[Variable, Variable]:
    """Return what the second loop reads instead of computing it, with its rows.

    These are the sums, and what reads states. A loop that may stop early stores all that differs
    from step to step, since its sequences have more rows.
    """
    recurrent = {tap for state in loop.states for tap in state.taps.values()}
    recurrent |= {carry.value for carry in loop.carries}
    if loop.stop is not None:
        recurrent |= {sequence.row for sequence in loop.sequences}
    rows: dict[Variable, Variable] = {}
    pending, seen = list(values), set[Variable]()
    while pending:
        value = pending.pop(0)
        if value in seen or value in own or isinstance(value, Constant):
            continue
        seen.add(value)
        if value in sums:
            rows[value] = value.type()
        elif value in above:
            pending += value.owner.inputs
        elif not recurrent.isdisjoint(ancestors([value])):
            rows[value] = value.type()
    return rows
