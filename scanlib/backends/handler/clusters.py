"""Which nodes around the loops of a graph are computed together, by kernels.

Nodes over arrays that have rules (`scanlib.kernels.arrays`) are gathered into *clusters*, each of
which is one program (`scanlib.schedules.array_loops`). What depends on a loop that depends on
such nodes belongs to a later cluster: with the stage of a node that has no kernel being that of the
last cluster it needs, clusters and such nodes take turns.

Views, and numbers that lengths are computed with, are cheap: a cluster that needs them has its own,
and so have the loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from pytensor.compile.mode import optdb
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable, clone_get_equiv
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors, toposort_with_orderings
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Mul, ScalarType
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i, SpecifyShape
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.type import DenseTensorType
from pytensor.tensor.type_other import NoneTypeT

from scanlib._compat import IfElse, freeze_graph
from scanlib.backends.handler.functions import has_compiled_function
from scanlib.kernels.arrays.decompositions import is_decomposed
from scanlib.kernels.program import LoopProgram
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.execution import LoopOp
from scanlib.ops.graph import depends_on
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.schedules.array_loops import graph_program, has_rule
from scanlib.schedules.linear_steps import has_products

VIEWS = (Subtensor, DimShuffle, SpecifyShape, CheckAndRaise)
NUMBERS = (Elemwise, ScalarFromTensor, TensorFromScalar, CheckAndRaise)
SAME = (ScalarFromTensor, TensorFromScalar, Shape_i)  # what is done where it is read
MOST_ITEMS = 16  # of a constant that a kernel writes itself


@dataclass
class Cluster:
    """Nodes that are one program.

    Attributes
    ----------
    inputs, outputs : list of Variable
        Of the graph.
    body : FunctionGraph
        A copy of the nodes.
    program : LoopProgram
    """

    inputs: list[Variable]
    outputs: list[Variable]
    body: FunctionGraph
    program: LoopProgram


@dataclass
class Plan:
    """In which order a graph is written.

    Attributes
    ----------
    fgraph : FunctionGraph
    refused : set of Apply
        Nodes that turned out to have no kernel, or that something else computes.
    early : dict of Apply to list of Variable
        What has to be computed before a node besides its inputs.
    """

    fgraph: FunctionGraph
    refused: set[Apply] = field(default_factory=set)
    early: dict[Apply, list[Variable]] = field(default_factory=dict)

    def order(self) -> list[Cluster | Apply]:
        """Return clusters and single nodes, each after what it needs."""
        while True:
            try:
                return list(self._order())
            except _RefusedError as error:
                self.refused |= error.nodes

    def order_with_numbers(self) -> Iterator[Cluster | Apply]:
        """Yield what `order` has, with numbers in programs as well, as few as there can be."""
        items, waiting = self.order(), []
        for item in items:
            if isinstance(item, Apply):
                if isinstance(item.op, Elemwise) and item in self.cheap:
                    waiting.append(item)
                    continue
                if isinstance(item.op, SAME):
                    yield item
                    continue
            if _reads(item, waiting) or (isinstance(item, Apply) and item.op.destroy_map):
                yield from self._numbers(waiting)
                waiting = []
            yield item
        yield from self._numbers(waiting)

    def _numbers(self, nodes: list[Apply]) -> list[Cluster] | list[Apply]:
        """Return one program of numbers; single nodes where there is none."""
        try:
            return [self._cluster(nodes, self.written)] if nodes else []
        except _RefusedError:
            return nodes

    def _order(self) -> Iterator[Cluster | Apply]:
        orderings = self.fgraph.orderings()
        for node, variables in self.early.items():
            owners = [variable.owner for variable in variables if variable.owner is not None]
            orderings[node] = [*orderings.get(node, ()), *owners]
        nodes = list(toposort_with_orderings(self.fgraph.outputs, orderings=orderings))
        self.cheap = self._cheap(nodes)
        self.gathered = {
            node for node in nodes if node not in self.cheap and self._may_be_gathered(node)
        }
        written = self.written = self._written(nodes)
        stages = self._stages(nodes, orderings)
        for stage in range(max(stages.values(), default=0) + 1):
            own = [node for node in nodes if node in self.gathered and stages[node] == stage]
            if own:
                yield self._cluster(own, written)
            yield from (n for n in nodes if n in written and stages[n] == stage)

    def _may_be_gathered(self, node: Apply) -> bool:
        if node in self.refused or not has_rule(node.op):
            return False
        return all(
            isinstance(variable.type, DenseTensorType | ScalarType | NoneTypeT)
            for variable in (*node.inputs, *node.outputs)
        )

    def _cheap(self, nodes: Sequence[Apply]) -> set[Apply]:
        """Return views of what comes from elsewhere, and numbers that are computed from numbers."""
        cheap: set[Apply] = set()

        def comes_from_elsewhere(variable: Variable) -> bool:
            owner = variable.owner
            return owner is None or owner in cheap or not self._may_be_gathered(owner)

        for node in nodes:
            if node in self.refused:
                continue
            if isinstance(node.op, Shape_i):
                if isinstance(node.inputs[0].type, DenseTensorType):
                    cheap.add(node)
            elif all(getattr(v.type, "ndim", 0) == 0 for v in (*node.inputs, *node.outputs)):
                if isinstance(node.op, NUMBERS) and all(map(comes_from_elsewhere, node.inputs)):
                    cheap.add(node)
            elif isinstance(node.op, VIEWS) and comes_from_elsewhere(node.inputs[0]):
                cheap.add(node)
        return cheap

    def _written(self, nodes: Sequence[Apply]) -> set[Apply]:
        """Return the nodes that are written one by one: those that are not gathered, and what is
        cheap and needed by them or by the graph."""
        written = {node for node in nodes if node not in self.gathered and node not in self.cheap}
        needed = {*self.fgraph.outputs, *(v for some in self.early.values() for v in some)}
        for node in reversed(nodes):
            if node in written or (node in self.cheap and needed & set(node.outputs)):
                written.add(node)
                needed |= set(node.inputs)
        return written

    def _stages(
        self, nodes: Sequence[Apply], orderings: dict[Apply, list[Apply]]
    ) -> dict[Apply, int]:
        """Return the stage of each node: that of its cluster, or of the last cluster it needs."""
        stages: dict[Apply, int] = {}
        inside: dict[Apply, int] = {}  # the first cluster that can have what is cheap
        for node in nodes:
            before = {inp.owner for inp in node.inputs if inp.owner is not None}
            before |= set(orderings.get(node, ()))
            first, last = 0, 0
            for other in before:
                is_text = other not in self.gathered and other not in self.cheap
                first = max(first, inside.get(other, stages[other] + is_text))
                last = max(last, stages[other])
            if node in self.cheap:
                inside[node] = first
            stages[node] = first if node in self.gathered else last
        return self._delayed(nodes, stages, orderings)

    def _delayed(
        self, nodes: Sequence[Apply], stages: dict[Apply, int], orderings: dict
    ) -> dict[Apply, int]:
        """Return the stages with each node in the last cluster that it can be in.

        There are fewer clusters then, and fewer results that one has to keep for another.
        """
        last = max((stages[node] for node in self.gathered), default=0)
        waiting: dict[Apply, list[Apply]] = {}  # what must come after a node that it does not read
        for node, before in orderings.items():
            for other in before:
                waiting.setdefault(other, []).append(node)
        latest: dict[Apply, int] = {}
        for node in reversed(nodes):
            clients = [c for out in node.outputs for c, _ in self.fgraph.clients[out]]
            limits = [last]
            for client in (*clients, *waiting.get(node, ())):
                if client in latest:
                    limits.append(latest[client])
            if node in self.gathered:
                latest[node] = max(stages[node], min(limits))
            elif node in self.cheap and node not in self.written:
                latest[node] = min(limits)
            else:
                latest[node] = stages[node]
        return {node: latest[node] if node in self.gathered else stages[node] for node in nodes}

    def _cluster(self, nodes: list[Apply], written: set[Apply]) -> Cluster:
        own = set(nodes)
        early = {variable for some in self.early.values() for variable in some}
        outputs = [
            out
            for node in nodes
            for out in node.outputs
            if out in early or self._is_read_outside(out, own, written)
        ]
        inputs: dict[Variable, None] = {}
        todo, seen = [inp for node in nodes for inp in node.inputs], set()
        while todo:
            variable = todo.pop(0)
            if variable in seen:
                continue
            seen.add(variable)
            owner = variable.owner
            if isinstance(variable, Constant):
                if np.size(variable.data) > MOST_ITEMS and hasattr(variable.type, "dtype"):
                    inputs[variable] = None
            elif owner is None or (owner not in own and owner not in self.cheap):
                inputs[variable] = None
            elif owner in self.cheap:
                todo += owner.inputs
        return Cluster(list(inputs), outputs, *self._program(list(inputs), outputs, nodes))

    def _is_read_outside(self, out: Variable, own: set[Apply], written: set[Apply]) -> bool:
        for client, _ in self.fgraph.clients[out]:
            if client in own:
                continue
            if client in self.cheap and client not in written:
                # Its readers count: those in other clusters.
                if any(self._is_read_outside(o, own, written) for o in client.outputs):
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


def _reads(item: Cluster | Apply, nodes: Sequence[Apply]) -> bool:
    """Whether something reads what nodes compute."""
    todo = [inp.owner for inp in item.inputs if inp.owner is not None]
    while todo:
        node = todo.pop()
        if node in nodes:
            return True
        if isinstance(node.op, SAME):
            todo += [inp.owner for inp in node.inputs if inp.owner is not None]
    return False


class _RefusedError(Exception):
    """Nodes turned out to have no kernel."""

    def __init__(self, nodes: set[Apply]) -> None:
        super().__init__()
        self.nodes = nodes


# In the place of nodes


class GatherAroundLoops(LoopRewrite):
    """Put one node in the place of those around loops that one program can compute."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        ops = [node.op for node in fgraph.apply_nodes]
        if not any(isinstance(op, LoopOp) for op in ops):
            return
        # Branches that are not taken are not computed.
        if config.scanlib__perform != "auto" or any(isinstance(op, IfElse) for op in ops):
            return
        gather(fgraph)


