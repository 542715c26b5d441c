"""The sizes and strides of a step's arrays: integers, nearly all known before the first step.

A size is a Python integer or an expression of the dimensions, strides and integers that the loop is
given. Expressions are values: equal ones are the same size. They are written into a kernel when
they are needed there, once in each (`SizeValues`), so that the kernel that allocates memory and the
one that uses it agree.

A slice between places that a step computes has another size at each step: an expression with
`Changing` integers, which is written where it is read. Memory is asked for what such a size does
not exceed (`bound`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from hashlib import blake2b
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.scalar import basic as ps

from scanlib.kernels.language import FLOAT64, FLOATS, INT64, Block, Value, Writer
from scanlib.kernels.scalars import NoKernelError, Number, Scalars, real


@dataclass(frozen=True)
class Given:
    """A number of an input, which `array` names: ``"dim"`` or ``"stride"`` (bytes) along an axis,
    its ``"value"``, or its ``"address"``; or ``"part"``, where a part of the workspace begins, by
    its number."""

    kind: str
    array: str
    axis: int = 0


@dataclass(frozen=True)
class Expression:
    """An operation on sizes: ``"add"``, ``"mul"``, ``"min"``, ``"max"``, ``"quotient"``,
    ``"equal"`` (which chooses the third part where the first two are equal, else the fourth), or a
    scalar node of PyTensor's and which of its outputs is meant: its operands may be other numbers.
    """

    operation: str | tuple[Apply, int]
    parts: tuple[Any, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.operation, self.parts))

    @cached_property
    def changes(self) -> bool:
        return changes(*self.parts)

    @cached_property
    def text(self) -> str:
        """What the terms of sums and products are sorted by: a digest, as text that repeats what
        several parts share would grow with every part."""
        operation = self.operation
        name = operation if isinstance(operation, str) else f"{operation[0].op} {operation[1]}"
        parts = [part.text if isinstance(part, Expression) else repr(part) for part in self.parts]
        return blake2b(" ".join((name, *parts)).encode(), digest_size=16).hexdigest()

    @cached_property
    def limits(self) -> "Limits":
        parts = [limits(part) for part in self.parts]
        if isinstance(self.operation, tuple):
            return limits_of_node(self.operation[0], parts)
        return limits_of(self.operation, parts)


@dataclass(frozen=True)
class Changing:
    """An integer that each step computes, as `value`; equal ones have the same `number`."""

    number: int
    value: Value = field(compare=False, repr=False)
    limits: "Limits" = field(compare=False, repr=False)


Size = int | Given | Expression | Changing
Limits = tuple[Size | None, Size | None]
"""Known sizes that a number does not fall below, and does not exceed; None where none is known."""


def changes(*sizes: Size) -> bool:
    """Whether one of some sizes is another one at each step."""
    return any(s.changes if isinstance(s, Expression) else isinstance(s, Changing) for s in sizes)


def unchanging(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return sizes that must be known before the first step; `NoKernelError` if they are not."""
    if changes(*sizes):
        raise NoKernelError("results whose sizes change from step to step have no kernel")
    return sizes


def bound(size: Size) -> Size:
    """Return a known size that a size never exceeds, the same one if it is known itself."""
    most = limits(size)[1]
    if most is None:
        raise NoKernelError("sizes that change from step to step have no kernel")
    return most


def limits(size: Size) -> Limits:
    return (
        size.limits if isinstance(size, Expression | Changing) and changes(size) else (size, size)
    )


def limits_of(operation: str, parts: Sequence[Limits]) -> Limits:
    """Return limits of what an operation gives, by those of its parts.

    Beside the operations of expressions, whose factors are sizes, there are ``"times"``, of any
    numbers, ``"sub"``, ``"neg"``, and ``"choice"``, which gives one of its parts.
    """
    if operation in ("sub", "neg"):
        *kept, last = parts
        return limits_of("add", [*kept, _limits_of_product([(-1, -1), last], of_sizes=False)])
    if operation in ("mul", "times"):
        return _limits_of_product(parts, of_sizes=operation == "mul")
    lows, highs = zip(*(parts[2:] if operation == "equal" else parts), strict=True)
    if operation == "quotient":
        is_fixed = lows[1] == highs[1] and lows[1] is not None
        return None, quotient(highs[0], highs[1]) if is_fixed and highs[0] is not None else None
    if operation == "add":
        return _of_all("add", lows), _of_all("add", highs)
    least, most = _of_all("min", lows), _of_all("max", highs)
    known = [end for end in (highs if operation == "min" else lows) if end is not None]
    if operation in ("min", "max") and known:
        end = reduce(partial(combined, operation), known)
        return (least, end) if operation == "min" else (end, most)
    return least, most


