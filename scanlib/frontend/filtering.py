r"""Recursive digital filters, in transposed direct form II.

    y[t]    = b0 x[t] + z1[t-1]
    zk[t]   = bk x[t] - ak y[t] + zk+1[t-1]          k = 1 … K-1
    zK[t]   = bK x[t] - aK y[t]

with ``K = max(len(a), len(b)) - 1`` delays and coefficients divided by ``a0``. This is the form
that SciPy computes, so that delays mean the same to both (A. Oppenheim and R. Schafer,
"Discrete-Time Signal Processing", section 6.3).

Where the order is known and small, every delay is a state of its own and a step is elementwise
over the channels. Otherwise the delays are the rows of one state.
"""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Constant, Variable
from pytensor.scalar import upcast
from pytensor.tensor.shape import shape_tuple

from scanlib.frontend.arguments import read_axis
from scanlib.frontend.builder import called_as
from scanlib.frontend.direct_functions import read_numbers
from scanlib.frontend.loop_function import loop
from scanlib.ops.graph import with_axes
from scanlib.ops.row_ops.checked_rows import CheckedValue

# Up to this order every delay is a state. Compiling takes longer with every state, and beyond
# it one step is enough work for arrays.
MAX_DELAYS = 8


def lfilter(b: Any, a: Any, x: Any, axis: int = -1, zi: Any = None) -> Any:
    """Filter along an axis with a rational transfer function.

    Computes ``a[0] y[t] = b[0] x[t] + b[1] x[t-1] + … - a[1] y[t-1] - a[2] y[t-2] - …``, like
    `scipy.signal.lfilter`, and is differentiable in all its arguments.

    Parameters
    ----------
    b, a : tensor_like
        Coefficients of the numerator and of the denominator, vectors.
    x : tensor_like
        The signals.
    axis : int, optional
        The time axis of `x`.
    zi : tensor_like, optional
        Initial values of the delays: the shape of `x` with
        ``K = max(len(a), len(b)) - 1`` along the time axis; other sizes may be 1. Zero by
        default. `scipy.signal.lfilter_zi` and `scipy.signal.lfiltic` make such values.

    Returns
    -------
    y : TensorVariable
        The filtered signals, shape of `x`.
    zf : TensorVariable
        The delays after the last step; returned only if `zi` is given.

    Raises
    ------
    TypeError
        If an argument is not numeric, or boolean.
    ValueError
        If `a` or `b` is no vector or empty, shapes that are known do not fit, or ``a[0]`` is
        known to be zero.
    AssertionError
        When it runs, if ``a[0]`` is zero.
    numpy.exceptions.AxisError
        If there is no such axis.

    Notes
    -----
    Integers are filtered as `floatX`.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> y = scanlib.lfilter([0.5], [1.0, -0.5], x)
    >>> print(pytensor.function([x], y)([1.0, 1.0, 1.0, 0.0]))
    [0.5    0.75   0.875  0.4375]
    """
    function = "lfilter"
    b, a, x, zi = read_numbers(function, "iufc", b=b, a=a, x=x, zi=zi).values()
    axis = read_axis(function, axis, x.type.ndim, "x")
    b, a = _read_coefficients("b", b), _read_coefficients("a", a)
    dtype = upcast(*(value.type.dtype for value in (b, a, x, zi) if value is not None))
    if np.dtype(dtype).kind in "iu":
        dtype = config.floatX
    lengths = b.type.shape[0], a.type.shape[0]
    order = None if None in lengths else max(lengths) - 1
    delays = None if zi is None else _read_delays(zi, b, a, x, axis, order, dtype)
    lead = pt.cast(_leading_coefficient(a), dtype)
    b, a = pt.cast(b, dtype) / lead, pt.cast(a, dtype) / lead
    signal = pt.moveaxis(pt.cast(x, dtype), axis, 0)
    if order == 0:
        y, zf = b[0] * signal, delays
    elif order is not None and order <= MAX_DELAYS:
        y, zf = _filter_by_scalars(b, a, signal, delays, order)
    else:
        y, zf = _filter_by_vector(b, a, signal, delays, order)
    y = pt.moveaxis(y, 0, axis)
    return y if zf is None or zi is None else (y, pt.moveaxis(zf, 0, axis))


# Arguments


def _read_coefficients(name: str, value: Variable) -> Variable:
    value = pt.atleast_1d(value) if value.type.ndim == 0 else value
    if value.type.ndim != 1 or value.type.shape[0] == 0:
        raise ValueError(f"lfilter: {name} must be a vector that is not empty, got {value.type}")
    return value


