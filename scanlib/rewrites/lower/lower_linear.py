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
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

from scanlib.lengths.arrays import Lengths
from scanlib.ops.graph import substitute
from scanlib.ops.linker_features import compiles_step_products
from scanlib.ops.loop import Carry, Loop, State
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.rewrites.lower.linear_choice import find_recurrence
from scanlib.rewrites.lower.linear_lowering import LinearLowering
from scanlib.rewrites.lower.linear_roles import NotLinearError, Roles
from scanlib.rewrites.pytensor_rewrites import run_query
from scanlib.rewrites.simplify.last_rows import is_loop
from scanlib.rewrites.simplify.simplify import replace

_STABLE = RewriteDatabaseQuery(include=["canonicalize", "stabilize", "merge"])


class LowerLinearLoops(LoopRewrite):
    """Replace loops around a matrix recurrence; see the module's text."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        for node in [node for node in fgraph.toposort() if is_loop(node)]:
            with self.attempt(fgraph, node):
                self.lower(fgraph, node)

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        """Replace one loop; return whether it could be."""
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
    outer = list(dict.fromkeys(loop.outer_inputs()))
    stand_ins = [variable.type() for variable in outer]
    places = dict(zip(outer, stand_ins, strict=True))
    known = Lengths(sure=True)
    lengths = {places[part.outer]: known.of(part.outer) for part in loop.sequences}
    _replace_outer(loop, places)
    try:
        lowering = LinearLowering(loop, parts, read, lengths)
        lowering.over_time.step_products = step_products
        results = lowering.results()
    except NotImplementedError as error:
        raise NotLinearError(f"a step cannot be evaluated as a batch: {error}") from error
    chosen = [value for value in results if value is not None]
    # What is new has missed the rewrites of this phase: the batches hold, for one, the naive
    # forms of logarithms of sums.
    graph = FunctionGraph(stand_ins, chosen, clone=False)
    run_query(_STABLE, graph)
    made = iter(substitute(graph.outputs, dict(zip(stand_ins, outer, strict=True))))
    return [None if value is None else next(made) for value in results]


def _replace_outer(loop: Loop, replacements: dict[Variable, Variable]) -> None:
    def new(variable: Variable) -> Variable:
        return replacements[variable]

    loop.n_steps = None if loop.n_steps is None else new(loop.n_steps)
    for sequence in loop.sequences:
        sequence.outer = new(sequence.outer)
    recurrent: list[State | Carry] = [*loop.states, *loop.carries]
    for part in recurrent:
        part.initial = new(part.initial)
    for whole in loop.non_sequences:
        whole.outer = new(whole.outer)
