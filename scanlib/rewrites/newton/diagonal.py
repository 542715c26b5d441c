r"""The diagonal of a Jacobian from the structure of a step, without the Jacobian.

What moves with a vector `m` is followed through the tangent of a step as

    D(δ) m + Σ D(a) W D(b) m + (what has the diagonal e)

with ``D(·)`` a diagonal matrix. Elementwise operations scale `δ`, `a` and `e`; a product with a
matrix `V` makes ``V D(δ)`` of the first part, and of the second, ``V D(a) W D(b)``, keeps the
diagonal ``((V ∘ Wᵀ) a) ∘ b``. A third product in a row has no such form: then there is no result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot


@dataclass
class _Moved:
    """How a vector moves; see the module's text. What is None is zero."""

    diagonal: Variable | None = None
    products: list[tuple[Variable, Variable, Variable]] = field(default_factory=list)
    rest: Variable | None = None

    def scaled(self, factor: Variable) -> _Moved:
        products = [(factor * a, w, b) for a, w, b in self.products]
        return _Moved(_times(self.diagonal, factor), products, _times(self.rest, factor))

    def plus(self, other: _Moved) -> _Moved:
        return _Moved(
            _sum(self.diagonal, other.diagonal),
            [*self.products, *other.products],
            _sum(self.rest, other.rest),
        )


def _times(value: Variable | None, factor: Variable) -> Variable | None:
    return None if value is None else value * factor


def _sum(one: Variable | None, other: Variable | None) -> Variable | None:
    return other if one is None else one if other is None else one + other


def diagonal_of(tangent: Variable, moved: Variable) -> Variable | None:
    """Return the diagonal of the Jacobian of vectors whose tangent is linear in `moved`.

    None where the structure of the step does not tell it.
    """
    if tangent.type.ndim != 1 or moved.type.ndim != 1:
        return None
    found = {moved: _Moved(pt.ones_like(moved))}
    live = {moved}
    for node in toposort([tangent]):
        if not live.intersection(node.inputs):
            continue
        if len(node.outputs) > 1:
            return None
        live.update(node.outputs)
        value = _step(node, found, live)
        if value is None:
            return None
        found[node.outputs[0]] = value
    last = found[tangent]
    total = _sum(last.diagonal, last.rest)
    for a, w, b in last.products:
        total = _sum(total, a * pt.diagonal(w) * b)
    return total


def _step(node: Apply, found: dict[Variable, _Moved], live: set[Variable]) -> _Moved | None:
    """Return how the result of a node moves, None if that has no such form."""
    own = [v for v in node.inputs if v in live]
    if any(v not in found for v in own):
        return None
    if isinstance(node.op, DimShuffle):
        # A vector as a column, and back: what moves is the same.
        return found[own[0]] if node.outputs[0].type.ndim in (1, 2) else None
    if isinstance(node.op, Elemwise) and node.outputs[0].type.ndim == 1:
        total: _Moved | None = None
        for each in own:
            units = [_unit(v, v is each) if v in live else v for v in node.inputs]
            part = found[each].scaled(node.op(*units))
            total = part if total is None else total.plus(part)
        return total
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    if isinstance(op, Dot) and len(node.inputs) == 2 and node.inputs[0] not in live:
        matrix, column = node.inputs
        before = found[column]
        if matrix.type.ndim != 2 or column.type.ndim != 2 or before.rest is not None:
            return None
        if column.type.shape[1] != 1:
            return None
        one = pt.ones_like(matrix[:, 0])
        products = [] if before.diagonal is None else [(one, matrix, before.diagonal)]
        rest: Variable | None = None
        for a, w, b in before.products:
            rest = _sum(rest, ((matrix * w.T) @ a) * b)
        return _Moved(None, products, rest)
    return None


def _unit(value: Variable, is_one: bool) -> Variable:
    return pt.ones_like(value) if is_one else pt.zeros_like(value)
