"""Chunks of the steps in threads of their own, where composing takes less than running.

For running extremes, sums, and logarithms of sums, whose elements depend on no state. To compose
steps of these is to find the extreme or the sum of all their elements: nothing waits for the step
before, and nothing is stored. So a thread composes all steps before its chunk while the
chunks before it are run. Chunks get shorter from one to the next, by what composing takes of the
time (`scanlib.ops.parts.composing_cost`), so that all end together.

A running extreme is right if it is what the chunk before ends with. A sum, or its logarithm, is
rounded less than by one step after the other; it is taken if both are finite: then no step on the
way has overflowed, and composing gives up where it does, or an element is infinity or NaN. Minus
infinity, the logarithm of nothing, must be in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from scanlib.backends.numba.elemwise.chunks import RUN, ChunkWriter
from scanlib.backends.numba.elemwise.extremes import extreme_of_all
from scanlib.backends.numba.elemwise.logs import all_below_infinity, exp
from scanlib.backends.numba.elemwise.steps import OPTIONS, is_nan, some_nan
from scanlib.ops.elemwise_scan import Recurrence
from scanlib.ops.parts import composing_cost, simple_family

VERSION = 2

# Sums in any order that the compiler chooses.
_ADDED = {**OPTIONS, "fastmath": {"nsz", "reassoc"}}


_all_largest, _all_smallest = extreme_of_all[True], extreme_of_all[False]


@njit(**OPTIONS)
def _largest(b: Any, n: int, value: Any) -> Any:
    """The largest of a value and `n` elements, none of which is NaN."""
    value, done = _all_largest(b, n, value)
    while done < n:
        value = b[done] if b[done] > value else value
        done += 1
    return value


@njit(**OPTIONS)
def _smallest(b: Any, n: int, value: Any) -> Any:
    value, done = _all_smallest(b, n, value)
    while done < n:
        value = b[done] if b[done] < value else value
        done += 1
    return value


@njit(**_ADDED)
def _sum(terms: Any, n: int) -> Any:
    total = terms.dtype.type(0)
    for j in range(n):
        total += terms[j]
    return total


def _extreme(pick: Callable[..., Any]) -> Callable[..., tuple[Any, bool]]:
    @njit(**OPTIONS)
    def extreme(b: Any, n: int, value: Any) -> tuple[Any, bool]:
        """Return the extreme of a value and `n` elements, and whether none of them is NaN."""
        if is_nan(value) or some_nan(b, n):
            return value, False
        return pick(b, n, value), True

    return extreme


@njit(**_ADDED)
def _added(b: Any, n: int) -> float:
    total = 0.0
    for j in range(n):
        total += np.float64(b[j])
    return total


@njit(**OPTIONS)
def _plus(b: Any, n: int, value: float) -> tuple[float, bool]:
    """Return the sum of a value and `n` elements, and whether it is finite."""
    value += _added(b, n)
    return value, bool(np.isfinite(value))


@njit(**OPTIONS)
def _with_terms(terms: Any, n: int, largest: float, total: float) -> tuple[float, float]:
    """Add the exponentials of `n` terms, which are overwritten, to ``exp(largest) * total``."""
    highest = _largest(terms, n, terms.dtype.type(-np.inf))
    if highest == -np.inf:
        return largest, total
    for j in range(n):
        terms[j] = exp(terms[j] - highest)
    if highest > largest:
        return np.float64(highest), np.exp(largest - highest) * total + _sum(terms, n)
    return largest, total + np.exp(highest - largest) * _sum(terms, n)


@njit(**OPTIONS)
def _logs(b: Any, n: int, work: Any, largest: float, total: float) -> tuple[float, float, bool]:
    """Compose ``exp(largest) * total`` with the steps ``h = logaddexp(h, b)`` of a block."""
    if not largest < np.inf or not all_below_infinity(b[:n]):
        return largest, total, False
    for j in range(n):
        work[j] = b[j]
    largest, total = _with_terms(work, n, largest, total)
    return largest, total, True


def _shifted_logs(reverse: bool) -> Callable[..., tuple[float, float, bool]]:
    @njit(**OPTIONS)
    def shifted_logs(
        a: Any, b: Any, n: int, work: Any, largest: float, total: float
    ) -> tuple[float, float, bool]:
        """Compose it with the steps ``h = logaddexp(h + a, b)``: `b` meets all later shifts."""
        shift = a.dtype.type(0)
        for k in range(n):
            j = k if reverse else n - 1 - k
            work[j] = b[j] + shift
            shift += a[j]
        largest += shift
        if not largest < np.inf or not all_below_infinity(work[:n]):
            return largest, total, False
        largest, total = _with_terms(work, n, largest, total)
        return largest, total, True

    return shifted_logs


# By name, and by whether they walk backwards.
COMPOSE: dict[tuple[str, bool], Callable[..., Any]] = {
    **{("maximum", reverse): _extreme(_largest) for reverse in (False, True)},
    **{("minimum", reverse): _extreme(_smallest) for reverse in (False, True)},
    **{("sum", reverse): _plus for reverse in (False, True)},
    **{("logaddexp", reverse): _logs for reverse in (False, True)},
    **{("logaddexp_shifted", reverse): _shifted_logs(reverse) for reverse in (False, True)},
}


class PrefixWriter(ChunkWriter):
    """Writes chunks of running extremes, sums, and logarithms of sums."""

    @property
    def maps(self) -> list[int]:
        return [recurrence.parts[0] for recurrence in self.lowered.recurrences]

    def write_maps(self) -> None:
        """Write the composition of all steps before a chunk."""
        line, recurrences = self.source.line, self.lowered.recurrences
        self.write_constants()
        for part, recurrence in zip(self.maps, recurrences, strict=True):
            if recurrence.family == "log-affine":
                line(f"W{part} = np.empty({self.block}, {self.dtypes[part]})")
                line(f"V{part}, S{part} = np.float64(before{part}_1[0]), 1.0")
            elif simple_family(recurrence) == "sum":
                line(f"V{part} = np.float64(before{part}_1[0])")
            else:
                line(f"V{part} = before{part}_1[0]")
        line("i = 0")
        with self.source.block("while runs and i < bounds[chunk]:"):
            line(f"n = {self.block}")
            line("low = steps - i - n" if self.reverse else "low = i")
            self.write_views_of_rows()
            for number, recurrence in enumerate(recurrences):
                self.write_elements(number)
                self.write_composition(number, recurrence)
            line("i += n")
        line("known[chunk] = runs")
        for part, recurrence in zip(self.maps, recurrences, strict=True):
            is_log = recurrence.family == "log-affine"
            value = f"V{part} + np.log(S{part})" if is_log else f"V{part}"
            line(f"before{part}_1[chunk] = {value}")

    def write_composition(self, number: int, recurrence: Recurrence) -> None:
        (part,), ((term,),) = recurrence.parts, recurrence.terms
        dtype = self.nexts[part].type.dtype
        chosen = [k for k in (term.coefficient, recurrence.constants[0]) if k is not None]
        names = [self.elements[number, k] for k in chosen]
        names = [name if name[0] == "E" else self.filled(name, dtype) for name in names]
        family, values = simple_family(recurrence), f"V{part}"
        if family == "log-affine":
            family = "logaddexp" if len(names) == 1 else "logaddexp_shifted"
            values = f"V{part}, S{part}"
            call = f"{', '.join(names)}, n, W{part}, {values}"
        else:
            call = f"{', '.join(names)}, n, {values}"
        key = f"scanlib compose {family} {self.reverse} {VERSION}"
        function = self.source.function(COMPOSE[family, self.reverse], key)
        line = self.source.line
        line(f"{values}, fine{part} = {function}({call})")
        line(f"runs = runs and fine{part}")

    def write_cuts(self) -> None:
        """Write chunks of one block and a share of the rest, each shorter than the one before."""
        line = self.source.line
        line("shares, share = 0.0, 1.0")
        with self.source.block("for k in range(chunks):"):
            line("shares += share")
            line(f"share *= {1 - composing_cost(self.lowered)!r}")
        line(f"rest, done, share = steps - chunks * {self.block}, 0.0, 1.0")
        with self.source.block("for k in range(chunks):"):
            line(f"blocks = k + np.int64(rest * (done / shares)) // {self.block}")
            line(f"bounds[k] = blocks * {self.block}")
            line("done += share")
            line(f"share *= {1 - composing_cost(self.lowered)!r}")

    def write_first_job(self) -> None:
        self.source.line(f"job, first_chunk, together = {RUN}, 0, chunks")
        self.write_first_values()

    def is_right(self) -> str:
        tests = ["known[chunk]"]
        for part, recurrence in zip(self.maps, self.lowered.recurrences, strict=True):
            values = f"after{part}_1[chunk - 1]", f"before{part}_1[chunk]"
            test = f"{values[0]} == {values[1]}"
            if simple_family(recurrence) in ("log-affine", "sum"):
                test = f"({test} or np.isfinite({values[0]}) and np.isfinite({values[1]}))"
            tests.append(test)
        return " and ".join(tests)