def gather(fgraph: FunctionGraph, with_numbers: bool = False) -> None:
    """Put one node in the place of each cluster of nodes, or of numbers as well."""
    new: dict[Variable, Variable] = {}
    plan = Plan(fgraph)
    for cluster in list(plan.order_with_numbers()) if with_numbers else plan.order():
        if not isinstance(cluster, Cluster):
            continue
        op = KernelGraph(freeze_graph(cluster.body.inputs, cluster.body.outputs), cluster.program)
        outputs = op.make_node(*(new.get(v, v) for v in cluster.inputs)).outputs
        pairs = list(zip(cluster.outputs, outputs, strict=True))
        new.update(pairs)
        fgraph.replace_all_validate(pairs, reason="scanlib_gather")


optdb.register("scanlib_gather", GatherAroundLoops(), "fast_run", "cxx_only", position=48.6)


# Products of states, which are computed with their recurrence


_LAST, _MIDDLE = (0, 1, "x"), (0, "x", 1)


@dataclass(frozen=True)
class Products:
    """The products of a recurrence's states and other rows, which are computed with them,

        z_t[i, j] = h_t[i] x_t[j]        or        z_t[i, j] = x_t[i] h_t[j]

    The gradient by a matrix for each step is such a product of the adjoint and the state. The
    steps of small matrices wait for one another and leave the memory idle; the products, which are
    as large as the matrices, are written meanwhile.

    Attributes
    ----------
    product : Apply
        The node.
    other : Variable
        Where the other rows are; it has to be computed before the recurrence.
    outer : {"after", "before"}
        The place of the states, see `scanlib.schedules.linear_steps.linear_program`.
    """

    product: Apply
    other: Variable
    outer: str


