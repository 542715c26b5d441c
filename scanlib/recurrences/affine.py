r"""The affine family: every next value is a linear combination of past ones, plus a constant.

    y_p[t] = Σ_{q,k} a_{pqk}[t] · y_q[t-k] + b_p[t]

One state of depth one is ``a h + b``; several states, or one with more taps (AR(p), ARMA, IIR
filters), are a coupled system (`scanlib.recurrences.coupled`). The composition of two affine
functions is affine:

    (a₂, b₂) ∘ (a₁, b₁) = (a₂ a₁, a₂ b₁ + b₂)

G. Blelloch, "Prefix sums and their applications", 1990.

The steps of one state are composed in vector registers (`scanlib.recurrences.block_scans`). With
one coefficient for all steps, its powers are computed once, and the state between vectors is kept
in double precision: single precision is rounded in sums of a few terms only, which leaves a
fraction of the error of rounding at every step, and powers that are rounded would change the
coefficient.

Where the sum comes first, ``s = h + b``, ``h ← a s`` (`scanlib.ops.lowered.sums_first`), the sums
are written: ``s ← a s + b`` with the coefficient of the step before, and one for the first step,
before which there is no sum but the state itself.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable

from scanlib.kernels.language import Type, Value
from scanlib.kernels.spans import Same
from scanlib.ops.lowered.elemwise_scan import Recurrence, Term
from scanlib.recurrences.block_scans import (
    Formulas,
    Function,
    Lanes,
    LaneScan,
    StepBlock,
    Steps,
    halves,
)
from scanlib.recurrences.coefficients import Coefficient, added, replaced
from scanlib.recurrences.form import (
    Component,
    Elements,
    NotInFamilyError,
    cast,
    common_dtype,
    constant,
    kind,
)
from scanlib.recurrences.trust import MODERATE, extreme, is_extreme

_WITH_DOUBLES = 4  # vectors side by side, where the state between them is in double precision

# Recognition

Key = tuple[int, int]


@dataclass(frozen=True)
class AffineForm:
    """``Σ coefficients[part, tap] · y_part[t + tap] + constant``.

    A coefficient of None is one; a constant of None is zero.
    """

    coefficients: dict[Key, Coefficient | None]
    constant: Variable | None


ARITHMETIC = (ps.Add, ps.Sub, ps.Neg, ps.Mul, ps.TrueDiv)


def recognize(component: Component) -> Recurrence:
    """Return the affine recurrence of a component; `NotInFamilyError` if a next value is not
    affine in its past values."""
    dtype = common_dtype(component)
    if dtype == "bool":
        raise NotInFamilyError("arithmetic on truth values is no affine recurrence")
    forms = component.propagate(
        lambda part, tap: AffineForm({(part, tap): None}, None), partial(_forms, component)
    )
    elements = Elements(dtype)
    terms, constants = [], []
    for own, value in component.nexts.items():
        form = forms[own] or AffineForm({}, value)
        own_terms = []
        for part, tap in sorted(form.coefficients, key=lambda key: (key[0], -key[1])):
            known = form.coefficients[part, tap]
            factor = None if known is None else elements.add(known.guarded)
            own_terms.append(Term(part, tap, factor))
        terms.append(tuple(own_terms))
        constants.append(elements.add(form.constant))
    return elements.recurrence("affine", component, tuple(terms), tuple(constants))


def _forms(component: Component, node: Apply, given: list[AffineForm | None]) -> list[AffineForm]:
    """Return the forms of a node's outputs from those of its inputs."""
    op, dtype = node.op, node.outputs[0].type.dtype
    # A cast rounds what the elements would keep.
    is_same = isinstance(op, ps.Cast | ps.Identity) and node.inputs[0].type.dtype == dtype
    if is_same and given[0] is not None:
        return [given[0]]
    if isinstance(op, ps.Switch) and given[0] is None:
        return [_choice(node, given)]
    if isinstance(op, ARITHMETIC):
        # An operation converts what it is given first: int8 products in an int64 sum do not wrap.
        inputs = [cast(inp, dtype) for inp in node.inputs]
        forms = list(map(_lifted, inputs, given))
        if isinstance(op, ps.Add):
            return [reduce(_plus, forms)]
        if isinstance(op, ps.Sub):
            return [_plus(forms[0], _scaled(forms[1], constant(-1, dtype)))]
        if isinstance(op, ps.Neg):
            return [_scaled(forms[0], constant(-1, dtype))]
        linear = [form for form in given if form is not None]
        if isinstance(op, ps.Mul) and len(linear) > 1:
            text = f"a coefficient of {_named(component, given)} reads a state itself"
            raise NotInFamilyError(text)
        if isinstance(op, ps.Mul):
            return [_product(linear[0], inputs, given.index(linear[0]))]
        if given[1] is None and given[0] is not None:
            return [_scaled(given[0], _inverse(inputs[1]))]
    raise NotInFamilyError(f"{op} of {_named(component, given)} is not affine")


