"""The parts of a loop around one matrix recurrence, each with its role.

See `lower_linear` for what such a loop becomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum
from pytensor.tensor.special import softmax

from scanlib._compat import DERIVATIVE_GRAPHS, LOG_SUM_EXP
from scanlib.analysis.matrix_affine import NotAffineError
from scanlib.analysis.matrix_factors import factors_of
from scanlib.analysis.matrix_recurrence import MatrixRecurrence, recognize
from scanlib.ops.graph import is_tensor, substitute
from scanlib.ops.loop import Carry, Loop, State
from scanlib.ops.recursion import MOST_TERMS
from scanlib.rewrites.lower.linear_cost import builds_matrices
from scanlib.rewrites.over_time.batched_indices import additions_as_sums
from scanlib.rewrites.over_time.peel import NotPeelableError, OverTime
from scanlib.rewrites.pytensor_rewrites import run_query

CANONICAL = RewriteDatabaseQuery(include=["canonicalize", "merge"])


class NotLinearError(Exception):
    """A loop is not a matrix recurrence with maps around it; the text says why."""


class MatricesCostMoreError(NotLinearError):
    """A loop is a matrix recurrence, but making its matrices costs more than its steps."""

    def __init__(self) -> None:
        super().__init__("making a matrix for each step would cost more than the steps do")


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


@dataclass
class Roles:
    """The roles of a loop's parts."""

    recurrent: State | Carry
    recurrence: MatrixRecurrence
    sums: list[tuple[Carry, Variable]]
    shift: Variable | None = None
    mask: Variable | None = None  # which items of the matrix are there; None: all
    factors: tuple[Variable, ...] = ()  # of which the matrix is made, where no step computes it


def value_of(part: State | Carry) -> Variable:
    return part.taps[-1] if isinstance(part, State) else part.value


def sort_parts(loop: Loop) -> Roles:
    """Sort a loop's parts."""
    if loop.stop is not None:
        raise NotLinearError("the loop may stop early")
    if loop.truncate_gradient != -1:
        raise NotLinearError("its gradient is truncated")
    sums, rest = split_sums(loop)
    recurrent: list[Any] = [*loop.states, *rest]
    if not recurrent:
        raise NotLinearError("no state depends on the one before it")
    if len(recurrent) > 1:
        raise NotLinearError(f"{len(recurrent)} parts of the loop are recurrent, not one")
    (part,) = recurrent
    if isinstance(part, State) and set(part.taps) != {-1}:
        raise NotLinearError(f"the state reads more than one row back: taps {list(part.taps)}")
    value = value_of(part)
    dtype = getattr(value.type, "dtype", "")
    if not is_tensor(value) or not dtype.startswith(("float", "complex")):
        raise NotLinearError("the state holds no floating-point numbers")
    if value.type.ndim == 0:
        raise NotLinearError("the state is a scalar")
    try:
        recurrence = recognize(value, part.next)
    except NotAffineError as error:
        raise NotLinearError(str(error)) from error
    if recurrence.matrix.type.dtype != dtype:
        raise NotLinearError("the matrix has another dtype than the state")
    if builds_matrices(loop, {value: part.next}, recurrence.matrix):
        raise MatricesCostMoreError
    parts = Roles(part, recurrence, sums, factors=_factors(loop, recurrence))
    check_maps(loop, parts)
    return parts


def _factors(loop: Loop, recurrence: MatrixRecurrence) -> tuple[Variable, ...]:
    """Return what the matrices of a recurrence are made of, where no step computes them."""
    if recurrence.semiring != "real":
        return ()
    body = set(ancestors(loop.body_outputs()))
    sides = [side for side in (recurrence.matrix, recurrence.across) if side is not None]
    return tuple(dict.fromkeys(f for side in sides for f in factors_of(side, body)))


def split_sums(loop: Loop) -> tuple[list[tuple[Carry, Variable]], list[Carry]]:
    """Return the carries that only add up, each with what a step adds, and the other carries."""
    sums, rest = [], []
    outputs = loop.body_outputs()
    readers = readers_of(outputs)
    for carry in loop.carries:
        added = _addend(carry, outputs, readers)
        if added is None:
            rest.append(carry)
        else:
            sums.append((carry, added))
    return sums, rest


def check_maps(loop: Loop, parts: Roles) -> None:
    """Refuse loops that compute something beside the recurrence that is not for a batch.

    Raises
    ------
    NotLinearError
    """
    part, recurrence = parts.recurrent, parts.recurrence
    value = value_of(part)
    varying = {sequence.row: sequence.outer for sequence in loop.sequences}
    fixed = {whole.inner: whole.outer for whole in loop.non_sequences}
    known = OverTime(pt.constant(0), fixed, {**varying, value: value, part.next: part.next})
    needed = [recurrence.matrix, *(added for _, added in parts.sums)]
    needed += [output.value for output in loop.outputs]
    needed += [v for v in (recurrence.across, recurrence.offset) if v is not None]
    needed += [v for v in (parts.shift, parts.mask) if v is not None]
    try:
        known.check(needed)
    except NotPeelableError as error:
        raise NotLinearError(str(error)) from error


