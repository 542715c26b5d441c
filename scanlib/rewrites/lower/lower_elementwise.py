"""Elementwise loops become `ElemwiseScan`s.

Elementwise work on whole sequences moves into the loop that reads them first. ``2 * y`` over all
time, computed for one loop alone, is a pass over memory that writes an array only for the loop to
read it. In the body of an elementwise loop the same product costs no memory.

Sums of what a loop computes move into it. A cost is nearly always a sum over time of an expression
of the trace. Inside an elementwise loop it takes no pass over memory of its own, and if nothing
else reads the trace, the history need not be stored at all.

A history holds the initial rows before the others, so that the trace is a view of it:
``history[K:]``. XLA has no views: it copies the slice, which takes longer than a compiled loop. So
under JAX, where nothing else is read of a history but last rows, the loop keeps these only, and
stacks the new rows as one more output.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import reduce

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import MergeOptimizer, dfs_rewriter, node_rewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors, toposort, walk
from pytensor.scalar.basic import Add
from pytensor.tensor.basic import Alloc, MakeVector
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import Subtensor

from scanlib._compat import freeze_graph
from scanlib.analysis.recognition import analyse
from scanlib.analysis.scalar_body import NotElementwiseError, scalar_loop
from scanlib.lengths.arrays import Lengths
from scanlib.ops.graph import (
    applies,
    core_op,
    depends_on,
    equality_tests,
    is_differentiable,
    is_linear_algebra,
    is_outer_product,
    readers_of,
    row_type,
    taken_apart,
)
from scanlib.ops.logaddexp import LogAddExp, logaddexp, write_stable_logs
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Part, Sequence, State
from scanlib.ops.loop_rewrite import LoopRewrite, LowersLoops
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from scanlib.rewrites.edit import replace
from scanlib.rewrites.pytensor_rewrites import BodyRewrite, run_query
from scanlib.rewrites.simplify.last_rows import is_loop, last_row_reads, tap_of_view, value_of_rows

Reader = tuple[Variable, State | Output, Callable[[Variable], Variable]]

_SPECIALIZED = RewriteDatabaseQuery(
    include=["canonicalize", "stabilize", "specialize", "merge"],
    # A sum of products is no product of a sum where numbers are huge or not finite. What is for C
    # alone looks for a library of matrix products, and PyTensor warns where there is none.
    exclude=["inplace", "fusion", "BlasOpt", "cxx_only", "local_sum_prod_of_mul_or_div"],
)


class LowerElementwiseLoops(LowersLoops):
    """Replace every loop whose body is elementwise; see `scanlib.ops.lowered.elemwise_scan`."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        if not config.scanlib__lower:
            return False
        loop = absorb_producers(fgraph, node)
        turned = turn_to_stored_order(loop)
        try:
            exact = any(is_tested(fgraph, out) for out in node.outputs)
            new = lower_elementwise(loop, may_round=not exact)
        except NotElementwiseError:
            return False
        results = [
            out[::-1] if turned and not isinstance(part, Carry) else out
            for part, out in zip(loop.parts, new.outputs, strict=True)
        ]
        replace(fgraph, dict(zip(node.outputs, results, strict=True)), "scanlib_elementwise")
        return True


def turn_to_stored_order(loop: Loop) -> bool:
    """Have a loop over numbers take its steps from the other end, if that leaves fewer sequences
    that are read from the last row to the first; whether it does.

    Kernels take many steps at a time, in the order of memory; rows in another order are copied. The
    results that have rows come in the order of memory then.
    """
    if any(part.row.type.ndim for part in loop.sequences):
        return False
    rows = Lengths(sure=True)
    views = [rows.view(part.outer) for part in loop.sequences]
    if 2 * sum(view.flipped for view in views) <= len(views):
        return False
    for part, view in zip(loop.sequences, views, strict=True):
        part.outer = rows.read(view.flip())
    loop.reverse = not loop.reverse
    for state in loop.states:
        if state.depth > 1:
            state.initial = state.initial[::-1]
    return True


