"""What one loop computes and another computes again is stored and read.

The backward loop of ``h_t = tanh(x_t W + h_{t-1} U)`` reads `h_t`, which the forward loop stored. A
network with gates needs more: values between the states, as functions of ``x_t`` and ``h_{t-1}``.
The gradient computes them again from the rows it reads. Here it is found out that these rows are
the rows of another loop, and that the same expressions stand in that loop's body; where the cost
rule (`over_time.split_cost`) says that reading them takes less than computing them again,
the first loop gets more outputs and the second one more sequences.

What is chosen is what a product goes into, at the last function before the gradient's own
work: the gates after their sigmoids, not the products before. What is arithmetic on them, or a
function of stored rows alone, is computed again.

Of an array into which steps write items, such as a table that a loop fills, the gradient reads the
items that a step has read. Where that is all it reads, the first loop stores these, and no array
for each step. So it is with an inner loop that the gradient runs again from an array, as of a table
that two loops fill: the first loop, which runs it anyway, stores what the gradient reads of it.

A choice is stored as truth values. The derivative of ``h_t = max(h_{t-1}, x_t)`` asks at every step
which of the two it was: it reads both, sixteen bytes, to find out one bit. Long loops of this kind
are as fast as the memory, and the forward loop has both numbers in its registers. So it stores the
answer, one byte, and the backward loop reads that. The history is not stored at all where nothing
else reads it. A truth value is moved if it reads nothing but rows, and past or next values, of the
first loop, and if fewer bytes are moved then. It must come out the same: so it holds comparisons,
choices and logic only, of numbers that are stored as they are. A next value is, if it is a running
extreme; kernels round others as they like, and ``max(h, x) = h`` would not hold for what they
stored.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import pytensor.scalar as ps
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors, toposort, walk
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.subtensor import Subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES, freeze_graph
from scanlib.analysis.scalar_body import NotElementwiseError
from scanlib.lengths.arrays import slice_of
from scanlib.ops.graph import (
    Readers,
    applies,
    depends_on,
    is_tensor,
    merge_equal,
    readers_of,
    substitute,
)
from scanlib.ops.loop import Carry, Loop, Output, Sequence, State
from scanlib.ops.loop_rewrite import LoopRewrite, holds
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.rewrites.edit import replace, rewrite_body
from scanlib.rewrites.lower.canonical_loop import reads_shape, sizes_from_outside
from scanlib.rewrites.lower.lower_elementwise import lower_elementwise
from scanlib.rewrites.over_time.split_cost import (
    HEAVY,
    PAIRS,
    PRODUCT,
    is_arithmetic,
    is_function,
    kind,
    of_differing_shapes,
)
from scanlib.rewrites.simplify.last_rows import (
    counts_of_rows,
    is_loop,
    last_row_reads,
    untrace_loops,
    value_of_rows,
)
from scanlib.rewrites.simplify.simplify import merge_loops
from scanlib.rewrites.split.split import keeps_loops_whole


class ReuseForwardValues(LoopRewrite):
    """Let loops read what others computed; see the module's text."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not (config.scanlib__split and config.scanlib__split_maps):
            return
        if keeps_loops_whole(fgraph):
            return
        loops = [n for n in fgraph.toposort() if is_loop(n) and not n.op.recompute]
        if serve_readers(fgraph, loops, self.serve):
            untrace_loops(self, fgraph)

    @staticmethod
    def serve(fgraph: FunctionGraph, maker: Apply, reader: Apply) -> Apply | None:
        """Store in one loop what another one computes again; return the first one's new node."""
        source, target = Loop.from_node(maker), Loop.from_node(reader)
        places = same_rows(maker, source, target)
        if not places:
            return None
        chosen = _chosen(source, target, places)
        reads_parts = False
        for parts in _parts_of_rows(fgraph, (maker, reader), (source, target), places, chosen):
            twins = _twins(source, toposort(parts), places)
            mine = [twins[part] for part in parts if part in twins]
            differing = of_differing_shapes(mine, source.varying_inputs())
            if mine and len(mine) == len(parts) and differing.isdisjoint(mine):
                chosen |= zip(parts, mine, strict=True)
                reads_parts = True
        if not chosen:
            return None

        def applied(loop: Loop) -> Apply:
            # Shapes of what is stored can be told without a step, and sizes without the rows.
            if loop is source or reads_parts:
                sizes_from_outside(loop)
            return loop.apply().node

        return store(fgraph, (maker, reader), (source, target), chosen, applied, "reuse")


