r"""Matrix recurrences that are normalized at every step: the projective form.

    a_t = A_t ⊗ h_{t-1},     h_t = a_t ⊘ |a_t|

with ``|a|`` the sum of `a` over its last axis in a semiring: the forward filter of a hidden Markov
model, ``h_t = (h_{t-1} P ∘ l_t) / c_t`` with ``c_t`` the sum of what stands above it, or the same
in logarithms, ``h_t = a_t - logsumexp(a_t)``. A factor of the state before changes nothing, so
steps compose as their matrices do, each product divided by any number that keeps it in range:

    h_t = A_t (… (A_1 h_0)) / |A_t (… (A_1 h_0))|

The element of a step is its matrix. On one core the steps themselves are the least work.

S. Hassan, S. Särkkä and Á. F. García-Fernández, "Temporal parallelization of inference in hidden
Markov models", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytensor.graph.basic import Apply, Variable
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.shape import SpecifyShape

from scanlib._compat import LOG_SUM_EXP
from scanlib.analysis.matrix_affine import NotAffineError
from scanlib.analysis.matrix_recurrence import recognize
from scanlib.ops.graph import depends_on
from scanlib.ops.loop import Carry, Loop, State


@dataclass(frozen=True)
class Projective:
    """A state that a step multiplies by a matrix and normalizes; variables of the body.

    Attributes
    ----------
    semiring : {"real", "log"}
    matrix : Variable
        The element of a step.
    scale : Variable or None
        In logarithms, what is added to the rows of the matrix.
    norm : Variable
        What the state is divided by.
    """

    semiring: str
    matrix: Variable
    scale: Variable | None
    norm: Variable


def find_projective(loop: Loop) -> list[Projective | None]:
    """Return, for each state and then each carry of a loop, its projective form if it has one."""
    parts: list[State | Carry] = [*loop.states, *loop.carries]
    return [_projective(part) for part in parts]


def _projective(part: State | Carry) -> Projective | None:
    if isinstance(part, Carry):
        past = part.value
    elif set(part.taps) == {-1}:
        past = part.taps[-1]
    else:
        return None
    following = _same(part.next)
    node = following.owner
    if node is None or not isinstance(node.op, Elemwise) or len(node.inputs) != 2:
        return None
    if following not in depends_on([following], [past]):
        return None
    for above, norm, semiring in _quotients(node):
        if _is_norm(norm, above, semiring):
            try:
                found = recognize(past, above)
            except NotAffineError:
                return None
            plain = found.offset is None or semiring == "log"
            if found.semiring == semiring and plain and found.axis == past.type.ndim - 1:
                return Projective(semiring, found.matrix, found.offset, norm)
    return None


def _quotients(node: Apply) -> list[tuple[Variable, Variable, str]]:
    """Return the ways to read an operation as ``a / n`` or, in logarithms, ``a - n``."""
    first, second = node.inputs
    if isinstance(node.op.scalar_op, ps.TrueDiv):
        return [(first, second, "real")]
    if isinstance(node.op.scalar_op, ps.Sub):
        return [(first, second, "log")]
    if isinstance(node.op.scalar_op, ps.Mul):
        pairs = [(first, second), (second, first)]
        found = [(a, _argument(b, ps.Reciprocal), "real") for a, b in pairs]
        return [(a, n, kind) for a, n, kind in found if n is not None]
    return []


def _argument(variable: Variable, kind: type) -> Variable | None:
    """Return what an elementwise operation is applied to, None if it is another one."""
    node = _same(variable).owner
    if node is None or not isinstance(node.op, Elemwise):
        return None
    return node.inputs[0] if isinstance(node.op.scalar_op, kind) else None


def _same(variable: Variable) -> Variable:
    """Look through axes of length one and checks of shapes."""
    node = variable.owner
    while node is not None and isinstance(node.op, DimShuffle | SpecifyShape):
        if isinstance(node.op, DimShuffle):
            kept = [axis for axis in node.op.new_order if axis != "x"]
            if kept != sorted(kept):
                break
        variable = node.inputs[0]
        node = variable.owner
    return variable


def _is_norm(norm: Variable, above: Variable, semiring: str) -> bool:
    """Whether a value is the sum of another over its last axis."""
    node = _same(norm).owner
    if semiring == "real":
        return _is_sum(node, above)
    if node is not None and LOG_SUM_EXP is not None and isinstance(node.op, LOG_SUM_EXP):
        return _same(node.inputs[0]) is _same(above) and _over_last(node, node.op.axis)
    total = _argument(norm, ps.Log)
    if total is None:
        return False
    node = _same(total).owner
    if node is None or not isinstance(node.op, TensorSum):
        return False
    exponent = _argument(node.inputs[0], ps.Exp)
    return (
        exponent is not None and _same(exponent) is _same(above) and _over_last(node, node.op.axis)
    )


def _is_sum(node: Apply | None, above: Variable) -> bool:
    if node is None or not isinstance(node.op, TensorSum):
        return False
    return _same(node.inputs[0]) is _same(above) and _over_last(node, node.op.axis)


def _over_last(node: Apply, axis: tuple[int, ...] | None) -> bool:
    ndim = node.inputs[0].type.ndim
    return (axis is None and ndim == 1) or (axis is not None and tuple(axis) == (ndim - 1,))
