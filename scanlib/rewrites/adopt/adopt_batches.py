"""Batches of loops of `pytensor.scan`, adopted as batches of canonical loops.

`vectorize_graph` makes a `Blockwise` of a loop of `pytensor.scan`, which runs the loops of a batch
one after the other. What it made of the graph around a loop is taken back here: the loop of one
member of the batch, with what its buffers are made of and what reads them, stands in a graph of
its own again. There it is adopted, and then that graph is made a batch, in which a canonical loop
takes the steps of all members at once.
"""

from collections.abc import Callable, Iterator

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.replace import graph_replace, vectorize_graph
from pytensor.graph.rewriting.basic import MergeOptimizer, dfs_rewriter
from pytensor.graph.traversal import ancestors, graph_inputs
from pytensor.tensor.basic import Alloc, Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Shape, SpecifyShape, specify_shape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, inc_subtensor, set_subtensor
from pytensor.tensor.type import TensorType

from scanlib._compat import UNBATCH, LegacyScan
from scanlib.lengths.batches import behind_the_batch, common, of_one_member, without_axes
from scanlib.lengths.numbers import constant_index, indices_of, steps_of
from scanlib.ops.graph import core_op
from scanlib.ops.row_ops.ran_steps import is_mask

# What one member's part of a result is computed by, from its parts of the inputs.
STRUCTURE = (
    Blockwise | CAReduce | DimShuffle | Elemwise | IncSubtensor | Join | SpecifyShape | Subtensor
)

# Batches of no axes, and numbers that are made arrays and numbers again.
_leave_out_what_does_nothing = dfs_rewriter(*UNBATCH)


def is_batch(op: Op) -> bool:
    """Whether an Op runs a loop of `pytensor.scan` for each member of a batch."""
    return isinstance(op, Blockwise) and isinstance(op.core_op, LegacyScan)


def adopt_batches(
    fgraph: FunctionGraph,
    adopt: Callable[[FunctionGraph], None],
    is_wanted: Callable[[Apply], bool],
) -> Iterator[dict[Variable, Variable]]:
    """Yield what replaces the results of batches of loops, and what reads rows of them.

    Batches of fewer axes come first; they are to be replaced before the next ones are asked for.
    `adopt` adopts the loops in a graph, where it can.
    """
    nodes = [node for node in fgraph.toposort() if is_batch(node.op) and is_wanted(node)]
    for rank in sorted({node.op.batch_ndim(node) for node in nodes}):
        own = [node for node in nodes if node.op.batch_ndim(node) == rank]
        yield _adopt_rank(fgraph, own, rank, adopt)


def _adopt_rank(
    fgraph: FunctionGraph, nodes: list[Apply], rank: int, adopt: Callable[[FunctionGraph], None]
) -> dict[Variable, Variable]:
    """Return what replaces batches of `rank` axes; nothing if no loop is adopted."""
    member = Member(rank)
    read = [
        result for node in nodes for out in node.outputs for result in _reads(fgraph, out, rank)
    ]
    results = [member.of(variable) for variable in read]
    roots = [root for root in graph_inputs(results) if not isinstance(root, Constant)]
    one = FunctionGraph(roots, results, clone=True)
    _leave_out_what_does_nothing.rewrite(one)
    MergeOptimizer().rewrite(one)
    loops = _legacy_loops(one)
    adopt(one)
    if len(_legacy_loops(one)) == len(loops) or _follows_another(one):
        return {}
    copies = dict(zip(one.inputs, roots, strict=True))
    shared = {new: root for new, root in copies.items() if root not in member.batches}
    batches = {new: member.batches[root] for new, root in copies.items() if new not in shared}
    try:
        made = vectorize_graph(graph_replace(one.outputs, shared, strict=False), batches)
        return {old: member.whole(old, new) for old, new in zip(read, made, strict=True)}
    except NotImplementedError:  # of shapes that depend on what a step computes, for example
        return {}


def _legacy_loops(fgraph: FunctionGraph) -> list[Apply]:
    return [node for node in fgraph.apply_nodes if isinstance(node.op, LegacyScan)]


def _follows_another(fgraph: FunctionGraph) -> bool:
    """Whether a loop takes the steps that one with `until` ran, and does not know which members of
    a batch ran them."""
    for node in fgraph.apply_nodes:
        steps = steps_of(node)
        if steps is None or any(map(is_mask, steps.sequences)):
            continue
        given = [*steps.sequences, *([] if steps.n_steps is None else [steps.n_steps])]
        before = (variable.owner for variable in ancestors(given) if variable.owner is not None)
        if any(own.may_stop for own in map(steps_of, before) if own is not None):
            return True
    return False


def _reads(fgraph: FunctionGraph, variable: Variable, rank: int) -> list[Variable]:
    """Return a result if other nodes read it than slices of it, and what those slices give."""
    found: list[Variable] = []
    is_read = False
    for client, position in fgraph.clients.get(variable, ()):
        if _slices_rows(client, position, rank):
            found += _reads(fgraph, client.outputs[0], rank)
        else:
            is_read = True
    return [variable, *found] if is_read else found