def is_tested(fgraph: FunctionGraph, rows: Variable) -> bool:
    """Whether rows of numbers are compared for equality with others.

    PyTensor's derivative of an extreme, ``max(x, y) = x``, does so with results of `pytensor.scan`.
    Several steps at once round otherwise than single ones, and no two numbers would be equal.
    """
    if not is_differentiable(rows):
        return False
    for client, _ in fgraph.clients[rows]:
        if isinstance(client.op, Subtensor | DimShuffle):
            if is_tested(fgraph, client.outputs[0]):
                return True
            continue
        nodes, read = [client], {rows}
        if isinstance(client.op, Scan):
            loop = Loop.from_node(client)
            nodes = list(toposort(loop.body_outputs()))
            read = {part.row for part in loop.sequences if part.outer is rows}
        tests = [set(node.inputs) for node in equality_tests(nodes)]
        constants = {inp for inputs in tests for inp in inputs if isinstance(inp, Constant)}
        if any(inputs & read and not inputs & constants for inputs in tests):
            return True
    return False


def lower_elementwise(loop: Loop, may_round: bool = True) -> Apply:
    """Return the lowered node of a loop, whose inputs and body are edited on the way.

    Without `may_round`, values are those of single operations. `NotElementwiseError` if its body is
    not elementwise.
    """
    specialize_elementwise(loop)
    if may_round:
        add_logs_of_states_last(loop)
    scalar = scalar_loop(loop)
    analysis = analyse(scalar)
    made = loop.apply().node
    rounded = {r.family for r in analysis.recurrences} - {"maximum", "minimum"}
    found = () if rounded and not may_round else analysis.recurrences
    body = freeze_graph(scalar.inputs, scalar.outputs)
    op = ElemwiseScan(made.op, body, scalar.layout, found, analysis.notes, exact=not may_round)
    return op.make_node(*made.inputs)


def add_logs_of_states_last(loop: Loop) -> None:
    """Reorder ``logaddexp(logaddexp(h, x), y)``: what reads no state need not wait for it."""
    roots = loop.body_outputs()
    late = depends_on(roots, [tap for part in loop.recurrent for tap in part.taps.values()])
    readers = readers_of(roots)

    def is_inner(variable: Variable) -> bool:
        return len(readers[variable]) == 1 and applies(readers[variable][0], LogAddExp)

    def inside(variable: Variable) -> list[Variable] | None:
        node = variable.owner
        is_log = variable in late and is_inner(variable) and applies(node, LogAddExp)
        return node.inputs if is_log else None

    replaced: dict[Variable, Variable] = {}
    for node in toposort(roots):
        out = node.outputs[0]
        if out in late and applies(node, LogAddExp) and not is_inner(out):
            terms = [term for inp in node.inputs for term in taken_apart(inp, inside)]
            if len(terms) > 2:
                replaced[out] = reduce(logaddexp, sorted(terms, key=late.__contains__))
    loop.substitute(replaced)


def specialize_elementwise(loop: Loop) -> None:
    """Run PyTensor's rewrites on a body that may be elementwise then.

    `NotElementwiseError` if it multiplies matrices, factorizes or solves, or computes with several
    numbers that it puts together: bodies are canonical, and no other rewrite takes out what they
    have of these, but where an axis may have one item.
    """
    if config.scanlib__simplify:
        roots = loop.body_outputs()
        nodes = list(toposort(roots))
        read = (inp for node in nodes if isinstance(node.op, Elemwise) for inp in node.inputs)
        made = (v for v in (*roots, *read) if isinstance(v.owner_op, MakeVector))
        stays = [*filter(_stays, nodes), *(v.owner for v in made if v.type.shape != (1,))]
        if stays:
            raise NotElementwiseError(f"{stays[0].op} is not elementwise", stays[0].outputs[0])
    specialize_body(loop)


def is_elementwise(loop: Loop) -> bool:
    """Whether a loop, which is edited, could be lowered."""
    try:
        specialize_elementwise(loop)
        scalar_loop(loop)
    except NotElementwiseError:
        return False
    return True


def _stays(node: Apply) -> bool:
    op = core_op(node)
    if isinstance(op, Dot):
        left, right = node.inputs
        return 1 not in (left.type.shape[-1], right.type.shape[-2:][0])
    return is_linear_algebra(op) and 1 not in node.inputs[0].type.shape[-2:]