class ReuseInnerLoops(ReuseForwardValues):
    """Let loops, once their bodies are lowered, read what the inner loops of others computed."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if any(is_loop(node) and holds(node.op.body, is_loop) for node in fgraph.apply_nodes):
            super().rewrite_loops(fgraph)
            untrace_loops(self, fgraph)

    @staticmethod
    def serve(fgraph: FunctionGraph, maker: Apply, reader: Apply) -> Apply | None:
        """Store in one loop results of an inner loop that another one runs again from its rows;
        return the first one's new node."""
        if not (holds(maker.op.body, is_loop) and holds(reader.op.body, is_loop)):
            return None
        source, target = Loop.from_node(maker), Loop.from_node(reader)
        places = same_rows(maker, source, target)
        chosen: dict[Variable, Variable] = {}
        is_spared = False
        for parts in _parts_of_rows(fgraph, (maker, reader), (source, target), places):
            mine = substitute(parts, places)
            differing = of_differing_shapes(mine, source.varying_inputs())
            if differing.isdisjoint(mine):
                is_spared = True
                chosen |= zip(parts, mine, strict=True)
        if not is_spared:
            return None

        def applied(loop: Loop) -> Apply:
            sizes_from_outside(loop)
            if loop is source:
                rewrite_body(loop, merge_loops)
            return loop.apply().node

        return store(fgraph, (maker, reader), (source, target), chosen, applied, "reuse_inner")


def serve_readers(
    fgraph: FunctionGraph,
    loops: list[Apply],
    serve: Callable[[FunctionGraph, Apply, Apply], Apply | None],
) -> bool:
    """Let each of some loops, in order, be served by the first one above it that has what it needs;
    return whether any is.

    `serve` is given a loop and its reader, and returns the first one's new node, None if that has
    nothing to serve.
    """
    served = False
    for reader in loops[1:]:
        above = set(ancestors(reader.inputs))
        for place, maker in enumerate(loops[: loops.index(reader)]):
            if above.intersection(maker.outputs):
                made = serve(fgraph, maker, reader)
                if made is not None:
                    loops[place], served = made, True
                    break
    return served


def store(
    fgraph: FunctionGraph,
    nodes: tuple[Apply, Apply],
    loops: tuple[Loop, Loop],
    chosen: dict[Variable, Variable],
    apply: Callable[[Loop], Apply],
    reason: str,
    last: Mapping[State, tuple[Variable, Variable]] = MappingProxyType({}),
) -> Apply | None:
    """Let one loop store values, and another one read them; return the first one's new node.

    None, with nothing changed, where the first loop is not elementwise with what it would store.
    The pairs are the maker and its reader as they stand in the graph, and taken apart; `chosen` has
    equal values of the reader's body and of the maker's; `apply` makes the node of a loop. From the
    `last` values of states the reader carries what it has in its body, and the next one of that.
    """
    (maker, reader), (source, target) = nodes, loops
    stored = {value: output_of(source, twin) for value, twin in chosen.items()}
    try:
        new = apply(source)
    except NotElementwiseError:
        return None
    # What is stored comes behind the results there were.
    replace(fgraph, dict(zip(maker.outputs, new.outputs, strict=False)), f"scanlib_{reason}")
    results = dict(zip(source.parts, new.outputs, strict=True))
    # What the reader reads by way of other nodes reads the new loop now; the rest is said here.
    new_inputs = reader.inputs if reader in fgraph.apply_nodes else target.outer_inputs()
    target.replace_outer(dict(zip(target.outer_inputs(), new_inputs, strict=True)))
    parts = target.parts
    target.carries += [Carry(results[state][-1], *pair) for state, pair in last.items()]
    rows = {value: value.type() for value in chosen}
    target.sequences += [Sequence(results[stored[v]], row) for v, row in rows.items()]
    target.substitute(rows)
    target.drop_unread_inputs()
    node = apply(target)
    theirs = dict(zip(target.parts, node.outputs, strict=True))
    made = {old: theirs[part] for old, part in zip(reader.outputs, parts, strict=True)}
    replace(fgraph, made, f"scanlib_{reason}")
    return new


