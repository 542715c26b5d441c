r"""Is the next value of a state a matrix times the state, plus something?

A form is carried from the state `h` through the body to its next value. For a variable `v` that
depends on `h`, it says

    v[s] = w[s] h[s'] + Σ_a (M_a ·_a h)[s'] + c[s]

where ``s'`` picks, for every axis of `h`, the axis of `v` that runs along it (`axes`); `w`, the
`M_a` and `c` do not depend on `h`; and ``M ·_a h`` is the product along axis `a` of the state,
``Σ_j M[…, i, j] h[…, j at a, …]``. `M` has one axis for every other axis of the state, of size one
where it does not vary, and then `i` and `j`. Elementwise sums and scalings, axes moved, added or
removed, matrix products, and sums of elementwise products over an axis of the state all lead from
forms to forms; anything else ends in `NotAffineError`, which names the variable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.variable import TensorConstant


class NotAffineError(Exception):
    """The next value of a state is no matrix times the state; the text says why."""


@dataclass
class MatrixForm:
    """What a variable is to the state; see the module's text.

    `weight` is None for no elementwise term and 1 for the state itself. `both` are matrices along
    the two axes of a state that is a matrix, ``(M_0 ·_0 M_1 ·_1 h)``; such a form has no terms and
    no weight.
    """

    axes: tuple[int | None, ...]
    weight: Any = None
    terms: dict[int, Variable] = field(default_factory=dict)
    offset: Any = None
    both: dict[int, Variable] | None = None

    @property
    def ndim(self) -> int:
        return len(self.axes)


def name_of(variable: Variable) -> str:
    if variable.name:
        return f"`{variable.name}`"
    op = variable.owner.op if variable.owner is not None else variable.type
    return f"the result of {op}"


def is_minus_one(variable: Variable) -> bool:
    """Whether a factor is the constant -1, which is how canonical bodies write a sign."""
    return isinstance(variable, TensorConstant) and bool(np.all(variable.data == -1))


def broadcasts(variable: Any, axis: int) -> bool:
    return isinstance(variable, int) or variable.type.shape[axis] == 1


class Propagation:
    """Computes forms of the variables above a next value."""

    def __init__(self, state: Variable, dependent: set[Variable]) -> None:
        self.state = state
        self.dependent = dependent
        self.forms: dict[Variable, MatrixForm] = {
            state: MatrixForm(tuple(range(state.type.ndim)), weight=1)
        }

    def form(self, variable: Variable) -> MatrixForm:
        for node in toposort([variable], blockers=[self.state]):
            out = node.outputs[0]
            if out in self.dependent and out not in self.forms:
                self.forms[out] = self.of_node(node)
        return self.forms[variable]

    def of_node(self, node: Apply) -> MatrixForm:
        op = node.op
        if len(node.outputs) > 1:
            raise NotAffineError(f"{name_of(node.outputs[0])} reads the state")
        if isinstance(op, DimShuffle):
            return self.dimshuffle(node)
        if isinstance(op, SpecifyShape) and node.inputs[0] in self.forms:
            return self.forms[node.inputs[0]]
        if isinstance(op, Elemwise):
            return self.elemwise(node)
        if isinstance(op, TensorSum):
            return self.sum(node)
        core = op.core_op if isinstance(op, Blockwise) else op
        if isinstance(core, Dot):
            return self.dot(node)
        raise NotAffineError(f"{name_of(node.outputs[0])} reads the state")

    # Axes

    def dimshuffle(self, node: Apply) -> MatrixForm:
        order = node.op.new_order
        form = self.forms[node.inputs[0]]
        lost = set(range(form.ndim)) - {k for k in order if k != "x"}
        if any(form.axes[k] is not None for k in lost):
            raise NotAffineError(f"{name_of(node.outputs[0])} drops an axis of the state")
        axes = tuple(None if k == "x" else form.axes[k] for k in order)

        def move(part: Any) -> Any:
            return part if part is None or isinstance(part, int) else part.dimshuffle(*order)

        return MatrixForm(axes, move(form.weight), dict(form.terms), move(form.offset), form.both)

    # Elementwise operations

    def elemwise(self, node: Apply) -> MatrixForm:
        scalar, inputs, out = node.op.scalar_op, node.inputs, node.outputs[0]
        if out.type.dtype != self.state.type.dtype:
            raise NotAffineError(f"{name_of(out)} has another dtype than the state")
        if isinstance(scalar, ps.Add):
            return self.total([(1, inp) for inp in inputs], out)
        if isinstance(scalar, ps.Sub):
            return self.total([(1, inputs[0]), (-1, inputs[1])], out)
        if isinstance(scalar, ps.Neg):
            return self.scale(self.forms[inputs[0]], lambda part: -part, None, out)
        varying = [inp for inp in inputs if inp in self.dependent]
        if isinstance(scalar, ps.Mul) and len(varying) == 1:
            others = [inp for inp in inputs if inp is not varying[0]]
            if len(others) == 1 and is_minus_one(others[0]):
                return self.scale(self.forms[varying[0]], lambda part: -part, None, out)
            factors = [self.converted(inp) for inp in others]
            factor = factors[0] if len(factors) == 1 else pt.mul(*factors)
            return self.scale(self.forms[varying[0]], lambda part: part * factor, factor, out)
        if isinstance(scalar, ps.TrueDiv) and varying == [inputs[0]]:
            factor = self.converted(inputs[1])
            return self.scale(self.forms[inputs[0]], lambda part: part / factor, 1 / factor, out)
        raise NotAffineError(f"{name_of(out)} is nonlinear in the state")

    def converted(self, variable: Variable) -> Variable:
        """Return an operand in the state's dtype, as an operation on the state converts it.

        Small integers would wrap around, and truth values have no sign.
        """
        return pt.cast(variable, self.state.type.dtype)

    def total(self, summands: list[tuple[int, Variable]], out: Variable) -> MatrixForm:
        result: MatrixForm | None = None
        constant: Any = None
        for sign, inp in summands:
            if inp in self.dependent:
                form = self.forms[inp]
                if sign < 0:
                    form = self.scale(form, lambda part: -part, None, out)
                result = form if result is None else self.plus(result, form, out)
            else:
                inp = self.converted(inp)
                constant = plus(constant, inp if sign > 0 else -inp)
        assert result is not None
        return replace(result, offset=plus(result.offset, constant))

    def plus(self, one: MatrixForm, two: MatrixForm, out: Variable) -> MatrixForm:
        if one.axes != two.axes:
            raise NotAffineError(f"{name_of(out)} adds the state to itself along another axis")
        if one.both is not None or two.both is not None:
            raise NotAffineError(f"{name_of(out)} adds a product from both sides to another one")
        terms = dict(one.terms)
        for axis, matrix in two.terms.items():
            terms[axis] = plus(terms.get(axis), matrix)
        return MatrixForm(
            one.axes, plus(one.weight, two.weight), terms, plus(one.offset, two.offset)
        )

    def scale(
        self, form: MatrixForm, apply: Callable[[Any], Any], factor: Variable | None, out: Variable
    ) -> MatrixForm:
        """Return a form multiplied by a factor in its layout (None: a plain number)."""

        def on(part: Any) -> Any:
            return None if part is None else apply(part)

        weight = form.weight
        if isinstance(weight, int) and factor is not None:
            weight = factor if weight == 1 else factor * weight
        else:
            weight = on(weight)
        terms = {}
        for axis, matrix in form.terms.items():
            if factor is None:
                terms[axis] = apply(matrix)
                continue
            order: list[Any] = []
            n = self.state.type.ndim
            for k in [*(k for k in range(n) if k != axis), axis]:
                order.append(form.axes.index(k))
            free = [f for f in range(form.ndim) if form.axes[f] is None]
            if any(not broadcasts(factor, f) for f in free):
                raise NotAffineError(f"{name_of(out)} spreads a product of the state over new axes")
            terms[axis] = matrix * factor.dimshuffle(*order, "x")
        both = form.both
        if both is not None:
            both = {0: self.scaled(both[0], apply, factor, out), 1: both[1]}
        return MatrixForm(form.axes, weight, terms, on(form.offset), both)

    def scaled(
        self,
        matrix: Variable,
        apply: Callable[[Any], Any],
        factor: Variable | None,
        out: Variable,
    ) -> Variable:
        """Return a matrix of a product from both sides, multiplied by a number."""
        if factor is None:
            return apply(matrix)
        if not all(factor.type.broadcastable):
            raise NotAffineError(f"{name_of(out)} scales items of a product from both sides")
        return matrix * factor.reshape((1,) * matrix.type.ndim)

    # Reductions and products

    def sum(self, node: Apply) -> MatrixForm:
        inp, out = node.inputs[0], node.outputs[0]
        form = self.forms[inp]
        axes = node.op.axis
        reduced = list(range(form.ndim)) if axes is None else list(axes)
        for axis in sorted(reduced, reverse=True):
            if out.type.dtype != self.state.type.dtype:
                raise NotAffineError(f"{name_of(out)} has another dtype than the state")
            form = self.sum_one(form, axis, inp, out)
        return form

    def sum_one(self, form: MatrixForm, axis: int, inp: Variable, out: Variable) -> MatrixForm:
        state_axis = form.axes[axis]
        keep = [k for k in range(form.ndim) if k != axis]
        if form.terms or form.both or state_axis is None or isinstance(form.weight, int | None):
            raise NotAffineError(f"{name_of(out)} sums the state itself")
        weight = form.weight
        free = [k for k in keep if form.axes[k] is None and not broadcasts(weight, k)]
        if len(free) != 1 or broadcasts(weight, axis):
            raise NotAffineError(f"{name_of(out)} is no product of a matrix and the state")
        (row,) = free
        n = self.state.type.ndim
        order = [form.axes.index(k) for k in range(n) if k != state_axis]
        if any(k not in (row, axis, *order) and not broadcasts(weight, k) for k in keep):
            raise NotAffineError(f"{name_of(out)} spreads a product of the state over new axes")
        matrix = weight.dimshuffle(*order, row, axis)
        offset = form.offset
        if offset is not None:
            if broadcasts(offset, axis):
                offset = offset * inp.shape[axis].astype(self.state.type.dtype)
            offset = offset.sum(axis=axis)
        axes = tuple(state_axis if k == row else form.axes[k] for k in keep)
        return MatrixForm(axes, None, {state_axis: matrix}, offset)

    def dot(self, node: Apply) -> MatrixForm:
        left, right = node.inputs
        out = node.outputs[0]
        if left in self.dependent and right in self.dependent:
            raise NotAffineError(f"{name_of(out)} is nonlinear in the state")
        if out.type.dtype != self.state.type.dtype:
            raise NotAffineError(f"{name_of(out)} has another dtype than the state")
        if right in self.dependent:
            form, matrix = self.forms[right], left
            contracted = max(form.ndim - 2, 0)
            product = lambda part: node.op(left, part)  # noqa: E731
        else:
            form, matrix = self.forms[left], right
            contracted = form.ndim - 1
            product = lambda part: node.op(part, right)  # noqa: E731
            if matrix.type.ndim > 1:
                matrix = matrix.mT
        state_axis = form.axes[contracted]
        if state_axis is None or matrix.type.ndim < 2:
            raise NotAffineError(f"{name_of(out)} is no product of a matrix and the state")
        matrix = self.spread(matrix, form, state_axis, out)
        if form.both is not None or any(axis != state_axis for axis in form.terms):
            both = self.from_both_sides(matrix, form, state_axis, out)
            offset = self.product_offset(node, form, contracted, product)
            return MatrixForm(form.axes, None, {}, offset, both)
        result = []
        if form.weight is not None:
            result.append(self.weighted(matrix, form, state_axis, contracted, out))
        result += [pt.matmul(matrix, term) for term in form.terms.values()]
        total = result[0] if len(result) == 1 else result[0] + result[1]
        offset = self.product_offset(node, form, contracted, product)
        return MatrixForm(form.axes, None, {state_axis: total}, offset)

    def product_offset(
        self, node: Apply, form: MatrixForm, contracted: int, product: Callable[[Any], Any]
    ) -> Any:
        """Return the offset of a form after a product."""
        offset, (left, right) = form.offset, node.inputs
        if offset is None:
            return None
        source = right if right in self.dependent else left
        if offset.type.shape[contracted] != source.type.shape[contracted]:
            offset = pt.broadcast_to(offset, source.shape)
        return product(offset)

    def from_both_sides(
        self, matrix: Variable, form: MatrixForm, state_axis: int, out: Variable
    ) -> dict[int, Variable]:
        """Return the matrices along both axes after a product along one of them."""
        if self.state.type.ndim != 2 or form.weight is not None or len(form.terms) > 1:
            raise NotAffineError(f"{name_of(out)} has matrices on both sides of the state")
        both = dict(form.terms if form.both is None else form.both)
        before = both.get(state_axis)
        both[state_axis] = matrix if before is None else pt.matmul(matrix, before)
        if any(not broadcasts(part, 0) for part in both.values()):
            raise NotAffineError(f"{name_of(out)} has a matrix for each row or column of the state")
        return both

    def spread(
        self, matrix: Variable, form: MatrixForm, state_axis: int, out: Variable
    ) -> Variable:
        """Give a matrix one axis for every other axis of the state; batch axes line up."""
        batch = matrix.type.ndim - 2
        order: list[Any] = []
        for k in range(self.state.type.ndim):
            if k == state_axis:
                continue
            place = form.axes.index(k)
            order.append(place if place < batch else "x")
        dropped = [k for k in range(batch) if k not in order]
        if any(not broadcasts(matrix, k) for k in dropped):
            raise NotAffineError(f"{name_of(out)} spreads a product of the state over new axes")
        return matrix.dimshuffle(*order, batch, batch + 1)

    def weighted(
        self, matrix: Variable, form: MatrixForm, state_axis: int, contracted: int, out: Variable
    ) -> Variable:
        """Return a matrix times the elementwise factor of a form."""
        weight = form.weight
        if isinstance(weight, int):
            return matrix if weight == 1 else matrix * weight
        free = [k for k in range(form.ndim) if form.axes[k] is None]
        if any(not broadcasts(weight, k) for k in free):
            raise NotAffineError(f"{name_of(out)} sums the state over new axes")
        others = [form.axes.index(k) for k in range(self.state.type.ndim) if k != state_axis]
        return matrix * weight.dimshuffle(*others, "x", contracted)


def plus(one: Any, two: Any) -> Any:
    if one is None or two is None:
        return two if one is None else one
    return one + two
