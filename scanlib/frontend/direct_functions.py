r"""Direct functions: linear recurrences, running extremes, running logarithms of sums.

    linear_scan   h[t] = a[t] h[t-1] + b[t]        elementwise
                  h[t] = A[t] @ h[t-1] + b[t]      with matrices
    cummax        h[t] = max(h[t-1], x[t])
    cummin        h[t] = min(h[t-1], x[t])
    cumlogsumexp  h[t] = log(exp h[t-1] + exp x[t])

for ``t = 0 … T-1``. With `reverse`, a recurrence reads ``h[t+1]`` instead and starts behind the
last row. A linear recurrence starts from the initial value, zero by default; the others from the
identity of their operation: -∞ (for integers the smallest number) for maxima, ∞ for minima, and
``-∞ = log 0`` for sums of exponentials. So there is no first step that differs, and an array
without rows needs no care. Linear recurrences are the model example of a prefix scan: their steps
compose, ``(a2, b2) ∘ (a1, b1) = (a2 a1, a2 b1 + b2)``, and this composition is associative (G.
Blelloch, "Prefix sums and their applications", 1990).

An argument with as many dimensions as the result has the time axis, and is the same at every
step if its size along it is 1 when the graph is built. An argument with fewer dimensions has no
time axis: it is the same at every step and broadcasts against a row, the shape of the result
without the time axis. No argument is broadcast by sizes that only show when the function runs.
Each function moves the time axis to the front (a view), makes one canonical loop, and moves the
time axis of its trace back.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.scalar import upcast

from scanlib.frontend.arguments import read_axis
from scanlib.frontend.builder import called_as, name_result
from scanlib.frontend.lags import lags
from scanlib.frontend.loop_function import loop
from scanlib.frontend.values import as_tensor, read_flag
from scanlib.ops.graph import with_axes
from scanlib.ops.logaddexp import logaddexp

Arguments = dict[str, Variable]
Shapes = dict[str, tuple[int | None, ...]]
OPTIONAL = ("init", "zi")
KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}


# Arguments


def _is_weak(value: Any) -> bool:
    """Whether a value is a Python number, which has no dtype of its own."""
    if isinstance(value, bool | np.generic):
        return False
    return isinstance(value, int | float | complex)


def read_numbers(function: str, kinds: str, **given: Any) -> dict[str, Any]:
    """Return the arguments of a direct function as tensors; an optional None stays None.

    A Python number takes the dtype that NumPy would give it beside the other arguments, with
    `floatX` where these are integers and the number is not. `TypeError` if an argument is no tensor
    of one of some kinds of dtype, as in `numpy.dtype.kind`.
    """
    result: dict[str, Any] = dict.fromkeys(given)
    for name, value in given.items():
        if (value is not None or name not in OPTIONAL) and not _is_weak(value):
            # A truth value is refused for its dtype, where it is.
            value = np.asarray(value) if isinstance(value, bool) else value
            result[name] = as_tensor(value, f"{function}: {name}")
    strong = [variable.type.dtype for variable in result.values() if variable is not None]
    common = np.dtype(upcast("bool", *strong))
    for name, value in given.items():
        if _is_weak(value):
            result[name] = pt.constant(np.asarray(value, dtype=_weak_dtype(value, common)))
    for name, variable in result.items():
        if variable is not None:
            _check_kind(variable, kinds, f"{function}: {name}")
    return result


def _weak_dtype(value: Any, common: np.dtype) -> np.dtype:
    if isinstance(value, float) and common.kind in "biu":
        return np.dtype(config.floatX)
    try:
        return np.asarray(value, dtype=np.result_type(common, value)).dtype
    except OverflowError:
        return np.asarray(value).dtype


def _check_kind(variable: Variable, kinds: str, where: str) -> None:
    kind = np.dtype(variable.type.dtype).kind
    if kind in kinds:
        return
    names = list(dict.fromkeys(KINDS[letter] for letter in kinds))
    expected = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    article = "an" if expected[0] in "aeiou" else "a"
    hint = "; cast it, for example with x.astype('float64')" if kind in "biu" else ""
    raise TypeError(
        f"{where} must have {article} {expected} dtype, got dtype {variable.type.dtype}{hint}"
    )


# Time axes


def read_arguments(
    given: dict[str, tuple[Variable, int]], leading: int, axis: int
) -> tuple[Arguments, Arguments]:
    """Return arguments with a row for each step, the time axis in front, and the others.

    They are given by name, as a variable and how many of its last dimensions are no batch
    dimensions. `leading` dimensions of the result may be time, and `axis` is.
    """
    full = {name: v for name, (v, core) in given.items() if v.type.ndim - core == leading}
    one_step = all(v.type.shape[axis] == 1 for v in full.values())
    timed, fixed = {}, {}
    for name, (variable, _) in given.items():
        if name not in full:
            fixed[name] = variable
        elif one_step or variable.type.shape[axis] != 1:
            timed[name] = pt.moveaxis(variable, axis, 0) if axis else variable
        else:
            fixed[name] = variable.squeeze(axis)
    return timed, fixed


def row_shapes(names: tuple[str, ...], timed: Arguments, fixed: Arguments) -> Shapes:
    """Return the static shapes of what one step reads."""
    whole = {name: (timed | fixed)[name].type.shape for name in names}
    return {name: shape[name in timed :] for name, shape in whole.items()}


def check_rows(function: str, rows: Shapes) -> None:
    """Raise if the shapes of what one step reads are known not to broadcast."""
    try:
        np.broadcast_shapes(*(tuple(1 if n is None else n for n in row) for row in rows.values()))
    except ValueError:
        texts = (f"{name} has ({', '.join(map(str, row))})" for name, row in rows.items())
        text = ", ".join(texts).replace("None", "?")
        raise ValueError(f"{function}: the shapes of one step do not broadcast: {text}") from None


# Loops


def recurrence(
    name: str,
    step: Callable[[Arguments, Variable], Variable],
    arguments: tuple[Arguments, Arguments],
    initial: Variable,
    axis: int,
    reverse: bool,
) -> Variable:
    """Return the trace of a loop with one state, its time axis at `axis`.

    The step takes a row of each argument, or what is the same at every step, and the state. The
    state before the first step has the rank and the dtype of all; sizes of 1 broadcast.
    """
    timed, fixed = arguments

    def walk(state: dict[str, Any], rows: Arguments) -> tuple[Any, Variable]:
        new = step({**fixed, **rows}, state["h"][1])
        return {"h": new}, new

    # A row of its own keeps the dtype of an integer.
    start = {"h": lags(pt.expand_dims(initial, 0), 1)}
    with called_as(name):
        _, result = loop(walk, start, timed, reverse=reverse, name=name)
    result = pt.moveaxis(result, 0, axis) if axis else result
    name_result(result, name)
    return result


# Linear recurrences


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
    start = _start(function, row_shapes(names, *arguments), (a, b, init), ndim - 1)

    def step(own: Arguments, h: Variable) -> Variable:
        return own[names[0]] * h + own[names[1]]

    return recurrence(function, step, arguments, start, axis, reverse)


def _start(
    function: str, rows: Shapes, values: tuple[Variable, Variable, Variable | None], ndim: int
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
    return with_axes(pt.cast(init, dtype), 0, ndim - init.type.ndim)


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
    rows = row_shapes(("a", "b"), *arguments)
    batched = len(rows["a"]) > 2 or b.type.ndim - 1 > core
    # Of a matrix, the state takes the batch dimensions and the number of rows.
    rows["a"] = (*rows["a"][:-1], *(() if vectors else (1,)))
    start = _start(function, rows, (a, b, init), b.type.ndim - 1)
    if start.type.shape[-core] == 1:  # products need all rows, sums broadcast the rest
        size = next((n for n in a.type.shape[-2:] if n is not None), a.shape[-1])
        sizes = [n if n is not None else start.shape[i] for i, n in enumerate(start.type.shape)]
        sizes[-core] = size
        start = pt.alloc(start, *sizes)

    def step(own: Arguments, h: Variable) -> Variable:
        if not batched:
            return pt.dot(own["a"], h) + own["b"]
        return (pt.matvec(own["a"], h) if vectors else pt.matmul(own["a"], h)) + own["b"]

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
    function = "discounted_cumsum"
    x, gamma, init = read_numbers(function, "iufc", x=x, gamma=gamma, init=init).values()
    if x.type.ndim == 0:
        raise ValueError(f"{function}: x is a scalar; it needs a time axis")
    if gamma.type.ndim > x.type.ndim:
        raise ValueError(
            f"{function}: gamma must be a scalar, one discount per row ({x.type.ndim - 1} "
            f"dimension(s)) or one per element ({x.type.ndim}), got {gamma.type.ndim} dimensions"
        )
    reverse = read_flag(function, "reverse", reverse)
    return _diagonal_scan(function, ("gamma", "x"), gamma, x, init, axis, reverse)


# Running extremes and logarithms of sums


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
    return _running("cummax", "buif", x, pt.maximum, -1, axis, reverse)


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
    return _running("cummin", "buif", x, pt.minimum, 1, axis, reverse)


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
    return _running("cumlogsumexp", "iuf", x, logaddexp, -1, axis, reverse)


def _running(
    function: str,
    kinds: str,
    x: Any,
    step: Callable[[Variable, Variable], Variable],
    sign: int,
    axis: int,
    reverse: bool,
) -> Variable:
    (x,) = read_numbers(function, kinds, x=x).values()
    axis = read_axis(function, axis, x.type.ndim, "x")
    reverse = read_flag(function, "reverse", reverse)
    if step is logaddexp and np.dtype(x.type.dtype).kind != "f":
        x = pt.cast(x, config.floatX)
    dtype = x.type.dtype
    arguments = read_arguments({"x": (x, 0)}, x.type.ndim, axis)
    start = np.full((1,) * (x.type.ndim - 1), _extreme(np.dtype(dtype), sign), dtype=dtype)

    def combine(own: Arguments, h: Variable) -> Variable:
        return step(own["x"], h)

    return recurrence(function, combine, arguments, pt.constant(start), axis, reverse)


def _extreme(dtype: np.dtype, sign: int) -> Any:
    """Return the largest number of a dtype, or with the sign -1 the smallest."""
    if dtype.kind in "bf":
        return sign > 0 if dtype.kind == "b" else sign * np.inf
    return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min