def output_of(loop: Loop, value: Variable) -> Output:
    """Return the output of a loop that holds a value, which becomes one if it is none."""
    for part in loop.outputs:
        if part.value is value:
            return part
    loop.outputs.append(Output(value))
    return loop.outputs[-1]


# Rows of one loop that are rows of the other


def same_rows(maker: Apply, source: Loop, target: Loop) -> dict[Variable, Variable]:
    """Return, for inputs of the reader's body, the values of the maker's body they equal."""
    results = dict(zip(maker.outputs, source.parts, strict=True))
    known = {part.outer: part.row for part in source.sequences}
    whole = {part.outer: part.inner for part in source.non_sequences}
    found = {p.inner: whole[p.outer] for p in target.non_sequences if p.outer in whole}
    values = [value_of_rows(part.outer, results, source.reverse) for part in target.sequences]
    # A reader of rows of a loop that stopped takes as many steps.
    stopped = source.stop is not None and any(value is not None for value in values)
    for part, value in zip(target.sequences, values, strict=True):
        value = known.get(part.outer, value)
        if value is None and stopped:
            value = known.get(_uncut(part.outer))
        if value is not None:
            found[part.row] = value
    return {inner: value for inner, value in found.items() if inner.type == value.type}


def _uncut(rows: Variable) -> Variable:
    """Return the array of which some are the first rows."""
    node = rows.owner
    index = slice_of(node) if node is not None and isinstance(node.op, Subtensor) else None
    is_front = index is not None and index.start is None and index.step is None
    return node.inputs[0] if is_front else rows


# What is read instead of computed


def _chosen(
    source: Loop, target: Loop, places: dict[Variable, Variable]
) -> dict[Variable, Variable]:
    """Return values of the reader's body that are read from the maker's, with their twins."""
    roots = target.body_outputs()
    others = [inp for inp in target.body_inputs() if inp not in places]
    own = depends_on(roots, others)
    nodes = [node for node in toposort(roots) if not any(out in own for out in node.outputs)]
    if not any(_is_product(node) for node in nodes):
        return {}
    twins = _twins(source, nodes, places)
    costly = depends_on(roots, [out for node in nodes if _is_product(node) for out in node.outputs])
    differing = of_differing_shapes(list(twins.values()), source.varying_inputs())
    chosen: dict[Variable, Variable] = {}

    def inputs_of(value: Variable) -> list[Variable]:
        node, twin = value.owner, twins.get(value)
        if node is None:
            return []
        is_stored = twin is not None and twin not in differing and value in costly
        if is_stored and _is_worth_it(node, costly):
            chosen[value] = twin
            return []
        return node.inputs

    for _ in walk(roots, inputs_of, bfs=False):
        pass
    return chosen


def rows_for_one(
    fgraph: FunctionGraph, nodes: tuple[Apply, Apply], loops: tuple[Loop, Loop]
) -> Iterator[tuple[State, list[Variable]]]:
    """Yield the states of the maker that the reader alone has a use for, but for last rows, and the
    rows by which it reads them."""
    (maker, reader), (source, target) = nodes, loops
    histories = maker.op.signature.split_outputs(maker.outputs).histories
    for state, history in zip(source.states, histories, strict=True):
        views = {
            part.outer.owner: part.row
            for part in target.sequences
            if part.outer.owner is not None
            and part.outer.owner.inputs[:1] == [history]
            and all(client is reader for client, _ in fgraph.clients[part.outer])
        }
        besides = {*views, *counts_of_rows(fgraph, source, history)}
        if views and last_row_reads(fgraph, history, state.depth, besides)[1]:
            yield state, list(views.values())


