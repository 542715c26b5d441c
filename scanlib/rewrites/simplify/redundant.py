"""Parts of a loop that need not be there, and work that every step repeats.

* What nobody reads goes: outputs, states, carries, and then inputs.
* Carries that no step changes are no carries. What later steps owe to an accumulator is the same at
  every step, so the gradient of a sum carries a value that never changes. As a non-sequence it does
  not stand in the way of evaluating the loop for all steps at once.
* Equal parts become one part; constants and echoes are forwarded. Two states are equal if they
  start equal and, assuming that they are equal at one step, a step makes them equal again. The
  largest such partition is found by starting from equal initial values and splitting classes until
  nothing changes (partition refinement, J. Hopcroft, "An n log n algorithm for minimizing states in
  a finite automaton", 1971).
"""

from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import ancestors, graph_inputs, toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import Alloc, MakeVector, Split
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Reshape, Shape, SpecifyShape
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.type import integer_dtypes

from scanlib._compat import copy_graph, freeze_graph
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.counted_rows import counts_by
from scanlib.ops.graph import (
    CHEAP,
    applies,
    depends_on,
    is_tensor,
    lifted_row,
    read_from_outside,
    substitute,
)
from scanlib.ops.logaddexp import write_stable_logs
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, State, past_rows
from scanlib.ops.row_ops.checked_rows import CheckedRows
from scanlib.ops.row_ops.ran_steps import RanSteps, is_mask, steps_of
from scanlib.ops.row_ops.triangular import true_shapes
from scanlib.rewrites.edit import Lookup, LoopEdit, replace
from scanlib.rewrites.inline import write_out_graphs
from scanlib.rewrites.pytensor_rewrites import CANONICAL, BodyRewrite, run_query
from scanlib.rewrites.simplify.last_rows import check_last_rows, is_loop
from scanlib.rewrites.simplify.stacked import without_stacks

MOST_INTEGERS = 6  # of a constant that a body has itself
# Ops whose result is larger than what they read, or a view of it: nothing to gain outside.
_NOT_WORTH_IT = (Alloc, DimShuffle, CheckAndRaise)


def drop_unread_results(edit: LoopEdit) -> None:
    """Drop outputs nobody reads, and states and carries that serve only themselves."""
    loop = edit.loop
    for output in list(loop.outputs):
        if not edit.is_read(output):
            edit.drop(output)
    roots: list[Variable] = [output.value for output in loop.outputs]
    if loop.stop is not None:
        roots.append(loop.stop)
    read = [part for part in loop.recurrent if edit.is_read(part)]
    live = live_parts(loop.recurrent, roots, read)
    for part in loop.recurrent:
        if part not in live:
            edit.drop(part)


def live_parts(
    recurrent: Sequence[State | Carry],
    roots: Sequence[Variable],
    read: Sequence[State | Carry] = (),
) -> list[State | Carry]:
    """Return the states and carries that are read, or needed for these, or for `roots`."""
    live = list(read)
    while True:
        needed = set(ancestors([*roots, *(part.next for part in live)]))
        waiting = [part for part in recurrent if part not in live]
        more = [part for part in waiting if needed.intersection(part.taps.values())]
        if not more:
            return live
        live += more


def drop_unread_inputs(edit: LoopEdit) -> None:
    """Drop sequences and non-sequences that no step reads, and taps nobody needs."""
    loop = edit.loop
    read = set(ancestors(loop.body_outputs()))
    for state in loop.states:
        farthest = -state.depth
        unread = [tap for tap, var in state.taps.items() if var not in read and tap != farthest]
        for tap in unread:
            del state.taps[tap]
            edit.changed = True
    non_sequences = [part for part in loop.non_sequences if part.inner in read]
    sequences = [part for part in loop.sequences if part.row in read]
    known = [part.row for part in loop.sequences if part.outer.type.shape[0] is not None]
    if sequences and loop.n_steps is None and read.isdisjoint(known):
        # The types of the results have this number of steps; it is checked when the loop runs.
        sequences = [part for part in loop.sequences if part.row in {*read, *known[:1]}]
    if len(non_sequences) < len(loop.non_sequences):
        loop.non_sequences = non_sequences
        edit.changed = True
    if len(sequences) < len(loop.sequences):
        if not sequences and loop.n_steps is None:
            masks = [part.outer for part in loop.sequences if is_mask(part.outer)]
            if masks:
                loop.n_steps = steps_of(masks[0])
            elif len(loop.sequences) == 1:
                return  # it still gives the number of steps, at no cost
            else:
                sequences = loop.sequences[:1]
        loop.sequences = sequences
        edit.changed = True


