r"""Running extremes and running logarithms of sums.

    cummax        h[t] = max(h[t-1], x[t])
    cummin        h[t] = min(h[t-1], x[t])
    cumlogsumexp  h[t] = log(exp h[t-1] + exp x[t])

The state starts from the identity of the operation: -∞ (for integers the smallest number) for
maxima, ∞ for minima, and ``-∞ = log 0`` for sums of exponentials. So there is no first step that
differs, and an array without rows needs no care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable

from scanlib.frontend.axes import (
    read_arguments,
    read_axis,
    read_numbers,
    recurrence,
)
from scanlib.frontend.values import read_flag
from scanlib.ops.logaddexp import logaddexp


def cummax(x: Any, axis: int = 0, reverse: bool = False) -> Variable:
    """Return the running maximum along an axis.

    Parameters
    ----------
    x : tensor_like
        Numbers or truth values; not complex.
    axis : int, optional
        The axis to accumulate along.
    reverse : bool, optional
        Accumulate from the last row to the first: ``y[t]`` is the maximum of ``x[t], x[t+1], …``.

    Returns
    -------
    TensorVariable
        Shape and dtype of `x`. From the first NaN on, everything is NaN, as in
        ``numpy.maximum.accumulate``.

    Raises
    ------
    TypeError
        If `x` is not numeric, or complex.
    ValueError
        If `x` is a scalar.
    numpy.exceptions.AxisError
        If there is no such axis.

    Notes
    -----
    Where several rows share the maximum, the derivative goes to the one seen last.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> print(pytensor.function([x], scanlib.cummax(x))([1.0, 3.0, 2.0, 5.0]))
    [1. 3. 3. 5.]
    """
    return _running("cummax", "buif", x, lambda h, x: pt.maximum(x, h), _lowest, axis, reverse)


def cummin(x: Any, axis: int = 0, reverse: bool = False) -> Variable:
    """Return the running minimum along an axis.

    Arguments, result and errors are those of `cummax`, with minima for maxima.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> print(pytensor.function([x], scanlib.cummin(x, reverse=True))([1.0, 3.0, 2.0, 5.0]))
    [1. 2. 2. 5.]
    """
    return _running("cummin", "buif", x, lambda h, x: pt.minimum(x, h), _highest, axis, reverse)


def cumlogsumexp(x: Any, axis: int = 0, reverse: bool = False) -> Variable:
    """Return the running ``log(sum(exp(x)))`` along an axis, without overflow.

    Parameters
    ----------
    x : tensor_like
        Real numbers, no truth values; integers are cast to `floatX`.
    axis, reverse
        As in `cummax`.

    Returns
    -------
    TensorVariable
        Shape of `x`. Rows of -∞ add nothing, ∞ stays, NaN stays.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `cummax`.

    Notes
    -----
    Computed as ``numpy.logaddexp.accumulate`` does. The derivative with respect to rows of -∞
    is finite: zero where the sum is finite.

    Examples
    --------
    >>> import numpy as np, pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> f = pytensor.function([x], scanlib.cumlogsumexp(x))
    >>> print(f([-np.inf, 1000.0, 1000.0]))
    [         -inf 1000.         1000.69314718]
    """
    return _running("cumlogsumexp", "iuf", x, logaddexp, _lowest, axis, reverse)


def _running(
    function: str,
    kinds: str,
    x: Any,
    step: Callable[[Variable, Variable], Variable],
    identity: Callable[[np.dtype], Any],
    axis: int,
    reverse: bool,
) -> Variable:
    (x,) = read_numbers(function, kinds, x=x).values()
    axis = read_axis(function, axis, x.type.ndim, "x")
    reverse = read_flag(function, "reverse", reverse)
    if step is logaddexp and np.dtype(x.type.dtype).kind != "f":
        x = pt.cast(x, config.floatX)
    dtype = x.type.dtype
    (argument,) = read_arguments({"x": (x, 0)}, x.type.ndim, axis)
    start = np.full((1,) * (x.type.ndim - 1), identity(np.dtype(dtype)), dtype=dtype)
    return recurrence(function, step, [argument], pt.constant(start), axis, reverse)


def _lowest(dtype: np.dtype) -> Any:
    """Return the number that every other one of a dtype is at least as large as."""
    if dtype.kind == "b":
        return False
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Any:
    """Return the number that every other one of a dtype is at most as large as."""
    if dtype.kind == "b":
        return True
    return np.inf if dtype.kind == "f" else np.iinfo(dtype).max