def _parts_of_rows(
    fgraph: FunctionGraph,
    nodes: tuple[Apply, Apply],
    loops: tuple[Loop, Loop],
    places: dict[Variable, Variable],
    blockers: Iterable[Variable] = (),
) -> Iterator[list[Variable]]:
    """Yield, for rows that the maker stores for the reader alone, the parts of them, or results of
    inner loops, that are all that the reader's body reads of them, if these are smaller, and come
    from what the maker knows."""
    roots = loops[1].body_outputs()
    own = depends_on(roots, [inp for inp in loops[1].body_inputs() if inp not in places])
    readers = readers_of(roots, blockers=blockers)
    for _, group in rows_for_one(fgraph, nodes, loops):
        reads = [node for row in group for node in _reads(row, readers)]
        if all(node and (is_loop(node) or isinstance(node.op, INDEX_READS)) for node in reads):
            parts = [part for node in reads for part in _parts(node, readers)]
            if are_smaller(parts, group[0]) and own.isdisjoint(parts):
                yield parts


def _reads(array: Variable, readers: Readers) -> Iterator[Apply | None]:
    """Yield who reads items of an array, also after others were written."""
    for node in readers[array]:
        if node and isinstance(node.op, INDEX_WRITES) and node.inputs[0] is array:
            yield from _reads(node.outputs[0], readers)
        elif not node or not reads_shape(node):
            yield node


def _parts(node: Apply, readers: Readers) -> list[Variable]:
    """Return the results of a node that are read; what is read of an array with the shape that is
    specified of it."""
    if is_loop(node):
        return [out for out in node.outputs if any(True for _ in _reads(out, readers))]
    (out,) = node.outputs
    only = readers[out][0] if len(readers[out]) == 1 else None
    return only.outputs if only and isinstance(only.op, SpecifyShape) else [out]


def are_smaller(parts: list[Variable], row: Variable) -> bool:
    """Whether parts of an array have fewer items than it; one of unknown size has more."""
    whole, shapes = row.type.shape, [part.type.shape for part in parts]
    if not any(None in shape for shape in (whole, *shapes)):
        return sum(map(math.prod, shapes)) < math.prod(whole)
    return all(len(own) < len(whole) or None not in own for own in shapes)


def _is_product(node: Apply) -> bool:
    return kind(node, lambda variable: not isinstance(variable, Constant)) in (
        *(PRODUCT, PAIRS, HEAVY),
    )


def _is_worth_it(node: Apply, costly: set[Variable]) -> bool:
    """Whether a value is stored itself, not what it is computed from."""
    if not is_tensor(node.outputs[0]):
        return False
    if is_function(node) or not is_arithmetic(node):
        return True
    return sum(inp in costly for inp in set(node.inputs)) > 1


def _twins(
    source: Loop, nodes: list[Apply], places: dict[Variable, Variable]
) -> dict[Variable, Variable]:
    """Return, for results of nodes, the equal values of another body."""
    mine = [out for node in nodes for out in node.outputs]
    theirs = [out for node in toposort(source.body_outputs()) for out in node.outputs]
    moved = substitute(mine, places)
    frozen = freeze_graph(source.body_inputs(), [*theirs, *moved])
    by_value = dict(zip(frozen.outputs, theirs, strict=False))
    pairs = zip(mine, frozen.outputs[len(theirs) :], strict=True)
    return {value: by_value[twin] for value, twin in pairs if twin in by_value}


# Choices

# What rounds nothing: results are one of the operands, or truth values.
_EXACT = (
    *(ps.LogicalComparison, ps.IsNan, ps.IsInf, ps.Identity, ps.Switch, ps.Second),
    *(ps.ScalarMaximum, ps.ScalarMinimum, ps.AND, ps.OR, ps.XOR, ps.Invert),
)


