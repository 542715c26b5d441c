r"""Logarithms of sums of exponentials in the body of a loop.

PyTensor writes `logaddexp` and `logsumexp` as they are defined and their derivatives as they follow
from that. Both overflow where the result is an ordinary number,

    log(exp x + exp y + …),    g exp x / (exp x + exp y + …)

A body has them in the forms

    logaddexp(x, logaddexp(y, …)),    g sigmoid(x - logaddexp(y, …))

which are right for all numbers, and the first of which is known to be closed under composition:
see `scanlib.ops.logaddexp` and `scanlib.recurrences.logaffine`. The second derivative has
products of shares in sums that PyTensor factors, ``exp x (c - (c exp x + d exp y) / s) / s``;
these are multiplied out first. So that ``logsumexp([x, y])`` is one of them too, vectors that a
step makes of a few numbers are taken apart: ``stack([x, y])[0]`` is `x`, and the sum of
``exp(stack([x, y]))`` is ``exp(x) + exp(y)``. Later releases of PyTensor have Ops for the first
form, and others for their derivatives, which become the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import MakeVector
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import DERIVATIVE_GRAPHS, LOG_ADD_EXP, LOG_SUM_EXP
from scanlib.ops.logaddexp import logaddexp

# What is multiplied, and what is divided by.
Product = tuple[tuple[Variable, ...], tuple[Variable, ...]]
_MOST_PRODUCTS = 32


def stabilize_logs(fgraph: FunctionGraph) -> None:
    """Rewrite a body in place; it is best in PyTensor's canonical form.

    To be run before PyTensor's own stabilization, which writes ``log(exp x + exp y)`` with
    a maximum, and its specialization, which makes ``exp x exp y`` one exponential.
    """
    _open_log_ops(fgraph)
    take_apart_stacks(fgraph)
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
    """Return a product written with shares, None if that leaves a sum of exponentials."""
    products = _expanded(node.outputs[0])
    if products is None or not any(_sums(product) for product in products):
        return None
    results = []
    for multiplied, divisors in products:
        factors: list[Variable] = list(multiplied)
        kept: list[Variable] = []
        for divisor in divisors:
            terms = _exponents(divisor)
            if terms is None:
                kept.append(divisor)
                continue
            numerator = next((factor for factor in factors if _exponent_in(factor, terms)), None)
            if numerator is None:
                return None
            factors.remove(numerator)
            terms.remove(numerator.owner.inputs[0])
            factors.append(share(numerator.owner.inputs[0], terms))
        result = pt.mul(*factors) if len(factors) > 1 else factors[0]
        results.append(result / pt.mul(*kept) if kept else result)
    return pt.add(*results) if len(results) > 1 else results[0]


def share(term: Variable, others: Sequence[Variable]) -> Variable:
    """Return what part of the sum of all exponentials that of `term` is.

    Two equal infinities share equally, as in the derivative of `logaddexp`.
    """
    rest = log_of_sum(others)
    same = pt.and_(pt.eq(term, rest), pt.isinf(term))
    return pt.sigmoid(pt.switch(same, pt.zeros_like(term), term - rest))


def _exponent_in(factor: Variable, terms: list[Variable]) -> bool:
    return _is(factor.owner, ps.Exp) and factor.owner.inputs[0] in terms


def _sums(product: Product) -> bool:
    return any(_exponents(divisor) is not None for divisor in product[1])


def _expanded(variable: Variable) -> list[Product] | None:
    """Return the products whose sum an expression is, None if there are too many.

    Sums are multiplied out where one of their terms has an exponential or a sum of them below it.
    """
    node = variable.owner
    if _is(node, ps.Mul):
        return _multiplied([_expanded(inp) for inp in node.inputs])
    if _is(node, ps.Sqr):
        return _multiplied([_expanded(node.inputs[0])] * 2)
    if _is(node, (ps.TrueDiv, ps.Reciprocal)):
        *above, below = node.inputs
        divisor = _expanded_divisor(below)
        return _multiplied([*(_expanded(inp) for inp in above), [divisor]])
    if _is(node, ps.Neg):
        minus = pt.constant(-1, dtype=variable.type.dtype)
        return _multiplied([[((minus,), ())], _expanded(node.inputs[0])])
    if _is(node, ps.Add):
        terms = [_expanded(inp) for inp in node.inputs]
        products = [product for term in terms for product in term or ()]
        if all(terms) and any(_matters(product) for product in products):
            return products if len(products) <= _MOST_PRODUCTS else None
    return [((variable,), ())]


def _expanded_divisor(variable: Variable) -> Product:
    """Return the product of one over each factor of a divisor, whose sums are left whole."""
    node = variable.owner
    if _is(node, ps.Mul):
        parts = [_expanded_divisor(inp) for inp in node.inputs]
    elif _is(node, ps.Sqr):
        parts = [_expanded_divisor(node.inputs[0])] * 2
    else:
        parts = [((), (variable,))]
    return tuple(f for fs, _ in parts for f in fs), tuple(d for _, ds in parts for d in ds)


def _multiplied(sums: list[list[Product] | None]) -> list[Product] | None:
    result: list[Product] = [((), ())]
    for products in sums:
        if products is None or len(result) * len(products) > _MOST_PRODUCTS:
            return None
        result = [
            (factors + more, divisors + less)
            for factors, divisors in result
            for more, less in products
        ]
    return result


def _matters(product: Product) -> bool:
    return _sums(product) or any(_is(factor.owner, ps.Exp) for factor in product[0])


# Ops that later releases of PyTensor have


def _open_log_ops(fgraph: FunctionGraph) -> None:
    """Replace PyTensor's own Ops for logarithms of sums, and those of their derivatives."""
    for node in fgraph.toposort():
        terms = _terms_of_op(node.op, node.inputs)
        if terms is not None:
            _replace(fgraph, node.outputs[0], log_of_sum(terms))
            continue
        derivative = _derivative_of_op(node)
        if derivative is not None:
            for old, new in zip(node.outputs, derivative, strict=True):
                _replace(fgraph, old, new)


