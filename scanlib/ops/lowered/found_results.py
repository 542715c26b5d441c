"""`FoundResults`: the results of a loop, found by other means than by walking.

Another algorithm may compute what a loop computes, such as a scan of associative elements.
`FoundResults` is given the loop's inputs and what was found, and returns that as it is; derivatives
are those of the loop at these values, of any order, whatever is not smooth in the other algorithm.
They have no loop either. With the cotangents ``g`` of the states that results read, the cotangents
of all states are those of an affine recurrence backwards,

    λ[t] = J[t]ᵀ λ[t+1] + g[t],    J[t] = ∂h[t+1] / ∂h[t]

which whoever found the results knows how to solve (`adjoint`). What steps owe to the loop's inputs
follows from ``λ``, for all steps at once. A rewrite takes the Op out when functions are compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.rewriting.basic import node_rewriter

from scanlib.ops.gradient.step_pullback import is_usable
from scanlib.ops.graph import Variables, conform, row_type, substitute
from scanlib.ops.loop import Loop, Results, map_rows
from scanlib.ops.lowered.solved_loop import SolvedLoop
from scanlib.ops.scan import Scan

# From a loop, its results and the cotangents of its histories to those of all states.
Adjoint = Callable[[Loop, Results, list[Variable]], list[Variable]]
Pair = tuple[Variable, Variable]
# What a loop without states is called that is a batch where rows are combined in parallel.
AT_ALL_STEPS = "all steps at once"


class FoundResults(SolvedLoop):
    """The results of a loop, given its inputs and these results.

    The loop has no carries and no `until`; its states have a depth of one. `adjoint`, a function of
    a module, gets the loop, its results, and for each state cotangents of the history; it returns
    the same with all that later states owe. A loop without states needs none.
    """

    __props__ = ("scan", "adjoint")
    view_map: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, scan: Scan, adjoint: Adjoint | None = None) -> None:
        self.scan = scan
        self.adjoint = adjoint

    def __str__(self) -> str:
        return f"Found{self.scan}"

    def make_node(self, *inputs: Variable) -> Apply:
        node = self.scan.make_node(*self.of_loop(inputs))
        given = inputs[len(node.inputs) :]
        found = [conform(v, out.type) for v, out in zip(given, node.outputs, strict=True)]
        return Apply(self, [*node.inputs, *found], [v.type() for v in found])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        node, shapes = arguments[-2:]
        return list(shapes[-len(node.outputs) :])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        for cell, value in zip(output_storage, inputs[-len(node.outputs) :], strict=True):
            cell[0] = value.copy()

    def pullback(
        self, inputs: Variables, outputs: Variables, cotangents: Variables
    ) -> list[Variable]:
        """Return the cotangents of the loop's inputs; what was found has none."""
        loop, results = Loop.from_op(self.scan, self.of_loop(inputs)), self.results(outputs)
        given = self.signature.split_outputs(cotangents)
        totals: list[Variable] = []
        if loop.states:
            nothing = [pg.disconnected_type() for _ in loop.states]
            _, read, _ = _pull_back(loop, results.histories, [*nothing, *given.outputs])
            parts = zip(results.histories, given.histories, read, strict=True)
            direct = [_added(history, own_g, g, loop.reverse) for history, own_g, g in parts]
            assert self.adjoint is not None
            totals = self.adjoint(loop, results, direct)
        after = [total[:-1] if loop.reverse else total[1:] for total in totals]
        sequences, _, fixed = _pull_back(loop, results.histories, [*after, *given.outputs])
        starts = [total[-1:] if loop.reverse else total[:1] for total in totals]
        return [*sequences, *starts, *fixed, *(pg.disconnected_type() for _ in outputs)]

    def of_batch(self, loop: Apply, others: Variables) -> Apply:
        return FoundResults(loop.op, self.adjoint).make_node(*loop.inputs, *others)


def at_all_steps(rows: Sequence[Pair], values: Sequence[Variable], name: str) -> list[Variable]:
    """Return what all steps compute of arrays: a loop without states.

    Backends that combine rows in parallel compute such a loop as batches, others by its kernel.
    `rows` are arrays, and what stands for a row of each in `values`: what one step computes, of
    rows and of what is the same at all steps.
    """
    return map_rows(rows, values, name=name, function=AT_ALL_STEPS)


def computes_all_steps(node: Apply) -> bool:
    """Whether a node is such a loop, or the gradient of one."""
    if not isinstance(node.op, Scan) or node.op.labels.function != AT_ALL_STEPS:
        return False
    signature = node.op.signature
    return not (signature.n_states or signature.n_carries or signature.has_stop)


def as_batches(node: Apply) -> list[Variable]:
    """Return the results of such a loop without a loop."""
    loop = Loop.from_node(node)
    fixed = {part.inner: part.outer for part in loop.non_sequences}
    values = substitute(loop.body_outputs(), fixed)
    found = vectorize_graph(values, {part.row: part.outer for part in loop.sequences})
    pairs = zip(found, values, node.outputs, strict=True)
    return [
        conform(
            pt.broadcast_to(new, [loop.length(), *new.shape]) if new.ndim == old.ndim else new,
            out.type,
        )
        for new, old, out in pairs
    ]


def _pull_back(
    loop: Loop, histories: Sequence[Variable], cotangents: Sequence[Variable]
) -> tuple[list[Variable], list[Variable], list[Variable]]:
    """Return the cotangents of sequences, of the states before all steps, of non-sequences.

    They are those of all steps at once, given the cotangents of the states after them and of the
    loop's outputs. What is the same at all steps is one row for each, so that there is no sum.
    """
    rows = [*loop.sequences, *loop.rows_of_taps(histories)]
    pairs = [(part.outer, part.row) for part in rows]
    steps = pairs[0][0].shape[0]
    for part in loop.non_sequences:
        pairs.append((pt.broadcast_to(part.outer, [steps, *part.outer.shape]), part.inner))
    values = at_all_steps(pairs, loop.body_outputs(), f"{loop.name or 'loop'}_steps")
    node = values[0].owner
    found = node.op.pullback(node.inputs, node.outputs, list(cotangents))
    first, last = len(loop.sequences), len(loop.sequences) + len(loop.states)
    sums = [pt.sum(g, axis=0) if is_usable(g) else g for g in found[last:]]
    return found[:first], found[first:last], sums


def with_derivatives_of(rows: Sequence[Variable], found: Sequence[Variable]) -> list[Variable]:
    """Return arrays that were found, with the derivatives of arrays that they stand for."""
    own = [row_type(v)() for v in rows]
    node = at_all_steps(list(zip(rows, own, strict=True)), own, "found")[0].owner
    return FoundResults(node.op).make_node(*node.inputs, *found).outputs


def _added(history: Variable, direct: Variable, read: Variable, reverse: bool) -> Variable:
    """Return the cotangent of a history: its own, and that of what steps read of it."""
    total = direct if is_usable(direct) else pt.zeros_like(history)
    if not is_usable(read):
        return total
    nothing = pt.zeros_like(history[:1])
    return total + pt.concatenate([nothing, read] if reverse else [read, nothing])


@node_rewriter([FoundResults])
def take_found(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    """Put what was found in the place of the Op: derivatives have been taken by then."""
    return node.inputs[-len(node.outputs) :]
