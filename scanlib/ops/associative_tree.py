r"""An associative scan as a tree: logarithmic depth, for backends with many processors.

With ``n`` rows, combine neighbours, scan the half as many results, and fill in what lies
between::

    p_i = x_{2i} ∘ x_{2i+1}                 i = 0 … ⌊n/2⌋ - 1
    (y_1, y_3, …) = scan(p)
    y_0 = x_0,   y_{2i} = y_{2i-1} ∘ x_{2i}

This takes about ``2 log2 n`` levels and fewer than ``2 n`` applications of ∘, in any order that
keeps the rows in their order, so ∘ need not be commutative: R. E. Ladner and M. J. Fischer,
"Parallel prefix computation", Journal of the ACM 27, 1980. A level is one batch of applications:
the body, vectorized over time. The levels are unrolled, so `n` must be known; the graph grows
with ``log n``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.features import Feature
from pytensor.graph.replace import vectorize_graph

from scanlib._compat import thaw_graph
from scanlib.ops.associative_batching import fill_batch
from scanlib.ops.associative_scan import AssociativeScan

Rows = list[Variable]


class CombinesInTrees(Feature):
    """Marks a graph for a backend that combines rows in trees: its associative scans stay."""


def associative_tree(op: AssociativeScan, inputs: Sequence[Variable]) -> list[Variable]:
    """Return the results of an associative scan, computed by a tree.

    Parameters
    ----------
    op : AssociativeScan
    inputs : sequence of Variable
        The arrays to scan, shape (T, …), then the non-sequences.

    Raises
    ------
    ValueError
        If the number of rows is not known when the graph is built.
    """
    length = op.static_length(inputs)
    if length is None:
        raise ValueError(f"{op}: a tree needs the number of rows when the graph is built")
    elems = [
        pt.specify_shape(elem, (length, *elem.type.shape[1:])) for elem in inputs[: op.n_elems]
    ]
    if op.reverse:
        elems = [elem[::-1] for elem in elems]
    rows = _scan(_Combine(op, inputs[op.n_elems :]), elems, length)
    return [row[::-1] for row in rows] if op.reverse else rows


class _Combine:
    """Applies the body to many pairs of rows at once."""

    def __init__(self, op: AssociativeScan, non_sequences: Sequence[Variable]) -> None:
        body = thaw_graph(op.body)
        self.outputs = list(body.outputs)
        self.inner = op.split_body_inputs(body.inputs)
        self.given = dict(zip(self.inner.non_sequences, non_sequences, strict=True))

    def __call__(self, earlier: Rows, later: Rows) -> Rows:
        parts = [*zip(self.inner.earlier, earlier, strict=True)]
        parts += zip(self.inner.later, later, strict=True)
        combined = vectorize_graph(self.outputs, self.given | dict(parts))
        return [fill_batch(model, value) for model, value in zip(earlier, combined, strict=True)]


def _scan(combine: _Combine, elems: Rows, length: int) -> Rows:
    if length < 2:
        return elems
    pairs = combine([x[: length - 1 : 2] for x in elems], [x[1::2] for x in elems])
    odd = _scan(combine, pairs, length // 2)
    if length == 2:
        return [pt.join(0, x[:1], y) for x, y in zip(elems, odd, strict=True)]
    before = [y[: (length - 1) // 2] for y in odd]
    inner = combine(before, [x[2::2] for x in elems])
    even = [pt.join(0, x[:1], y) for x, y in zip(elems, inner, strict=True)]
    return [_interleave(*pair, length) for pair in zip(even, odd, strict=True)]


def _interleave(even: Variable, odd: Variable, length: int) -> Variable:
    """Return ``even[0], odd[0], even[1], odd[1] …``, `length` rows in all."""
    half = length // 2
    pairs = pt.stack([even[:half], odd], axis=1)
    sizes = list(pairs.shape)[2:]
    rows = pt.reshape(pairs, (2 * half, *sizes), ndim=even.type.ndim)
    return pt.join(0, rows, even[half:]) if length % 2 else rows