def _terms_of_op(op: object, inputs: Sequence[Variable]) -> list[Variable] | None:
    """Return the numbers of whose exponentials an Op sums, None for any other Op."""
    if LOG_ADD_EXP is not None and isinstance(op, LOG_ADD_EXP) and len(inputs) > 1:
        alike = {(x.type.dtype, x.type.broadcastable) for x in inputs}
        return list(inputs) if len(alike) == 1 else None
    if LOG_SUM_EXP is not None and isinstance(op, LOG_SUM_EXP):
        size = stack_size(inputs[0])
        return None if size is None else stack_items(inputs[0], range(size))
    return None


def _derivative_of_op(node: Apply) -> list[Variable] | None:
    """Return the cotangents of numbers that a node computes for one of these Ops, None if not."""
    derivative = derivative_of_logs(node)
    if derivative is None:
        return None
    op, inputs, cotangent = derivative
    terms = _terms_of_op(op, inputs)
    if terms is None or len(terms) < 2:
        return None
    parts = [cotangent * share(term, [*terms[:k], *terms[k + 1 :]]) for k, term in enumerate(terms)]
    return parts if len(inputs) > 1 else [pt.stack(parts)]


def derivative_of_logs(node: Apply) -> tuple[Any, list[Variable], Variable] | None:
    """Return the Op that a node is the derivative of, with its inputs and the cotangent.

    Later releases keep derivatives of their Ops for logarithms of sums in Ops of their own, in
    which no structure can be seen.
    """
    n = len(node.outputs)
    if LOG_ADD_EXP is None or LOG_SUM_EXP is None or type(node.op) not in DERIVATIVE_GRAPHS:
        return None
    if len(node.inputs) != n + 2:
        return None
    *inputs, _, cotangent = node.inputs
    if not all(getattr(inp.type, "dtype", "").startswith("float") for inp in node.inputs):
        return None
    axes = [None] if n > 1 else range(inputs[0].type.ndim)
    for op in [LOG_ADD_EXP() if axis is None else LOG_SUM_EXP(axis=(axis,)) for axis in axes]:
        dummies = [inp.type() for inp in inputs]
        out = op(*dummies)
        if out.type.ndim != cotangent.type.ndim:
            return None
        expected = out.owner.op.pullback(dummies, [out], [out.type()])[0]
        if expected.owner is not None and expected.owner.op == node.op:
            return out.owner.op, inputs, cotangent
    return None


