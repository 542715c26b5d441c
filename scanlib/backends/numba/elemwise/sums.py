"""Kernels of recurrences in which a sum comes first: ``s = h + g``, ``h = a * s``.

They write the sums of `n` steps to `s`. The state `h` before the block is an argument; what they
return is the state after it and whether all can be trusted (see `steps`). See
`scanlib.ops.sums_first`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from scanlib.backends.numba.elemwise import lanes
from scanlib.backends.numba.elemwise.steps import OPTIONS, is_extreme, is_moderate


def _sums_first(reverse: bool, fixed: bool) -> Callable[..., tuple[Any, bool]]:
    several_steps = lanes.scan(reverse, fixed=fixed, sum_first=True)

    @njit(**OPTIONS)
    def sums_first(a: Any, g: Any, s: Any, n: int, state: Any, ahead: Any) -> tuple[Any, bool]:
        """``s = h + g``, ``h = a * s``, maybe with one `a`; takes and returns the state `h`."""
        if (is_extreme(a) if fixed else False) or not is_moderate(state):
            return state, False
        after, done, lost = several_steps(a, g, s, 0, n, state, ahead)
        while done < n:
            j = n - 1 - done if reverse else done
            total = after + g[j]
            s[j] = total
            after = (a if fixed else a[j]) * total
            lost |= (False if fixed else is_extreme(a[j])) | (not is_moderate(s[j]))
            done += 1
        return s.dtype.type(after), not lost

    return sums_first


# By name and by whether they walk backwards.
KERNELS: dict[tuple[str, bool], Callable[..., tuple[Any, bool]]] = {
    ("sums_first", False): _sums_first(False, fixed=False),
    ("sums_first", True): _sums_first(True, fixed=False),
    ("sums_first_fixed", False): _sums_first(False, fixed=True),
    ("sums_first_fixed", True): _sums_first(True, fixed=True),
}
