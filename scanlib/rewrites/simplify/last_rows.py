"""Reads of the last rows of a trace, and histories that need not be stored for them.

``trace[-j]``, with ``trace = history[K:]``, is ``history[-j]`` if the loop took at least `j`
steps, and an error otherwise. If nobody reads more of a history than such rows, the loop
keeps only its last rows; the check then moves into the loop. How many rows the history of a loop
with `until` would have is read off an output, of truth values where there is no other.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import Subtensor

from scanlib._compat import IfElse
from scanlib.lengths.arrays import slice_of
from scanlib.lengths.numbers import constant_index, indices_of
from scanlib.ops.graph import before_writes, lifted_row
from scanlib.ops.loop import Carry, Loop, Output, Part, State
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.row_ops.checked_rows import CheckedValue
from scanlib.ops.scan import Scan
from scanlib.rewrites.edit import Lookup, LoopEdit, replace

MAX_KEPT_ROWS = 8  # more rows than this are read from a stored history


@dataclass
class LastRow:
    """A read of one row, counted from the end: ``old = history[-back, rest]``.

    With `several` it reads that row and all after it: ``old = history[-back:, rest]``.
    `needs_step` says that the row must be one that the loop wrote: the read goes through the
    trace, which has no rows if there are no steps.
    """

    old: Variable
    back: int
    rest: tuple
    needs_step: bool
    several: bool = False

    def exists(self, length: int | None) -> bool:
        """Whether the row is sure to be there, given a number of steps that the loop surely takes,
        None if that is not known."""
        return not self.needs_step or (length is not None and length >= self.back)

    def of(self, history: Variable) -> Variable:
        """Return the same read of another history."""
        row = lifted_row(history)
        if row is not None and self.back == 1 and not self.several:
            return row[self.rest] if self.rest else row
        first = slice(-self.back, None) if self.several else -self.back
        return history[(first, *self.rest)]

    def checked(self, loop: Loop, history: Variable, steps: Variable) -> Variable:
        """Return the same read of another history, if its loop took enough steps; an error else."""
        check = CheckedValue(IndexError, loop.messages().missing_steps(self.back))
        return check(self.of(history), pt.ge(steps, self.back))


def tap_of_view(node: Apply, depth: int, reverse: bool = False) -> int | None:
    """Return the tap whose values at all steps a view of a history holds.

    It is 0 for the next value, whose rows are the trace; None for all other views.
    """
    index = slice_of(node) if isinstance(node.op, Subtensor) else None
    if index is None or index.step is not None:
        return None
    start = 0 if index.start is None else constant_index(index.start)
    stop = 0 if index.stop is None else constant_index(index.stop) or None  # none before row 0
    if start is None or stop is None or start < 0 or stop > 0 or start - stop != depth:
        return None
    return -start if reverse else start - depth


def value_of_rows(
    rows: Variable, results: Mapping[Variable, Part], reverse: bool
) -> Variable | None:
    """Return the value of a step whose rows, one for each step, a variable holds; None for others.

    It is an output, or a tap or the next value of a state that is stored. `results` are those of
    the loop, with their parts.
    """
    part, view = results.get(rows), rows.owner
    if isinstance(part, Output):
        return part.value
    state = None if view is None or not view.inputs else results.get(view.inputs[0])
    if not isinstance(state, State) or state.untraced:
        return None
    offset = tap_of_view(view, state.depth, reverse)
    if offset is None:
        return None
    return state.next if offset == 0 else state.taps.get(offset)


def last_row_reads(
    fgraph: FunctionGraph, history: Variable, depth: int, besides: Collection[Apply] = ()
) -> tuple[list[LastRow], bool]:
    """Return the reads of last rows of a history, and whether it is read in no other way, `besides`
    by some nodes."""
    reads: list[LastRow] = []
    only = True
    for client in fgraph.clients.get(history, ()):
        if client[0] in besides:
            continue
        is_trace = tap_of_view(client[0], depth) == 0
        readers = fgraph.clients.get(client[0].outputs[0], ()) if is_trace else [client]
        found = (_last_row(node, place, is_trace) for node, place in readers)
        last = [read for read in found if read and (is_trace or read.back <= depth)]
        only &= len(last) == len(readers)
        reads += last
    return reads, only


def _last_row(node: Apply, position: int, needs_step: bool) -> LastRow | None:
    if not isinstance(node.op, Subtensor) or position != 0:
        return None
    indices = indices_of(node)
    if not indices:
        return None
    first, several = indices[0], isinstance(indices[0], slice)
    if several:
        # Of a trace there may be fewer rows than are asked for.
        if needs_step or first.stop is not None or first.step is not None:
            return None
        first = first.start
    back = None if first is None else constant_index(first)
    rows = node.inputs[0].type.shape[0]
    if back is not None and back >= 0 and rows is not None:
        back -= rows  # PyTensor counts from the start where it knows the length
    if back is None or not -MAX_KEPT_ROWS <= back < 0:
        return None
    return LastRow(node.outputs[0], -back, tuple(indices[1:]), needs_step, several)


def counts_of_rows(fgraph: FunctionGraph, loop: Loop, history: Variable) -> list[Apply]:
    """Return the nodes that ask how many rows a history of a loop that may stop has; an output
    says that as well."""
    if loop.stop is None:
        return []
    clients = [client for client, _ in fgraph.clients.get(history, ())]
    return [c for c in clients if isinstance(c.op, Shape_i) and c.op.i == 0]


def untrace_loops(rewrite: LoopRewrite, fgraph: FunctionGraph) -> None:
    """Let a rewrite stop the storing of histories that only last rows are read of."""
    for node in filter(is_loop, fgraph.toposort()):
        if node in fgraph.apply_nodes:
            with rewrite.attempt(fgraph, node):
                replace(fgraph, _untrace(LoopEdit(fgraph, node)), "scanlib_untrace")
    for node in filter(is_loop, fgraph.toposort()):
        with rewrite.attempt(fgraph, node):
            replace(fgraph, _carry_what_is_written(LoopEdit(fgraph, node)), "scanlib_carry")


def _carry_what_is_written(edit: LoopEdit) -> dict[Variable, Variable]:
    """Carry the arrays into which steps write.

    A carry is overwritten in place also where numba compiles the loop, or a step runs it.
    """
    loop, written = edit.loop, []
    for state in loop.states:
        base = _before_steps(state.next)
        if state.untraced and base is not state.next and state.taps == {-1: base}:
            row = lifted_row(state.initial)
            initial = state.initial[0] if row is None else row
            written.append((state, Carry(initial, base, state.next, state.name)))
    for state, carry in written:
        loop.carries.append(carry)
        edit.redirect(state, partial(_as_history, carry))
    replacements = edit.replacements() if written else {}
    for state, _ in written:
        history = edit.old[state]
        for read in last_row_reads(edit.fgraph, history, state.depth)[0]:
            if not read.needs_step:
                replacements[read.old] = read.of(replacements[history])
    return replacements


def _before_steps(array: Variable) -> Variable:
    """Return what an array was before items were written into it, also by the steps of a loop."""
    base = before_writes(array)
    while (node := base.owner) is not None:
        if isinstance(node.op, CheckedValue):
            before = node.inputs[0]
        else:
            carried = node.op.signature.carried(node.inputs, node.outputs) if is_loop(node) else []
            before = next((first for first, last in carried if last is base), None)
        if before is None:
            break
        base = before_writes(before)
    return base


def _as_history(carry: Carry, result_of: Lookup) -> Variable:
    return result_of(carry)[None]


def _untrace(edit: LoopEdit) -> dict[Variable, Variable]:
    """Stop storing histories of which only last rows are read.

    Returns what replaces those reads. Loops that run backwards keep their histories: users
    reach them only through gradients, which read them whole.
    """
    loop = edit.loop
    unread = [s for s in loop.states if not s.untraced and not edit.is_read(s)]
    for state in unread:
        state.untraced = edit.changed = True
    length = edit.node.op.steps_of(edit.node).least()
    has_branches = any(isinstance(node.op, IfElse) for node in edit.fgraph.apply_nodes)
    pending: list[tuple[State, list[LastRow]]] = []
    counts: dict[Variable, int] = {}
    for state in loop.states:
        if loop.reverse or state.untraced or not edit.is_read(state):
            continue
        asked = counts_of_rows(edit.fgraph, loop, edit.old[state])
        reads, only = last_row_reads(edit.fgraph, edit.old[state], state.depth, asked)
        if not only or not (reads or asked):
            continue
        # A branch that is not taken reads no row: the loop must not miss it. See `check_last_rows`.
        if all(read.exists(length) for read in reads) or not has_branches:
            pending.append((state, reads))
            counts |= dict.fromkeys([node.outputs[0] for node in asked], state.depth)
    if not pending:
        return edit.replacements() if unread else {}
    if counts and not loop.outputs:
        loop.outputs.append(Output(loop.stop))
    required = loop.required_steps
    for state, reads in pending:
        back = max((read.back for read in reads), default=1)
        if back > state.depth:
            _deepen(state, back)
        state.untraced = True
        required = max([required, *(read.back for read in reads if read.needs_step)])
    loop.required_steps = 0 if length is not None and length >= required else required
    edit.changed = True
    replacements = edit.replacements()
    for state, reads in pending:
        kept = replacements.pop(edit.old[state])
        for read in reads:
            replacements[read.old] = read.of(kept)
    if counts:
        made = loop.signature().split_outputs(kept.owner.outputs)
        steps = made.outputs[0].shape[0]
        replacements |= {count: steps + depth for count, depth in counts.items()}
    return replacements


def _deepen(state: State, depth: int) -> None:
    """Make a state keep `depth` rows; the initial rows added are never read."""
    missing = depth - state.depth
    filler = pt.zeros((missing, *state.initial.shape[1:]), dtype=state.initial.type.dtype)
    state.taps[-depth] = state.type()
    state.initial = pt.concatenate([filler, state.initial])


def check_last_rows(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable]:
    """Guard reads of last rows of traces that stay stored.

    PyTensor merges ``history[K:][-1]`` into one index, and compiled code does not check its
    bounds: with no steps it would read an initial row.
    """
    loop = Loop.from_node(node)
    if loop.reverse:
        return {}
    length = node.op.steps_of(node).least()
    replacements = {}
    outputs = node.op.signature.split_outputs(node.outputs)
    for state, history in zip(loop.states, outputs.histories, strict=True):
        if state.untraced:
            continue
        for read in last_row_reads(fgraph, history, state.depth)[0]:
            if not read.exists(length):
                may_stop = loop.stop is not None and read.back > 1
                steps = history.shape[0] - state.depth if may_stop else loop.length()
                replacements[read.old] = read.checked(loop, history, steps)
    return replacements


def is_loop(node: Apply) -> bool:
    """Whether a node is a canonical loop."""
    return isinstance(node.op, Scan)
