r"""First-order linear recurrences: `linear_scan`, `pscan` and discounted sums.

    h[t] = a[t] h[t-1] + b[t]        elementwise
    h[t] = A[t] @ h[t-1] + b[t]      with matrices

for ``t = 0 … T-1``, where ``h[-1]`` is the initial value, zero by default. With `reverse`, the
recurrence reads ``h[t+1]`` instead and starts behind the last row. See `scanlib.frontend.axes`
for the rule that says which arguments have a time axis.

The recurrence is the model example of a prefix scan: its steps compose,
``(a2, b2) ∘ (a1, b1) = (a2 a1, a2 b1 + b2)``, and this composition is associative (G. Blelloch,
"Prefix sums and their applications", 1990).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.scalar import upcast

from scanlib.frontend.axes import (
    check_lengths,
    check_rows,
    read_arguments,
    read_axis,
    read_numbers,
    recurrence,
)
from scanlib.frontend.values import read_flag


def linear_scan(
    a: Any, b: Any, init: Any = None, axis: int = 0, reverse: bool = False, matrix: bool = False
) -> Variable:
    """Compute ``h[t] = a[t] * h[t-1] + b[t]`` along an axis.

    Parameters
    ----------
    a : tensor_like
        Coefficients. With as many dimensions as the result, `a` has the time axis, where it
        may have size 1 for "the same at every step". With fewer dimensions it is the same at
        every step and broadcasts against a row: a scalar, or one coefficient per channel.
    b : tensor_like
        What is added at each step; read by the same rule. The result has as many dimensions
        as the one of `a` and `b` that has more.
    init : tensor_like, optional
        ``h[-1]``, the value before the first step; zero by default. It broadcasts against a
        row: the shape of the result without the time axis.
    axis : int, optional
        The time axis of the result.
    reverse : bool, optional
        Compute ``h[t] = a[t] * h[t+1] + b[t]``, from the last row to the first; `init` is the
        value behind the last row. The result is in the order of `b`.
    matrix : bool, optional
        Compute ``h[t] = A[t] @ h[t-1] + b[t]``. `a` has shape ``(…, T, …, d, d)``, where ``…``
        are batch dimensions and any of the leading dimensions may be 1, or shape ``(d, d)``
        for the same matrix everywhere. `b` holds vectors, shape ``(…, T, …, d)``, if it has
        one dimension less than `a`, and matrices, shape ``(…, T, …, d, m)``, if it has as
        many. With `a` of shape ``(d, d)``, a `b` of two dimensions holds vectors, shape
        ``(T, d)``, and a `b` of more holds matrices. `axis` counts the dimensions of `b`.

    Returns
    -------
    TensorVariable
        ``h``, of the shape that `a`, `b` and `init` broadcast to, in the smallest dtype that
        holds all three.

    Raises
    ------
    TypeError
        If an argument is not numeric, or boolean.
    ValueError
        If ranks or sizes that are known do not fit. Sizes that are not known are compared when
        the function runs.
    numpy.exceptions.AxisError
        If there is no such axis.

    Notes
    -----
    The derivatives are linear scans in the other direction (E. Martin and C. Cundy,
    "Parallelizing linear recurrent neural nets over sequence length", ICLR 2018).

    Examples
    --------
    >>> import numpy as np, pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> a, b = pt.vectors("a", "b")
    >>> f = pytensor.function([a, b], scanlib.linear_scan(a, b))
    >>> print(f([2.0, 2.0, 0.5], [1.0, 1.0, 1.0]))
    [1.  3.  2.5]
    >>> fibonacci = scanlib.linear_scan(
    ...     [[0, 1], [1, 1]], np.zeros((6, 2), dtype="int64"), init=[0, 1], matrix=True
    ... )
    >>> print(fibonacci.eval()[:, 0])
    [1 1 2 3 5 8]
    """
    function = "linear_scan"
    numbers = read_numbers(function, "iufc", a=a, b=b, init=init)
    reverse = read_flag(function, "reverse", reverse)
    if read_flag(function, "matrix", matrix):
        return _matrix_scan(**numbers, axis=axis, reverse=reverse)
    return _diagonal_scan(function, ("a", "b"), **numbers, axis=axis, reverse=reverse)


def _diagonal_scan(
    function: str,
    names: tuple[str, str],
    a: Variable,
    b: Variable,
    init: Variable | None,
    axis: int,
    reverse: bool,
) -> Variable:
    ndim = max(a.type.ndim, b.type.ndim)
    axis = read_axis(function, axis, ndim, names[1] if b.type.ndim == ndim else names[0])
    arguments = read_arguments({names[0]: (a, 0), names[1]: (b, 0)}, ndim, axis)
    check_lengths(function, arguments)
    rows = {argument.name: argument.row_shape() for argument in arguments}
    start = _start(function, rows, (a, b, init), ndim - 1)
    return recurrence(function, lambda h, a, b: a * h + b, arguments, start, axis, reverse)


def _start(
    function: str,
    rows: dict[str, tuple[int | None, ...]],
    values: tuple[Variable, Variable, Variable | None],
    ndim: int,
) -> Variable:
    """Return the value that the state starts from, in its dtype and rank."""
    init = values[2]
    dtype = upcast(*(value.type.dtype for value in values if value is not None))
    if init is None:
        check_rows(function, rows)
        return pt.constant(np.zeros((1,) * ndim, dtype=dtype))
    if init.type.ndim > ndim:
        raise ValueError(
            f"{function}: init must broadcast against one row of the result, which has {ndim} "
            f"dimension(s), but it has {init.type.ndim} ({init.type}); leave out the time axis"
        )
    check_rows(function, {**rows, "init": init.type.shape})
    return pt.expand_dims(pt.cast(init, dtype), tuple(range(ndim - init.type.ndim)))


def _matrix_scan(
    a: Variable, b: Variable, init: Variable | None, axis: int, reverse: bool
) -> Variable:
    function = "linear_scan"
    vectors = _holds_vectors(a, b)
    _check_square(a, b, vectors)
    core = 1 if vectors else 2
    leading = b.type.ndim - core
    axis = read_axis(function, axis, b.type.ndim, "b")
    if axis >= leading:
        raise np.exceptions.AxisError(
            f"{function}: axis={axis} is a dimension of the {'vectors' if vectors else 'matrices'} "
            f"of b, which has {b.type.ndim} dimensions; the time axis must be one of the first "
            f"{leading}"
        )
    arguments = read_arguments({"a": (a, 2), "b": (b, core)}, leading, axis)
    check_lengths(function, arguments)
    matrices, drive = (argument.row_shape() for argument in arguments)
    # Of a matrix, the state takes the batch dimensions and the number of rows.
    rows = {"a": (*matrices[:-1], *(() if vectors else (1,))), "b": drive}
    start = _start(function, rows, (a, b, init), b.type.ndim - 1)
    if start.type.shape[-core] == 1:  # products need all rows, sums broadcast the rest
        size = next((n for n in a.type.shape[-2:] if n is not None), a.shape[-1])
        sizes = [n if n is not None else start.shape[i] for i, n in enumerate(start.type.shape)]
        sizes[-core] = size
        start = pt.alloc(start, *sizes)
    batched = start.type.ndim > core or len(matrices) > 2

    def step(h: Variable, a: Variable, b: Variable) -> Variable:
        if not batched:
            return pt.dot(a, h) + b
        return (pt.matvec(a, h) if vectors else pt.matmul(a, h)) + b

    return recurrence(function, step, arguments, start, axis, reverse)


def _holds_vectors(a: Variable, b: Variable) -> bool:
    """Whether the rows of `b` are vectors, not matrices; see `linear_scan`."""
    shapes = f"got a with {a.type.ndim} and b with {b.type.ndim} dimension(s)"
    if a.type.ndim < 2:
        raise ValueError(
            f"linear_scan: with matrix=True, a must have shape (d, d) or (…, T, …, d, d); {shapes}"
        )
    if a.type.ndim == 2 and b.type.ndim >= 2:
        return b.type.ndim == 2
    if b.type.ndim not in (a.type.ndim - 1, a.type.ndim) or b.type.ndim < 2:
        raise ValueError(
            "linear_scan: with matrix=True, b must have one dimension less than a (vectors of "
            f"size d) or as many (matrices of shape (d, m)), or a must have shape (d, d); {shapes}"
        )
    return b.type.ndim == a.type.ndim - 1


def _check_square(a: Variable, b: Variable, vectors: bool) -> None:
    *_, rows, columns = a.type.shape
    size = b.type.shape[-1 if vectors else -2]
    if rows is not None and columns is not None and rows != columns:
        raise ValueError(
            f"linear_scan: with matrix=True, the matrices of a must be square, got {rows} by "
            f"{columns}"
        )
    d = rows if rows is not None else columns
    if d is not None and size not in (None, 1, d):
        raise ValueError(
            f"linear_scan: the matrices of a have size {d}, but the "
            f"{'vectors' if vectors else 'matrices'} of b have {size} rows"
        )


def pscan(A: Any, X: Any) -> Variable:  # noqa: N803
    """Compute ``Y[t] = A[t] * Y[t-1] + X[t]`` for arrays (batch, length, channels, states).

    Parameters
    ----------
    A, X : tensor_like
        Shape ``(…, length, channels, states)``: the time axis is the third from the end, and
        there may be any number of dimensions before it. Sizes of 1 that are known broadcast,
        over time as well.

    Returns
    -------
    TensorVariable
        ``Y``, of the shape that `A` and `X` broadcast to. ``Y[0]`` is ``X[0]``: the first row
        of `A` multiplies zero (so an infinite or NaN coefficient there gives NaN).

    Raises
    ------
    TypeError
        If an argument is not numeric, or boolean.
    ValueError
        If an argument has less than three dimensions, or the shapes do not fit.

    Notes
    -----
    This is the scan at the heart of selective state-space models (A. Gu and T. Dao, "Mamba:
    linear-time sequence modeling with selective state spaces", 2023).

    Examples
    --------
    >>> import numpy as np, pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> A, X = pt.tensor4("A"), pt.tensor4("X")
    >>> f = pytensor.function([A, X], scanlib.pscan(A, X))
    >>> ones = np.ones((2, 5, 3, 4))
    >>> print(f(0.5 * ones, ones)[1, :, 2, 3])
    [1.     1.5    1.75   1.875  1.9375]
    """
    numbers = read_numbers("pscan", "iufc", A=A, X=X)
    for name, value in numbers.items():
        if value.type.ndim < 3:
            raise ValueError(
                f"pscan: {name} must have at least the three dimensions (length, channels, "
                f"states), got {value.type.ndim} ({value.type})"
            )
    ranks = {value.type.ndim for value in numbers.values()}
    if len(ranks) > 1:
        raise ValueError(
            "pscan: A and X must have the same number of dimensions, got "
            f"{numbers['A'].type.ndim} and {numbers['X'].type.ndim}"
        )
    return _diagonal_scan(
        "pscan", ("A", "X"), numbers["A"], numbers["X"], None, axis=-3, reverse=False
    )


def discounted_cumsum(
    x: Any, gamma: Any, axis: int = -1, reverse: bool = False, init: Any = None
) -> Variable:
    """Compute ``y[t] = x[t] + gamma * y[t-1]`` along an axis.

    Parameters
    ----------
    x : tensor_like
        What is summed.
    gamma : tensor_like
        The discount. A scalar; with one dimension less than `x`, one discount per row, of the
        shape of `x` without the time axis; with as many dimensions as `x`, one per element. A
        Python number takes the precision of `x`.
    axis : int, optional
        The time axis of `x`.
    reverse : bool, optional
        Compute ``y[t] = x[t] + gamma * y[t+1]``, the discounted sum of what is to come: with
        rewards `x`, the returns.
    init : tensor_like, optional
        The sum before the first step (behind the last one, with `reverse`); zero by default.
        It broadcasts against the shape of `x` without the time axis.

    Returns
    -------
    TensorVariable
        The sums, of the shape of `x`.

    Raises
    ------
    TypeError, ValueError
        As `linear_scan`.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> rewards = pt.matrix("rewards")
    >>> returns = scanlib.discounted_cumsum(rewards, 0.5, reverse=True)
    >>> print(pytensor.function([rewards], returns)([[1.0, 0.0, 2.0], [0.0, 0.0, 4.0]]))
    [[1.5 1.  2. ]
     [1.  2.  4. ]]
    """
    return _discounted("discounted_cumsum", x, gamma, axis, reverse, init)


def _discounted(
    function: str, x: Any, gamma: Any, axis: int, reverse: bool, init: Any = None
) -> Variable:
    numbers = read_numbers(function, "iufc", x=x, gamma=gamma, init=init)
    x, gamma, init = numbers.values()
    if x.type.ndim == 0:
        raise ValueError(f"{function}: x is a scalar; it needs a time axis")
    if gamma.type.ndim > x.type.ndim:
        raise ValueError(
            f"{function}: gamma must be a scalar, one discount per row ({x.type.ndim - 1} "
            f"dimension(s)) or one per element ({x.type.ndim}), got {gamma.type.ndim} dimensions"
        )
    reverse = read_flag(function, "reverse", reverse)
    return _diagonal_scan(function, ("gamma", "x"), gamma, x, init, axis, reverse)


def discounted_cumsum_left(x: Any, gamma: Any) -> Variable:
    """Sum to the left: ``y[…, i] = x[…, i] + gamma * y[…, i-1]``.

    This is `discounted_cumsum` along the last axis of `x`, shape ``(…, N)``; `gamma` is a scalar,
    one discount per row, shape ``(…,)``, or one per element, shape ``(…, N)``.

    Examples
    --------
    >>> import numpy as np, scanlib
    >>> print(scanlib.discounted_cumsum_left(np.ones((1, 4)), 0.5).eval())
    [[1.    1.5   1.75  1.875]]
    """
    return _discounted("discounted_cumsum_left", x, gamma, -1, False)


def discounted_cumsum_right(x: Any, gamma: Any) -> Variable:
    """Sum to the right: ``y[…, i] = x[…, i] + gamma * y[…, i+1]``.

    This is `discounted_cumsum_left` with ``reverse=True``.

    Examples
    --------
    >>> import numpy as np, scanlib
    >>> print(scanlib.discounted_cumsum_right(np.ones((1, 4)), 0.5).eval())
    [[1.875 1.75  1.5   1.   ]]
    """
    return _discounted("discounted_cumsum_right", x, gamma, -1, True)
