"""Plain loops that the direct functions are held against, and how they are compiled in tests."""

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tests.modes import MODES

# Zero, one, two, primes, next to powers of two, and longer than a block of any kernel.
LENGTHS = (0, 1, 2, 3, 5, 7, 8, 9, 31, 32, 33, 127, 128, 129, 257)


def time_rows(value: np.ndarray, ndim: int, axis: int) -> np.ndarray | None:
    """Return an argument with its time axis in front, None if it has no time axis."""
    return np.moveaxis(value, axis, 0) if value.ndim == ndim else None


def linear_loop(
    a: Any, b: Any, init: Any = None, axis: int = 0, reverse: bool = False, product=np.multiply
) -> np.ndarray:
    """Compute ``h = product(a, h) + b`` step by step; see `scanlib.linear_scan`.

    With matrices, `a` comes with the number of dimensions of its matrices less: the caller moves
    the time axes to the front and passes ``axis=0``.
    """
    a, b = np.asarray(a), np.asarray(b)
    ndim = max(a.ndim, b.ndim)
    parts = [time_rows(value, ndim, axis) for value in (a, b)]
    return first_order_loop(parts, (a, b), init, axis, reverse, product)


def first_order_loop(parts, whole, init, axis, reverse, product) -> np.ndarray:
    """Walk over `parts`, the rows of the arguments; None stands for the one in `whole`."""
    steps = {len(part) for part in parts if part is not None}
    length = 1 if steps == {1} else next(iter(steps - {1}))

    def row(k: int, t: int) -> np.ndarray:
        part = parts[k]
        if part is None:
            return whole[k]
        return part[0] if len(part) == 1 else part[t]

    dtype = np.result_type(*whole, *([] if init is None else [init]))
    # One step with zeros tells the shape of a row, without any value in it.
    empty = [np.zeros(w.shape if p is None else p.shape[1:]) for p, w in zip(parts, whole)]  # noqa: B905
    h = np.zeros_like(empty[1], dtype=dtype) if product is not np.multiply else np.zeros((), dtype)
    h = h if init is None else h + np.asarray(init, dtype)
    shape = np.broadcast_shapes(np.shape(product(empty[0], np.zeros(h.shape)) + empty[1]), h.shape)
    h = np.broadcast_to(h, shape).astype(dtype)
    result = np.zeros((length, *shape), dtype)
    with np.errstate(all="ignore"):
        for t in reversed(range(length)) if reverse else range(length):
            h = (product(row(0, t), h) + row(1, t)).astype(dtype)
            result[t] = h
    return np.moveaxis(result, 0, axis)


def running(ufunc: np.ufunc, x: np.ndarray, axis: int = 0, reverse: bool = False) -> np.ndarray:
    """Accumulate a ufunc from the first row to the last, or back."""
    with np.errstate(all="ignore"):
        if reverse:
            return np.flip(ufunc.accumulate(np.flip(x, axis), axis), axis)
        return ufunc.accumulate(x, axis)


def unknown(value: Any, name: str | None = None, static: bool = False) -> Any:
    """Return a variable for a value; its sizes are unknown, unless they are 1 or `static`."""
    value = np.asarray(value)
    shape = tuple(size if static or size == 1 else None for size in value.shape)
    return pt.tensor(name, dtype=str(value.dtype), shape=shape)


@contextmanager
def python_loops():
    """Run loops in plain Python: quick to make, for tests that make many."""
    with pytensor.config.change_flags(scanlib__perform="python"):
        yield MODES["py"]


def call(build, *values: Any, mode: Any, static: bool = False) -> Any:
    """Build a graph of variables for the values, compile it and call it.

    The values must come back as they were.
    """
    values = tuple(np.asarray(value) for value in values)
    before = [value.copy() for value in values]
    variables = [unknown(value, static=static) for value in values]
    function = pytensor.function(variables, build(*variables), mode=mode)
    result = function(*values)
    for value, copy in zip(values, before, strict=True):
        np.testing.assert_array_equal(value, copy)
    return result