@node_rewriter([Dot])
def multiply_columns_and_rows(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Write products without a sum as elementwise ones; PyTensor keeps them for BLAS."""
    return [pt.mul(*node.inputs)] if is_outer_product(node) else None


_without_sums = dfs_rewriter(multiply_columns_and_rows)


def _specialize(body: FunctionGraph) -> None:
    _without_sums.rewrite(body)
    # Before PyTensor's own stabilization, which writes ``log(exp x + exp y)`` with a maximum, and
    # its specialization, which makes ``exp x exp y`` one exponential.
    MergeOptimizer().rewrite(body)
    write_stable_logs(body)
    run_query(_SPECIALIZED, body)


# PyTensor's rewrites of a body, but for fusion and in-place ones.
specialize_body = BodyRewrite(_specialize)


def absorb_producers(fgraph: FunctionGraph, node: Apply) -> Loop:
    """Return a loop whose step computes what elementwise Ops made for it alone.

    `node` is the loop as it stands in `fgraph`.
    """
    loop = Loop.from_node(node)
    absorbed = {node}
    pending = list(loop.sequences)
    while pending:
        rows: dict[Variable, Variable] = {}
        added: list[Sequence] = []
        read: set[Variable] = set()
        for part in reversed(pending):
            if part.row in read:
                added.append(part)  # until what reads it is part of the step
                continue
            if any(client not in absorbed for client, _ in fgraph.clients[part.outer]):
                continue
            new = _absorb(loop, part, rows)
            if new is not None:
                absorbed.add(part.outer.owner)
                read.update(ancestors([rows[part.row]]))
                added += new
        loop.substitute(rows)
        pending = added
    return loop


def _absorb(
    loop: Loop, part: Sequence, replaced: dict[Variable, Variable]
) -> list[Sequence] | None:
    """Replace a sequence by those it was computed from; return the new ones.

    `replaced` gets what its row is in the step.
    """
    producer = part.outer.owner
    if producer is None or len(producer.outputs) != 1:
        return None
    given, fills = producer.inputs, isinstance(producer.op, Alloc)
    if fills:  # one number everywhere
        given = given[:1]
        if part.row.type.ndim or len(loop.sequences) == 1 or not all(given[0].type.broadcastable):
            return None
    elif not isinstance(producer.op, Elemwise) or all(x.type.broadcastable[0] for x in given):
        return None
    rows: list[Variable] = []
    sequences: list[Sequence] = []
    non_sequences: list[NonSequence] = []
    for inp in given:
        row = _row_of(loop, inp, sequences, non_sequences)
        if row is None:
            sequences.append(Sequence(inp, row_type(inp)()))
            row = sequences[-1].row
        rows.append(row)
    value = rows[0] if fills else producer.op(*rows)
    if not part.row.type.is_super(value.type):
        return None
    loop.sequences = [other for other in loop.sequences if other is not part] + sequences
    loop.non_sequences += non_sequences
    replaced[part.row] = value
    return sequences


def _row_of(
    loop: Loop, variable: Variable, more: list[Sequence], non_sequences: list[NonSequence]
) -> Variable | None:
    """Return the row of a constant, of a sequence of a loop, or of what has one row for all.

    `more` are sequences that the loop is to have; what has one row is added to `non_sequences`.
    """
    for part in [*loop.sequences, *more]:
        if part.outer is variable:
            return part.row
    if isinstance(variable, Constant) and variable.data.size == 1:
        return pt.constant(variable.data.reshape((1,) * max(variable.type.ndim - 1, 0)))
    if not all(variable.type.broadcastable[:1]):
        return None
    row = variable[0] if variable.type.ndim else variable
    non_sequences.append(NonSequence(row, row.type()))
    return non_sequences[-1].inner


class SumsIntoLoops(LoopRewrite):
    """Add an accumulator to an elementwise loop for every sum over all it computes."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not (config.scanlib__lower and config.scanlib__simplify):
            return
        loops = [node for node in fgraph.toposort() if is_loop(node)]
        totals = [
            node
            for node in fgraph.toposort()
            if isinstance(node.op, CAReduce)
            and isinstance(node.op.scalar_op, Add)
            and node.inputs[0].type.ndim
            and (node.op.axis is None or len(node.op.axis) == node.inputs[0].type.ndim)
        ]
        sums = [(total, _loops_below(total)) for total in totals] if loops else []
        for node in loops:
            found = [total for total, below in sums if node in below]
            if not found or node.op.signature.has_stop or not is_elementwise(Loop.from_node(node)):
                continue
            with self.attempt(fgraph, node):
                replace(fgraph, _fuse(fgraph, node, found), "scanlib_sums")


def _loops_below(total: Apply) -> set[Apply]:
    """Return the loops whose results an elementwise expression reads directly."""

    def inputs_of(variable: Variable) -> list[Variable]:
        node = variable.owner
        if node is None or not isinstance(node.op, Elemwise | Subtensor):
            return []
        return node.inputs[:1] if isinstance(node.op, Subtensor) else node.inputs

    above = (variable.owner for variable in walk(total.inputs[:1], inputs_of))
    return {node for node in above if node is not None and is_loop(node)}


def _fuse(fgraph: FunctionGraph, node: Apply, totals: list[Apply]) -> dict[Variable, Variable]:
    """Return what replaces the loop's results and those of the sums that it can compute."""
    loop = Loop.from_node(node)
    known = dict(zip(node.outputs, loop.parts, strict=True))
    carries: dict[Variable, Carry] = {}
    for total in totals:
        if total not in fgraph.apply_nodes:
            continue
        fixed: list[NonSequence] = []
        row, reads = _row_of_results(fgraph, loop, known, total.inputs[0], total, fixed)
        if row is None or not reads:
            continue
        if set(ancestors([part.outer for part in fixed])).intersection(node.outputs):
            continue
        loop.non_sequences += fixed
        dtype = getattr(total.op, "acc_dtype", None) or total.outputs[0].type.dtype
        value = pt.scalar(dtype=dtype)
        step = pt.sum(row, dtype=dtype, acc_dtype=dtype) if row.type.ndim else pt.cast(row, dtype)
        carry = Carry(pt.constant(np.zeros((), dtype)), value, value + step, "sum")
        loop.carries.append(carry)
        carries[total.outputs[0]] = carry
    if not carries:
        return {}
    new = loop.results()
    replacements = {old: new[part] for old, part in known.items()}
    for out, carry in carries.items():
        replacements[out] = pt.cast(new[carry], out.type.dtype)
    return replacements


def _row_of_results(
    fgraph: FunctionGraph,
    loop: Loop,
    results: dict[Variable, Part],
    variable: Variable,
    reader: Apply,
    non_sequences: list[NonSequence],
) -> tuple[Variable | None, bool]:
    """Return the row of an expression over whole traces that only `reader` reads, in terms of the
    body, and whether it reads results of the loop; None if it has none."""
    known = value_of_rows(variable, results, loop.reverse)
    if known is not None:
        return known, True
    row, producer = _row_of(loop, variable, [], non_sequences), variable.owner
    if row is not None or producer is None or not isinstance(producer.op, Elemwise):
        return row, False
    clients = [client for client, _ in fgraph.clients[variable]]
    if len(producer.outputs) > 1 or any(client is not reader for client in clients):
        return None, False
    found = [
        _row_of_results(fgraph, loop, results, inp, producer, non_sequences)
        for inp in producer.inputs
    ]
    if any(row is None for row, _ in found):
        return None, False
    value = producer.op(*(row for row, _ in found))
    is_same = value.type.dtype == variable.type.dtype
    return (value if is_same else None), any(reads for _, reads in found)


# Traces under JAX


class StackTraces(LoopRewrite):
    """Have loops stack the rows of states of which only the trace and last rows are read."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        for node in fgraph.toposort():
            if not isinstance(node.op, ElemwiseScan) or node.op.signature.has_stop:
                continue
            loop = Loop.from_node(node)
            readers = _stack(fgraph, node, loop)
            if not readers:
                continue
            # The initial rows alone may tell how many channels there are: an output has none.
            with self.attempt(fgraph, node), suppress(NotElementwiseError):
                lowered = lower_elementwise(loop, may_round=not node.op.exact)
                new = lowered.outputs  # the stacked ones come last
                results = dict(zip(loop.parts, new, strict=True))
                replacements = dict(zip(node.outputs, new, strict=False))
                replacements |= {old: read(results[part]) for old, part, read in readers}
                replace(fgraph, replacements, "scanlib_stack_traces")


def _stack(fgraph: FunctionGraph, node: Apply, loop: Loop) -> list[Reader]:
    """Give a loop outputs in the place of such traces.

    Returns what reads their histories, of which part instead, and how.
    """
    found: list[Reader] = []
    histories = node.op.signature.split_outputs(node.outputs).histories
    for state, history in zip(loop.states, histories, strict=True):
        clients = [client for client, _ in fgraph.clients[history]]
        views = [view for view in clients if tap_of_view(view, state.depth, loop.reverse) == 0]
        reads = [] if loop.reverse else last_row_reads(fgraph, history, state.depth)[0]
        rows = [read for read in reads if not read.needs_step and read.back <= state.depth]
        if state.untraced or not views or len(views) + len(rows) < len(clients):
            continue
        state.untraced = True
        loop.outputs.append(Output(state.next, state.name))
        found += [(view.outputs[0], loop.outputs[-1], lambda trace: trace) for view in views]
        found += [(row.old, state, row.of) for row in rows]
    return found