@node_rewriter([RanSteps])
def fill_mask(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    """Write a mask that no rewrite dropped with PyTensor's own Ops."""
    return [pt.ones(steps_of(node.outputs[0]), dtype="bool")]


def forward_constants(edit: LoopEdit) -> None:
    """Turn carries, and states that are not stored, into non-sequences where nothing changes."""
    loop = edit.loop
    unchanged: dict[Variable, Variable] = {}
    for part in loop.recurrent:
        old, outer = part.taps.get(-1), part.initial
        if part.next is not old:
            continue
        if isinstance(part, State):
            if not part.untraced or set(part.taps) != {-1}:
                continue
            if loop.required_steps:
                continue  # the check that there are steps belongs to the state
            outer = part.initial[0]
        of_gradient = isinstance(part, Carry) and loop.reverse
        if len(loop.body_outputs()) == 1 and not of_gradient:
            continue  # nothing else is computed: who reads the number of steps needs the loop
        inner = old.type()
        loop.non_sequences.append(NonSequence(outer, inner, part.name))
        edit.redirect(part, part.initial)
        unchanged[old] = inner
    loop.substitute(unchanged)


def forward_inputs(edit: LoopEdit) -> None:
    """Give equal outer inputs one place in the body, and constants of one number, or few integers
    such as a shape, none at all; a shape that is made of numbers is made in the body."""
    loop = edit.loop
    _make_shapes_in_body(edit)
    first: dict[Variable, Variable] = {}
    same = {part.row: first.setdefault(part.outer, part.row) for part in loop.sequences}
    whole: dict[Variable, Variable] = {}
    for part in loop.non_sequences:
        is_constant = isinstance(part.outer, Constant) and is_tensor(part.outer)
        most = MOST_INTEGERS if is_constant and part.outer.type.dtype in integer_dtypes else 1
        if (
            is_constant
            and 0 < np.size(part.outer.data) <= most
            and part.inner.type.is_super(part.outer.type)
        ):
            same[part.inner] = part.outer
        else:
            same[part.inner] = whole.setdefault(part.outer, part.inner)
    same = {old: new for old, new in same.items() if old is not new}
    if same:
        loop.sequences = [part for part in loop.sequences if part.row not in same]
        loop.non_sequences = [part for part in loop.non_sequences if part.inner not in same]
        loop.substitute(same)
        edit.changed = True


def _make_shapes_in_body(edit: LoopEdit) -> None:
    """Give a body the numbers that a shape consists of, in place of the vector: kernels know sizes
    that they are given one by one."""
    loop = edit.loop
    vectors = {
        part.inner: part.outer
        for part in loop.non_sequences
        if is_tensor(part.outer)
        and part.outer.type.ndim == 1
        # Of a length that is known, and which a `Reshape` then does not have to check.
        and 0 < (part.outer.type.shape[0] or 0) <= MOST_INTEGERS
    }
    nodes = toposort(loop.body_outputs()) if vectors else ()
    read = {node.inputs[-1] for node in nodes if isinstance(node.op, Reshape | Split)}
    shapes: dict[Variable, Variable] = {}
    for vector, outer in vectors.items():
        # Vectors of sizes may be for a loop in the step.
        if numbers := _numbers_of(outer) if vector in read or _is_of_sizes(outer) else []:
            parts = [NonSequence(number, number.type()) for number in numbers]
            loop.non_sequences += parts
            shapes[vector] = pt.stack([part.inner for part in parts])
    if shapes:
        loop.non_sequences = [part for part in loop.non_sequences if part.inner not in shapes]
        loop.substitute(shapes)
        edit.changed = True


def _is_of_sizes(variable: Variable) -> bool:
    """Whether a variable is a vector that is made of integers."""
    node = variable.owner
    is_made = node is not None and isinstance(node.op, MakeVector)
    return is_made and variable.type.dtype in integer_dtypes


def _numbers_of(vector: Variable) -> list[Variable]:
    """Return the items of a vector of known length; none where that is checked when it is read."""
    above = [variable.owner for variable in ancestors([vector]) if variable.owner is not None]
    if above and isinstance(vector.owner.op, MakeVector):
        return list(vector.owner.inputs)
    if any(isinstance(node.op, SpecifyShape) for node in above):
        return []
    return [vector[k] for k in range(vector.type.shape[0])]


def forward_outputs(edit: LoopEdit) -> None:
    """Forward stacked outputs that are another output, a state's trace, or a sequence."""
    loop = edit.loop
    rows = {part.row: position for position, part in enumerate(loop.sequences)}
    seen: dict[Variable, State | Output] = {}
    for state in loop.states:
        if not state.untraced and edit.is_read(state):
            seen.setdefault(state.next, state)
    for output in list(loop.outputs):
        known = seen.get(output.value)
        wanted = edit.old[output].type
        if known is not None:
            edit.redirect(output, partial(_trace, known, loop.reverse))
        elif output.value in rows and loop.stop is None:
            outer = _whole(loop, rows[output.value])
            if wanted.is_super(outer.type):
                edit.redirect(output, outer)
        else:
            seen[output.value] = output


def _whole(loop: Loop, position: int) -> Variable:
    """Return a sequence, with the loop's check that it has a row for every step."""
    outer = loop.sequences[position].outer
    if loop.n_steps is None:
        return outer
    steps = constant_integer(loop.n_steps)
    if steps is not None and steps == outer.type.shape[0]:
        return outer
    messages = loop.messages()
    return CheckedRows(messages.sequence_length(position))(outer, loop.length())


def _trace(part: State | Output, reverse: bool, lookup: Lookup) -> Variable:
    """Return the result of an output, or the trace of a state."""
    result = lookup(part)
    return result if isinstance(part, Output) else past_rows(result, part.depth, 0, reverse)


def merge_equal_states(edit: LoopEdit) -> None:
    """Merge states and carries that are equal at every step."""
    loop = edit.loop
    classes: dict[Hashable, list[State | Carry]] = {}
    for part in loop.recurrent:
        classes.setdefault((_start_key(part), _outline(part.next)), []).append(part)
    groups = [group for group in classes.values() if len(group) > 1]
    while groups and (refined := _refine(loop, groups)) != groups:
        groups = refined
    for group in groups:
        # A state can stand for a carry, but not the other way round; a traced one for all.
        group.sort(key=lambda p: (isinstance(p, Carry), isinstance(p, State) and p.untraced))
        kept, *others = group
        if isinstance(kept, State):
            for part in others:
                for tap in part.taps:
                    kept.tap(tap)
    loop.substitute(_assumed(groups))
    for kept, *others in groups:
        for part in others:
            edit.redirect(part, partial(_same_state, kept, part, loop.reverse))


def _start_key(part: State | Carry) -> Hashable:
    """Return what must be equal for two parts to start equal."""
    if isinstance(part, Carry):
        return (1, part.initial, part.type)
    row = lifted_row(part.initial) if part.depth == 1 else None
    return (part.depth, part.initial if row is None else row, part.type)


def _outline(value: Variable, levels: int = 4) -> Hashable:
    """Return what must be equal for two values to be: the operations of so many levels; of loops,
    which may compute other values besides, nothing."""
    node = value.owner
    if node is None or not levels or is_loop(node):
        return value.type
    inside = (_outline(inp, levels - 1) for inp in node.inputs)
    return (node.op, node.outputs.index(value), *inside)


def _assumed(groups: list[list[State | Carry]]) -> dict[Variable, Variable]:
    """Return replacements that read one member of each group instead of the others."""
    replacements: dict[Variable, Variable] = {}
    for group in groups:
        shared: dict[int, Variable] = {}
        for part in group:
            for tap, variable in part.taps.items():
                replacements[variable] = shared.setdefault(tap, variable)
    return {old: new for old, new in replacements.items() if old is not new}


def _refine(loop: Loop, groups: list[list[State | Carry]]) -> list[list[State | Carry]]:
    """Split groups whose members a step makes different, assuming they were equal before."""
    members = [part for group in groups for part in group]
    nexts = _alone(substitute([part.next for part in members], _assumed(groups)))
    frozen = freeze_graph(loop.body_inputs(), nexts)
    after = dict(zip(members, frozen.outputs, strict=True))
    result = []
    for group in groups:
        split: dict[Variable, list[State | Carry]] = {}
        for part in group:
            split.setdefault(after[part], []).append(part)
        result += [part for part in split.values() if len(part) > 1]
    return result


def _alone(values: list[Variable]) -> list[Variable]:
    """Return values of which the loops above compute nothing else."""
    if not any(is_loop(node) for node in toposort(values)):
        return values
    inputs = [v for v in graph_inputs(values) if not isinstance(v, Constant)]
    graph = FunctionGraph(inputs, copy_graph(inputs, values, onto=inputs)[1], clone=False)
    for node in graph.toposort()[::-1]:
        if is_loop(node) and node in graph.apply_nodes:
            edit = LoopEdit(graph, node)
            drop_unread_results(edit)
            if edit.changed:
                drop_unread_inputs(edit)
                replace(graph, edit.replacements(), "scanlib_alone")
    return list(graph.outputs)


def _same_state(
    kept: State | Carry, part: State | Carry, reverse: bool, lookup: Lookup
) -> Variable:
    """Return the result of a state or carry, made of that of an equal one."""
    value = lookup(kept)
    if isinstance(kept, Carry):
        return value
    if isinstance(part, Carry):
        return value[0] if reverse else value[-1]
    if part.untraced and not kept.untraced:
        return value[: kept.depth] if reverse else value[-kept.depth :]
    return value


# The body in canonical form, and work taken out of it


def _canonicalize(body: FunctionGraph) -> None:
    """Run PyTensor's canonicalization on a body.

    Gradients leave terms behind that read a value for its shape alone, or multiply by zero;
    as long as they stand, the loop seems to need what it does not. Shares of sums of exponentials
    are written before parts of them are stored, or leave the loop. Last rows of loops in the body
    are checked while they are seen to be rows of a trace.
    """
    for node in list(body.apply_nodes):
        if is_loop(node):
            replace(body, check_last_rows(body, node), "scanlib_check_last_rows")
    write_out_graphs.rewrite(body)
    true_shapes.rewrite(body)
    run_query(CANONICAL, body)
    if without_stacks(body):
        run_query(CANONICAL, body)
    write_stable_logs(body)


canonicalize_body = BodyRewrite(_canonicalize, settles=True)


def hoist_invariants(edit: LoopEdit) -> None:
    """Compute what depends on non-sequences alone once, outside the loop: the largest expressions
    for which that is worth it."""
    loop = edit.loop
    outer_of = {part.inner: part.outer for part in loop.non_sequences}
    varying = [variable for variable in loop.body_inputs() if variable not in outer_of]
    outputs = loop.body_outputs()
    dependent = depends_on(outputs, varying)
    pending = read_from_outside(toposort(outputs), outputs, dependent, counts_by)[::-1]
    found, seen = dict[Variable, None](), set[Variable]()
    while pending:
        current = pending.pop()
        if current.owner is None or current in seen:
            continue
        seen.add(current)
        if _worth_hoisting(current):
            found[current] = None
        else:
            pending += reversed(current.owner.inputs)
    if not found:
        return
    replacements: dict[Variable, Variable] = {}
    hoisted = substitute(list(found), outer_of)
    for inner, outer in zip(found, hoisted, strict=True):
        new = inner.type()
        loop.non_sequences.append(NonSequence(outer, new))
        replacements[inner] = new
    loop.substitute(replacements)
    edit.changed = True


def _worth_hoisting(variable: Variable) -> bool:
    node = variable.owner
    if isinstance(node.op, Subtensor):
        # Where items of floats remain, the loop may be elementwise; integers may be sizes, and
        # those of arrays are known.
        above = node.inputs[0].owner
        is_size = above is not None and isinstance(above.op, Shape)
        is_integer = variable.type.dtype in integer_dtypes and not is_size
        return bool(variable.type.ndim > 0) or is_integer
    if isinstance(node.op, _NOT_WORTH_IT) or getattr(node.op, "view_map", None):
        return False
    if _is_of_sizes(variable):
        return False  # kernels know sizes one by one
    if applies(node, ps.Second):
        return False
    if getattr(variable.type, "ndim", 0) > 0:
        return True
    return not all(
        applies(above, CHEAP) or isinstance(above.op, _NOT_WORTH_IT)
        for above in toposort([variable])
    )
