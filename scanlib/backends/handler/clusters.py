"""Which nodes around the loops of a graph are computed together, by kernels.

Nodes over arrays that have rules (`scanlib.kernels.arrays`) are gathered into *clusters*, each of
which is one program (`scanlib.schedules.array_loops`). What a loop needs cannot be in one cluster
with what needs that loop: from the end of the graph, nodes that have no kernel and clusters take
turns.

Views, and numbers that lengths are computed with, are cheap: a cluster that needs them has its own,
and so have the loops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable, clone_get_equiv
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort_with_orderings, walk
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import DenseTensorType
from pytensor.tensor.type_other import NoneTypeT

from scanlib._compat import INDEX_WRITES, IfElse, freeze_graph
from scanlib.backends.handler.functions import has_compiled_function
from scanlib.kernels.arrays.decompositions import is_decomposed
from scanlib.kernels.program import LoopProgram
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.execution import LoopOp
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.ops.row_ops.checked_rows import CheckedItems, CheckedRows
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from scanlib.schedules.array_loops import graph_program, has_rule

VIEWS = (Subtensor, DimShuffle, SpecifyShape, CheckAndRaise)
NUMBERS = (Elemwise, ScalarFromTensor, TensorFromScalar, CheckAndRaise)
SAME = (ScalarFromTensor, TensorFromScalar, Shape_i)  # what is done where it is read
# Loops, choices, and views that programs would copy.
ALONE = (LoopOp, IfElse, CheckedItems, CheckedRows, MergeRows, SplitRows)
MOST_ITEMS = 16  # of a constant that a kernel writes itself


@dataclass
class Cluster:
    """Nodes that are one program, and a copy of them; inputs and outputs are of the graph."""

    inputs: list[Variable]
    outputs: list[Variable]
    body: FunctionGraph
    program: LoopProgram


@dataclass
class Plan:
    """In which order a graph is written.

    Nodes are `refused` that turned out to have no kernel, or that something else computes; `early`
    says what has to be computed before a node besides its inputs.
    """

    fgraph: FunctionGraph
    refused: set[Apply] = field(default_factory=set)
    early: dict[Apply, list[Variable]] = field(default_factory=dict)

    def order(self) -> list[Cluster | Apply]:
        """Return clusters and single nodes, each after what it needs."""
        while True:
            try:
                return list(self._backwards())[::-1]
            except _RefusedError as error:
                self.refused |= error.args[0]

    def _backwards(self) -> Iterator[Cluster | Apply]:
        """Yield clusters and single nodes, the last one first.

        Single nodes, numbers and clusters take turns, each of which takes all that nothing else is
        left to come after. So clusters are as few, and as late, as they can be: one then has to
        keep few results for another. What else is cheap belongs to any turn.
        """
        orderings = self.fgraph.orderings()
        for node, variables in self.early.items():
            owners = [variable.owner for variable in variables if variable.owner is not None]
            orderings[node] = [*orderings.get(node, ()), *owners]
        nodes = list(toposort_with_orderings(self.fgraph.outputs, orderings=orderings))
        self.cheap = self._cheap(nodes)
        gathered = {n for n in nodes if n not in self.cheap and self._may_be_gathered(n)}
        gathered -= {node for node in gathered if self._is_left_outside(node, gathered)}
        self.written = self._written(nodes, gathered)
        numbers = {n for n in self.cheap & self.written if isinstance(n.op, Elemwise)}
        alone = {n for n in nodes if n not in gathered and n not in self.cheap}
        turns, free = cycle([alone, numbers, gathered]), self.cheap - numbers
        behind: dict[Apply, set[Apply]] = {node: set() for node in nodes}
        for node in nodes:
            for other in (*(inp.owner for inp in node.inputs), *orderings.get(node, ())):
                if other is not None:
                    behind[other].add(node)
        left, done = nodes[::-1], set[Apply]()
        while left:
            turn, own = next(turns), []
            for node in left:
                if (node in turn or node in free) and behind[node] <= done:
                    done.add(node)
                    if node in turn and turn is not alone:
                        own.append(node)
                    elif node in self.written:
                        yield node
            if own:
                yield self._cluster(own[::-1])
            left = [node for node in left if node not in done]

    def _may_be_gathered(self, node: Apply) -> bool:
        if node in self.refused or isinstance(node.op, ALONE) or not has_rule(node.op):
            return False
        above: Apply | None = node
        while above and above.op.destroy_map and isinstance(above.op, INDEX_WRITES):
            above = above.inputs[0].owner
        if above is None:
            return False  # a program would copy what the graph is given, into which nodes write
        return all(
            isinstance(variable.type, DenseTensorType | ScalarType | NoneTypeT)
            for variable in (*node.inputs, *node.outputs)
        )

    def _is_left_outside(self, node: Apply, gathered: set[Apply]) -> bool:
        """Whether a node slices an array that is written into, for nothing that is gathered: a
        program would return a copy."""
        written = node.inputs[0].owner if isinstance(node.op, Subtensor) else None
        if written is None or not isinstance(written.op, IncSubtensor):
            return False
        has_slices = all(isinstance(index, slice) for index in node.op.idx_list)
        readers = {client for client, _ in self.fgraph.clients[node.outputs[0]]}
        return has_slices and not readers & gathered

    def _cheap(self, nodes: Sequence[Apply]) -> set[Apply]:
        """Return views of what comes from elsewhere, and numbers that are computed from numbers.

        A size is none if the array is written over: later clusters would read that for it.
        """
        cheap: set[Apply] = set()
        overwritten = {
            node.inputs[place]
            for node in nodes
            for places in node.op.destroy_map.values()
            for place in places
        }

        def comes_from_elsewhere(variable: Variable) -> bool:
            owner = variable.owner
            return owner is None or owner in cheap or not self._may_be_gathered(owner)

        for node in nodes:
            if node in self.refused:
                continue
            if isinstance(node.op, Shape_i):
                (array,) = node.inputs
                if isinstance(array.type, DenseTensorType) and array not in overwritten:
                    cheap.add(node)
            elif all(getattr(v.type, "ndim", 0) == 0 for v in (*node.inputs, *node.outputs)):
                if isinstance(node.op, NUMBERS) and all(map(comes_from_elsewhere, node.inputs)):
                    cheap.add(node)
            elif isinstance(node.op, VIEWS) and comes_from_elsewhere(node.inputs[0]):
                cheap.add(node)
        return cheap

    def _written(self, nodes: Sequence[Apply], gathered: set[Apply]) -> set[Apply]:
        """Return the nodes that are written one by one: those that are not gathered, and what is
        cheap and needed by them or by the graph."""
        written = {node for node in nodes if node not in gathered and node not in self.cheap}
        needed = {*self.fgraph.outputs, *(v for some in self.early.values() for v in some)}
        for node in reversed(nodes):
            if node in written or (node in self.cheap and needed & set(node.outputs)):
                written.add(node)
                needed |= set(node.inputs)
        return written

    def _cluster(self, nodes: list[Apply]) -> Cluster:
        own = set(nodes)
        early = {variable for some in self.early.values() for variable in some}
        outputs = [
            out
            for node in nodes
            for out in node.outputs
            if out in early or self._is_read_outside(out, own)
        ]

        def above(variable: Variable) -> list[Variable] | None:
            return variable.owner.inputs if variable.owner in self.cheap else None

        def enters(variable: Variable) -> bool:
            if isinstance(variable, Constant):
                return np.size(variable.data) > MOST_ITEMS and hasattr(variable.type, "dtype")
            return variable.owner not in own and variable.owner not in self.cheap

        read = [inp for node in nodes for inp in node.inputs]
        inputs = list(filter(enters, walk(read, above)))
        return Cluster(inputs, outputs, *self._program(inputs, outputs, nodes))

    def _is_read_outside(self, out: Variable, own: set[Apply]) -> bool:
        for client, _ in self.fgraph.clients[out]:
            if client in own:
                continue
            if client in self.cheap and client not in self.written:
                # Its readers count: those in other clusters.
                if any(self._is_read_outside(o, own) for o in client.outputs):
                    return True
                continue
            return True
        return False

    def _program(
        self, inputs: list[Variable], outputs: list[Variable], nodes: list[Apply]
    ) -> tuple[FunctionGraph, LoopProgram]:
        equivalent = clone_get_equiv(inputs, outputs, copy_inputs=True, copy_orphans=True)
        graph = FunctionGraph(
            [equivalent[v] for v in inputs], [equivalent[v] for v in outputs], clone=False
        )
        try:
            program = graph_program(graph)
        except NoKernelError as error:
            failed = {node for node in nodes if equivalent.get(node) is error.node}
            # What takes the place of an Op is no node of the graph.
            failed = failed or {node for node in nodes if is_decomposed(node.op)}
            raise _RefusedError(failed or set(nodes)) from error
        if not all(map(has_compiled_function, program.functions)):
            raise _RefusedError(set(nodes))
        return graph, program


class _RefusedError(Exception):
    """Nodes, a set of them, turned out to have no kernel."""


def gather(fgraph: FunctionGraph) -> None:
    """Put one node in the place of each cluster of nodes."""
    new: dict[Variable, Variable] = {}
    for cluster in Plan(fgraph).order():
        if not isinstance(cluster, Cluster):
            continue
        op = KernelGraph(freeze_graph(cluster.body.inputs, cluster.body.outputs), cluster.program)
        outputs = op.make_node(*(new.get(v, v) for v in cluster.inputs)).outputs
        pairs = list(zip(cluster.outputs, outputs, strict=True))
        new.update(pairs)
        fgraph.replace_all_validate(pairs, reason="scanlib_gather")
