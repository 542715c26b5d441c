r"""The logarithm of a sum of two exponentials as one scalar operation.

    logaddexp(x, y) = log(exp x + exp y) = max(x, y) + log(1 + exp(-|x - y|))

PyTensor writes it as the first of these expressions and counts on a rewrite to avoid the
overflow; inside the body of a loop it must be right as it stands. With ``s = 1 / (1 + exp(y - x))``
the derivatives are `s` and ``1 - s``. They are written with the difference of the arguments, not
with ``exp(x - logaddexp(x, y))``, which loses digits where the arguments are large. Two equal
infinities have no difference; there, both derivatives are one half and the second ones zero.

`stable_logs` finds it in steps, where they are built, so that derivatives of any order are those of
this operation:

    log(exp x + exp y + …)                    logaddexp(x, logaddexp(y, …))
    log(c sum(exp z) / n)                     log c + log(sum(exp z)) - log n
    g exp x / (exp x + exp y + …)             g sigmoid(x - logaddexp(y, …))
    g / sum(exp z) exp z                      g softmax(z)

There, `c` and `n` are positive constants and sizes: a mean is divided by one. The last two are
derivatives of logarithms of sums, and 0/0 where all exponentials are too small.
Releases of PyTensor that have Ops for these logarithms have others for the derivatives.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort
from pytensor.scalar import basic as ps
from pytensor.scalar.math import sigmoid
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Prod, Sum
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.special import softmax
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.variable import TensorConstant

from scanlib._compat import DERIVATIVE_GRAPHS, LOG_ADD_EXP, LOG_SUM_EXP
from scanlib.ops.graph import applies, substitute, taken_apart
from scanlib.source_keys import source_key


class LogAddExp(ps.BinaryScalarOp):
    """``log(exp(x) + exp(y))`` of two real numbers, without overflow."""

    commutative = True
    associative = True
    identity = -np.inf
    nfunc_spec = ("logaddexp", 2, 1)

    def impl(self, x: Any, y: Any) -> Any:
        return np.logaddexp(x, y)

    def c_code(
        self, node: Any, name: str, inputs: Sequence[str], outputs: Sequence[str], sub: Any
    ) -> str:
        x, y = inputs
        (z,) = outputs
        # The second test is false for NaN; equal infinities never reach their difference.
        return f"""
        if ({x} == {y}) {z} = {x} + 0.69314718055994530942;
        else if ({x} > {y}) {z} = {x} + log1p(exp({y} - {x}));
        else {z} = {y} + log1p(exp({x} - {y}));
        """

    def c_code_cache_version(self) -> tuple[str, ...]:
        return (source_key("ops/logaddexp.py"),)

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], gout: Sequence[Variable]
    ) -> list[Variable]:
        x, y = inputs
        (gz,) = gout
        return [gz * sigmoid(_difference(x, y)), gz * sigmoid(_difference(y, x))]


def _difference(x: Variable, y: Variable) -> Variable:
    """Return ``x - y``, zero where both are the same infinity."""
    same = ps.and_(ps.eq(x, y), ps.isinf(x))
    return ps.switch(same, x.zeros_like(), x - y)


log_add_exp = LogAddExp(ps.upgrade_to_float, name="log_add_exp")
logaddexp = Elemwise(log_add_exp)


def stable_logs(outputs: Sequence[Variable]) -> dict[Variable, Variable]:
    """Return what replaces logarithms and shares of sums of exponentials above some variables."""
    found: dict[Variable, Variable] = {}
    nodes = list(toposort(outputs))
    has_sums = any(_sums_exponentials(node) for node in nodes)
    for node in nodes if has_sums or LOG_ADD_EXP is not None else ():
        made = _stable(node, has_sums)
        for old, new in zip(node.outputs, substitute(made, found), strict=bool(made)):
            if old.type.is_super(new.type):
                found[old] = new
    return found


def write_stable_logs(body: FunctionGraph) -> None:
    """Write logarithms and shares of sums of exponentials in their stable forms."""
    for old, new in stable_logs(body.outputs).items():
        body.replace(old, new, reason="scanlib_logs", import_missing=True)


def logs_of_batch(node: Apply) -> list[Variable]:
    """Return logarithms of sums, or their derivatives, of a batch by axes of the whole batch;
    nothing if a node is no such batch."""
    rank = node.op.batch_ndim(node)
    core = node.op._create_dummy_core_node(node.inputs)
    if LOG_SUM_EXP is not None and isinstance(core.op, LOG_SUM_EXP):
        return [LOG_SUM_EXP(axis=[axis + rank for axis in core.op.axis])(*node.inputs)]
    derivative = derivative_of_logs(core)
    if derivative is None or derivative[1] is None:
        return []
    inputs, axis, cotangent = derivative
    given = dict(zip(core.inputs, node.inputs, strict=True))
    shares = softmax(given[inputs[0]], axis=axis + rank)
    return [pt.expand_dims(given[cotangent], axis + rank) * shares]


def _stable(node: Apply, has_sums: bool) -> list[Variable]:
    """Return the outputs of a node in another form; nothing if it has none."""
    terms = None
    if has_sums and applies(node, ps.Log):
        terms = _exponents(node.inputs[0])
        if terms is None:
            return _log_of_scaled_sum(node.inputs[0])
    elif LOG_ADD_EXP is not None and isinstance(node.op, LOG_ADD_EXP):
        terms = _alike(node.inputs)
    if terms is not None:
        return [_log_of_sum(terms)]
    if has_sums and applies(node, (ps.Mul, ps.TrueDiv)):
        return _with_shares(node)
    derivative = derivative_of_logs(node)
    if derivative is None:
        return []
    inputs, axis, cotangent = derivative
    if axis is not None:
        return [pt.expand_dims(cotangent, axis) * softmax(*inputs, axis=axis)]
    terms = _alike(inputs) or []
    return [cotangent * _share(terms, k) for k in range(len(terms))]


def _sums_exponentials(node: Apply) -> bool:
    total = isinstance(node.op, Sum) or applies(node, ps.Add)
    return total and any(applies(inp.owner, ps.Exp) for inp in node.inputs)


def _alike(inputs: Sequence[Variable]) -> list[Variable] | None:
    """Return several variables of one type, None for others."""
    types = {(x.type.dtype, x.type.broadcastable) for x in inputs}
    return list(inputs) if len(types) == 1 and len(inputs) > 1 else None


def _log_of_sum(terms: Sequence[Variable]) -> Variable:
    """Return the logarithm of the sum of the exponentials of `terms`."""
    *rest, result = terms
    for term in reversed(rest):
        result = logaddexp(term, result)
    return result


def _log_of_scaled_sum(argument: Variable) -> list[Variable]:
    """Return the logarithm of a sum of exponentials times and by positive numbers, if it is one."""
    factors, divisors = _factors(argument)
    sums = [factor for factor in factors if not _is_positive(factor)]
    if len(sums) != 1 or len(factors) + len(divisors) == 1 or not all(map(_is_positive, divisors)):
        return []
    dtype, (total,) = argument.type.dtype, sums
    terms, node = _exponents(total), total.owner
    if node is not None and isinstance(node.op, DimShuffle):
        node = node.inputs[0].owner
    if terms is None and (node is None or not _sums_exponentials(node)):
        return []
    result = pt.log(total) if terms is None else _log_of_sum(terms)
    for factor in factors:
        result = result if factor is total else result + pt.log(pt.cast(factor, dtype))
    for divisor in divisors:
        result = result - pt.log(pt.cast(divisor, dtype))
    return [result]


def _is_positive(variable: Variable) -> bool:
    """Whether a variable is a positive constant or a size of an array."""
    node = variable.owner
    if node is None:
        return isinstance(variable, TensorConstant) and bool(np.all(variable.data > 0))
    if isinstance(node.op, DimShuffle | Prod | Subtensor) or applies(node, ps.Cast):
        return _is_positive(node.inputs[0])
    return isinstance(node.op, Shape | Shape_i)


def _share(terms: list[Variable], k: int) -> Variable:
    """Return what part of the sum of all exponentials that of one term is.

    Two equal infinities share equally, as in the derivative of `logaddexp`.
    """
    term, rest = terms[k], _log_of_sum([*terms[:k], *terms[k + 1 :]])
    same = pt.and_(pt.eq(term, rest), pt.isinf(term))
    return pt.sigmoid(pt.switch(same, pt.zeros_like(term), term - rest))


def _exponents(variable: Variable) -> list[Variable] | None:
    """Return the x, y, … of ``exp x + exp y + …``, None for anything else."""

    def parts(term: Variable) -> Sequence[Variable] | None:
        is_sum = applies(term.owner, ps.Add) and term.type.dtype == variable.type.dtype
        return term.owner.inputs if is_sum else None

    terms = taken_apart(variable, parts)
    if len(terms) < 2 or not variable.type.dtype.startswith("float"):
        return None
    if any(not applies(v.owner, ps.Exp) or v.type.dtype != variable.type.dtype for v in terms):
        return None
    return [term.owner.inputs[0] for term in terms]


def _with_shares(node: Apply) -> list[Variable]:
    """Return a product or quotient with the shares of sums of exponentials in it, if any."""
    factors, divisors = _factors(node.outputs[0])
    kept: list[Variable] = []
    for divisor in divisors:
        terms = _exponents(divisor)
        shares = [_share_of(factor, divisor, terms) for factor in factors]
        place = next((k for k, share in enumerate(shares) if share is not None), None)
        if place is not None:
            factors[place] = shares[place]
        elif terms is not None:
            return []
        else:
            kept.append(divisor)
    if len(kept) == len(divisors):
        return []
    result = pt.mul(*factors) if len(factors) > 1 else factors[0]
    return [result / pt.mul(*kept) if kept else result]


def _share_of(factor: Variable, divisor: Variable, terms: list[Variable] | None) -> Variable | None:
    """Return an exponential divided by a sum of exponentials that it is one of, else None."""
    spread = factor.owner if isinstance(factor.owner and factor.owner.op, DimShuffle) else None
    exponential = factor if spread is None else spread.inputs[0]
    if not applies(exponential.owner, ps.Exp):
        return None
    (term,) = exponential.owner.inputs
    if terms is not None:
        return _share(terms, terms.index(term)) if spread is None and term in terms else None
    order = range(factor.type.ndim) if spread is None else spread.op.new_order
    axes = _summed_axes(divisor, exponential, order)
    if axes is None:
        return None
    share = softmax(term, axis=axes[0] if len(axes) == 1 else None)
    return share if spread is None else spread.op(share)


def _summed_axes(
    total: Variable, exponential: Variable, order: Iterable[int | str]
) -> tuple[int, ...] | None:
    """Return along which axes a variable is the kept sum of an exponential whose axes are in an
    order, if it is one: along one axis, or along all."""
    node = total.owner
    above = node.inputs[0].owner if node is not None and isinstance(node.op, DimShuffle) else None
    if above is None or not isinstance(above.op, Sum) or above.inputs[0] is not exponential:
        return None
    whole = tuple(range(exponential.type.ndim))
    axes = whole if above.op.axis is None else tuple(above.op.axis)
    rest = [k for k in whole if k not in axes]
    kept = tuple(rest.index(k) if k in rest else "x" for k in order)
    return axes if len(axes) in (1, len(whole)) and tuple(node.op.new_order) == kept else None


def _factors(variable: Variable) -> tuple[list[Variable], list[Variable]]:
    """Return what is multiplied, and what is divided by."""
    found: tuple[list[Variable], list[Variable]] = [], []
    pending = [(variable, 0)]
    while pending:
        factor, side = pending.pop()
        if applies(factor.owner, ps.Mul):
            pending += [(inp, side) for inp in reversed(factor.owner.inputs)]
        elif applies(factor.owner, ps.TrueDiv):
            above, below = factor.owner.inputs
            pending += [(below, 1 - side), (above, side)]
        else:
            found[side].append(factor)
    return found


def derivative_of_logs(node: Apply) -> tuple[list[Variable], int | None, Variable] | None:
    """Return the inputs and the axis of the Op that a node is the derivative of, and the cotangent.

    Later releases keep derivatives of their Ops for logarithms of sums in Ops of their own, in
    which no structure can be seen. There is no axis where numbers are added up item by item.
    """
    n = len(node.outputs)
    if LOG_ADD_EXP is None or LOG_SUM_EXP is None or type(node.op) not in DERIVATIVE_GRAPHS:
        return None
    if len(node.inputs) != n + 2:
        return None
    *inputs, _, cotangent = node.inputs
    if not all(getattr(inp.type, "dtype", "").startswith("float") for inp in node.inputs):
        return None
    for axis in [None] if n > 1 else range(inputs[0].type.ndim):
        op = LOG_ADD_EXP() if axis is None else LOG_SUM_EXP(axis=(axis,))
        dummies = [inp.type() for inp in inputs]
        out = op(*dummies)
        if out.type.ndim != cotangent.type.ndim:
            return None
        expected = out.owner.op.pullback(dummies, [out], [out.type()])[0]
        if expected.owner is not None and expected.owner.op == node.op:
            return inputs, axis, cotangent
    return None