def _leading_coefficient(a: Variable) -> Variable:
    if not isinstance(a, Constant):
        first = a[0]
        check = CheckedValue(AssertionError, "lfilter: a[0] must not be zero")
        return check(first, pt.neq(first, 0))
    if np.asarray(a.data)[0] == 0:
        raise ValueError(f"lfilter: a[0] must not be zero, got a = {a.data}")
    return a[0]


def _read_delays(
    zi: Variable, b: Variable, a: Variable, x: Variable, axis: int, order: int | None, dtype: str
) -> Variable:
    """Return `zi` with the delays in front, every one as large as a row of `x`."""
    if zi.type.ndim != x.type.ndim:
        raise ValueError(
            f"lfilter: zi must have as many dimensions as x, {x.type.ndim}, got {zi.type.ndim} "
            f"({zi.type})"
        )
    zi, x = (pt.moveaxis(value, axis, 0) for value in (pt.cast(zi, dtype), x))
    given, *row = zi.type.shape
    needed = "lfilter: zi must have max(len(a), len(b)) - 1 values along the time axis"
    if None not in (given, order):
        if given != order:
            raise ValueError(f"{needed}, which is {order}, got {given}")
    else:
        known = pt.maximum(a.shape[0], b.shape[0]) - 1 if order is None else order
        zi = CheckedValue(AssertionError, needed)(zi, pt.eq(zi.shape[0], known))
    sizes = x.type.shape[1:]
    for mine, size in zip(row, sizes, strict=True):
        if mine not in (None, 1, size) and size is not None:
            raise ValueError(
                f"lfilter: zi must have the sizes of x, or 1, in the axes that are not time; "
                f"expected {tuple(sizes)}, got {tuple(row)}"
            )
    if any(mine == 1 and size != 1 for mine, size in zip(row, sizes, strict=True)):
        full = [x.shape[k + 1] if mine == 1 else zi.shape[k + 1] for k, mine in enumerate(row)]
        zi = pt.alloc(zi, zi.shape[0], *full)
    return zi


# Loops


def _filter_by_scalars(
    b: Variable, a: Variable, signal: Variable, delays: Variable | None, order: int
) -> tuple[Variable, Variable]:
    """Filter with one state for every delay; return the signals and the last delays."""
    start = pt.zeros(shape_tuple(signal)[1:], dtype=signal.type.dtype)
    starts = {f"z{k + 1}": start if delays is None else delays[k] for k in range(order)}

    def step(delays: dict[str, Variable], row: dict[str, Variable]) -> Any:
        z, x = list(delays.values()), row["x"]
        y = b[0] * x + z[0]
        following = []
        for k in range(1, order + 1):
            terms = [z[k]] if k < order else []
            terms += [b[k] * x] if k < b.type.shape[0] else []
            terms += [-(a[k] * y)] if k < a.type.shape[0] else []
            following.append(sum(terms[1:], terms[0]))
        return dict(zip(delays, following, strict=True)), y

    with called_as("lfilter"):
        final, y = loop(step, starts, {"x": signal}, name="lfilter")
    return y, pt.stack(list(final.values()))


def _filter_by_vector(
    b: Variable, a: Variable, signal: Variable, delays: Variable | None, order: int | None
) -> tuple[Variable, Variable]:
    """Filter with all delays in one state; return the signals and the last delays.

    The state has a row of zeros below the last delay, so that it is never empty and a step
    is: shift up, add.
    """
    dtype, row_ndim = signal.type.dtype, signal.type.ndim - 1
    n = pt.maximum(a.shape[0], b.shape[0]) if order is None else order + 1
    columns = []
    for vector in (b, a):
        column = pt.set_subtensor(pt.zeros(n, dtype=dtype)[: vector.shape[0] - 1], vector[1:])
        columns.append(with_axes(column, 1, row_ndim))
    start = pt.zeros((n, *shape_tuple(signal)[1:]), dtype=dtype)
    start = start if delays is None else pt.set_subtensor(start[:-1], delays)

    def step(delays: dict[str, Variable], row: dict[str, Variable]) -> Any:
        z, x = delays["z"], row["x"]
        y = b[0] * x + z[0]
        drive = columns[0] * x - columns[1] * y
        return {"z": pt.inc_subtensor(drive[:-1], z[1:])}, y

    with called_as("lfilter"):
        final, y = loop(step, {"z": start}, {"x": signal}, name="lfilter")
    return y, final["z"][:-1]
