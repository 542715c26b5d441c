"""Names the first thing that is wrong with a kernel.

What a printer is given fits: types do, every name has a value before it is read, and has it once.
While tests run, every kernel that is compiled is verified (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from scanlib.kernels import language as ir


class KernelError(TypeError):
    """A tree that is no kernel: the message has the statement and what is wrong with it."""


def verify(root: ir.Function | ir.Kernel) -> None:
    """Check a kernel or function, and all functions that it calls; `KernelError` names the first
    statement that is wrong.
    """
    names: dict[str, ir.Function] = {}
    for function in [*ir.functions_of(root), root]:
        if (
            isinstance(function, ir.Function)
            and names.setdefault(function.name, function) != function
        ):
            raise KernelError(f"two functions are called {function.name!r}")
        if isinstance(function, ir.Function) and function.is_shared:
            _check_shared(function)
        _Scope(function).check()


def _check_shared(function: ir.Function) -> None:
    """Check that no vectors pass between a shared function and its callers.

    They are modules of their own, which may be compiled for registers of different widths, and
    would then pass a vector in different ways.
    """
    for value in (*function.parameters, *function.results):
        if value.type.lanes > 1:
            raise KernelError(
                f"{function.name} is shared and passes {value!r}: shared functions take and return "
                "plain numbers and pointers; pass a pointer to the vector, or do not share it"
            )


class _Scope:
    """The names of one function or kernel that have a value."""

    def __init__(self, root: ir.Function | ir.Kernel) -> None:
        self.root = root
        self.known: set[ir.Value] = set(root.parameters)
        self.names: set[str] = {value.name for value in root.parameters}

    def check(self) -> None:
        if len(self.names) != len(self.root.parameters):
            raise KernelError(f"{self.root.name}: two parameters have one name")
        self.statements(self.root.body)
        if isinstance(self.root, ir.Function):
            for value in self.root.results:
                self.read(value, f"the results of {self.root.name}")

    def block(self, block: ir.Block) -> None:
        """Check a block; what it names has no value after it."""
        known = set(self.known)
        self.statements(block)
        self.known = known

    def statements(self, block: ir.Block) -> None:
        for statement in block.statements:
            try:
                self.statement(statement)
            except KernelError as error:
                if " in `" in str(error):
                    raise
                line = next(ir.lines_of(statement))
                raise KernelError(f"{error} in `{line}` of {self.root.name}") from None

    def statement(self, statement: ir.Statement) -> None:
        read, made = values_of(statement)
        if not isinstance(statement, ir.While):
            self.read_all(read)
            self.check_types(statement)
        if not isinstance(statement, ir.For):
            self.check_rules(statement)
            for value in made:
                self.define(value)
            if isinstance(statement, ir.Assign) and statement.local not in self.known:
                self.define(statement.local)
        if not ir.blocks_of(statement):
            return
        known = set(self.known)
        match statement:
            case ir.For(index, _, _, step, body):
                if step < 1:
                    raise KernelError(f"the step is {step}")
                self.define(index)
                self.statements(body)
            case ir.While(before, _, body):
                self.statements(before)
                self.read_all(read)
                self.check_types(statement)
                self.block(body)
            case ir.If(_, body, otherwise):
                self.block(body)
                self.block(otherwise)
        self.known = known

    def check_types(self, statement: ir.Statement) -> None:
        """Check what has one type wherever it stands."""
        for name, wanted in _TYPES.items():
            value = getattr(statement, name, None)
            if value is not None and value.type != wanted:
                raise KernelError(f"{value!r} must be {wanted}")

    def check_rules(self, statement: ir.Statement) -> None:
        match statement:
            case ir.Apply(result, operation, operands):
                _check_operation(result, operation, operands)
            case ir.Scratch(_, _, count) if count < 1:
                raise KernelError(f"scratch memory for {count} numbers")
            case ir.Assign(local, value) if local.type != value.type:
                raise KernelError(f"{value!r} is assigned to {local!r}")
            case ir.Call(results, ir.Function() as function, operands):
                expected = [value.type for value in function.parameters]
                if expected != [value.type for value in operands]:
                    raise KernelError(f"{function.name} takes {_types(expected)}")
                for result, value in zip(results, function.results, strict=True):
                    if result.type != value.type:
                        raise KernelError(f"{result!r} is {value.type}")
            case ir.Call((result,), str(), operands):
                if any(value.type != result.type for value in operands) or result.type.lanes > 1:
                    raise KernelError("functions of the C library take numbers of one dtype")
            case ir.Call(results, pointer, operands):
                if pointer.type != ir.POINTER:
                    raise KernelError(f"{pointer!r} must be {ir.POINTER}")
                if any(value.type.lanes > 1 for value in (*results, *operands)):
                    raise KernelError("functions outside of a kernel take numbers and pointers")
            case ir.Fail(code, values) if code < 0 and values:
                raise KernelError("an end that is no failure shows no numbers")
            case ir.Fail(code) if not code or not isinstance(self.root, ir.Kernel):
                raise KernelError("kernels fail, or end, with a code that is not zero")
            case ir.Poll() if not isinstance(self.root, ir.Kernel):
                raise KernelError("kernels are interrupted, not functions")

    def define(self, value: ir.Value) -> None:
        if value.name in self.names:
            raise KernelError(f"{value} has a value already")
        if isinstance(value, ir.Constant):
            raise KernelError("a constant is given a value")
        self.names.add(value.name)
        self.known.add(value)

    def read_all(self, values: Iterable[ir.Value]) -> None:
        for value in values:
            self.read(value)

    def read(self, value: ir.Value, where: str = "") -> None:
        if not isinstance(value, ir.Constant) and value not in self.known:
            raise KernelError(f"{where}{': ' if where else ''}{value} has no value here")


def values_of(statement: ir.Statement) -> tuple[list[ir.Value], list[ir.Value]]:
    """Return what a statement reads, and the names that it gives a value, but for locals."""
    read: list[ir.Value] = []
    made: list[ir.Value] = []
    kind: Any = type(statement)
    for name, is_made in _parts(kind):
        found = getattr(statement, name)
        values = made if is_made else read
        if isinstance(found, tuple):
            values.extend(found)
        elif isinstance(found, ir.Value):
            values.append(found)
    return read, made


@cache
def _parts(kind: type[Any]) -> list[tuple[str, bool]]:
    """Return the names of the parts of statements that are values, and whether they are made."""
    names = [part.name for part in fields(kind) if "Value" in str(part.type)]
    return [(name, name in ("result", "results", "index")) for name in names]


# By the name of a part of statements.
_TYPES = {
    **dict.fromkeys(("pointer", "source"), ir.POINTER),
    **dict.fromkeys(("offset", "start", "stop"), ir.INT64),
    "condition": ir.BOOL,
}


def _types(types: Iterable[object]) -> str:
    return ", ".join(map(str, types))


# Which types the operands of an operation may have, by its `operands`.
FITS = {
    "float": lambda kind: kind.is_float,
    "integer": lambda kind: kind.is_integer,
    "number": lambda kind: kind.is_float or kind.is_integer,
    "bits": lambda kind: kind.is_integer or kind.dtype == "bool",
    "any": lambda kind: True,
}


def _check_operation(result: ir.Value, operation: str, operands: tuple[ir.Value, ...]) -> None:
    """Check the types of one operation."""
    rule = ir.OPERATIONS.get(operation)
    if rule is None:
        raise KernelError(f"there is no operation {operation!r}")
    if len(operands) != rule.arity:
        raise KernelError(f"{operation} takes {rule.arity} operands, not {len(operands)}")
    kinds, made = [value.type for value in operands], result.type
    first = kinds[0]
    if operation == "select":
        kinds = kinds[1:]
        if first != kinds[0].of("bool"):
            raise KernelError(f"{operands[0]!r} must be {kinds[0].of('bool')}")
    if operation in ("lane", "splat", "shuffle", "offset"):
        _check_given(operation, operands, made)
        return
    if any(kind != kinds[0] for kind in kinds):
        raise KernelError(f"operands of {_types(kinds)}")
    if not FITS[rule.operands](kinds[0]):
        raise KernelError(f"{operation} takes no {kinds[0]}")
    if operation == "opaque":
        fits = first == made and made.lanes == 1
    elif operation == "cast":
        fits = ir.POINTER not in (first, made) and first.lanes == made.lanes
    elif operation == "bitcast":
        fits = first.lanes == made.lanes and first.itemsize == made.itemsize
    else:
        fits = made == (kinds[0].of("bool") if rule.result == "bool" else kinds[0])
    if not fits:
        raise KernelError(f"{operation} of {_types(kinds)} is no {made}")


def _check_given(operation: str, operands: tuple[ir.Value, ...], made: object) -> None:
    first = operands[0].type
    if operation == "offset":
        fits = first == ir.POINTER == made and operands[1].type == ir.INT64
    elif operation == "splat":
        fits = first.lanes == 1 and getattr(made, "dtype", None) == first.dtype
    elif operation == "shuffle":
        lanes, places = first.lanes, operands[2]
        if first != operands[1].type or lanes == 1:
            raise KernelError(f"a shuffle of {first} and {operands[1].type}")
        assert isinstance(places, ir.Constant)
        if not all(0 <= place < 2 * lanes for place in places.by_lane):
            raise KernelError(f"there are {2 * lanes} lanes")
        fits = made == ir.Type(first.dtype, places.type.lanes)
    else:
        lane = operands[1]
        fits = isinstance(lane, ir.Constant) and 0 <= int(lane.value) < first.lanes
    if not fits:
        raise KernelError(f"{operation} of {_types(value.type for value in operands)} is no {made}")
