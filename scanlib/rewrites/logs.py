r"""Logarithms of sums of exponentials in the body of a loop.

PyTensor writes `logaddexp` and `logsumexp` as they are defined and their derivatives as they follow
from that. Both overflow where the result is an ordinary number,

    log(exp x + exp y + …),    g exp x / (exp x + exp y + …)

A body has them in the forms

    logaddexp(x, logaddexp(y, …)),    g sigmoid(x - logaddexp(y, …))

which are right for all numbers, and the first of which is known to be closed under composition:
see `scanlib.ops.logaddexp` and `scanlib.analysis.families.logaffine`. The second derivative has
products of shares, ``exp x exp y / (exp x + exp y)²``, which are read in the same way. So that
``logsumexp([x, y])`` is one of them too, vectors that a step makes of a few numbers are taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import MakeVector
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib.ops.logaddexp import logaddexp

_LARGEST_STACK = 8  # vectors of more numbers are better left whole


def stabilize_logs(fgraph: FunctionGraph) -> None:
    """Rewrite a body in place; it is best in PyTensor's canonical form.

    To be run before PyTensor's own stabilization, which writes ``log(exp x + exp y)`` with
    a maximum, and its specialization, which makes ``exp x exp y`` one exponential.
    """
    nodes = fgraph.apply_nodes
    if any(isinstance(node.op, MakeVector) for node in nodes):
        _take_apart_stacks(fgraph)
    if not any(_is(node, ps.Exp) for node in fgraph.apply_nodes):
        return
    MergeOptimizer().rewrite(fgraph)
    for node in fgraph.toposort():
        if node not in fgraph.apply_nodes:
            continue
        if _is(node, ps.Log):
            terms = _exponents(node.inputs[0])
            if terms is not None:
                _replace(fgraph, node.outputs[0], log_of_sum(terms))
        elif _is(node, (ps.Mul, ps.TrueDiv)):
            new = _shares(node)
            if new is not None:
                _replace(fgraph, node.outputs[0], new)


def log_of_sum(terms: Sequence[Variable]) -> Variable:
    """Return the logarithm of the sum of the exponentials of `terms`."""
    *rest, result = terms
    for term in reversed(rest):
        result = logaddexp(term, result)
    return result


def _is(node: Apply | None, scalar_ops: type | tuple[type, ...]) -> bool:
    """Whether a node is an elementwise Op of one of some kinds."""
    return (
        node is not None
        and isinstance(node.op, Elemwise)
        and isinstance(node.op.scalar_op, scalar_ops)
    )


def _replace(fgraph: FunctionGraph, old: Variable, new: Variable) -> None:
    """Replace a variable, unless the new one is of another kind."""
    if old.type.is_super(new.type):
        fgraph.replace(old, new, reason="scanlib_logs", import_missing=True)


# Sums of exponentials


def _exponents(variable: Variable) -> list[Variable] | None:
    """Return the x, y, … of ``exp x + exp y + …``, None for anything else."""
    node = variable.owner
    if not _is(node, ps.Add) or not variable.type.dtype.startswith("float"):
        return None
    found: list[Variable] = []
    for term in node.inputs:
        if not _is(term.owner, ps.Exp) or term.type.dtype != variable.type.dtype:
            return None
        found.append(term.owner.inputs[0])
    return found


def _shares(node: Apply) -> Variable | None:
    """Return a product with its exponentials over sums of them as shares, None without any."""
    factors, divisors = _parts_of_product(node.outputs[0])
    found = []
    kept = []
    for divisor in divisors:
        terms = _exponents(divisor) or []
        numerator = next((factor for factor in factors if _exponent_in(factor, terms)), None)
        if numerator is None:
            kept.append(divisor)
            continue
        factors.remove(numerator)
        terms.remove(numerator.owner.inputs[0])
        found.append(share(numerator.owner.inputs[0], terms))
    if not found:
        return None
    result = pt.mul(*factors, *found) if len(factors) + len(found) > 1 else found[0]
    return result / pt.mul(*kept) if kept else result


def share(term: Variable, others: Sequence[Variable]) -> Variable:
    """Return what part of the sum of all exponentials that of `term` is.

    Two equal infinities share equally, as in the derivative of `logaddexp`.
    """
    rest = log_of_sum(others)
    same = pt.and_(pt.eq(term, rest), pt.isinf(term))
    return pt.sigmoid(pt.switch(same, pt.zeros_like(term), term - rest))


def _exponent_in(factor: Variable, terms: list[Variable]) -> bool:
    return _is(factor.owner, ps.Exp) and factor.owner.inputs[0] in terms


def _parts_of_product(variable: Variable) -> tuple[list[Variable], list[Variable]]:
    """Return what is multiplied, and what is divided by, in products inside products too."""
    node = variable.owner
    if _is(node, ps.Mul):
        parts = [_parts_of_product(inp) for inp in node.inputs]
        return [f for fs, _ in parts for f in fs], [d for _, ds in parts for d in ds]
    if _is(node, ps.TrueDiv):
        factors, divisors = _parts_of_product(node.inputs[0])
        more, less = _parts_of_product(node.inputs[1])
        return factors + less, divisors + more
    if _is(node, ps.Reciprocal):
        factors, divisors = _parts_of_product(node.inputs[0])
        return divisors, factors
    if _is(node, ps.Sqr):
        factors, divisors = _parts_of_product(node.inputs[0])
        return factors * 2, divisors * 2
    return [variable], []


# Vectors made of a few numbers


def _take_apart_stacks(fgraph: FunctionGraph) -> None:
    """Replace items and sums of vectors that a step makes of numbers."""
    known: dict[tuple[Variable, int], Variable | None] = {}
    for node in fgraph.toposort():
        if node not in fgraph.apply_nodes or not isinstance(node.op, Subtensor | TensorSum):
            continue
        vector, out = node.inputs[0], node.outputs[0]
        size = vector.type.shape[0] if vector.type.ndim == 1 else None
        if size is None or not 0 < size <= _LARGEST_STACK or out.type.ndim > 0:
            continue
        places = list(range(size))
        if isinstance(node.op, Subtensor):
            (place,) = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
            if not isinstance(place, Constant | int):
                continue
            number = int(place.data) if isinstance(place, Constant) else place
            if not -size <= number < size:
                continue
            places = [places[number]]
        items = [_item(vector, place, known) for place in places]
        if all(item is not None for item in items):
            new = pt.add(*items) if len(items) > 1 else items[0]
            _replace(fgraph, out, pt.cast(new, out.type.dtype))


def _item(
    vector: Variable, place: int, known: dict[tuple[Variable, int], Variable | None]
) -> Variable | None:
    """Return one item of a vector as an expression of numbers, None if there is none."""
    key = (vector, place)
    if key not in known:
        known[key] = _find_item(vector, place, known)
    return known[key]


def _find_item(
    vector: Variable, place: int, known: dict[tuple[Variable, int], Variable | None]
) -> Variable | None:
    node = vector.owner
    if isinstance(vector, Constant):
        return pt.constant(vector.data[place])
    if node is None:
        return None
    if isinstance(node.op, MakeVector):
        return pt.cast(node.inputs[place], vector.type.dtype)
    if isinstance(node.op, DimShuffle) and node.inputs[0].type.ndim == 0:
        return node.inputs[0]
    if not isinstance(node.op, Elemwise) or len(node.outputs) > 1:
        return None
    places = [0 if inp.type.broadcastable[0] else place for inp in node.inputs]
    items = [_item(inp, at, known) for inp, at in zip(node.inputs, places, strict=True)]
    if any(item is None for item in items):
        return None
    return Elemwise(node.op.scalar_op)(*items)