def _named(component: Component, given: list[AffineForm | None]) -> str:
    """Return how messages name a state that one of the forms reads."""
    keys = [key for form in given if form is not None for key in [*form.coefficients][:1]]
    return f"'{component.names[component.taps[keys[0][0]][keys[0][1]]]}'" if keys else "a state"


def _lifted(value: Variable, form: AffineForm | None) -> AffineForm:
    return AffineForm({}, value) if form is None else form


def _product(form: AffineForm, inputs: list[Variable], place: int) -> AffineForm:
    """Return a product in which a form has a place; what stands before it is multiplied first."""
    before, after = inputs[:place], inputs[place + 1 :]
    if before:
        form = _scaled(form, before[0] if len(before) == 1 else ps.mul(*before))
    return reduce(_scaled, after, form)


def _choice(node: Apply, given: list[AffineForm | None]) -> AffineForm:
    """Return the form of a switch whose condition reads no state."""
    condition = node.inputs[0]
    left, right = map(_lifted, node.inputs[1:], given[1:])
    dtype = node.outputs[0].type.dtype
    zero, one = constant(0, dtype), constant(1, dtype)
    # What changes no number, not even -0.0.
    nothing = constant(-0.0, dtype) if kind(node.outputs[0]) == "f" else zero

    def pick(a: Variable | None, b: Variable | None) -> Variable:
        return ps.switch(condition, nothing if a is None else a, nothing if b is None else b)

    def coefficient(form: AffineForm, key: Key) -> Variable:
        if key in form.coefficients:
            return _guarded(form.coefficients[key], one)
        return replaced(form.constant, zero)

    coefficients: dict[Key, Coefficient | None] = {}
    for key in {**left.coefficients, **right.coefficients}:
        if all(form.coefficients.get(key, zero) is None for form in (left, right)):
            coefficients[key] = None
        else:
            coefficients[key] = Coefficient(pick(coefficient(left, key), coefficient(right, key)))
    if left.constant is None and right.constant is None:
        return AffineForm(coefficients, None)
    return AffineForm(coefficients, pick(left.constant, right.constant))


def _guarded(coefficient: Coefficient | None, one: Variable) -> Variable:
    return one if coefficient is None else coefficient.guarded


def _plus(a: AffineForm, b: AffineForm) -> AffineForm:
    coefficients = dict(a.coefficients)
    for key, value in b.coefficients.items():
        if key not in coefficients:
            coefficients[key] = value
            continue
        mine = coefficients[key]
        like = mine if mine is not None else value
        if like is None:
            raise NotInFamilyError("a state is added to itself")
        one = constant(1, like.value.type.dtype)
        coefficients[key] = Coefficient(added(_guarded(mine, one), _guarded(value, one)))
    if a.constant is None or b.constant is None:
        return AffineForm(coefficients, b.constant if a.constant is None else a.constant)
    return AffineForm(coefficients, ps.add(a.constant, b.constant))


def _scaled(form: AffineForm, factor: Variable) -> AffineForm:
    return AffineForm(
        {
            key: Coefficient(factor) if known is None else known.times(factor)
            for key, known in form.coefficients.items()
        },
        None if form.constant is None else ps.mul(form.constant, factor),
    )


def _inverse(divisor: Variable) -> Variable:
    if isinstance(divisor, Constant) and np.abs(divisor.data) > 1e-30:
        return constant(1 / divisor.data, divisor.type.dtype)
    return ps.reciprocal(divisor)


# Formulas and scan


def compose(m: Any, first: Function, later: Function) -> Function:
    """Return the function that does `first`, then `later`; without `b` it is a product."""
    if len(first) == 1:
        return (later[0] * first[0],)
    return later[0] * first[0], m.fma(later[0], first[1], later[1])


def apply(m: Any, function: Function, state: Any) -> Any:
    return function[0] * state if len(function) == 1 else m.fma(function[0], state, function[1])


AFFINE = Formulas(compose, apply, lambda dtype: (1.0, 0.0))


