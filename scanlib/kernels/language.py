r"""The typed loop language in which every kernel is written.

A kernel is a tree of the statements below. Whatever decides what a kernel does makes such trees;
text is made of them by the printers alone (`scanlib.kernels.printers`). The tests have an
interpreter, which runs them as they are defined, and verify every kernel that they compile.

    type      ::= dtype × lanes | pointer            bool, int8 … uint64, float32, float64
    operand   ::= name | local | constant
    statement ::= name = operation(operand, …)       one of `OPERATIONS`; no side effects
                | name = load type, pointer, bytes   the item `bytes` after the pointer
                | store pointer, bytes, operand
                | prefetch pointer, bytes            a hint; has no effect on values
                | move pointer, source, bytes        copies memory; places may overlap
                | name = scratch dtype × count       memory of one run of the kernel
                | local = operand                    a local is a name that changes
                | for name in start … stop, step: block
                | while block, operand: block        the first block ends with the condition
                | if operand: block else block
                | name, … = call target(operand, …)  a function of the language, of the C library by
                                                     its name, or one outside by its address
                | poll operand, …                    a chance to interrupt the kernel: so many
                                                     steps are done, of how many
                | fail code, operand, …              ends the kernel; what it wrote stays. It has
                                                     failed if the code is positive
    function  ::= name(parameter, …) block, results  no stores but to what its pointers say
    kernel    ::= name(parameter, …) block           functions whose result is how it ended

Every statement has at most one operation, so that no text is nested deeper than its loops are, and
names that are not locals are given a value once. An operation on several lanes is the operation on
each of them. Arithmetic is IEEE's, each result rounded once and nothing regrouped; integers wrap
around; a multiply-add is fused where it is written as one (`fma`) and nowhere else. Division of
integers by zero, shifts by as many bits as there are, and conversions of numbers that the integer
cannot hold have no meaning: whoever writes a kernel keeps them from happening.

`Writer` makes trees. Its values have operators, so that a formula reads like one:

>>> def axpy(w, a, x, y):
...     return a * x + y
>>> function = write_function("axpy", [FLOAT64, FLOAT64, FLOAT64], axpy)
>>> print(function)
axpy(x0: float64, x1: float64, x2: float64):
  v0 = mul(x0, x1)
  v1 = add(v0, x2)
  return v1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64")
INTEGERS = SIGNED + UNSIGNED
DTYPES = ("bool", *INTEGERS, *FLOATS)
_ITEMSIZES = {dtype: int(np.dtype(dtype).itemsize) for dtype in DTYPES} | {"pointer": 8}


# Types


class Type(NamedTuple):
    """The type of a value: `lanes` numbers of one of `DTYPES` side by side, or a ``"pointer"``."""

    dtype: str
    lanes: int = 1

    def __str__(self) -> str:
        return self.dtype if self.lanes == 1 else f"{self.dtype} x {self.lanes}"

    @property
    def itemsize(self) -> int:
        """Bytes of one number in memory."""
        return _ITEMSIZES[self.dtype]

    def of(self, dtype: str) -> Type:
        """Return the type of another dtype with as many lanes."""
        return Type(dtype, self.lanes)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def is_signed(self) -> bool:
        return self.dtype in SIGNED

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS


POINTER = Type("pointer")
BOOL = Type("bool")
INT64 = Type("int64")
FLOAT32, FLOAT64 = Type("float32"), Type("float64")


# Operations


@dataclass(frozen=True)
class Operation:
    """What `OPERATIONS` says of an operation.

    It takes operands of ``"float"``, ``"integer"``, ``"number"`` (either), ``"bits"`` (integers and
    truth values) or ``"any"``; its result is of the ``"same"`` type, ``"bool"``, or ``"given"``
    with the statement.

    `llvm` is an instruction of two operands, or those of floats, of signed integers, and of
    unsigned integers and truth values, with ``/`` between them; or an intrinsic function; or the
    whole instruction, with ``{k}`` for the type of the last operand, ``{zero}`` for its zero,
    ``{k0}`` for the type of the first, and ``{r}`` for the result's. It is empty where the printer
    writes it itself. `c` is C's text, with ``{f}`` for the letter of functions of 32-bit numbers.
    """

    arity: int
    operands: str
    llvm: str
    c: str
    result: str = "same"


_NEGATED = "fneg {k} {0}/sub {k} {zero}, {0}/sub {k} {zero}, {0}"
# Quotients are towards zero, remainders have the sign of the dividend, `rint` goes to the nearest
# integer, halves to the even one, and `shr` copies the sign of signed integers. Of NaN, `ne` is
# true and the other comparisons are false. `opaque` is the same number, of which compilers are to
# know nothing; `cast` goes to the nearest number, to integers towards zero; `bitcast` keeps the
# bits. The first operand of `select`, a truth value, chooses. The last one of `lane` is a constant,
# and that of `shuffle` says at which of the lanes of the first, then of the second, its result is.
OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, "number", "fadd/add/add", "{0} + {1}"),
    "sub": Operation(2, "number", "fsub/sub/sub", "{0} - {1}"),
    "mul": Operation(2, "number", "fmul/mul/mul", "{0} * {1}"),
    "neg": Operation(1, "number", _NEGATED, ""),
    "fma": Operation(3, "float", "llvm.fma", "fma{f}({0}, {1}, {2})"),
    "div": Operation(2, "float", "fdiv", "{0} / {1}"),
    "sqrt": Operation(1, "float", "llvm.sqrt", "sqrt{f}({0})"),
    "abs": Operation(1, "float", "llvm.fabs", "fabs{f}({0})"),
    "copysign": Operation(2, "float", "llvm.copysign", "copysign{f}({0}, {1})"),
    "floor": Operation(1, "float", "llvm.floor", "floor{f}({0})"),
    "ceil": Operation(1, "float", "llvm.ceil", "ceil{f}({0})"),
    "trunc": Operation(1, "float", "llvm.trunc", "trunc{f}({0})"),
    "rint": Operation(1, "float", "llvm.rint", "rint{f}({0})"),
    "quotient": Operation(2, "integer", "/sdiv/udiv", "{0} / {1}"),
    "remainder": Operation(2, "integer", "/srem/urem", "{0} % {1}"),
    "and": Operation(2, "bits", "and", "{0} & {1}"),
    "or": Operation(2, "bits", "or", "{0} | {1}"),
    "xor": Operation(2, "bits", "xor", "{0} ^ {1}"),
    "not": Operation(1, "bits", "", ""),
    "shl": Operation(2, "integer", "shl", "{0} << {1}"),
    "shr": Operation(2, "integer", "/ashr/lshr", "{0} >> {1}"),
    "eq": Operation(2, "any", "fcmp oeq/icmp eq/icmp eq", "{0} == {1}", "bool"),
    "ne": Operation(2, "any", "fcmp une/icmp ne/icmp ne", "{0} != {1}", "bool"),
    "lt": Operation(2, "number", "fcmp olt/icmp slt/icmp ult", "{0} < {1}", "bool"),
    "le": Operation(2, "number", "fcmp ole/icmp sle/icmp ule", "{0} <= {1}", "bool"),
    "gt": Operation(2, "number", "fcmp ogt/icmp sgt/icmp ugt", "{0} > {1}", "bool"),
    "ge": Operation(2, "number", "fcmp oge/icmp sge/icmp uge", "{0} >= {1}", "bool"),
    "select": Operation(3, "any", "select {k0} {0}, {k} {1}, {k} {2}", "{0} ? {1} : {2}"),
    "copy": Operation(1, "any", "", "{0}"),
    "opaque": Operation(1, "integer", 'call {k} asm "", "=r,0"({k} {0})', ""),
    "cast": Operation(1, "any", "", "", "given"),
    "bitcast": Operation(1, "number", "bitcast {k} {0} to {r}", "", "given"),
    "splat": Operation(1, "any", "", "", "given"),
    "lane": Operation(2, "any", "extractelement {k0} {0}, i64 {1}", "", "given"),
    "shuffle": Operation(3, "any", "shufflevector {k0} {0}, {k0} {1}, {k} {2}", "", "given"),
    "offset": Operation(2, "any", "getelementptr i8, ptr {0}, i64 {1}", "{0} + {1}", "given"),
}


# Values


def _operator(operation: str, swapped: bool = False) -> Callable[[Any, Any], Value]:
    """Return the method of `Value` that writes an operation with another operand."""

    def method(self: Value, other: Any) -> Value:
        pair = (self, self.tree.as_value(other, self.type))
        return self.tree.apply(operation, *(pair[::-1] if swapped else pair))

    return method


def _unary_operator(operation: str) -> Callable[[Any], Value]:
    return lambda self: self.tree.apply(operation, self)


class Value:
    """What a statement can read. Values are equal if they are the same object.

    Operators write the statements that compute their results into the block that is being
    written; the other operand may be a Python number.
    """

    def __init__(self, type: Type, name: str, writer: Writer | None = None) -> None:
        self.type = type
        self.name = name
        self.writer = writer

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{self}: {self.type}"

    @property
    def tree(self) -> Writer:
        """The writer of the tree that the value belongs to."""
        assert self.writer is not None, f"{self!r} belongs to no tree that is being written"
        return self.writer

    __add__ = _operator("add")
    __radd__ = _operator("add", swapped=True)
    __sub__ = _operator("sub")
    __rsub__ = _operator("sub", swapped=True)
    __mul__ = _operator("mul")
    __rmul__ = _operator("mul", swapped=True)
    __truediv__ = _operator("div")
    __rtruediv__ = _operator("div", swapped=True)
    __and__ = _operator("and")
    __or__ = _operator("or")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("shr")
    __lt__ = _operator("lt")
    __le__ = _operator("le")
    __gt__ = _operator("gt")
    __ge__ = _operator("ge")
    equals = _operator("eq")
    differs = _operator("ne")
    __neg__ = _unary_operator("neg")
    __invert__ = _unary_operator("not")
    __abs__ = _unary_operator("abs")


class Constant(Value):
    """A number that is known, the same in all lanes, or one for each of them."""

    def __init__(self, type: Type, value: Any, writer: Writer | None = None) -> None:
        self.value = np.asarray(value).astype(type.dtype)[()]
        assert self.value.shape in ((), (type.lanes,)), (type, value)
        super().__init__(type, "", writer)

    def __str__(self) -> str:
        return str(self.value)

    @property
    def by_lane(self) -> list[Any]:
        """The number of each lane."""
        return [self.value] * self.type.lanes if self.value.ndim == 0 else list(self.value)


class Local(Value):
    """A name whose value changes; as an operand, it stands for its value at that time."""


# Statements


class Statement:
    """One line of a block, or a line and the blocks below it."""


@dataclass(eq=False)
class Block:
    """Statements in their order."""

    statements: list[Statement] = field(default_factory=list)


@dataclass(eq=False)
class Apply(Statement):
    """``result = operation(operands)``"""

    result: Value
    operation: str
    operands: tuple[Value, ...]


@dataclass(eq=False)
class Load(Statement):
    """The value `offset` bytes after a pointer; lanes lie side by side."""

    result: Value
    pointer: Value
    offset: Value


@dataclass(eq=False)
class Store(Statement):
    """Write a value `offset` bytes after a pointer."""

    pointer: Value
    offset: Value
    value: Value


@dataclass(eq=False)
class Prefetch(Statement):
    """Ask for memory that will be read or written, which need not exist."""

    pointer: Value
    offset: Value


@dataclass(eq=False)
class Move(Statement):
    """Copy `count` bytes from one place to another; they may overlap."""

    pointer: Value
    source: Value
    count: Value


@dataclass(eq=False)
class Scratch(Statement):
    """Memory for `count` numbers of a dtype, undefined at first, until the kernel ends."""

    result: Value
    dtype: str
    count: int


@dataclass(eq=False)
class Assign(Statement):
    """Give a local its first value, or another."""

    local: Local
    value: Value


@dataclass(eq=False)
class For(Statement):
    """Run a block for ``index = start, start + step, …`` below `stop`; the step is positive."""

    index: Value
    start: Value
    stop: Value
    step: int
    body: Block


@dataclass(eq=False)
class While(Statement):
    """Run `before`, and if its `condition` is true, `body`, and all again."""

    before: Block
    condition: Value
    body: Block


@dataclass(eq=False)
class If(Statement):
    """Run one of two blocks."""

    condition: Value
    body: Block
    otherwise: Block


@dataclass(eq=False)
class Call(Statement):
    """Call a function of the language, one of the C library by its name, from numbers of one dtype
    to one of them, or one outside of the kernel by its address, from numbers and pointers to one of
    them, or none."""

    results: tuple[Value, ...]
    target: Function | str | Value
    operands: tuple[Value, ...]


@dataclass(eq=False)
class Poll(Statement):
    """Let the kernel be interrupted here, and say how far it is: a number of steps, of how many."""

    steps: tuple[Value, ...] = ()


@dataclass(eq=False)
class Fail(Statement):
    """End the kernel with a code, and numbers that the message will show; a negative code is no
    failure."""

    code: int
    values: tuple[Value, ...]


INTERRUPTED = -1  # how a kernel ends when a `poll` says so
FULL = -2  # ... and one whose outputs are full: `scanlib.kernels.program`
# The words of the frame that a kernel is called with: the address of a function that `poll` calls
# with the frame and that returns zero to go on, numbers for messages, what a `poll` says, whether
# that ends the kernel, and a word for who calls it.
ASK, NUMBERS, PROGRESS, ANSWER, FRAME = 0, 1, 9, 11, 13


# Text for people


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _inside(block: Block) -> Iterator[str]:
    return (f"  {line}" for statement in block.statements for line in lines_of(statement))


def lines_of(statement: Statement) -> Iterator[str]:
    """Yield the text of a statement."""
    match statement:
        case Apply(result, operation, operands):
            rule = OPERATIONS.get(operation)
            kind = f" {result.type}" if rule is not None and rule.result == "given" else ""
            yield f"{result} = {operation}{kind}({_listed(operands)})"
        case Load(result, pointer, offset):
            yield f"{result} = load {result.type}, {pointer}, {offset}"
        case Scratch(result, dtype, count):
            yield f"{result} = scratch {dtype} x {count}"
        case Assign(local, value):
            yield f"{local} <- {value}"
        case For(index, start, stop, step, body):
            yield f"for {index} in {start} ... {stop}, {step}:"
            yield from _inside(body)
        case While(before, condition, body):
            yield "while:"
            yield from _inside(before)
            yield f"  {condition}:"
            yield from _inside(body)
        case If(condition, body, otherwise):
            yield f"if {condition}:"
            yield from _inside(body)
            if otherwise.statements:
                yield "else:"
                yield from _inside(otherwise)
        case Call(results, target, operands):
            given = f"{_listed(results)} = " if results else ""
            name = target.name if isinstance(target, Function) else f"[{target}]"
            yield f"{given}call {name}({_listed(operands)})"
        case _:
            fields = (f if isinstance(f, tuple) else (f,) for f in vars(statement).values())
            yield f"{type(statement).__name__.lower()} {_listed(sum(fields, ()))}"


# Functions and kernels


class _Calling:
    """What has a block that may call functions."""

    body: Block

    @cached_property
    def calls(self) -> list[Function]:
        """The function of the language that each call is of."""
        called = (statement.target for statement in walk(self.body) if isinstance(statement, Call))
        return [target for target in called if isinstance(target, Function)]


@dataclass(eq=False)
class Function(_Calling):
    """A part of kernels that is written once; its name is unique among the functions that a kernel
    calls.

    All calls of one that `is_shared` run the same code, of which no copies are made. It takes and
    returns no vectors: its machine code is a module of its own.
    """

    name: str
    parameters: tuple[Value, ...]
    body: Block
    results: tuple[Value, ...]
    is_shared: bool = False

    def __str__(self) -> str:
        head = f"{self.name}({', '.join(map(repr, self.parameters))}):"
        last = [f"  return {_listed(self.results)}"] if self.results else []
        return "\n".join([head, *_inside(self.body), *last])


TABLE, CALLED_WITH = -1, -2  # no words: the address of the table itself, that of the frame


@dataclass(eq=False)
class Kernel(_Calling):
    """A whole kernel. Memory that one of its pointers leads to is reached through no other.

    `slots` says which word of the table that a caller gives is each parameter, `TABLE` for the
    address of the table, `CALLED_WITH` for that of the frame. Its vectors have `register` bytes;
    longer ones are taken apart. One that `runs_once` does so for each call of a loop, whatever its
    length.
    """

    name: str
    parameters: tuple[Value, ...]
    body: Block
    slots: tuple[int, ...]
    register: int = 32
    runs_once: bool = False

    def __str__(self) -> str:
        head = f"{self.name}({', '.join(map(repr, self.parameters))}):"
        return "\n".join([head, *_inside(self.body)])


def blocks_of(statement: Statement) -> tuple[Block, ...]:
    """Return the blocks that a statement holds, in the order in which they may run."""
    if isinstance(statement, For):
        return (statement.body,)
    if isinstance(statement, While):
        return (statement.before, statement.body)
    return (statement.body, statement.otherwise) if isinstance(statement, If) else ()


def walk(block: Block) -> Iterator[Statement]:
    """Yield all statements of a block and of the blocks inside it."""
    for statement in block.statements:
        yield statement
        for inner in blocks_of(statement):
            yield from walk(inner)


def functions_of(*roots: Function | Kernel, shared: bool = True) -> list[Function]:
    """Return the functions that kernels need, each after those that it calls itself.

    Without `shared`, those whose code is shared are left out, and what only they need.
    """
    found: dict[Function, None] = {}

    def visit(root: Function | Kernel) -> None:
        for function in root.calls:
            if function not in found and (shared or not function.is_shared):
                visit(function)
                found[function] = None

    for root in roots:
        visit(root)
    return list(found)


# Writing trees


class Writer:
    """Writes statements into blocks; the innermost block that is open receives them."""

    def __init__(self) -> None:
        self.block = Block()
        self._count = 0

    # Names and numbers

    def name(self, prefix: str) -> str:
        """Return a name that this writer has not given yet."""
        self._count += 1
        return f"{prefix}{self._count - 1}"

    def constant(self, value: Any, type: Type) -> Constant:
        return Constant(type, value, self)

    def as_value(self, value: Any, like: Type) -> Value:
        """Return a value, or a Python number as a constant of a type; spread over lanes."""
        if not isinstance(value, Value):
            return self.constant(value, like)
        if like.lanes > 1 and value.type.lanes == 1:
            return self.splat(value, like.lanes)
        return value

    def parameter(self, type: Type, name: str) -> Value:
        return Value(type, name, self)

    # Operations

    def apply(self, operation: str, *operands: Value, type: Type | None = None) -> Value:
        """Write one operation and return its result; `type` where the operation says "given"."""
        rule = OPERATIONS[operation]
        if type is None:
            type = operands[-1].type
            type = type.of("bool") if rule.result == "bool" else type
        result = Value(type, self.name("v"), self)
        self.block.statements.append(Apply(result, operation, operands))
        return result

    def fma(self, x: Value, y: Any, z: Any) -> Value:
        return self.apply("fma", x, self.as_value(y, x.type), self.as_value(z, x.type))

    def select(self, condition: Value, chosen: Any, other: Any) -> Value:
        like = chosen if isinstance(chosen, Value) else other
        values = self.as_value(chosen, like.type), self.as_value(other, like.type)
        return self.apply("select", self.as_value(condition, like.type.of("bool")), *values)

    def cast(self, value: Value, dtype: str) -> Value:
        kind = value.type.of(dtype)
        if value.type.dtype == dtype:
            return value
        is_exact = kind.is_float or not (value.type.is_float or dtype == "bool")
        if isinstance(value, Constant) and is_exact:
            return self.constant(value.value, kind)
        return self.apply("cast", value, type=kind)

    def bitcast(self, value: Value, dtype: str) -> Value:
        return self.apply("bitcast", value, type=value.type.of(dtype))

    def splat(self, value: Value, lanes: int) -> Value:
        """Return a number in every lane."""
        if isinstance(value, Constant):
            return self.constant(value.value[()], Type(value.type.dtype, lanes))
        return self.apply("splat", value, type=Type(value.type.dtype, lanes))

    def lane(self, value: Value, lane: int) -> Value:
        return self.apply("lane", value, self.constant(lane, INT64), type=Type(value.type.dtype))

    def offset(self, pointer: Value, count: Any) -> Value:
        """Return a pointer some bytes after another, which is that itself where they are none."""
        value = self.as_value(count, INT64)
        if isinstance(value, Constant) and value.value == 0:
            return pointer
        return self.apply("offset", pointer, value, type=POINTER)

    def shuffle(self, first: Value, second: Value, places: Sequence[int]) -> Value:
        """Return a vector of some lanes of two vectors, those of the second counted on."""
        count, dtype = len(places), first.type.dtype
        chosen = self.constant(list(places), Type("int32", count))
        return self.apply("shuffle", first, second, chosen, type=Type(dtype, count))

    # Memory

    def load(self, type: Type, pointer: Value, offset: Any = 0) -> Value:
        result = Value(type, self.name("v"), self)
        self.block.statements.append(Load(result, pointer, self.as_value(offset, INT64)))
        return result

    def store(self, pointer: Value, offset: Any, value: Value) -> None:
        self.block.statements.append(Store(pointer, self.as_value(offset, INT64), value))

    def prefetch(self, pointer: Value, offset: Any) -> None:
        self.block.statements.append(Prefetch(pointer, self.as_value(offset, INT64)))

    def move(self, pointer: Value, source: Value, count: Any) -> None:
        self.block.statements.append(Move(pointer, source, self.as_value(count, INT64)))

    def scratch(self, dtype: str, count: int) -> Value:
        result = Value(POINTER, self.name("m"), self)
        self.block.statements.append(Scratch(result, dtype, count))
        return result

    def local(self, value: Any, type: Type | None = None) -> Local:
        """Return a new local with its first value."""
        kind = value.type if type is None else type
        local = Local(kind, self.name("l"), self)
        self.assign(local, value)
        return local

    def assign(self, local: Local, value: Any) -> None:
        self.block.statements.append(Assign(local, self.as_value(value, local.type)))

    def copy(self, local: Local) -> Value:
        """Return what a local holds now, under a name that keeps it."""
        return self.apply("copy", local)

    # Control

    @contextmanager
    def inside(self, block: Block) -> Iterator[Block]:
        """Write into another block."""
        outer, self.block = self.block, block
        try:
            yield block
        finally:
            self.block = outer

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Value]:
        """Write a `for`; the index is what the block gets."""
        index = Value(INT64, self.name("i"), self)
        ends = self.as_value(start, INT64), self.as_value(stop, INT64)
        statement = For(index, *ends, step, Block())
        self.block.statements.append(statement)
        with self.inside(statement.body):
            yield index

    @contextmanager
    def loop_while(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Write a `while`; `condition` writes the block before each pass."""
        before = Block()
        with self.inside(before):
            holds = condition()
        statement = While(before, holds, Block())
        self.block.statements.append(statement)
        with self.inside(statement.body):
            yield

    @contextmanager
    def when(self, condition: Value) -> Iterator[If]:
        """Write an `if`; what it yields is for `otherwise`."""
        statement = If(condition, Block(), Block())
        self.block.statements.append(statement)
        with self.inside(statement.body):
            yield statement

    @contextmanager
    def otherwise(self, statement: If) -> Iterator[None]:
        with self.inside(statement.otherwise):
            yield

    # Calls

    def call(
        self, target: Function | str | Value, *operands: Value, result: Type | None = None
    ) -> tuple[Value, ...]:
        """Write a call; `result` is the type of what other functions than the language's return."""
        types = [] if result is None else [result]
        if isinstance(target, Function):
            types = [value.type for value in target.results]
        results = tuple(Value(type, self.name("v"), self) for type in types)
        self.block.statements.append(Call(results, target, operands))
        return results

    def poll(self, *steps: Value) -> None:
        self.block.statements.append(Poll(steps))

    def fail(self, code: int, *values: Value) -> None:
        self.block.statements.append(Fail(code, values))


def write_function(
    name: str,
    types: Sequence[Type],
    write: Callable[..., Value | tuple[Value, ...]],
    is_shared: bool = False,
) -> Function:
    """Return the function that `write` writes: given a `Writer` and parameters of `types`, it
    returns a result or several."""
    writer = Writer()
    parameters = tuple(writer.parameter(type, f"x{i}") for i, type in enumerate(types))
    found = write(writer, *parameters)
    results = found if isinstance(found, tuple) else (found,)
    return Function(name, parameters, writer.block, results, is_shared)
