"""Values that several graphs of a step compute from its rows alone, and that are worth keeping.

A block of steps computes the elements of its recurrences before the states are known, and what
reads the states after. Both may need the same quotient or exponential of the rows: it is computed
once for all steps of the block, and kept until the block ends.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytensor.scalar.basic as ps
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors, toposort

from scanlib.kernels.language import FLOATS
from scanlib.ops.graph import is_cheap
from scanlib.ops.signature import BodyInputs


@dataclass(frozen=True)
class StepGraph:
    """A graph that computes a part of one step, from inputs of the body. `scanned` is what has been
    computed before, and whose it is: nothing above it is looked at."""

    outputs: Sequence[Variable]
    scanned: Mapping[Variable, int]


def shared_values(graphs: Sequence[StepGraph], inner: BodyInputs) -> list[dict[Variable, int]]:
    """Return, for each graph, which of its values are shared, by their numbers.

    Equal numbers are equal values of the same rows. `inner` are the inputs of the body.
    """
    numbers: dict[object, int] = {}
    found = [_slow_values(graph, inner, numbers) for graph in graphs]
    uses = Counter(number for own in found for number in set(own.values()))
    shared = [{v: number for v, number in own.items() if uses[number] > 1} for own in found]
    return [_last(graph, own) for graph, own in zip(graphs, shared, strict=True)]


def _slow_values(
    graph: StepGraph, inner: BodyInputs, numbers: dict[object, int]
) -> dict[Variable, int]:
    """Return what a graph computes from rows by slow operations."""
    blockers = {*graph.scanned}
    varying, known = (
        {variable: numbers.setdefault(variable, len(numbers)) for variable in inputs}
        for inputs in (inner.rows, inner.non_sequences)
    )
    order = list(toposort(graph.outputs, blockers=blockers))
    for node in order:
        for inp in node.inputs:
            if isinstance(inp, Constant):
                known[inp] = numbers.setdefault(inp.signature(), len(numbers))
        operands = [varying.get(inp, known.get(inp)) for inp in node.inputs]
        if None in operands:
            continue
        own = varying if any(inp in varying for inp in node.inputs) else known
        for place, out in enumerate(node.outputs):
            own[out] = numbers.setdefault((node.op, place, *operands), len(numbers))
    above = set(ancestors(graph.outputs, blockers=blockers)) - blockers
    return {
        out: varying[out]
        for node in order
        for out in node.outputs
        if out in above and out in varying and out.type.dtype in FLOATS and _is_slow(node.op)
    }


def _is_slow(op: Op) -> bool:
    return isinstance(op, ps.TrueDiv | ps.Reciprocal) or not is_cheap(op)


def _last(graph: StepGraph, shared: Mapping[Variable, int]) -> dict[Variable, int]:
    """Return the shared values that a graph reads when it has all of them."""
    above = set(ancestors(graph.outputs, blockers={*graph.scanned, *shared}))
    return {value: number for value, number in shared.items() if value in above}
