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

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Constant, Variable
from pytensor.raise_op import Assert
from pytensor.scalar import upcast
from pytensor.tensor.type import TensorType

from scanlib.frontend.axes import (
    Argument,
    add_argument,
    read_axis,
    read_numbers,
    zeros,
)
from scanlib.ops.loop import Carry, Loop, Output

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
    signal = Argument("x", pt.moveaxis(pt.cast(x, dtype), axis, 0), timed=True)
    if order == 0:
        y, zf = b[0] * signal.value, delays
    elif order is not None and order <= MAX_DELAYS:
        y, zf = _filter_by_scalars(b, a, signal, delays, order, dtype)
    else:
        y, zf = _filter_by_vector(b, a, signal, delays, order, dtype)
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
        return Assert("lfilter: a[0] must not be zero")(first, pt.neq(first, 0))
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
        zi = Assert(needed)(zi, pt.eq(zi.shape[0], known))
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
    b: Variable, a: Variable, signal: Argument, delays: Variable | None, order: int, dtype: str
) -> tuple[Variable, Variable]:
    """Filter with one carry for every delay; return the signals and the last delays."""
    sizes = signal.row_shape()
    loop = Loop(name="lfilter", function="lfilter")
    x = add_argument(loop, signal)
    weights = _scalars(loop, "b", b, 0)
    feedback = _scalars(loop, "a", a, 1)
    row = TensorType(dtype, shape=[size for size, _ in sizes])
    z = [row(name=f"z{k}[t-1]") for k in range(1, order + 1)]
    y = weights[0] * x + z[0]
    for k in range(1, order + 1):
        value = z[k] if k < order else None
        if k < len(weights):
            term = weights[k] * x
            value = term if value is None else value + term
        if k < len(feedback) + 1:
            term = feedback[k - 1] * y
            value = -term if value is None else value - term
        start = zeros(sizes, dtype) if delays is None else delays[k - 1]
        loop.carries.append(Carry(start, z[k - 1], value, f"z{k}"))
    loop.outputs.append(Output(y, "y"))
    results = loop.apply()
    return results.outputs[0], pt.stack(results.carries)


def _scalars(loop: Loop, name: str, vector: Variable, first: int) -> list[Variable]:
    """Make the items of a vector inputs of a loop, from position `first`."""
    return [
        add_argument(loop, Argument(f"{name}{k}", vector[k], timed=False))
        for k in range(first, vector.type.shape[0])
    ]


def _filter_by_vector(
    b: Variable,
    a: Variable,
    signal: Argument,
    delays: Variable | None,
    order: int | None,
    dtype: str,
) -> tuple[Variable, Variable]:
    """Filter with all delays in one carry; return the signals and the last delays.

    The carry has a row of zeros below the last delay, so that it is never empty and a step
    is: shift up, add.
    """
    sizes = signal.row_shape()
    n = pt.maximum(a.shape[0], b.shape[0]) if order is None else order + 1
    known = None if order is None else order + 1
    row_ndim = len(sizes)
    loop = Loop(name="lfilter", function="lfilter")
    x = add_argument(loop, signal)
    b0 = add_argument(loop, Argument("b0", b[0], timed=False))
    columns = []
    for name, vector in (("b", b), ("a", a)):
        column = pt.set_subtensor(pt.zeros(n, dtype=dtype)[: vector.shape[0] - 1], vector[1:])
        column = pt.expand_dims(column, tuple(range(1, row_ndim + 1)))
        columns.append(add_argument(loop, Argument(name, column, timed=False)))
    z = TensorType(dtype, shape=(known, *(size for size, _ in sizes)))(name="z[t-1]")
    y = b0 * x + z[0]
    drive = columns[0] * x - columns[1] * y
    start = pt.zeros((n, *(size for _, size in sizes)), dtype=dtype)
    if delays is not None:
        start = pt.set_subtensor(start[:-1], delays)
    loop.carries.append(Carry(start, z, pt.inc_subtensor(drive[:-1], z[1:]), "z"))
    loop.outputs.append(Output(y, "y"))
    results = loop.apply()
    return results.outputs[0], results.carries[0][:-1]
