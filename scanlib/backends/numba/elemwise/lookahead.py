"""Several steps at once of coupled affine recurrences, as straight code.

With ``s`` the values before a group of steps, the value of part `p` after step `u` of the group is

    y_p[u] = Σ_s P_{pus} · s + F_pu

where the coefficients `P` and the constants `F` follow the recurrence itself, and so do not wait
for `s`. Only values that lie fewer steps back than the group is long are composed in this way; the
far taps of a season are read as they are and belong to `F`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scanlib.backends.numba.elemwise import steps as kernels
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import multiply_add
from scanlib.ops.elemwise_scan import Recurrence

GROUP = 4

Symbol = tuple[int, int]
Element = Callable[[int, str], str]  # the text of an element at a step


@dataclass
class Form:
    """Names of the coefficients of values before the group (None is one), and of the constant."""

    coefficients: dict[Symbol, str | None]
    constant: str | None


class Lookahead:
    """Writes the scan of one block of a coupled affine recurrence.

    The values of a part are in ``H{part}``, in the order of memory, with those before the block
    in front (`depths` of them), or behind where the loop walks backwards.
    """

    def __init__(
        self, source: Source, recurrence: Recurrence, depths: dict[int, int], reverse: bool
    ) -> None:
        self.source = source
        self.recurrence = recurrence
        self.depths = depths
        self.reverse = reverse
        self.kept: set[str] = set()

    def at(self, step: int) -> str:
        """Return the place of a step of the group in the order of memory."""
        return _moved("j", -step if self.reverse else step)

    def place(self, part: int, step: int) -> str:
        """Return where the value of a part is, `step` steps after the first of the group."""
        by = -step if self.reverse else self.depths[part] + step
        return f"H{part}[{_moved('j', by)}]"

    def write(self, element: Element, dtype: str) -> None:
        """Write the loop over groups of steps, and the steps that are left."""
        line = self.source.line
        line("k = 0")
        for steps in (GROUP, 1):
            line("j = n - 1 - k" if self.reverse else "j = k")
            self.source.mark_prelude()
            with self.source.block(f"while k + {steps} <= n:"):
                line("j = n - 1 - k" if self.reverse else "j = k")
                self.write_group(element, dtype, steps)
                line(f"k += {steps}")

    def write_group(self, element: Element, dtype: str, steps: int) -> None:
        forms: list[dict[int, Form]] = []
        results: list[tuple[str, str]] = []
        read: dict[Symbol, str] = {}
        values: dict[Symbol, str] = {}
        if np.dtype(dtype.removeprefix("np_")).kind != "c":
            add = self.source.object("multiply_add", multiply_add)
        else:
            add = self.source.function(kernels.multiply_add, f"scanlib add {kernels.VERSION}")
        for u in range(steps):
            item = self.items(element, self.at(u))
            current: dict[int, Form] = {}
            for part, terms, constant in zip(
                self.recurrence.parts,
                self.recurrence.terms,
                self.recurrence.constants,
                strict=True,
            ):
                sums: dict[Symbol, list[str | None]] = {}
                free = [] if constant is None else [item(constant)]
                for term in terms:
                    factor = None if term.coefficient is None else item(term.coefficient)
                    back = -term.tap
                    if back > u and back >= steps:
                        free.append(_times(factor, self.past(term.part, back - u, read, steps)))
                    elif back > u:
                        sums.setdefault((term.part, back - u), []).append(factor)
                    else:
                        form = forms[u - back][term.part]
                        for symbol, coefficient in form.coefficients.items():
                            sums.setdefault(symbol, []).append(_product(factor, coefficient))
                        if form.constant is not None:
                            free.append(_times(factor, form.constant))
                current[part] = self.named(sums, free, dtype)
            forms.append(current)
        for u, current in enumerate(forms):
            for part, form in current.items():
                text = form.constant or f"{dtype}(0)"
                # The newest values come last: they are what the next group waits for.
                for symbol in sorted(form.coefficients, key=lambda s: -s[1]):
                    factor = form.coefficients[symbol] or f"{dtype}(1)"
                    text = f"{add}({factor}, {self.past(*symbol, read, steps)}, {text})"
                name = self.source.name("y")
                self.source.line(f"{name} = {dtype}({text})")
                results.append((self.place(part, u), name))
                values[part, steps - u] = name
        for place, name in results:
            self.source.line(f"{place} = {name}")
        for symbol, name in read.items():
            if name in self.kept:
                self.source.line(f"{name} = {values[symbol]}")

    def items(self, element: Element, at: str) -> Callable[[int], str]:
        """Return a function that gives the names of a step's elements, each read once."""
        names: dict[int, str] = {}

        def item(k: int) -> str:
            text = names.get(k) or element(k, at)
            if not text.isidentifier():
                name = self.source.name("q")
                self.source.line(f"{name} = {text}")
                text = name
            return names.setdefault(k, text)

        return item

    def past(self, part: int, back: int, read: dict[Symbol, str], steps: int) -> str:
        """Return the name of the value of a part `back` steps before the group."""
        if (part, back) not in read:
            name = read[part, back] = self.source.name("s")
            text = f"{name} = {self.place(part, -back)}"
            if back <= steps:
                # The group computes it for the next one: it never needs to be read again.
                self.source.before_loop(text)
                self.kept.add(name)
            else:
                self.source.line(text)
        return read[part, back]

    def named(self, sums: dict[Symbol, list[str | None]], free: list[str], dtype: str) -> Form:
        coefficients: dict[Symbol, str | None] = {}
        for symbol, factors in sums.items():
            if factors == [None]:
                coefficients[symbol] = None
            else:
                coefficients[symbol] = self.assign(
                    [f"{dtype}(1)" if factor is None else factor for factor in factors], dtype
                )
        return Form(coefficients, self.assign(free, dtype) if free else None)

    def assign(self, parts: list[str], dtype: str) -> str:
        if len(parts) == 1 and parts[0].isidentifier():
            return parts[0]
        name = self.source.name("q")
        self.source.line(f"{name} = {dtype}({' + '.join(parts)})")
        return name


def _moved(name: str, by: int) -> str:
    """Return the text of a number that is changed by a known one."""
    return name if not by else f"{name} {'-' if by < 0 else '+'} {abs(by)}"


def _product(a: str | None, b: str | None) -> str | None:
    if a is None or b is None:
        return b if a is None else a
    return f"{a} * {b}"


def _times(factor: str | None, value: str) -> str:
    return value if factor is None else f"{factor} * {value}"