def products_of(fgraph: FunctionGraph) -> dict[Apply, Products]:
    """Return the recurrences of a graph that have such products."""
    found: dict[Apply, Products] = {}
    for node in fgraph.toposort():
        if isinstance(node.op, LinearScan):
            products = _products_of(fgraph, node, {p.other for p in found.values()})
            if products is not None:
                found[node] = products
    return found


def _products_of(fgraph: FunctionGraph, node: Apply, waited_for: set[Variable]) -> Products | None:
    history = node.outputs[0]
    # What others wait for must not wait itself.
    if not has_products(node) or waited_for & depends_on([*waited_for], [history]):
        return None
    for shuffle, _ in fgraph.clients[history]:
        if not _is_shuffle(shuffle):
            continue
        for product, _ in fgraph.clients[shuffle.outputs[0]]:
            other = _other_rows(product, shuffle)
            if other is None or _is_summed(fgraph, product.outputs[0]):
                continue  # sums of products need no memory for these
            above = {v.owner for v in ancestors([other]) if v.owner is not None}
            # What is moved to an earlier place must not write where somebody has yet to read.
            may_move = all(_writes_for(fgraph, other, above) for other in above)
            if node in above or product.op.destroy_map or not may_move:
                continue
            return Products(product, other, "after" if shuffle.op.new_order == _LAST else "before")
    return None


def _writes_for(fgraph: FunctionGraph, node: Apply, readers: set[Apply]) -> bool:
    """Whether a node writes over nothing but results that these nodes alone read, and no views."""
    written = [node.inputs[k] for places in node.op.destroy_map.values() for k in places]
    return all(
        value.owner is not None
        and not value.owner.op.view_map
        and all(
            client in readers and [place] not in client.op.view_map.values()
            for client, place in fgraph.clients[value]
        )
        for value in written
    )


def _is_summed(fgraph: FunctionGraph, variable: Variable) -> bool:
    clients = fgraph.clients[variable]
    return len(clients) == 1 and isinstance(clients[0][0].op, CAReduce)


def _is_shuffle(node: Apply) -> bool:
    return isinstance(node.op, DimShuffle) and node.op.new_order in (_LAST, _MIDDLE)


def _other_rows(product: Apply, shuffle: Apply) -> Variable | None:
    """Return the rows that a node multiplies with shuffled states, None if it does not."""
    if not isinstance(product.op, Elemwise) or not isinstance(product.op.scalar_op, Mul):
        return None
    factors = [v for v in product.inputs if v is not shuffle.outputs[0]]
    if len(product.inputs) != 2 or len(factors) != 1:
        return None
    owner = factors[0].owner
    if owner is None or not _is_shuffle(owner) or owner.op.new_order == shuffle.op.new_order:
        return None
    other, states = owner.inputs[0], shuffle.inputs[0]
    same = other.type.dtype == states.type.dtype == product.outputs[0].type.dtype
    if not same or 1 in (other.type.shape[0], states.type.shape[0]):
        return None
    return other
