"""A loop taken apart, in the form in which what it is can be seen, and its sums over time.

A part is a sum over time if its next value is the value before it plus something, and nothing else
of a step reads it.
"""

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
from pytensor.tensor.subtensor import IncSubtensor

from scanlib._compat import DERIVATIVE_GRAPHS, LOG_SUM_EXP
from scanlib.ops.graph import Readers, is_tensor, readers_of
from scanlib.ops.loop import Carry, Loop, NonSequence, State
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


def added_up(part: State | Carry, readers: Readers) -> Variable | None:
    """Return what a step adds to a part that only adds up and is not stored, else None.

    Parameters
    ----------
    part : State or Carry
    readers : dict
        What `readers_of` returns for the body.
    """
    if isinstance(part, Carry):
        return _addend(part.value, part.next, readers)
    if not part.untraced or set(part.taps) != {-1}:
        return None
    return _addend(part.taps[-1], part.next, readers)


def split_sums(loop: Loop) -> tuple[list[tuple[Carry, Variable]], list[Carry]]:
    """Return the carries that only add up, each with what a step adds, and the other carries."""
    readers = readers_of(loop.body_outputs())
    found = [(carry, added_up(carry, readers)) for carry in loop.carries]
    sums = [(carry, added) for carry, added in found if added is not None]
    return sums, [carry for carry, added in found if added is None]


def _addend(value: Variable, following: Variable, readers: Readers) -> Variable | None:
    """Return what is added to a value on its way to the next one, None if it goes elsewhere.

    Sums in another dtype are none: small integers wrap around.
    """
    if not is_tensor(value) or any(reader is not None for reader in readers[following]):
        return None
    total, added = value, None
    while total is not following:
        node = readers[total][0] if len(readers[total]) == 1 else None
        if node is None:
            return None
        op = node.op.scalar_op if isinstance(node.op, Elemwise) else None
        minus = isinstance(op, ps.Sub) and node.inputs[0] is total
        if not (minus or isinstance(op, ps.Add)):
            return None
        for inp in node.inputs:
            if inp is total:
                continue
            term = pt.cast(inp, value.type.dtype)
            term = -term if minus else term
            added = term if added is None else added + term
        total = node.outputs[0]
        if total.type.dtype != value.type.dtype:
            return None
    return added if added is not None and added.type.ndim == value.type.ndim else None


def additions_as_sums(loop: Loop) -> None:
    """Write accumulators ``c[z] += v`` as ``c + (0, but v at z)``, in place."""
    for carry in loop.carries:
        if not is_tensor(carry.value):
            continue
        base, additions = _additions(carry.next, carry.value)
        if base is not carry.value or not additions:
            continue
        whole = carry.value.type()
        zeros = pt.zeros_like(whole)
        parts = [node.op(zeros, *node.inputs[1:]) for node in additions]
        loop.non_sequences.append(NonSequence(carry.initial, whole))
        carry.next = pt.add(carry.value, *parts)


def _additions(variable: Variable, value: Variable) -> tuple[Variable, list[Apply]]:
    """Take apart what is added to parts of a value, one addition after the other."""
    found: list[Apply] = []
    while variable is not value:
        node = variable.owner
        if node is None or not isinstance(node.op, IncSubtensor) or node.op.set_instead_of_inc:
            break
        found.append(node)
        variable = node.inputs[0]
    return variable, found