_LARGEST = 8  # vectors of more numbers are better left whole


def take_apart_stacks(fgraph: FunctionGraph) -> None:
    """Replace, in place, items and sums of vectors that a step makes of numbers."""
    if not any(isinstance(node.op, MakeVector) for node in fgraph.apply_nodes):
        return
    for node in fgraph.toposort():
        if node not in fgraph.apply_nodes or not isinstance(node.op, Subtensor | TensorSum):
            continue
        out = node.outputs[0]
        size = stack_size(node.inputs[0])
        if size is None or out.type.ndim > 0:
            continue
        places = list(range(size))
        if isinstance(node.op, Subtensor):
            number = _constant_place(node.inputs[1:], node.op, size)
            if number is None:
                continue
            places = [number]
        items = stack_items(node.inputs[0], places)
        if items is not None:
            # A sum of small integers or truth values is one of larger integers.
            items = [pt.cast(item, out.type.dtype) for item in items]
            new = pt.add(*items) if len(items) > 1 else items[0]
            fgraph.replace(out, new, reason="scanlib_stacks", import_missing=True)


def stack_size(vector: Variable) -> int | None:
    """Return the number of items of a vector of few numbers, None for anything else."""
    size = vector.type.shape[0] if getattr(vector.type, "ndim", 0) == 1 else None
    return size if size is not None and 0 < size <= _LARGEST else None


def stack_items(vector: Variable, places: Sequence[int]) -> list[Variable] | None:
    """Return items of a vector as expressions of numbers, None if one of them is none."""
    known: dict[tuple[Variable, int], Variable | None] = {}
    items = [_item(vector, place, known) for place in places]
    found = [item for item in items if item is not None]
    return found if len(found) == len(items) else None


def _constant_place(indices: Sequence[Variable], op: Subtensor, size: int) -> int | None:
    """Return the place that a constant index selects, counted from the start."""
    (place,) = indices_from_subtensor(indices, op.idx_list)
    if isinstance(place, Constant) and place.type.ndim == 0:
        place = int(place.data)
    return place % size if isinstance(place, int) and -size <= place < size else None


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
    if isinstance(node.op, IncSubtensor):
        return _written_item(node, place, known)
    if not isinstance(node.op, Elemwise) or len(node.outputs) > 1:
        return None
    if isinstance(node.op.scalar_op, ps.Second):  # a second value in the shape of the first
        at = 0 if node.inputs[1].type.broadcastable[0] else place
        return _item(node.inputs[1], at, known)
    places = [0 if inp.type.broadcastable[0] else place for inp in node.inputs]
    items = [_item(inp, at, known) for inp, at in zip(node.inputs, places, strict=True)]
    if any(item is None for item in items):
        return None
    return Elemwise(node.op.scalar_op)(*items)


def _written_item(
    node: Apply, place: int, known: dict[tuple[Variable, int], Variable | None]
) -> Variable | None:
    """Return one item of a vector of which one item was set or added to."""
    vector, value, *indices = node.inputs
    size = vector.type.shape[0]
    written = None if size is None else _constant_place(indices, node.op, size)
    if written is None or value.type.ndim > 0:
        return None
    before = _item(vector, place, known)
    if before is None or written != place:
        return before
    new = value if node.op.set_instead_of_inc else before + value
    return pt.cast(new, vector.type.dtype)
