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
"""

from __future__ import annotations

from collections.abc import Callable

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors, toposort, walk
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib._compat import freeze_graph
from scanlib.lengths.numbers import constant_index
from scanlib.ops.graph import depends_on, is_tensor, substitute
from scanlib.ops.loop import Loop, Output, Sequence
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.rewrites.edit import results_by_part
from scanlib.rewrites.over_time.shape_reads import sizes_from_outside
from scanlib.rewrites.over_time.split_cost import (
    HEAVY,
    PAIRS,
    PRODUCT,
    is_arithmetic,
    is_function,
    kind,
    of_differing_shapes,
)
from scanlib.rewrites.simplify.last_rows import is_loop
from scanlib.rewrites.simplify.simplify import replace
from scanlib.rewrites.split.split import keeps_loops_whole


class ReuseForwardValues(LoopRewrite):
    """Let loops read what others computed; see the module's text."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not (config.scanlib__split and config.scanlib__split_maps):
            return
        if keeps_loops_whole(fgraph):
            return
        loops = [n for n in fgraph.toposort() if is_loop(n) and not n.op.recompute]
        serve_readers(fgraph, loops, lambda node: not node.op.signature.has_stop, _reuse)


def serve_readers(
    fgraph: FunctionGraph,
    loops: list[Apply],
    can_serve: Callable[[Apply], bool],
    serve: Callable[[FunctionGraph, Apply, Apply], Apply | None],
) -> None:
    """Let each of some loops, in order, be served by the first one above it that has what it needs.

    `serve` is given a loop that `can_serve` and its reader, and returns the first one's new node.
    """
    for reader in loops[1:]:
        above = set(ancestors(reader.inputs))
        for place, maker in enumerate(loops[: loops.index(reader)]):
            if above.intersection(maker.outputs) and can_serve(maker):
                made = serve(fgraph, maker, reader)
                if made is not None:
                    loops[place] = made
                    break


def _reuse(fgraph: FunctionGraph, maker: Apply, reader: Apply) -> Apply | None:
    """Store in one loop what another one computes again; return the first loop's new node."""
    source, target = Loop.from_node(maker), Loop.from_node(reader)
    places = same_rows(maker, source, target)
    chosen = _chosen(source, target, places) if places else {}
    if not chosen:
        return None
    parts = [*source.states, *source.carries, *source.outputs]
    stored = {value: output_of(source, value) for value in chosen.values()}
    sizes_from_outside(source)  # so that the shapes of what is stored can be told without a step
    results = source.apply()
    new = results_by_part(source, results)
    moved = {old: new[id(part)] for part, old in zip(parts, maker.outputs, strict=True)}
    replace(fgraph, moved, "scanlib_reuse")
    # What the reader reads by way of other nodes reads the new loop now; the rest is said here.
    new_inputs = reader.inputs if reader in fgraph.apply_nodes else target.outer_inputs()
    target.replace_outer(dict(zip(target.outer_inputs(), new_inputs, strict=True)))
    rows = {}
    for value, twin in chosen.items():
        rows[value] = value.type()
        target.sequences.append(Sequence(new[id(stored[twin])], rows[value]))
    old_parts = [*target.states, *target.carries, *target.outputs]
    target.substitute(rows)
    read = set(ancestors(target.body_outputs()))
    target.sequences = [part for part in target.sequences if part.row in read]
    target.non_sequences = [part for part in target.non_sequences if part.inner in read]
    made = results_by_part(target, target.apply())
    pairs = zip(old_parts, reader.outputs, strict=True)
    replace(fgraph, {old: made[id(part)] for part, old in pairs}, "scanlib_reuse")
    return results.node


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
    results = maker.op.signature.split_outputs(maker.outputs)
    known = {part.outer: part.row for part in source.sequences}
    for output, rows in zip(source.outputs, results.outputs, strict=True):
        known[rows] = output.value
    whole = {part.outer: part.inner for part in source.non_sequences}
    found = {p.inner: whole[p.outer] for p in target.non_sequences if p.outer in whole}
    for part in target.sequences:
        if part.outer in known:
            found[part.row] = known[part.outer]
            continue
        value = _tap_of(part.outer, results.histories, source)
        if value is not None:
            found[part.row] = value
    return {inner: value for inner, value in found.items() if inner.type == value.type}


def _tap_of(rows: Variable, histories: list[Variable], source: Loop) -> Variable | None:
    """Return the tap, or next value, whose rows a view of a history holds."""
    node = rows.owner
    if node is None or not isinstance(node.op, Subtensor) or node.inputs[0] not in histories:
        return None
    indices = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    if len(indices) != 1 or not isinstance(indices[0], slice) or indices[0].step is not None:
        return None
    start = 0 if indices[0].start is None else constant_index(indices[0].start)
    stop = 0 if indices[0].stop is None else constant_index(indices[0].stop)
    state = source.states[histories.index(node.inputs[0])]
    if state.untraced or start is None or stop is None or stop > 0 or start - stop != state.depth:
        return None
    offset = -start if source.reverse else start - state.depth
    return state.next if offset == 0 else state.taps.get(offset)


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
    fixed = {part.inner for part in source.non_sequences}
    varying = [value for value in source.body_inputs() if value not in fixed]
    differing = of_differing_shapes(list(twins.values()), varying)
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
