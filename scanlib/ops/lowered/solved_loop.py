"""Ops that stand for a loop whose results are found otherwise than by walking.

Each has the loop in canonical form. Whatever led to the results, derivatives are those of the loop
at these values, and a batch of such loops is one of the batch of loops.
"""

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import toposort

from scanlib._compat import vectorize_rule
from scanlib.ops.batching import vectorize_scan
from scanlib.ops.gradient.pushforward import pushforward_at
from scanlib.ops.graph import Variables, substitute
from scanlib.ops.loop import Results
from scanlib.ops.scan import Scan
from scanlib.ops.signature import Signature


class SolvedLoop(Op):
    """An Op with the inputs of a loop, then perhaps others, and its results, then perhaps others.

    Through the others nothing is differentiated.
    """

    scan: Scan

    @property
    def signature(self) -> Signature:
        return self.scan.signature

    def of_loop(self, inputs: Variables) -> list[Variable]:
        """Return the inputs that are the loop's."""
        return list(inputs[: len(self.scan.outer_input_types())])

    def results(self, outputs: Variables) -> Results:
        """Name the results that are the loop's by role."""
        signature = self.signature
        count = signature.n_states + signature.n_carries + signature.n_outputs
        return Results(*signature.split_outputs(outputs[:count]), outputs[0].owner)

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        pattern = self.scan.connection_pattern(node)
        rows = [[*row, *[False] * (len(node.outputs) - len(row))] for row in pattern]
        others = len(node.inputs) - len(rows)
        return [*rows, *([False] * len(node.outputs) for _ in range(others))]

    def pushforward(
        self, inputs: Variables, outputs: Variables, tangents: Variables
    ) -> list[Variable]:
        """Return the tangents of the results, at the values that were found."""
        own = self.of_loop(inputs)
        moved = pushforward_at(self.scan, own, self.results(outputs), tangents[: len(own)])
        return [*moved, *(pt.zeros_like(out, dtype="float64") for out in outputs[len(moved) :])]

    def of_batch(self, loop: Apply, others: Variables) -> Apply:
        """Return the Op on a batch of loops, written as one, and the other inputs for the batch."""
        raise NotImplementedError


@vectorize_rule.register(SolvedLoop)
def vectorize_solved(op: SolvedLoop, node: Apply, *batched: Variable) -> list[Variable]:
    """Return the results of a batch of loops: those of one loop over the batch."""
    own = op.of_loop(batched)
    cores = node.outputs
    outputs = vectorize_scan(op.scan, op.scan.make_node(*op.of_loop(node.inputs)), *own)
    (loop,) = [n for n in toposort(outputs, blockers=own) if isinstance(n.op, Scan)]
    ranks = [new.type.ndim - old.type.ndim for old, new in zip(cores, outputs, strict=False)]
    rows = zip(batched[len(own) :], outputs, ranks, strict=False)
    solved = op.of_batch(loop, [_time_first(*row) for row in rows])
    new = substitute(outputs, dict(zip(loop.outputs, solved.outputs, strict=False)))
    sizes = list(new[0].shape)[: ranks[0]]
    return [*new, *(pt.broadcast_to(out, sizes) for out in solved.outputs[len(new) :])]


def _time_first(found: Variable, like: Variable, rank: int) -> Variable:
    """Return what was found for a result of a batch in the layout of a loop's results."""
    found = found[(0,) * max(found.type.ndim - like.type.ndim, 0)]
    found = found if found.type.ndim == like.type.ndim else pt.broadcast_to(found, like.shape)
    return pt.moveaxis(found, rank, 0) if rank else found