def _limits_of_product(parts: Sequence[Limits], of_sizes: bool) -> Limits:
    factor, others = 1, []
    for low, high in parts:
        if isinstance(low, int) and low == high:
            factor *= low
        else:
            others.append((low, high))
    low, high = others[0] if len(others) == 1 else (None, None)
    if len(others) > 1 and of_sizes:
        highs = [most for _, most in others]
        free = [most for most in highs if most is not None and not _is_of_arrays(most)]
        high = _of_all("mul", highs) if len(free) < 2 else None
    if factor < 0:
        low, high = high, low
    ends = [None if end is None else product(factor, end) for end in (low, high)]
    return (factor, factor) if not others else (ends[0], ends[1])


def _is_of_arrays(size: Size) -> bool:
    """Whether memory for a size is there already, as that of an array. Of two numbers the largest
    may be of different steps, and an array by both larger than any that a step makes."""
    if isinstance(size, Expression):
        some = any if size.operation == "min" else all
        return some(map(_is_of_arrays, size.parts[2 * (size.operation == "equal") :]))
    return not isinstance(size, Given) or size.kind != "value"


def _of_all(operation: str, ends: Sequence[Size | None]) -> Size | None:
    known = [end for end in ends if end is not None]
    return reduce(partial(combined, operation), known) if len(known) == len(ends) else None


_OPERATIONS: dict[type, str] = {
    ps.Add: "add",
    ps.Clip: "choice",
    ps.Mul: "times",
    ps.Neg: "neg",
    ps.ScalarMaximum: "max",
    ps.ScalarMinimum: "min",
    ps.Sub: "sub",
    ps.Switch: "choice",
}


def limits_of_node(node: Apply, parts: Sequence[Limits]) -> Limits:
    """Return limits of what a node of scalars, or an elementwise one, gives, by its operands'."""
    scalar = getattr(node.op, "scalar_op", node.op)
    is_wide = node.outputs[0].type.dtype == "int64"
    if isinstance(scalar, ps.Cast):
        is_whole = is_wide and np.can_cast(node.inputs[0].type.dtype, "int64")
        return parts[0] if is_whole else (None, None)
    if isinstance(scalar, ps.IntDiv | ps.Mod):
        by = parts[1][0]
        if not isinstance(by, int) or by <= 0 or by != parts[1][1]:
            return None, None
        return limits_of("quotient", parts) if isinstance(scalar, ps.IntDiv) else (0, by - 1)
    operation = _OPERATIONS.get(type(scalar), "")
    if operation == "choice":  # the limits of a clip may be swapped
        return limits_of(operation, parts[1:])
    # Smaller integers wrap.
    is_known = operation in ("min", "max") or (is_wide and operation)
    return limits_of(operation, parts) if is_known else (None, None)


def product(*sizes: Size) -> Size:
    return _joined("mul", 1, sizes)


def total(*sizes: Size) -> Size:
    return _joined("add", 0, sizes)


def _joined(operation: str, nothing: int, sizes: tuple[Size, ...]) -> Size:
    """Return a product or sum, its known part last; `nothing` is that of no sizes."""
    number, terms, todo = nothing, [], list(sizes)
    while todo:
        size = todo.pop()
        if isinstance(size, int):
            number = number * size if operation == "mul" else number + size
        elif isinstance(size, Expression) and size.operation == operation:
            todo += size.parts
        else:
            terms.append(size)
    if not terms or (operation == "mul" and number == 0):
        return number
    terms.sort(key=lambda term: term.text if isinstance(term, Expression) else repr(term))
    parts = (*terms, *([number] if number != nothing else []))
    return parts[0] if len(parts) == 1 else Expression(operation, parts)


_KNOWN: dict[str, Callable[..., int]] = {
    "min": min,
    "max": max,
    "quotient": lambda a, b: a // b if b else 0,
    "equal": lambda a, b, same, other: same if a == b else other,
}


def combined(operation: str | tuple[Apply, int], *parts: Any) -> Size:
    """Return an expression, or its value where that is known."""
    if isinstance(operation, tuple):
        return Expression(operation, parts)
    if operation in ("add", "mul"):
        return total(*parts) if operation == "add" else product(*parts)
    if all(isinstance(part, int) for part in parts):
        return _KNOWN[operation](*parts)
    if operation in ("min", "max") and parts[0] == parts[1]:
        return parts[0]
    return Expression(operation, parts)


def minimum(one: Size, other: Size) -> Size:
    return combined("min", one, other)


def maximum(one: Size, other: Size) -> Size:
    return combined("max", one, other)


def quotient(size: Size, by: Size) -> Size:
    """Return a quotient without its remainder, zero where there is none."""
    return size if by == 1 else combined("quotient", size, by)


def pieces(size: Size, by: int) -> Size:
    """Return how many pieces of a length a size has, the last of which may be shorter."""
    return quotient(total(size, by - 1), by)


def if_equal(one: Size, other: Size, chosen: Size, otherwise: Size) -> Size:
    return combined("equal", one, other, chosen, otherwise)


