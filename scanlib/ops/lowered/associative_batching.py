"""A batch of associative scans is one scan whose rows are batches.

As for loops (`scanlib.ops.batching`), time stays the first axis and the batch stands between
time and row. An array becomes batched if it is given as a batch or if combining makes it one;
only what depends on the batch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import vectorize_graph

from scanlib._compat import freeze_graph, thaw_graph, vectorize_rule
from scanlib.ops.graph import conform, is_tensor
from scanlib.ops.lowered.associative_scan import AssociativeScan


@vectorize_rule.register(AssociativeScan)
def vectorize_associative_scan(
    op: AssociativeScan, node: Apply, *batched: Variable
) -> list[Variable]:
    """Return the outputs of a scan over a batch; see the module's text."""
    ranks = [_rank(core, new) for core, new in zip(node.inputs, batched, strict=True)]
    rank = max(ranks)
    if rank == 0:
        return op.make_node(*batched).outputs
    given, shape = equal_batches(batched, ranks)
    body = thaw_graph(op.body)
    inner = op.split_body_inputs(body.inputs)
    n = op.n_elems
    replacements = {
        variable: batch_of(variable, rank)
        for variable, own in zip(inner.non_sequences, ranks[n:], strict=True)
        if own
    }
    live = {i for i in range(n) if ranks[i]}
    while True:
        for i in live:
            for variable in (inner.earlier[i], inner.later[i]):
                replacements.setdefault(variable, batch_of(variable, rank))
        combined = vectorize_graph(list(body.outputs), replacements)
        grown = {i for i in range(n) if _rank(body.outputs[i], combined[i])}
        if grown <= live:
            break
        live |= grown
    for i in live:
        like = replacements[inner.earlier[i]]
        combined[i] = conform(fill_batch(like, combined[i]), like.type)
    elems = [time_first(given[i], rank) if ranks[i] else given[i] for i in range(n)]
    for i in live:
        if not ranks[i]:
            elems[i] = _repeat(elems[i], shape)
    inputs = [replacements.get(variable, variable) for variable in body.inputs]
    frozen = freeze_graph(inputs, combined)
    new = AssociativeScan(frozen, n, op.reverse, name=op.name, labels=op.labels)
    results = new.make_node(*elems, *given[n:]).outputs
    return [pt.moveaxis(out, 0, rank) if i in live else out for i, out in enumerate(results)]


def _rank(core: Variable, batched: Variable) -> int:
    """Return how many batch dimensions a variable has."""
    return batched.type.ndim - core.type.ndim if is_tensor(core) else 0


def batch_of(variable: Variable, rank: int) -> Variable:
    """Return a new body variable for a batch of values of the type of `variable`."""
    shape = (*(None,) * rank, *variable.type.shape)
    return pt.TensorType(variable.type.dtype, shape=shape)(name=variable.name)


def fill_batch(model: Variable, value: Variable) -> Variable:
    """Return `value` with the batch dimensions of `model`."""
    return pt.second(model, value) if value.type.ndim < model.type.ndim else value


def time_first(variable: Variable, rank: int) -> Variable:
    """Move the time axis, behind `rank` batch dimensions, to the front."""
    return pt.moveaxis(variable, rank, 0)


def _repeat(elem: Variable, shape: Sequence[Variable]) -> Variable:
    """Return an array ``(T, …)`` repeated to ``(T, *shape, …)``."""
    spread = pt.expand_dims(elem, tuple(range(1, len(shape) + 1)))
    sizes = list(elem.shape)
    return pt.broadcast_to(spread, [sizes[0], *shape, *sizes[1:]])


def equal_batches(
    batched: Sequence[Variable], ranks: Sequence[int]
) -> tuple[list[Variable], list[Variable]]:
    """Return the inputs with one batch shape for all that have one, and that shape."""
    given = list(batched)
    live = [i for i, rank in enumerate(ranks) if rank]
    static = [given[i].type.shape[: ranks[i]] for i in live]
    sizes = [list(given[i].shape)[: ranks[i]] for i in live]
    uneven = len({len(shape) for shape in static}) > 1 or (
        len(set(static)) > 1 and any(1 in shape for shape in static)
    )
    if not uneven:
        return given, sizes[0]
    known = [
        [
            size if n is None else pt.constant(n, dtype="int64")
            for n, size in zip(*pair, strict=True)
        ]
        for pair in zip(static, sizes, strict=True)
    ]
    shape = list(pt.broadcast_shape(*map(tuple, known), arrays_are_shapes=True))
    for i in live:
        given[i] = pt.broadcast_to(given[i], [*shape, *list(given[i].shape)[ranks[i] :]])
    return given, shape
