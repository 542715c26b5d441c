"""Batches of matrix recurrences: `vectorize_graph` of a `LinearScan` is a `LinearScan`.

Batch dimensions come in front and go between time and row, as in `scanlib.ops.batching`. A matrix
that the batch shares keeps its shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable

from scanlib._compat import vectorize_rule
from scanlib.lengths.batches import steps_of_batch
from scanlib.ops.batching import one_number_of_steps
from scanlib.ops.lowered.linear_scan import LinearScan, Parts


@vectorize_rule.register(LinearScan)
def vectorize_linear_scan(op: LinearScan, node: Apply, *batched: Variable) -> Sequence[Variable]:
    """Return the history of a batch of recurrences."""
    core, new = op.parts(node.inputs), op.parts(batched)
    numbers: tuple[Variable, ...] = ()
    if new.n_steps is not None and new.n_steps.type.ndim:
        numbers = tuple(new.n_steps.shape)
        steps, _ = steps_of_batch(new.n_steps, (), one_number_of_steps(op))
        new = new._replace(n_steps=steps)
    if new.mask is not None and new.mask.type.ndim > 2:
        raise NotImplementedError(f"{op}: the mask cannot differ between the members of a batch")
    if new.right is not None and any(
        variable.type.ndim > core.type.ndim
        for variable, core in zip(batched, node.inputs, strict=True)
    ):
        raise NotImplementedError(f"{op}: batches of products from both sides")
    ranks = {
        name: getattr(new, name).type.ndim - getattr(core, name).type.ndim
        for name in ("matrix", "offset", "initial")
        if getattr(core, name) is not None
    }
    rank = max(ranks.values())
    if not rank:
        out = op.make_node(*op.join(new)).outputs[0]
        return [pt.broadcast_to(out, (*numbers, *out.shape)) if numbers else out]
    sizes = [tuple(getattr(new, n).shape)[:rank] for n, own in ranks.items() if own == rank]
    if len(sizes) > 1:
        sizes = [tuple(pt.broadcast_shape(*sizes, arrays_are_shapes=True))]
    (batch,) = sizes

    def spread(name: str) -> Variable:
        """Return an input with the whole batch in front."""
        variable = getattr(new, name)
        missing = tuple(range(rank - ranks[name]))
        row = tuple(variable.shape)[ranks[name] :]
        return pt.broadcast_to(pt.expand_dims(variable, missing), (*batch, *row))

    def time_first(variable: Variable) -> Variable:
        return pt.moveaxis(variable, rank, 0)

    initial = time_first(spread("initial"))
    offset = None if new.offset is None else time_first(spread("offset"))
    matrix, own = new.matrix, op.matrix_batch_rank(core.matrix.type.ndim)
    if ranks["matrix"] or own:
        matrix = spread("matrix")
        time = int(op.coefficient == "steps")
        lacking = op.batch_rank(core.initial.type.ndim) - own
        if lacking:
            # The members of the batch have batches of their own, which share a matrix each.
            before = rank + time
            shape = tuple(matrix.shape)
            matrix = pt.expand_dims(matrix, tuple(range(before, before + lacking)))
            inner = tuple(initial.shape)[1 + rank : 1 + rank + lacking]
            matrix = pt.broadcast_to(matrix, (*shape[:before], *inner, *shape[before:]))
        matrix = time_first(matrix) if time else matrix
    out = op.make_node(
        *op.join(Parts(new.n_steps, matrix, offset, initial, new.mask, new.right))
    ).outputs[0]
    return [pt.moveaxis(out, 0, rank)]