def scan(block: StepBlock, steps: Steps, sum_first: bool = False) -> tuple[Value, Value]:
    """Write the scan of one state; return it after the block, and whether values can be trusted.

    Its elements are a coefficient and what is added. Where the sum comes first, the sums are
    written.
    """
    w, dtype = block.writer, steps.h.dtype
    a, b = steps.elements
    a = Same(w, w.constant(1.0, Type(dtype))) if a is None else a
    fixed = isinstance(a, Same)
    if b is None and fixed:
        b = Same(w, w.constant(-0.0, Type(dtype)))
    elements = (a,) if b is None else (a, b)
    tests = (None if fixed else extreme, *[None] * (len(elements) - 1))
    kind = _FixedSingle if fixed and dtype == "float32" else _Affine
    given = replace(steps, elements=elements)
    found = kind(block, AFFINE, given, tests, MODERATE[dtype])
    found.sum_first = sum_first
    return found.write()


class _Affine(LaneScan):
    """The scan of one state, whose coefficient may be one for all steps."""

    sum_first = False

    @property
    def fixed(self) -> Value | None:
        """The coefficient that all steps have."""
        a = self.steps.elements[0]
        return a.real(0) if isinstance(a, Same) else None

    def is_fine(self) -> Value:
        fine = super().is_fine()
        return fine if self.fixed is None else fine & ~is_extreme(self.w, self.fixed)

    def one_step(self, function: Function, state: Value) -> tuple[Value, Value]:
        if self.sum_first:
            total = state + function[1]
            return function[0] * total, total
        return super().one_step(function, state)

    def prepare(self) -> None:
        if self.fixed is None:
            return
        w, v, late = self.w, self.v, int(self.sum_first)
        wide = w.cast(self.fixed, "float64")
        self.powers: list[Value] = [w.constant(1.0, Type("float64"))]
        for _ in range(v.group):
            self.powers.append(self.powers[-1] * wide)
        powers = [w.cast(power, self.dtype) for power in self.powers]
        self.factors = v.by_step(lambda step: powers[step + 1 - late])
        self.weights = {half: v.weights(powers, half) for half in v.masks}

    def composed(self, several: list[Function]) -> list[Function]:
        v = self.v
        if self.fixed is None:
            if self.sum_first:
                several = [(v.shifted(a, 1.0), b) for a, b in several]
            return super().composed(several)
        terms = [b for _, b in several]
        for half, weight in self.weights.items():
            # Lanes of first halves have the weight zero. What is not finite spreads among lanes,
            # but never gets lost.
            terms = [self.w.fma(weight, v.half_before(b, half), b) for b in terms]
        return [(self.factors, b) for b in terms]

    def onward(self, maps: list[Function], own: list[Function]) -> list[Function]:
        if not self.sum_first:
            return maps
        pairs = zip(own, maps, strict=True)
        return [tuple(function[0] * number for number in sums) for function, sums in pairs]


class _FixedSingle(_Affine):
    """One coefficient for all steps, in single precision with the state in double precision.

    The terms of all groups come into one vector, are widened, and are composed there.
    """

    side_by_side = _WITH_DOUBLES

    def first_state(self) -> Value:
        return self.w.cast(self.steps.before, "float64")

    def one_step(self, function: Function, state: Value) -> tuple[Value, Value]:
        wide = tuple(self.w.cast(number, "float64") for number in function)
        after, stored = super().one_step(wide, state)
        return after, self.w.cast(stored, self.dtype)

    def prepare(self) -> None:
        super().prepare()
        groups = self.side_by_side * len(self.v.groups)
        self.doubles = d = Lanes(self.w, "float64", False, groups, groups)
        powers = [self.powers[0]]
        for _ in range(groups):
            powers.append(powers[-1] * self.powers[self.v.group])
        self.group_weights = {half: d.weights(powers, half) for half in halves(groups)}
        self.group_powers = d.by_step(lambda k: powers[k])
        self.all_groups = self.w.splat(powers[groups], groups)

    def spread(self, state: Value) -> Value:
        return self.w.splat(state, self.doubles.lanes)

    def onward(self, maps: list[Function], own: list[Function]) -> list[Function]:
        return maps

    def states(self, state: Value, functions: list[Function]) -> tuple[list[Value], Value]:
        v, d, w = self.v, self.doubles, self.w
        terms = [b for _, b in functions]
        ends = w.cast(v.lasts(terms), "float64")
        if self.sum_first:
            ends = w.splat(self.powers[1], d.lanes) * ends
        for half, weight in self.group_weights.items():
            ends = w.fma(weight, d.half_before(ends, half), ends)
        # Minus zero, so that a sum with it is what is added to it.
        before = w.fma(self.group_powers, state, d.shifted(ends, -0.0))
        after = w.fma(self.all_groups, state, d.splat_last(ends, 0))
        return v.spread(w.cast(before, self.dtype), len(terms)), after