class StoreChoices(LoopRewrite):
    """Let loops, once they are kernels, read what others have compared."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not (config.scanlib__lower and config.scanlib__simplify):
            return
        loops = [node for node in fgraph.toposort() if isinstance(node.op, ElemwiseScan)]
        serve_readers(fgraph, loops, _store)


def _keeps_extremes(node: Apply) -> bool:
    """Whether a loop has running extremes, all steps of which run, and is not to run again."""
    op = node.op
    return bool(_extremes(op)) and not op.signature.has_stop and not op.scan.recompute


def _extremes(op: ElemwiseScan) -> list[int]:
    """Return the states and carries that are running extremes, by their place among the results."""
    return [r.parts[0] for r in op.recurrences if r.family in ("maximum", "minimum")]


def _store(fgraph: FunctionGraph, maker: Apply, reader: Apply) -> Apply | None:
    """Store truth values in one loop that another one needs; return the first one's new node."""
    if not _keeps_extremes(maker):
        return None
    source, target = Loop.from_node(maker), Loop.from_node(reader)
    places = same_rows(maker, source, target)
    chosen = _choices(maker.op, source, target, places) if places else {}
    if not chosen:
        return None
    rows = [part.row for part in target.sequences]
    read = set(ancestors(target.body_outputs(), blockers=[*chosen, *rows]))
    unread = [part for part in target.sequences if part.row not in read]
    if not _saves_bytes(chosen, unread):
        return None
    _forget_histories(fgraph, maker, source, reader, [part.outer for part in unread])

    def lower(loop: Loop) -> Apply:
        return lower_elementwise(loop, not (maker if loop is source else reader).op.exact)

    return store(fgraph, (maker, reader), (source, target), chosen, lower, "choices")


def _choices(
    op: ElemwiseScan, source: Loop, target: Loop, places: dict[Variable, Variable]
) -> dict[Variable, Variable]:
    """Return truth values of the reader's body, and what they are in the maker's."""
    roots = target.body_outputs()
    own = depends_on(roots, [inp for inp in target.body_inputs() if inp not in places])

    def is_choice(value: Variable) -> bool:
        return value.owner is not None and value.type.dtype == "bool" and value not in own

    def inputs_of(value: Variable) -> list[Variable]:
        return [] if value.owner is None or is_choice(value) else value.owner.inputs

    found = [value for value in walk(roots, inputs_of, bfs=False) if is_choice(value)]
    if not found:
        return {}
    count = len(source.body_outputs())
    merged = merge_equal([*source.body_outputs(), *substitute(found, places)])
    source.set_body_outputs(merged[:count])
    extremes = _extremes(op)
    exact = {part.next for k, part in enumerate(source.recurrent) if k in extremes}
    pairs = zip(found, merged[count:], strict=True)
    return {
        value: twin
        for value, twin in pairs
        if all(
            isinstance(node.op, DimShuffle) or applies(node, _EXACT)
            for node in toposort([twin], blockers=list(exact))
        )
    }


def _saves_bytes(chosen: dict[Variable, Variable], unread: list[Sequence]) -> bool:
    """Whether fewer bytes are read than the truth values take, which are written and read."""
    kinds = {value.type.broadcastable for value in chosen}
    if len(kinds) > 1 or any(isinstance(twin, Constant) for twin in chosen.values()):
        return False
    saved = sum(
        np.dtype(part.row.type.dtype).itemsize
        for part in unread
        if part.row.type.broadcastable in kinds
    )
    return saved > 2 * len(chosen)


def _forget_histories(
    fgraph: FunctionGraph, maker: Apply, source: Loop, reader: Apply, unread: list[Variable]
) -> None:
    """Mark the states whose histories nobody else reads."""
    if source.reverse:
        return
    histories = maker.op.signature.split_outputs(maker.outputs).histories
    for state, history in zip(source.states, histories, strict=True):
        views = [client for client, _ in fgraph.clients[history]]
        if state.untraced or not views:
            continue
        if all(
            len(view.outputs) == 1
            and view.outputs[0] in unread
            and all(client is reader for client, _ in fgraph.clients[view.outputs[0]])
            for view in views
        ):
            state.untraced = True
