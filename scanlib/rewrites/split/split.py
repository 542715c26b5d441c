"""The smallest possible loop: what does not need the steps one after the other leaves it.

For a loop with recurrent parts `h`, early values `m`, late outputs `y` and sums `c`::

    m_t = μ(x_t)            one batch for all steps, before the loop
    h_t = φ(h_{t-1}, m_t)   the loop
    y_t = ψ(h_t, x_t)       one batch, after the loop
    c   = Σ_t g(h_t, x_t)   a sum over rows; for g = λ_t h_tᵀ one matrix product Λᵀ H

`split_parts` says what belongs where, by the cost rule of
`over_time.split_cost`; `over_time.peel` evaluates batches and sums. In the gradient
of a recurrent network all weight gradients are such sums.

A loop with `until` stays whole: batches before it would compute steps that it may not take, and
fail where a step would.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import graph_inputs, toposort
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from scanlib.lengths.known import countable_scalars
from scanlib.ops.graph import is_outer_product
from scanlib.ops.linker_features import needs_known_lengths, takes_steps
from scanlib.ops.loop import Loop, Output, Part, Sequence, State, past_rows
from scanlib.ops.loop_rewrite import LoopRewrite, record_of
from scanlib.ops.row_ops.checked_rows import CheckedValue
from scanlib.rewrites.edit import Detached, detach, replace
from scanlib.rewrites.lower.canonical_loop import canonical_loop, sizes_from_outside
from scanlib.rewrites.lower.lower_elementwise import LowerElementwiseLoops, is_elementwise
from scanlib.rewrites.lower.lower_linear import LowerLinearLoops
from scanlib.rewrites.over_time.peel import OverTime
from scanlib.rewrites.simplify.last_rows import is_loop
from scanlib.rewrites.split.split_parts import SplitParts


def _note(parts: SplitParts, remains: bool) -> str:
    """Return what is said of what left a loop."""
    where = " after the loop" if remains else ""
    counts = (
        (len(parts.before), "value", " computed for all steps before the loop"),
        (len(parts.outputs), "output", f" computed for all steps{where}"),
        (len(parts.taken_sums), "sum", " taken over all steps at once"),
        (len(parts.stored), "value", " stored for that"),
    )
    said = [f"{n} {what}{'' if n == 1 else 's'}{done}" for n, what, done in counts if n]
    return "; ".join(said if remains else [*said, "no loop remains"])


class SplitLoops(LoopRewrite):
    """Take loops apart; see the module's text.

    With `maps_only`, only those that a later lowering would keep alive: maps, and elementwise loops
    that add up outer products.
    """

    def __init__(self, maps_only: bool = False) -> None:
        super().__init__()
        self.maps_only = maps_only

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not config.scanlib__split or keeps_loops_whole(fgraph):
            return
        # Segments of a checkpointed loop stay whole: what a batch stores is what they save.
        for node in reversed([n for n in fgraph.toposort() if is_loop(n)]):
            if node.op.recompute or node.op.signature.has_stop or node not in fgraph.apply_nodes:
                continue
            if not self.maps_only or _leaves_early(node):
                with self.attempt(fgraph, node):
                    self.take_apart(fgraph, node)

    def take_apart(self, fgraph: FunctionGraph, node: Apply) -> None:
        """Take one loop apart where that is worth it, and lower the loops among its parts."""
        read = [bool(fgraph.clients.get(out)) for out in node.outputs]
        found = split(node, read, takes_steps(fgraph) is not None)
        if found is None:
            return
        new, note = found
        before = set(fgraph.apply_nodes)
        pairs = zip(node.outputs, new, strict=True)
        made = {old: value for old, value in pairs if value is not None}
        replace(fgraph, made, "scanlib_split")
        record_of(fgraph).splits.append(note)
        for part in [n for n in fgraph.toposort() if is_loop(n) and n not in before]:
            LowerLinearLoops.lower(fgraph, part) or LowerElementwiseLoops.lower(fgraph, part)


def keeps_loops_whole(fgraph: FunctionGraph) -> bool:
    """Whether a value decides how many steps a loop takes, and the linker has to know."""
    if not needs_known_lengths(fgraph):
        return False
    known: set[Variable] | None = None
    for node in filter(is_loop, fgraph.apply_nodes):
        n_steps = node.op.signature.split_inputs(node.inputs).n_steps
        if node.op.signature.has_stop:
            return True
        if n_steps is not None and not isinstance(n_steps, Constant):
            known = countable_scalars(fgraph) if known is None else known
            if n_steps not in known:
                return True
    return False


def _leaves_early(node: Apply) -> bool:
    """Whether a lowering would keep a loop that need not be one, or hide a matrix product."""
    signature = node.op.signature
    if not (signature.n_states or signature.n_carries):
        return True
    loop = canonical_loop(node)
    nodes = toposort(loop.body_outputs())
    works = all(isinstance(n.op, Elemwise | DimShuffle) or is_outer_product(n) for n in nodes)
    return works and SplitParts(loop).has_product_sums()


def split(
    node: Apply, read: list[bool], in_programs: bool = False
) -> tuple[list[Variable | None], tuple[str, str]] | None:
    """Return what replaces each output of a loop that is read, None if the loop stays."""
    loop = canonical_loop(node)
    sizes_from_outside(loop)
    parts = SplitParts(loop)
    if not parts.plan() and (parts.recurrent or not parts.sums):
        return None
    if not parts.recurrent:
        rows = {v: v.type.clone(shape=(None, *v.type.shape))() for v in parts.before}
        rest, *_ = remaining_loop(parts, rows)
        given = rest.body_inputs()
        others = set(graph_inputs(rest.body_outputs(), blockers=given)).difference(given)
        if not all(isinstance(other, Constant) for other in others):
            return None  # it reads a part that does not remain: a sum of sums, say
        if rest.body_outputs() and not is_elementwise(Loop.from_node(rest.apply().node)):
            parts.take_all_sums()
    if not (parts.before or parts.outputs or parts.taken_sums):
        return None
    detached = detach(loop)
    try:
        values, remains = _results(parts, read, detached, in_programs)
    except NotImplementedError:
        return None
    note = loop.name or "loop", _note(parts, remains)
    return detached.attach(values), note


def remaining_loop(
    parts: SplitParts, before: dict[Variable, Variable]
) -> tuple[Loop, dict[Variable, Output], dict[Part, Any]]:
    """Return the loop of what does not leave, and the outputs that store values for batches.

    `before` holds the rows of early values, `parts.stored` what is stored; the third result are
    the copies of parts.
    """
    loop = parts.loop
    taken = {*dict(parts.taken_sums), *parts.outputs}
    stored = {value: Output(value) for value in parts.stored}
    twins: dict[Part, Any] = {p: dataclasses.replace(p) for p in loop.parts if p not in taken}
    for twin in twins.values():
        if isinstance(twin, State):
            twin.taps = dict(twin.taps)
    rest = dataclasses.replace(
        loop,
        sequences=list(loop.sequences),
        states=[twins[part] for part in loop.states if part in twins],
        carries=[twins[part] for part in loop.carries if part in twins],
        non_sequences=list(loop.non_sequences),
        outputs=[*(twins[part] for part in loop.outputs if part in twins), *stored.values()],
    )
    if not rest.body_outputs():
        return rest, stored, twins
    rows = {value: value.type() for value in before}
    rest.sequences += [Sequence(before[value], row) for value, row in rows.items()]
    rest.substitute(rows)
    rest.drop_unread_inputs()
    return rest, stored, twins


def _results(
    parts: SplitParts, read: list[bool], detached: Detached, in_programs: bool
) -> tuple[list[Variable | None], bool]:
    """Return what replaces each output of a loop that is read, and whether a loop remains."""
    loop = parts.loop
    rows_of = {part.row: part.outer for part in loop.sequences}
    over_time = OverTime(loop, rows_of, in_programs=in_programs)
    before = {value: over_time.rows(value) for value in parts.before}
    rest, stored, twins = remaining_loop(parts, before)
    remains, by_part = bool(rest.body_outputs()), dict[Part, Variable]()
    if remains:
        made = rest.results()
        by_part = {part: made[twin] for part, twin in twins.items()}
        for value, rows in _known_rows(parts, by_part):
            if value not in over_time.varying:
                over_time.add(value, rows)
        for value, output in stored.items():
            over_time.add(value, made[output])
    known = [part.outer for part in rest.sequences] if remains else None
    over_time.varying |= detached.checked(loop, known)
    found = over_time.results(loop, read, by_part, parts.taken_sums)
    if remains or not loop.required_steps:
        return found, remains
    check = CheckedValue(IndexError, loop.messages().missing_steps())
    enough, states = pt.ge(loop.length(), loop.required_steps), len(loop.states)
    checked = [value if value is None else check(value, enough) for value in found[:states]]
    return [*checked, *found[states:]], remains


def _known_rows(
    parts: SplitParts, by_part: dict[Part, Variable]
) -> Iterator[tuple[Variable, Variable]]:
    """Yield values of a step that the results of a loop hold, with their rows."""
    loop = parts.loop
    for state in loop.states:
        if not state.untraced and state in by_part:
            for offset, tap in [*state.taps.items(), (0, state.next)]:
                if offset or tap in parts.late_or_recurrent:
                    rows = past_rows(by_part[state], state.depth, -offset, loop.reverse)
                    yield tap, rows
    for output in loop.outputs:
        if output in by_part and output.value in parts.late_or_recurrent:
            yield output.value, by_part[output]
