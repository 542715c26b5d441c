"""Runs kernels in Python: what the statements of `scanlib.kernels.language` mean.

Slow, and meant to be read. Numbers are NumPy's, arrays of them where there are lanes, so that every
result is rounded and wraps around as its dtype says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from scanlib.kernels import language as ir


@dataclass(frozen=True)
class Address:
    """A place in memory: bytes, and how far from their start."""

    memory: np.ndarray
    start: int = 0

    def item(self, offset: int, size: int) -> np.ndarray:
        """Return a view of some bytes.

        Raises
        ------
        IndexError
            If they are not all in memory.
        """
        first = self.start + offset
        if first < 0 or first + size > self.memory.size:
            raise IndexError(f"bytes {first} to {first + size} of {self.memory.size}")
        return self.memory[first : first + size]

    def moved(self, count: int) -> Address:
        """Return the address some bytes on."""
        return Address(self.memory, self.start + count)


def address_of(array: np.ndarray) -> Address:
    """Return the address of the first item of an array, within the memory that it is a view of."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    assert whole.flags.c_contiguous or whole.flags.f_contiguous
    flat = whole.reshape(-1, order="A").view(np.uint8)
    return Address(flat, array.ctypes.data - whole.ctypes.data)


class _EndError(Exception):
    def __init__(self, code: int, values: tuple[Any, ...] = ()) -> None:
        self.code = code
        self.values = values


def call(function: ir.Function, *operands: Any) -> tuple[Any, ...]:
    """Return the results of a function; pointers are given as `Address`."""
    run = _Run({}, None)
    with np.errstate(all="ignore"):
        for value, operand in zip(function.parameters, operands, strict=True):
            run.values[value] = _number(operand, value.type)
        run.block(function.body)
        return tuple(run.read(value) for value in function.results)


def run(
    kernel: ir.Kernel,
    operands: Mapping[str, Any] | Sequence[Any],
    interrupted: Callable[..., bool] | None = None,
) -> tuple[int, tuple[Any, ...]]:
    """Run a kernel.

    Parameters
    ----------
    kernel : Kernel
    operands : sequence
        A value for each parameter; arrays, or `Address`, for pointers.
    interrupted : callable, optional
        Asked at each `poll`, with its operands.

    Returns
    -------
    code : int
        How it ended: 0, the code of a `fail`, or `INTERRUPTED`.
    values : tuple
        Those of the `fail`.
    """
    given = list(operands.values()) if isinstance(operands, Mapping) else list(operands)
    state = _Run({}, interrupted)
    for value, operand in zip(kernel.parameters, given, strict=True):
        state.values[value] = _number(operand, value.type)
    try:
        with np.errstate(all="ignore"):
            state.block(kernel.body)
    except _EndError as end:
        return end.code, end.values
    return 0, ()


def _number(value: Any, type: ir.Type) -> Any:
    if type == ir.POINTER:
        return address_of(value) if isinstance(value, np.ndarray) else value
    array = np.asarray(value, type.dtype)
    return np.broadcast_to(array, type.lanes).copy() if type.lanes > 1 else array[()]


class _Run:
    """The values of names, and what statements do to them."""

    def __init__(self, values: dict[ir.Value, Any], interrupted: Callable[[], bool] | None) -> None:
        self.values = values
        self.interrupted = interrupted

    def read(self, value: ir.Value) -> Any:
        if isinstance(value, ir.Constant):
            return _number(value.value, value.type)
        return self.values[value]

    def block(self, block: ir.Block) -> None:
        for statement in block.statements:
            self.statement(statement)

    def statement(self, statement: ir.Statement) -> None:
        values, read = self.values, self.read
        match statement:
            case ir.Apply(result, operation, operands):
                values[result] = apply(operation, [read(value) for value in operands], result.type)
            case ir.Load(result, pointer, offset):
                kind = result.type
                found = read(pointer).item(int(read(offset)), kind.itemsize * kind.lanes)
                items = found.view(kind.dtype)
                values[result] = items.copy() if kind.lanes > 1 else items[0]
            case ir.Store(pointer, offset, value):
                kind = value.type
                place = read(pointer).item(int(read(offset)), kind.itemsize * kind.lanes)
                place.view(kind.dtype)[:] = read(value)
            case ir.Shuffle(result, first, second, places):
                values[result] = np.concatenate([read(first), read(second)])[list(places)]
            case ir.Scratch(result, dtype, count):
                memory = np.full(count * np.dtype(dtype).itemsize, 0xAB, np.uint8)
                values[result] = Address(memory)
            case ir.Assign(local, value):
                values[local] = read(value)
            case ir.For(index, start, stop, step, body):
                for i in range(int(read(start)), int(read(stop)), step):
                    values[index] = np.int64(i)
                    self.block(body)
            case ir.While(before, condition, body):
                while True:
                    self.block(before)
                    if not read(condition):
                        break
                    self.block(body)
            case ir.If(condition, body, otherwise):
                self.block(body if read(condition) else otherwise)
            case ir.Call(results, function, operands):
                found = call(function, *(read(value) for value in operands))
                values.update(zip(results, found, strict=True))
            case ir.CallSymbol(result, symbol, operands):
                values[result] = _library_call(symbol, result.type, map(read, operands))
            case ir.CallPointer(result, pointer, operands):
                found = read(pointer)(*map(read, operands))
                if result is not None:
                    values[result] = _number(found, result.type)
            case ir.Poll(steps):
                told = self.interrupted is not None and self.interrupted(*map(read, steps))
                if told:
                    raise _EndError(ir.INTERRUPTED)
            case ir.Fail(code, operands):
                raise _EndError(code, tuple(map(read, operands)))
            case ir.End(code):
                raise _EndError(code)
            case ir.Prefetch():
                pass
            case _:
                raise NotImplementedError(statement)