UNFIT = "NotCompilableError"  # of `scanlib.ops.execution`, which whoever runs a program catches


@dataclass(frozen=True)
class Check:
    """Two sizes that must be equal, or the first one not below the second: `operation` is what must
    not be, ``"ne"`` or ``"lt"``. The failure's message shows `values`."""

    operation: str
    sizes: tuple[Size, Size]
    error: str
    template: str
    values: tuple[Size, ...] = ()


class Sizes:
    """Which sizes are the same, and what has to be compared before the first step."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self._same: dict[Size, Size] = {}
        self._resolved: dict[Size, Size] = {}

    def same(self, size: Size) -> Size:
        """Return what stands for all sizes known to be equal to this one."""
        if isinstance(size, int | float):
            return size
        if size not in self._resolved:
            self._resolved[size] = size  # a size that leads back to itself stands for itself
            self._resolved[size] = self._resolve(size)
        return self._resolved[size]

    def _resolve(self, size: Size) -> Size:
        if size in self._same:
            return self.same(self._same[size])
        if isinstance(size, Expression):
            parts = tuple(map(self.same, size.parts))
            if parts == size.parts:
                return size
            found = combined(size.operation, *parts)
            return self.same(found) if isinstance(size.operation, str) else found
        return size

    def require(self, check: Check) -> Size:
        """Note what must hold, and return what stands for both sizes where these must be equal."""
        size, other = map(self.same, check.sizes)
        if size == other:
            return size
        if check.operation == "lt":
            if not (isinstance(size, int) and isinstance(other, int) and size > other):
                self.checks.append(replace(check, sizes=(size, other)))
            return size
        self.checks.append(replace(check, sizes=(size, other)))
        if isinstance(size, int) and isinstance(other, int):
            return size
        kept, dropped = (size, other) if isinstance(size, int) else (other, size)
        if isinstance(kept, Expression) and isinstance(dropped, Given):
            kept, dropped = dropped, kept
        if _occurs(dropped, kept):
            kept, dropped = dropped, kept
        if _occurs(dropped, kept):
            return kept
        self._same[dropped] = kept
        self._resolved.clear()
        return kept

    def contiguous_strides(self, itemsize: int, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        """Return the strides in bytes of an array that fills its memory in order."""
        return tuple(self.same(product(itemsize, *sizes[axis + 1 :])) for axis in range(len(sizes)))


def _occurs(size: Size, whole: Size) -> bool:
    """Whether an expression is made of a size, among others."""
    seen: set[Size] = set()
    todo = [whole] if isinstance(whole, Expression) else []
    while todo:
        parts = set(todo.pop().parts) - seen
        if size in parts:
            return True
        seen |= parts
        todo += [part for part in parts if isinstance(part, Expression)]
    return False


@dataclass(eq=False)
class SizeValues:
    """Writes sizes into a kernel, expressions into a block that comes before all that read sizes.
    `given` returns the value of a `Given`."""

    writer: Writer
    given: Callable[[Given], Value]
    block: Block = field(default_factory=Block)
    _values: dict[Size, Value] = field(default_factory=dict)

    def has(self, size: Size) -> bool:
        """Whether a size is in the kernel already."""
        return size in self._values

    def value(self, size: Size) -> Value:
        if isinstance(size, int | float):
            return self.writer.constant(size, INT64 if isinstance(size, int) else FLOAT64)
        if isinstance(size, Changing):
            return size.value
        if changes(size):
            return self._write(size)
        if size not in self._values:
            with self.writer.inside(self.block):
                self._values[size] = self._write(size)
        return self._values[size]

    def _write(self, size: Given | Expression) -> Value:
        w = self.writer
        if isinstance(size, Given):
            return self.given(size)
        parts = [self.value(part) for part in size.parts]
        if isinstance(size.operation, tuple):
            node, place = size.operation
            operands = zip(parts, node.inputs, strict=True)
            numbers: list[Number] = [w.cast(part, inp.type.dtype) for part, inp in operands]
            result, dtype = Scalars(w).apply(node, numbers)[place], node.outputs[place].type.dtype
            return real(result) if dtype in FLOATS else w.cast(real(result), "int64")
        if size.operation in ("min", "max"):
            a, b = parts
            return w.select(a < b if size.operation == "min" else a > b, a, b)
        if size.operation == "equal":
            a, b, same, other = parts
            return w.select(a.equals(b), same, other)
        if size.operation == "quotient":
            a, b = parts
            if isinstance(size.parts[1], int) and size.parts[1]:
                return w.apply("quotient", a, b)
            zero = b.equals(0)
            whole = w.apply("quotient", a, w.select(zero, 1, b))
            return w.select(zero, 0, whole)
        result = parts[0]
        for part in parts[1:]:
            result = result + part if size.operation == "add" else result * part
        return result
