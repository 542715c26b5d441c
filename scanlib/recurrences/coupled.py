r"""Several steps at once of coupled affine recurrences, as straight code.

With ``s`` the values before a group of steps, the value of part `p` after step `u` of the group is

    y_p[u] = Σ_s P_{pus} · s + F_pu

where the coefficients `P` and the constants `F` follow the recurrence itself, and so do not wait
for `s`. Only values that lie fewer steps back than the group is long are composed in this way; the
far taps of a season are read as they are and belong to `F`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from scanlib.kernels.language import BOOL, FLOATS, Local, Type, Value
from scanlib.kernels.spans import Items
from scanlib.ops.lowered.elemwise_scan import Recurrence
from scanlib.recurrences.block_scans import Arithmetic, History, StepBlock
from scanlib.recurrences.trust import MODERATE, above, extreme, is_moderate, some

GROUP = 4

Symbol = tuple[int, int]  # a part, and how many steps before the group
_Product = tuple[Value | None, Value | None]  # None is one


@dataclass
class _Form:
    """Coefficients of values before the group (None is one), and the constant."""

    coefficients: dict[Symbol, Value | None]
    constant: Value | None


def scan_coupled(
    block: StepBlock,
    recurrence: Recurrence,
    elements: Mapping[int, Items],
    histories: Mapping[int, History],
    read: Collection[int],
) -> Value:
    """Write the scan of one block; return whether all values can be trusted.

    Of a part that only delays what another one reads, nothing but the last value of a group is
    computed, where nobody else reads it. The recurrence is affine, of any number of parts and taps;
    `elements` are by their number in it, histories by part, and of the parts `read` the values at
    all steps are read.
    """
    w = block.writer
    dtype = histories[recurrence.parts[0]].values.dtype
    trusted = w.local(True, BOOL)
    inexact = dtype in FLOATS
    if inexact:
        used = {term.coefficient for terms in recurrence.terms for term in terms}
        for k in sorted(k for k in used if k is not None):
            w.assign(trusted, w.copy(trusted) & ~some(w, elements[k], block.size, extreme))
    good, delays = w.copy(trusted), _delays(recurrence, read)
    with w.when(good):
        done: Value = w.constant(0, Type("int64"))
        for steps in (GROUP, 1):
            done = _Groups(block, recurrence, elements, histories, delays, steps).write(done)
        for part in recurrence.parts if inexact else ():
            own = histories[part]
            if part in delays:
                last = own.at(-1).real(block.step(block.size))
                w.assign(trusted, w.copy(trusted) & is_moderate(w, last))
                continue
            bad = some(w, own.values, block.size + own.depth, above(MODERATE[dtype]))
            w.assign(trusted, w.copy(trusted) & ~bad)
    return w.copy(trusted)


def _delays(recurrence: Recurrence, read: Collection[int]) -> set[int]:
    """Return the parts that nothing reads but one step of the recurrence, after one step.

    Such a part is added, as it is, to parts of which all values are known: where these are no large
    numbers, it is none, but for its last value.
    """
    rows = dict(zip(recurrence.parts, recurrence.terms, strict=True))
    if any(term.tap != -1 for terms in rows.values() for term in terms):
        return set()
    known, before = set(read) & set(rows), -1
    while before < len(known):
        before = len(known)
        for part in list(known):
            left = [term for term in rows[part] if term.part not in known]
            if len(left) == 1 and left[0].coefficient is None:
                known.add(left[0].part)
    return known - set(read) if len(known) == len(rows) else set()


@dataclass
class _Groups:
    """Writes the loop over groups of some steps."""

    block: StepBlock
    recurrence: Recurrence
    elements: Mapping[int, Items]
    histories: Mapping[int, History]
    delays: Collection[int]
    steps: int

    def __post_init__(self) -> None:
        self.w = self.block.writer
        self.dtype = self.histories[self.recurrence.parts[0]].values.dtype
        self.kept: dict[Symbol, Local] = {}
        self.arithmetic = Arithmetic(self.w)

    def write(self, begin: Value) -> Value:
        """Write the groups from a step on; return the step after them."""
        w, n = self.w, self.block.size
        end = begin + ((n - begin) & -self.steps) if self.steps > 1 else n
        first = self.block.step(begin)
        for symbol in self.symbols():
            # The group computes it for the next one: it never needs to be read again. Where there
            # is no group, what is read here is memory of the history all the same.
            part, back = symbol
            if back <= self.steps:
                self.kept[symbol] = w.local(self.histories[part].at(-back).real(first))
        with w.loop(begin, end, self.steps) as k:
            self.write_group(self.block.step(k))
        return end

    def symbols(self) -> list[Symbol]:
        """Return the values before a group that it reads as such."""
        found: dict[Symbol, None] = {}
        for u in range(self.steps):
            for terms in self.recurrence.terms:
                for term in terms:
                    back = -term.tap - u
                    if back > 0:
                        found[term.part, back] = None
        return list(found)

    def write_group(self, j: Value) -> None:
        forms: list[dict[int, _Form]] = []
        read: dict[Symbol, Value] = {}
        values: dict[Symbol, Value] = {}
        for u in range(self.steps):
            at = (j - u if self.block.reverse else j + u) if u else j
            item = cache(lambda k, at=at: self.elements[k].real(at))
            current: dict[int, _Form] = {}
            rows = zip(
                self.recurrence.parts, self.recurrence.terms, self.recurrence.constants, strict=True
            )
            for part, terms, constant in rows:
                sums: dict[Symbol, list[_Product]] = {}
                free: list[_Product] = [] if constant is None else [(None, item(constant))]
                for term in terms:
                    factor = None if term.coefficient is None else item(term.coefficient)
                    back = -term.tap
                    if back > u and back >= self.steps:
                        free.append((factor, self.past(term.part, back - u, j, read)))
                    elif back > u:
                        sums.setdefault((term.part, back - u), []).append((factor, None))
                    else:
                        form = forms[u - back][term.part]
                        for symbol, coefficient in form.coefficients.items():
                            sums.setdefault(symbol, []).append((factor, coefficient))
                        if form.constant is not None:
                            free.append((factor, form.constant))
                coefficients = {
                    symbol: None if products == [(None, None)] else self.sum_of(products)
                    for symbol, products in sums.items()
                }
                current[part] = _Form(coefficients, self.sum_of(free) if free else None)
            forms.append(current)
        stored = []
        for u, current in enumerate(forms):
            for part, form in current.items():
                if part in self.delays and u < self.steps - 1:
                    continue
                total = form.constant if form.constant is not None else self.number(0)
                # The newest values come last: they are what the next group waits for.
                for symbol in sorted(form.coefficients, key=lambda s: -s[1]):
                    factor = form.coefficients[symbol]
                    value = self.past(*symbol, j, read)
                    total = self.arithmetic.fma(
                        factor if factor is not None else self.number(1), value, total
                    )
                stored.append((part, u, total))
                values[part, self.steps - u] = total
        for part, u, total in stored:
            self.histories[part].at(u).store(j, total)
        for symbol, local in self.kept.items():
            self.w.assign(local, values[symbol])

    def past(self, part: int, back: int, j: Value, read: dict[Symbol, Value]) -> Value:
        """Return the value of a part `back` steps before the group."""
        if (part, back) not in read:
            if (part, back) in self.kept:
                read[part, back] = self.w.copy(self.kept[part, back])
            else:
                read[part, back] = self.histories[part].at(-back).real(j)
        return read[part, back]

    def number(self, value: int) -> Value:
        return self.w.constant(value, Type(self.dtype))

    def sum_of(self, products: list[_Product]) -> Any:
        """Return a sum of products, whose factors are one where they are None."""
        total: Any = None
        for x, y in products:
            if x is not None and y is not None and total is not None:
                total = self.arithmetic.fma(x, y, total)
                continue
            factors: list[Any] = [factor for factor in (x, y) if factor is not None]
            value = factors[0] * factors[1] if len(factors) == 2 else (*factors, self.number(1))[0]
            total = value if total is None else total + value
        return total
