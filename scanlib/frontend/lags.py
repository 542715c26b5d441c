"""`lags`: values of steps before, by how many steps they lie back."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from scanlib.frontend.values import brief, read_integer

T = TypeVar("T")


class Lags(Generic[T]):
    """Values by lag: ``x[2]`` is the value two steps back. See `lags`."""

    def __init__(self, n: int, first: int, value: Callable[[int], T], rows: Any = None) -> None:
        self.n, self.first, self.rows = n, first, rows
        self._value = value

    @overload
    def __getitem__(self, lag: int) -> T: ...

    @overload
    def __getitem__(self, lag: slice) -> list[T]: ...

    def __getitem__(self, lag: Any) -> Any:
        known = range(self.first, self.n + 1)
        if isinstance(lag, slice):
            start = max(self.first, lag.start or 0)
            stop = self.n + 1 if lag.stop is None else min(lag.stop, self.n + 1)
            return [self._value(k) for k in range(start, stop, lag.step or 1)]
        if lag not in known:
            hint = "; it is what the step computes" if lag == 0 else ""
            count = f"{self.first} to {self.n}" if known else "none"
            raise IndexError(f"lags: there is no lag {brief(lag)} here, the lags are {count}{hint}")
        return self._value(operator.index(lag))

    def __iter__(self) -> Iterator[T]:
        return iter(self[:])

    def __len__(self) -> int:
        return self.n + 1 - self.first

    def __repr__(self) -> str:
        return f"lags({'' if self.rows is None else f'{self.rows}, '}{self.n})"


def past(values: Sequence[T], first: int) -> Lags[T]:
    """Return what a step sees: values from the nearest to the farthest."""
    return Lags(first + len(values) - 1, first, lambda lag: values[lag - first])


def lags(x: Any, n: int) -> Lags[Any]:
    """Give a step values of the `n` steps before, for `loop`.

    Parameters
    ----------
    x : variable or array_like
        In `xs`, an array to iterate over: a step gets ``x[0]``, the row of this step, and ``x[1]``
        to ``x[n]``, the rows one to `n` steps back. The loop starts where all of them exist, so
        the loop takes `n` steps fewer than `x` has rows. In `init`, the `n` rows that adjoin the
        first step, in the order of time: the step gets ``x[1]`` to ``x[n]`` and returns one new
        value.
    n : int
        How many steps back. With 0, a step gets ``x[0]`` alone, or, of a state, nothing.

    Returns
    -------
    Lags
        What stands in `xs` or `init` in the place of an array. In a step, and in the `final` that
        `loop` returns, values are read by lag: ``x[1]``, ``x[1:3]``, ``for value in x``, from the
        nearest to the farthest. In `final`, `rows` has the rows as `init` had them.

    Raises
    ------
    TypeError, ValueError
        If `n` is no integer, or negative.

    Notes
    -----
    With ``reverse=True`` a step back is a row further on: ``x[1]`` is then the row behind.

    Examples
    --------
    >>> import numpy as np, pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> def step(f, _):
    ...     new = f[1] + f[2]
    ...     return new, new
    >>> final, fibonacci = scanlib.loop(step, scanlib.lags(np.array([1, 1]), 2), length=6)
    >>> pytensor.function([], [fibonacci, final[1]])()
    [array([ 2,  3,  5,  8, 13, 21]), array(21)]
    """
    n = read_integer("lags: n", n)
    if n < 0:
        raise ValueError(f"lags: n must not be negative, got {n}; lags count steps back")
    return Lags(n, 1, lambda lag: x[-lag], x)