# Operations


def apply(operation: str, operands: list[Any], type: ir.Type) -> Any:
    """Return the result of one operation, which has `type`."""
    found = _MEANING[operation](operands, type)
    return found if type == ir.POINTER else _number(found, type)


def _quotient(operands: list[Any], type: ir.Type) -> Any:
    x, y = (np.asarray(value) for value in operands)
    q = np.asarray([_truncated(int(a), int(b)) for a, b in zip(x.flat, y.flat, strict=True)])
    return (
        (q.astype(object) & _mask(type)).astype(_unsigned(type)).view(type.dtype).reshape(x.shape)
    )


def _truncated(a: int, b: int) -> int:
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


def _mask(type: ir.Type) -> int:
    return (1 << 8 * type.itemsize) - 1


def _unsigned(type: ir.Type) -> str:
    return f"uint{8 * type.itemsize}"


def _fma(operands: list[Any], type: ir.Type) -> Any:
    pieces = np.broadcast_arrays(*operands)
    items = [fused(*triple) for triple in zip(*(piece.flat for piece in pieces), strict=True)]
    return np.asarray(items, type.dtype).reshape(pieces[0].shape)


def fused(x: Any, y: Any, z: Any) -> Any:
    """Return ``x y + z``, rounded once, for floats of one dtype."""
    dtype = type(x)
    if not (np.isfinite(x) and np.isfinite(y)):
        return dtype(x * y + z)
    if not np.isfinite(z):
        return z
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    if exact == 0:
        return dtype(x * y + z) if x == 0 or y == 0 else dtype(0)
    return nearest(exact, dtype)


def nearest(exact: Fraction, dtype: Any) -> Any:
    """Return the float nearest to a fraction, the even one of two."""
    try:
        double = float(exact)  # division of integers is rounded correctly
    except OverflowError:
        return dtype(np.inf if exact > 0 else -np.inf)
    if dtype is np.float64:
        # A fraction below all numbers is a zero with its sign.
        return np.copysign(np.float64(double), 1 if exact > 0 else -1)
    guess = np.float32(double)
    if not np.isfinite(guess):
        return guess
    # Rounded twice, it may be the wrong one of two: the neighbours are asked.
    around = [np.nextafter(guess, np.float32(s * np.inf)) for s in (-1, 1)] + [guess]
    finite = [number for number in around if np.isfinite(number)]
    size = min(abs(Fraction(float(number)) - exact) for number in finite)
    best = [n for n in finite if abs(Fraction(float(n)) - exact) == size]
    even = [n for n in best if not n.view(np.int32) & 1]
    return np.copysign((even or best)[0], np.float32(1 if exact > 0 else -1))


def _cast(operands: list[Any], type: ir.Type) -> Any:
    (value,) = operands
    if type.dtype == "bool":
        return np.asarray(value) != 0
    return np.asarray(value).astype(type.dtype)


def _select(operands: list[Any], type: ir.Type) -> Any:
    condition, chosen, other = operands
    if type == ir.POINTER:
        return chosen if condition else other
    return np.where(condition, chosen, other)


def _offset(operands: list[Any], type: ir.Type) -> Any:
    pointer, count = operands
    return pointer.moved(int(count))


def _of(function: Callable[..., Any]) -> Callable[[list[Any], ir.Type], Any]:
    return lambda operands, type: function(*operands)


_MEANING: dict[str, Callable[[list[Any], ir.Type], Any]] = {
    "add": _of(np.add),
    "sub": _of(np.subtract),
    "mul": _of(np.multiply),
    "neg": _of(np.negative),
    "fma": _fma,
    "div": _of(np.divide),
    "sqrt": _of(np.sqrt),
    "abs": _of(np.abs),
    "copysign": _of(np.copysign),
    "floor": _of(np.floor),
    "ceil": _of(np.ceil),
    "trunc": _of(np.trunc),
    "rint": _of(np.rint),
    "quotient": _quotient,
    "remainder": _of(np.fmod),
    "and": _of(np.bitwise_and),
    "or": _of(np.bitwise_or),
    "xor": _of(np.bitwise_xor),
    "not": _of(np.invert),
    "shl": _of(np.left_shift),
    "shr": _of(np.right_shift),
    "eq": _of(np.equal),
    "ne": _of(np.not_equal),
    "lt": _of(np.less),
    "le": _of(np.less_equal),
    "gt": _of(np.greater),
    "ge": _of(np.greater_equal),
    "select": _select,
    "copy": _of(lambda value: value),
    "opaque": _of(lambda value: value),
    "cast": _cast,
    "bitcast": lambda operands, type: np.asarray(operands[0]).view(type.dtype),
    "splat": _of(lambda value: value),
    "lane": _of(lambda value, lane: value[int(lane)]),
    "offset": _offset,
}


def _library_call(symbol: str, type: ir.Type, operands: Any) -> Any:
    function = getattr(ctypes.CDLL(None), symbol)
    kind = ctypes.c_double if type.dtype == "float64" else ctypes.c_float
    numbers = [kind(value) for value in operands]
    function.argtypes, function.restype = [kind] * len(numbers), kind
    return function(*numbers)