def shifted(loop: Loop) -> Roles | None:
    """Let a loop whose steps read a carry `c` only in ``u = c + g`` be one of `u`.

    Cotangents are such carries: a step adds what its own result is owed to what later steps owe.
    With ``c' = M u``, the recurrence is ``u' = M u + g'`` with the `g` of the step that follows:
    all values of `u`, which outputs and sums read, come from the recurrence, and ``M g`` is not
    computed. The loop is changed to have `u` in the place of `c`, and `shift` is `g`.
    """
    part = sort_parts(loop).recurrent
    if isinstance(part, State):
        return None
    outputs = loop.body_outputs()
    shift = added_to(part.value, outputs)
    if shift is None:
        return None
    size = len(list(toposort(outputs)))
    new = part.value.type()
    outputs = substitute(outputs, {part.value: new - shift})
    part.value = new
    body = FunctionGraph(loop.body_inputs(), [*outputs, shift], clone=False)
    run_query(CANONICAL, body)
    *outputs, shift = body.outputs
    loop.set_body_outputs(outputs)
    if len(list(toposort(outputs))) >= size:
        return None  # the subtraction did not cancel
    try:
        parts = sort_parts(loop)
    except NotLinearError:
        return None
    parts.shift = shift
    return parts


def added_to(value: Variable, outputs: list[Variable]) -> Variable | None:
    """Return what is added to a variable where it is read first, in its own layout."""
    if not is_tensor(value):
        return None
    for node in toposort(outputs):
        if not isinstance(node.op, Elemwise) or not isinstance(node.op.scalar_op, ps.Add):
            continue
        for place, inp in enumerate(node.inputs):
            order: tuple[Any, ...] = tuple(range(value.type.ndim))
            if inp is not value:
                above = inp.owner
                if above is None or not isinstance(above.op, DimShuffle):
                    continue
                if above.inputs[0] is not value:
                    continue
                order = above.op.new_order
                if not set(range(value.type.ndim)) <= set(order):
                    continue  # an axis of one item was dropped
            others = [other for k, other in enumerate(node.inputs) if k != place]
            shift = others[0] if len(others) == 1 else pt.add(*others)
            added = [k for k, axis in enumerate(order) if axis == "x"]
            if any(shift.type.shape[k] != 1 for k in added) or len(order) != shift.type.ndim:
                continue
            if value in ancestors([shift]):
                continue
            return shift.dimshuffle(*(order.index(k) for k in range(value.type.ndim)))
    return None


Readers = dict[Variable, list[Apply]]


def added_up(part: State | Carry, loop: Loop, readers: Readers | None = None) -> Variable | None:
    """Return what a step adds to a part that only adds up and is not stored, else None.

    Parameters
    ----------
    part : State or Carry
    loop : Loop
    readers : dict, optional
        What `readers_of` returns for the body, for those who ask for many parts.
    """
    if isinstance(part, State):
        if not part.untraced or set(part.taps) != {-1}:
            return None
        part = Carry(part.initial, part.taps[-1], part.next)
    outputs = loop.body_outputs()
    return _addend(part, outputs, readers_of(outputs) if readers is None else readers)


def readers_of(outputs: list[Variable]) -> Readers:
    """Return the nodes of a step that read each variable."""
    readers: Readers = {}
    for node in toposort(outputs):
        for inp in set(node.inputs):
            readers.setdefault(inp, []).append(node)
    return readers


def _reaches(
    start: Variable,
    ends: set[Variable],
    readers: Readers,
    blocker: Variable,
) -> bool:
    """Whether one of some variables depends on another, not by way of a blocker."""
    seen, pending = {start}, [start]
    while pending:
        variable = pending.pop()
        if variable in ends:
            return True
        for node in readers.get(variable, ()):
            new = [out for out in node.outputs if out not in seen and out is not blocker]
            seen.update(new)
            pending += new
    return False


def _addend(carry: Carry, outputs: list[Variable], readers: Readers) -> Variable | None:
    """Return what a step adds to a carry that only adds up, else None."""
    if not is_tensor(carry.value):
        return None
    summands = _summands(carry.next, carry.value)
    if sum(variable is carry.value and sign > 0 for sign, variable in summands) != 1:
        return None
    others = [(sign, variable) for sign, variable in summands if variable is not carry.value]
    if len(others) != len(summands) - 1 or not others:
        return None
    if carry.next in readers:
        return None
    ends = {*outputs, *(variable for _, variable in others)} - {carry.next}
    if _reaches(carry.value, ends, readers, carry.next):
        return None
    added = None
    for sign, summand in others:
        variable = pt.cast(summand, carry.value.type.dtype)
        if added is None:
            added = variable if sign > 0 else -variable
        else:
            added = added + variable if sign > 0 else added - variable
    assert added is not None
    return added if added.type.ndim == carry.value.type.ndim else None


def _summands(variable: Variable, value: Variable) -> list[tuple[int, Variable]]:
    """Take the sums and differences apart in which a value may stand.

    Those in another dtype are summands themselves: small integers wrap around.
    """
    found: list[tuple[int, Variable]] = []
    pending = [(1, variable)]
    while pending:
        sign, term = pending.pop()
        op = None if term.owner is None else getattr(term.owner.op, "scalar_op", None)
        inner = sign > 0 and term is not value and term.type.dtype == value.type.dtype
        if inner and isinstance(op, ps.Add | ps.Sub) and isinstance(term.owner.op, Elemwise):
            first, *others = term.owner.inputs
            after = -1 if isinstance(op, ps.Sub) else 1
            pending += [*((after, other) for other in reversed(others)), (1, first)]
        else:
            found.append((sign, term))
        if len(found) + len(pending) > MOST_TERMS:
            return [(1, variable)]
    return found
