"""A loop taken apart, in the form in which what it is can be seen."""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum
from pytensor.tensor.special import softmax

from scanlib._compat import DERIVATIVE_GRAPHS, LOG_SUM_EXP
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop
from scanlib.rewrites.over_time.batched_indices import additions_as_sums
from scanlib.rewrites.pytensor_rewrites import run_query

CANONICAL = RewriteDatabaseQuery(include=["canonicalize", "merge"])


def canonical_loop(node: Apply) -> Loop:
    loop = Loop.from_node(node)
    if not config.scanlib__simplify:
        body = FunctionGraph(loop.body_inputs(), loop.body_outputs(), clone=False)
        run_query(CANONICAL, body)
        loop.set_body_outputs(list(body.outputs))
    loop.substitute(_softmaxes(loop.body_outputs()))
    additions_as_sums(loop)
    return loop


def _softmaxes(outputs: list[Variable]) -> dict[Variable, Variable]:
    """Return products ``x / sum(exp(z)) * exp(z)`` with the softmax of `z` in them.

    The derivative of the logarithm of a sum comes in this order, which PyTensor does not see as
    a softmax; written so, it is 0/0 where all exponentials are too small.
    """
    found = {}
    for node in toposort(outputs):
        opened = _derivative_of_op(node)
        if opened is not None:
            found[node.outputs[0]] = opened
        if not isinstance(node.op, Elemwise) or not isinstance(node.op.scalar_op, ps.Mul):
            continue
        for quotient in node.inputs:
            above = quotient.owner
            if above is None or not isinstance(above.op, Elemwise):
                continue
            if not isinstance(above.op.scalar_op, ps.TrueDiv):
                continue
            numerator, total = above.inputs
            for exponential in node.inputs:
                axis = _summed_axis(total, exponential)
                if axis is not None:
                    z = exponential.owner.inputs[0]
                    rest = [v for v in node.inputs if v is not quotient and v is not exponential]
                    found[node.outputs[0]] = pt.mul(numerator, softmax(z, axis=axis), *rest)
    return found


def _derivative_of_op(node: Apply) -> Variable | None:
    """Return the cotangent that a node computes for PyTensor's `LogSumExp`, if it does that.

    Later releases keep it in an Op of its own, in which no structure can be seen.
    """
    if LOG_SUM_EXP is None or type(node.op) not in DERIVATIVE_GRAPHS or len(node.inputs) != 3:
        return None
    terms, _, cotangent = node.inputs
    if any(not is_tensor(inp) for inp in node.inputs):
        return None
    for axis in range(terms.type.ndim):
        stand_in = terms.type()
        out = LOG_SUM_EXP(axis=(axis,))(stand_in)
        if out.type.ndim != cotangent.type.ndim or len(node.outputs) != 1:
            return None
        expected = out.owner.op.pullback([stand_in], [out], [cotangent.type()])[0]
        if expected.owner is not None and expected.owner.op == node.op:
            return pt.expand_dims(cotangent, axis) * softmax(terms, axis=axis)
    return None


def _summed_axis(total: Variable, exponential: Variable) -> int | None:
    """Return the axis along which a variable is the kept sum of an exponential, if it is one."""
    node, spread = exponential.owner, total.owner
    if node is None or not isinstance(node.op, Elemwise):
        return None
    if not isinstance(node.op.scalar_op, ps.Exp):
        return None
    if spread is None or not isinstance(spread.op, DimShuffle):
        return None
    above = spread.inputs[0].owner
    if above is None or not isinstance(above.op, Sum) or above.inputs[0] is not exponential:
        return None
    ndim = exponential.type.ndim
    axes = tuple(range(ndim)) if above.op.axis is None else tuple(above.op.axis)
    if len(axes) != 1:
        return None
    kept = iter(range(ndim - 1))
    order = tuple("x" if k == axes[0] else next(kept) for k in range(ndim))
    return axes[0] if tuple(spread.op.new_order) == order else None
