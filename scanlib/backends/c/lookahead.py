"""Several steps at once of coupled affine recurrences, as straight C code.

With ``s`` the values before a group of steps, the value of part `p` after step `u` of the group is

    y_p[u] = Σ_s P_{pus} · s + F_pu

where the coefficients `P` and the constants `F` follow the recurrence itself, and so do not wait
for `s`. Only values that lie fewer steps back than the group is long are composed in this way; the
far taps of a season are read as they are and belong to `F`. From one group to the next, `s` is in
local variables: what has just been written takes longer to read than to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scanlib.backends.c.source import Source
from scanlib.ops.elemwise_scan import Recurrence

GROUP = 4

Symbol = tuple[int, int]  # a part, and how many steps before the group


@dataclass
class Form:
    """Coefficients of values before the group (None is one), and the constant, as expressions."""

    coefficients: dict[Symbol, str | None]
    constant: str | None


class Lookahead:
    """Writes the scan of one block of a coupled affine recurrence.

    The values of a part are in ``H{part}``, in the order of memory, with those before the block
    in front (`depths` of them), or behind where the loop walks backwards. `element` gives the
    expression of an element at a step, from its position and the place of the step.
    """

    def __init__(
        self,
        source: Source,
        recurrence: Recurrence,
        depths: dict[int, int],
        reverse: bool,
        element: Callable[[int, str], str],
        item: str,
    ) -> None:
        self.source = source
        self.recurrence = recurrence
        self.depths = depths
        self.reverse = reverse
        self.element = element
        self.item = item  # the C type
        self.read: dict[Symbol, str] = {}
        self.kept: dict[Symbol, str] = {}

    def place(self, part: int, step: int) -> str:
        """Return where the value of a part is, `step` steps after the first of the group."""
        return f"H{part}[j + {-step if self.reverse else self.depths[part] + step}]"

    def write(self) -> None:
        """Write the loop over groups of steps, and the steps that are left."""
        self.source.line("npy_intp k = 0;")
        for steps in (GROUP, 1):
            first = len(self.source.lines)
            self.read, self.kept = {}, {}
            with self.source.block(f"for (; k + {steps} <= n; k += {steps})"):
                self.source.line(f"const npy_intp j = {'n - 1 - k' if self.reverse else 'k'};")
                self.write_group(steps)
            start = "[n - 1" if self.reverse else "[0"
            self.source.lines[first:first] = [
                f"  {self.item} {name} = {self.place(part, -back).replace('[j', start)};"
                for (part, back), name in self.kept.items()
            ]

    def write_group(self, steps: int) -> None:
        """Write a group: its forms, then its values, then where they go."""
        forms: list[dict[int, Form]] = []
        for u in range(steps):
            forms.append(self.forms_of(u, steps, forms))
        results: dict[Symbol, str] = {}
        for u, current in enumerate(forms):
            for part, form in current.items():
                # What is known last is added last.
                parts = [] if form.constant is None else [form.constant]
                parts += [
                    _product(coefficient, self.before(*symbol))
                    for symbol, coefficient in sorted(
                        form.coefficients.items(), key=lambda item: -item[0][1]
                    )
                ]
                results[part, steps - u] = self.assign(parts or [f"{self.item}(0)"])
        for (part, back), name in results.items():
            self.source.line(f"{self.place(part, steps - back)} = {name};")
        # A value may be one from before the group, as it is: all are read before any is replaced.
        replaced = set(self.kept.values())
        moved = {name: results[symbol] for symbol, name in self.kept.items()}
        for name, value in moved.items():
            if value in replaced:
                moved[name] = self.source.name("q")
                self.source.line(f"const {self.item} {moved[name]} = {value};")
        for name, value in moved.items():
            self.source.line(f"{name} = {value};")

    def forms_of(self, u: int, steps: int, before: list[dict[int, Form]]) -> dict[int, Form]:
        """Return the parts' forms after step `u`, from the forms of the steps before."""
        at = f"j {'-' if self.reverse else '+'} {u}"
        current: dict[int, Form] = {}
        recurrence = self.recurrence
        for part, terms, constant in zip(
            recurrence.parts, recurrence.terms, recurrence.constants, strict=True
        ):
            sums: dict[Symbol, list[str | None]] = {}
            free = [] if constant is None else [self.element(constant, at)]
            for term in terms:
                factor = None if term.coefficient is None else self.element(term.coefficient, at)
                back = -term.tap
                if back > u and back >= steps:
                    free.append(_product(factor, self.past(term.part, back - u)))
                elif back > u:
                    sums.setdefault((term.part, back - u), []).append(factor)
                else:
                    form = before[u - back][term.part]
                    for symbol, coefficient in form.coefficients.items():
                        both = coefficient if factor is None else _times(factor, coefficient)
                        sums.setdefault(symbol, []).append(both)
                    if form.constant is not None:
                        free.append(_product(factor, form.constant))
            current[part] = self.named(sums, free)
        return current

    def before(self, part: int, back: int) -> str:
        """Return the variable of a value before the group that the group before has computed."""
        if (part, back) not in self.kept:
            self.kept[part, back] = self.source.name("p")
        return self.kept[part, back]

    def past(self, part: int, back: int) -> str:
        """Return the name of the value of a part `back` steps before the group."""
        if (part, back) not in self.read:
            self.read[part, back] = self.assign([self.place(part, -back)])
        return self.read[part, back]

    def named(self, sums: dict[Symbol, list[str | None]], free: list[str]) -> Form:
        coefficients: dict[Symbol, str | None] = {}
        for symbol, factors in sums.items():
            one = f"{self.item}(1)"
            coefficients[symbol] = (
                None if factors == [None] else self.assign([factor or one for factor in factors])
            )
        return Form(coefficients, self.assign(free) if free else None)

    def assign(self, parts: list[str]) -> str:
        """Write a local variable with the sum of `parts`."""
        if len(parts) == 1 and parts[0].isidentifier():
            return parts[0]
        name = self.source.name("q")
        self.source.line(f"const {self.item} {name} = {self.item}({' + '.join(parts)});")
        return name


def _times(a: str, b: str | None) -> str:
    return a if b is None else f"{a} * {b}"


def _product(factor: str | None, value: str) -> str:
    return value if factor is None else f"{factor} * {value}"
