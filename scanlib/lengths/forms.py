"""The algebra of lengths: sums of symbols, compared without values.

A `LengthForm` is ``c_0 + Σ c_i s_i`` with integers `c` and symbols `s`, each of which is the length
of an array along an axis, an integer of the graph, or a minimum of forms. A length is *known* if
its form is a number, *equal* to another one if both have one form, and *bounded* by one if their
difference has no negative term. All symbols are taken to be nonnegative: none of them is ever the
length of anything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib._compat import variable_number

# A symbol: "axis" of a variable and its number, "integer" and a variable, or "minimum" and forms.
Symbol = tuple[str, Any]


@dataclass(frozen=True)
class LengthForm:
    """A sum of symbols and a number; see the module's text."""

    terms: frozenset[tuple[Symbol, int]] = frozenset()
    number: int = 0

    @classmethod
    def of(cls, kind: str, what: Any) -> LengthForm:
        """Return the form that is one symbol."""
        return cls(frozenset({((kind, what), 1)}))

    @classmethod
    def of_axis(cls, variable: Variable, axis: int = 0) -> LengthForm:
        """Return the length of an array along an axis as a symbol."""
        return cls.of("axis", (variable, axis))

    def __add__(self, other: LengthForm | int) -> LengthForm:
        if isinstance(other, int):
            return LengthForm(self.terms, self.number + other)
        total = dict(self.terms)
        for symbol, factor in other.terms:
            total[symbol] = total.get(symbol, 0) + factor
        terms = frozenset((symbol, factor) for symbol, factor in total.items() if factor)
        return LengthForm(terms, self.number + other.number)

    def __neg__(self) -> LengthForm:
        return LengthForm(
            frozenset((symbol, -factor) for symbol, factor in self.terms), -self.number
        )

    def __sub__(self, other: LengthForm | int) -> LengthForm:
        return self + (-other)

    @property
    def constant(self) -> int | None:
        """The number that the form is, None if symbols take part."""
        return None if self.terms else self.number

    @property
    def is_zero(self) -> bool:
        return not self.terms and self.number == 0

    def minima(self) -> list[tuple[frozenset[LengthForm], LengthForm]]:
        """Return each minimum among the terms, with what else the form consists of."""
        return [
            (symbol[1], self - LengthForm.of(*symbol))
            for symbol, factor in self.terms
            if symbol[0] == "minimum" and factor == 1
        ]

    def at_most(self, other: LengthForm) -> bool:
        """Whether the form is sure to be no greater than another."""
        gap = other - self
        if gap.number >= 0 and all(factor > 0 for _, factor in gap.terms):
            return True
        if any((each + rest).at_most(other) for forms, rest in self.minima() for each in forms):
            return True
        return any(
            all(self.at_most(each + rest) for each in forms) for forms, rest in other.minima()
        )

    def is_length(self) -> bool:
        """Whether the form is sure not to be negative: no integer of the graph takes part."""
        if self.number < 0:
            return False
        for (kind, what), factor in self.terms:
            if kind == "minimum" and factor == -1:  # any of the forms is as great
                rest = self + LengthForm.of(kind, what)
                return any((rest - form).is_length() for form in what)
            if factor < 0 or kind == "integer":
                return False
            if kind == "minimum" and not all(form.is_length() for form in what):
                return False
        return True

    def variable(self) -> Variable:
        """Return the form as an int64 scalar of the graph."""
        total: Variable | None = None
        if self.number or not self.terms:
            total = pt.constant(self.number, dtype="int64")
        for (kind, what), factor in sorted(self.terms, key=lambda term: (-term[1], _age(term[0]))):
            value = _symbol(kind, what)
            for _ in range(abs(factor)):
                if total is None:
                    total = value if factor > 0 else -value
                else:
                    total = total + value if factor > 0 else total - value
        return total


def _symbol(kind: str, what: Any) -> Variable:
    if kind == "axis":
        return what[0].shape[what[1]]
    if kind == "integer":
        return pt.cast(what, "int64")
    first, *others = sorted(what, key=_ages)
    least = first.variable()
    for other in others:
        least = pt.minimum(least, other.variable())
    return least


def _age(symbol: Symbol) -> tuple[int, ...]:
    """Return what symbols are sorted by, so that every process writes the same graph."""
    kind, what = symbol
    if kind == "minimum":
        return tuple(number for form in sorted(what, key=_ages) for number in _ages(form))
    variable, axis = what if kind == "axis" else (what, -1)
    return variable_number(variable), axis


def _ages(form: LengthForm) -> tuple[int, ...]:
    ages = sorted((*_age(symbol), factor) for symbol, factor in form.terms)
    return *(number for age in ages for number in age), form.number


def number(value: int) -> LengthForm:
    """Return the form of a number."""
    return LengthForm(number=value)


def minimum(forms: Iterable[LengthForm]) -> LengthForm:
    """Return the least of some forms, with those left out that are never the only least one."""
    pending, kept = list(forms), list[LengthForm]()
    while pending:
        form = pending.pop()
        nested = form.minima()
        if nested:
            inner, rest = nested[0]
            pending += [each + rest for each in inner]
            continue
        if any(other.at_most(form) for other in kept):
            continue
        kept = [other for other in kept if not form.at_most(other)] + [form]
    return kept[0] if len(kept) == 1 else LengthForm.of("minimum", frozenset(kept))


def resolve(form: LengthForm, known: dict[Symbol, int]) -> LengthForm:
    """Return a form with symbols replaced by the numbers they are known to be."""
    if not known or not form.terms:
        return form
    total = number(form.number)
    for symbol, factor in form.terms:
        kind, what = symbol
        value = LengthForm.of(*symbol)
        if kind == "minimum":
            value = minimum(resolve(each, known) for each in what)
        for inner, _ in list(value.terms):
            if inner in known and value == LengthForm.of(*inner):
                value = number(known[inner])
        for _ in range(abs(factor)):
            total = total + value if factor > 0 else total - value
    return total


def learn(form: LengthForm, value: int, known: dict[Symbol, int]) -> None:
    """Remember what one symbol must be, as a form is known to be a number."""
    gap = resolve(form, known)
    if len(gap.terms) == 1:
        ((symbol, factor),) = gap.terms
        if factor == 1:
            known[symbol] = value - gap.number
