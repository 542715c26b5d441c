"""Runs kernels in Python: what the statements of `scanlib.kernels.language` mean.

Slow, and meant to be read. Numbers are NumPy's, arrays of them where there are lanes, so that every
result is rounded and wraps around as its dtype says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from scanlib.kernels import language as ir


@dataclass(frozen=True)
class Address:
    """A place in memory: bytes, and how far from their start."""

    memory: np.ndarray
    start: int = 0

    def item(self, offset: int, size: int) -> np.ndarray:
        """Return a view of some bytes; `IndexError` if they are not all in memory."""
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
    operands: Sequence[Any],
    interrupted: Callable[..., bool] | None = None,
) -> tuple[int, tuple[Any, ...]]:
    """Run a kernel on a value for each parameter, arrays or `Address` for pointers.

    Return how it ended, 0, the code of a `fail` or `INTERRUPTED`, and the values of the `fail`.
    `interrupted` is asked at each `poll`, with its operands.
    """
    state = _Run({}, interrupted)
    for value, operand in zip(kernel.parameters, operands, strict=True):
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
            case ir.Call(results, ir.Function() as function, operands):
                found = call(function, *(read(value) for value in operands))
                values.update(zip(results, found, strict=True))
            case ir.Call((result,), str() as symbol, operands):
                values[result] = _library_call(symbol, result.type, map(read, operands))
            case ir.Call(results, pointer, operands):
                found = read(pointer)(*map(read, operands))
                for result in results:
                    values[result] = _number(found, result.type)
            case ir.Poll(steps):
                told = self.interrupted is not None and self.interrupted(*map(read, steps))
                if told:
                    raise _EndError(ir.INTERRUPTED)
            case ir.Fail(code, operands):
                raise _EndError(code, tuple(map(read, operands)))
            case ir.Move(pointer, source, count):
                size = int(read(count))
                read(pointer).item(0, size)[:] = read(source).item(0, size).copy()
            case ir.Prefetch():
                pass
            case _:
                raise NotImplementedError(statement)


# Operations


def apply(operation: str, operands: list[Any], type: ir.Type) -> Any:
    """Return the result of one operation, which has `type`."""
    typed, meaning = _TYPED.get(operation), _OF_NUMBERS.get(operation)
    found = typed(operands, type) if meaning is None else meaning(*operands)
    return found if type == ir.POINTER else _number(found, type)


def _itself(value: Any) -> Any:
    return value


def _quotient(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y


# What operations are of NumPy's numbers, and those that depend on the type of the result.
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "div": np.divide,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "copysign": np.copysign,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rint": np.rint,
    "quotient": _quotient,
    "remainder": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "copy": _itself,
    "opaque": _itself,
    "splat": _itself,
    "lane": lambda v, k: v[int(k)],
    "shuffle": lambda a, b, places: np.concatenate([a, b])[places],
}


def _fma(operands: list[Any], type: ir.Type) -> Any:
    pieces = np.broadcast_arrays(*operands)
    triples = zip(*(piece.flat for piece in pieces), strict=True)
    symbol = "fma" if type.dtype == "float64" else "fmaf"
    items = [_library_call(symbol, ir.Type(type.dtype), triple) for triple in triples]
    return np.asarray(items, type.dtype).reshape(pieces[0].shape)


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


_TYPED: dict[str, Callable[[list[Any], ir.Type], Any]] = {
    "fma": _fma,
    "select": _select,
    "cast": _cast,
    "bitcast": lambda operands, type: np.asarray(operands[0]).view(type.dtype),
    "offset": lambda operands, type: operands[0].moved(int(operands[1])),
}


def _library_call(symbol: str, type: ir.Type, operands: Iterable[Any]) -> Any:
    numbers = list(operands)
    return _library_function(symbol, type.dtype, len(numbers))(*numbers)


@cache
def _library_function(symbol: str, dtype: str, count: int) -> Any:
    function = ctypes.CDLL(None)[symbol]
    function.restype = ctypes.c_double if dtype == "float64" else ctypes.c_float
    function.argtypes = [function.restype] * count
    return function
