"""Loops around one matrix recurrence become a `LinearScan` and batches.

A loop is lowered if its recurrent part is one state (or carry) of depth one whose next value
`scanlib.analysis.matrix_recurrence` recognizes; all else that a step computes must be maps of the
step's inputs and that state, stacked as outputs or added up in accumulators ``c ← c + f``. Then

1. the coefficients and offsets of all steps are evaluated as a batch (`over_time.peel`);
2. `LinearScan` gives the history of the state;
3. outputs are evaluated as batches over views of the history;
4. accumulators become sums over time.

The derivative of a loop is a loop of the same form, whose carry holds the cotangents, so it is
lowered by the same rule. It costs memory only for what such a loop stored anyway: the history of
the cotangents is as large as that of the states. A state of which only the last row is read, by
nobody but itself, is not stored.

Several recurrent parts, deeper taps, and states that a step cuts up or joins are first made one
vector (`linear_system`). Loops with `until` stay.
"""

from __future__ import annotations

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib.ops.linker_features import compiles_step_products
from scanlib.ops.loop import Loop
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.rewrites.detached import detach
from scanlib.rewrites.lower.linear_choice import find_recurrence
from scanlib.rewrites.lower.linear_lowering import LinearLowering
from scanlib.rewrites.lower.linear_roles import NotLinearError, Roles
from scanlib.rewrites.simplify.simplify import replace


class LowerLinearLoops(LowersLoops):
    """Replace loops around a matrix recurrence; see the module's text."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        if not config.scanlib__linear:
            return False
        read = [bool(fgraph.clients.get(out)) for out in node.outputs]
        try:
            new = lower_linear(node, read, compiles_step_products(fgraph))
        except NotLinearError:
            return False
        pairs = zip(node.outputs, new, strict=True)
        replacements = {old: value for old, value in pairs if value is not None}
        replace(fgraph, replacements, "scanlib_linear")
        return True


def explain_linear(loop: Loop) -> str | None:
    """Return why a loop is not lowered to a `LinearScan`, None if it can be."""
    try:
        find_recurrence(loop.apply().node)
    except NotLinearError as error:
        return str(error)
    return None


def lower_linear(
    node: Apply, read: list[bool], step_products: bool = False
) -> list[Variable | None]:
    """Return what replaces each output of a loop that is read, as graphs of its inputs.

    Raises
    ------
    NotLinearError
        If the loop is of another form.
    """
    loop, parts, joined = find_recurrence(node)
    if joined is not None:
        values = lower_parts(loop, parts, joined.read(read), step_products)
        return joined.results(values, read)
    return lower_parts(loop, parts, read, step_products)


def lower_parts(
    loop: Loop, parts: Roles, read: list[bool], step_products: bool
) -> list[Variable | None]:
    """Return what replaces each output of a loop around a recurrence that is read."""
    detached = detach(loop)
    try:
        lowering = LinearLowering(loop, parts, read, detached.lengths)
        lowering.over_time.step_products = step_products
        results = lowering.results()
    except NotImplementedError as error:
        raise NotLinearError(f"a step cannot be evaluated as a batch: {error}") from error
    return detached.attach(results)