def _slices_rows(node: Apply, position: int, rank: int) -> bool:
    """Whether a node reads rows of each member of a batch."""
    op = node.op
    if not isinstance(core_op(node), Subtensor) or position:
        return False
    if isinstance(op, Blockwise):
        return op.batch_ndim(node) == rank
    return behind_the_batch(node, rank) is not None


def _is_size(variable: Variable) -> bool:
    """Whether it is one of the sizes that a shape must have; the others are None."""
    return isinstance(variable.type, TensorType)


class Member:
    """What is computed for one member of a batch, whose axes are the first `rank` of every
    variable.

    `batches` has the batches of the variables that the graphs of a member begin with.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.batches: dict[Variable, Variable] = {}
        self._known: dict[Variable, Variable] = {}
        self._nodes: dict[Apply, Apply] = {}

    def of(self, variable: Variable) -> Variable:
        """Return that of one member which a variable has for all of them."""
        pending = [variable]
        while pending:
            missing = [v for v in self._made_of(pending[-1]) if v not in self._known]
            if missing:
                pending += missing
                continue
            last = pending.pop()
            if last not in self._known:
                found = self._found(last)
                if found is None:
                    shape = last.type.shape[self.rank :]
                    found = TensorType(last.type.dtype, shape=shape)(last.name)
                    self.batches[found] = last
                self._known[last] = found
        return self._known[variable]

    def whole(self, variable: Variable, new: Variable) -> Variable:
        """Return what replaces a variable, repeated if all members have the same."""
        if new.type.ndim == variable.type.ndim:
            return new
        above = set(ancestors([variable]))
        sizes = {
            axis: batch.shape[axis]
            for batch in self.batches.values()
            for axis in range(self.rank)
            if batch in above and not batch.type.broadcastable[axis]
        }
        if len(sizes) < self.rank:
            raise NotImplementedError("nothing that is known of the batch tells its size")
        return pt.broadcast_to(new, [*(sizes[axis] for axis in range(self.rank)), *new.shape])

    def _made_of(self, variable: Variable) -> list[Variable]:
        """Return what is to be known first: a graph may be deeper than Python's calls."""
        node = variable.owner
        if variable in self._known or node is None or not isinstance(node.op, STRUCTURE):
            return []
        if all(variable.type.broadcastable[: self.rank]):
            return []
        return [
            each
            for each in node.inputs
            if isinstance(each.type, TensorType) and each.type.ndim >= self.rank
        ]

    def _found(self, variable: Variable) -> Variable | None:
        """Return it as an expression, None where it can only be given."""
        rank = self.rank
        if all(variable.type.broadcastable[:rank]):
            return without_axes(variable, rank)
        node = variable.owner
        found = None if node is None else self._of_result(node, node.outputs.index(variable))
        return common(variable, rank) if found is None else found

    def _of_result(self, node: Apply, position: int) -> Variable | None:
        op, rank = node.op, self.rank
        if isinstance(op, Blockwise):
            if op.batch_ndim(node) != rank:
                return None
            if node not in self._nodes:
                self._nodes[node] = op.core_op.make_node(*map(self.of, node.inputs))
            return self._nodes[node].outputs[position]
        if isinstance(op, Alloc):
            return self._shape(node)
        if isinstance(op, IncSubtensor):
            return self._written(node)
        if isinstance(op, SpecifyShape) and not any(map(_is_size, node.inputs[1 : rank + 1])):
            sizes = [each if _is_size(each) else None for each in node.inputs[rank + 1 :]]
            return specify_shape(self.of(node.inputs[0]), sizes)
        if isinstance(op, CAReduce) and op.axis is not None and min(op.axis, default=rank) >= rank:
            return op.clone(axis=[axis - rank for axis in op.axis])(self.of(node.inputs[0]))
        made = of_one_member(node, rank, self.of)
        return None if made is None else made[position]

    def _shape(self, node: Apply) -> Variable | None:
        """Return the shape of a member, which `vectorize_graph` repeats for all of them."""
        value, *sizes = node.inputs
        cut = value.owner
        if len(sizes) != self.rank + 1 or cut is None or not isinstance(cut.op, Subtensor):
            return None
        shape, (index,) = cut.inputs[0], indices_of(cut)
        if shape.owner is None or not isinstance(shape.owner.op, Shape):
            return None
        if not isinstance(index, slice) or (index.stop, index.step) != (None, None):
            return None
        if index.start is None or constant_index(index.start) != self.rank:
            return None
        return self.of(shape.owner.inputs[0]).shape

    def _written(self, node: Apply) -> Variable | None:
        """Return one member of which some rows are written."""
        rest = behind_the_batch(node, self.rank)
        if not rest:
            return None
        rows, value = self.of(node.inputs[0])[rest], node.inputs[1]
        axes = value.type.ndim - rows.type.ndim
        if axes == self.rank:
            value = self.of(value)
        elif axes > 0:  # it has some of the axes of the batch, but not all
            return None
        write = set_subtensor if node.op.set_instead_of_inc else inc_subtensor
        return write(rows, value)
