"""Kernels as text of LLVM's intermediate language.

Each function of a kernel is a function of its module, which is inlined where that makes few copies;
locals are stack slots, which LLVM turns into registers. Truth values are ``i1``, and bytes in
memory.

A kernel becomes two functions. ``NAME`` has the pointers among the kernel's parameters, marked as
leading to memory of their own, the address of a table, from whose words of eight bytes it reads the
others (`Kernel.slots`), and that of a frame. ``NAME_entry`` is how others call it: with the table,
which has the pointers as well, and the frame. It returns how the kernel ended. The frame has a word
for the address of a function that `poll` calls, which returns an int, not zero to stop, and one for
every value of a `fail`.
"""

from __future__ import annotations

import operator
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from scanlib.kernels import language as ir
from scanlib.kernels.processor import has_fused_multiply_add

MOST_COPIES = 24  # of a function that is inlined: more would take long to compile

_NAME = re.compile(r"%([\w.]+)")
_TRAPS = ("sdiv", "udiv", "srem", "urem")  # may stop the process: stay where they are
_INTEGER = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_SHORT = 64  # statements of a loop around others: what grows with longer ones has no register
_SCALES = (1, 2, 4, 8)  # of an index in an address
_FLOAT = {"float32": "float", "float64": "double"}


@cache
def type_text(type: ir.Type, in_memory: bool = False) -> str:
    if type == ir.POINTER:
        return "ptr"
    bits = 8 if in_memory and type.dtype == "bool" else _bits(type)
    item = _FLOAT.get(type.dtype, f"i{bits}")
    return item if type.lanes == 1 else f"<{type.lanes} x {item}>"


def _bits(type: ir.Type) -> int:
    return 1 if type.dtype == "bool" else 8 * type.itemsize


def constant_text(value: ir.Constant) -> str:
    """Return the text of a number, or of the numbers of all lanes."""
    type = value.type
    if type.lanes == 1:
        return _number_text(value.value, type)
    one = type_text(ir.Type(type.dtype))
    return f"<{', '.join(f'{one} {_number_text(item, type)}' for item in value.by_lane)}>"


def _number_text(value: Any, type: ir.Type) -> str:
    if type.is_float:
        if value != value:
            return "0x7FF8000000000000"
        # The bits of a double, whatever the type.
        return f"0x{struct.pack('>d', value).hex().upper()}"
    if type.dtype == "bool":
        return "true" if value else "false"
    return str(int(value))


def print_function(function: ir.Function) -> str:
    """Return a module with a function and what it calls."""
    return "\n".join(_Module().functions(function).function(function, "").text())


def shared_functions(*roots: ir.Function | ir.Kernel) -> dict[str, str]:
    """Return the module of each shared function that kernels call, by the function's symbol."""
    return dict(_shared_module(f) for f in ir.functions_of(*roots) if f.is_shared)


def symbol_of(function: ir.Function) -> str:
    """Return the name of a function in modules; that of a shared one has a hash of its text."""
    return _shared_module(function)[0] if function.is_shared else function.name


_shared: WeakKeyDictionary[ir.Function, tuple[str, str]] = WeakKeyDictionary()


def _shared_module(function: ir.Function) -> tuple[str, str]:
    if function not in _shared:
        module = _Module().functions(function).function(function, "", False, "SYMBOL")
        text = "\n".join(module.text())
        symbol = f"{function.name}.{sha256(text.encode()).hexdigest()[:24]}"
        _shared[function] = symbol, text.replace("@SYMBOL(", f"@{symbol}(")
    return _shared[function]


def print_kernels(*kernels: ir.Kernel) -> str:
    """Return a module with kernels, of different names, their entries, and what they call.

    Shared functions are declared: they are modules of their own (`shared_functions`).
    """
    module = _Module(max(kernel.register for kernel in kernels)).functions(*kernels)
    for kernel in kernels:
        module.kernel(kernel)
    return "\n".join(module.text())


class _Module:
    """The functions of a module, and what they need to be declared.

    All of them take vectors of at most `register` bytes into one register, if that is given, as
    whoever passes a vector to another function must do it in the same way.
    """

    def __init__(self, register: int | None = None) -> None:
        width = f'"{8 * (register or 0)}"'
        kinds = ("prefer", "min-legal") if register else ()
        self.attributes = " ".join(["nounwind", *(f'"{k}-vector-width"={width}' for k in kinds)])
        self.definitions: list[str] = []
        self.declarations: dict[str, None] = {}

    def text(self) -> Iterator[str]:
        yield from self.definitions
        yield from self.declarations

    def functions(self, *roots: ir.Function | ir.Kernel) -> _Module:
        """Write what others call but shared functions, inlined unless it is called many times."""
        functions = ir.functions_of(*roots, shared=False)
        calls = Counter(function for root in (*functions, *roots) for function in root.calls)
        for function in functions:
            self.function(function, "internal", calls[function] <= MOST_COPIES)
        return self

    def function(
        self, function: ir.Function, linkage: str, is_inlined: bool = True, name: str = ""
    ) -> _Module:
        body = _Body(self, function.body)
        results = [(type_text(v.type), body.read(v)) for v in function.results]
        if len(results) == 1:
            ((result, text),) = results
            body.line(f"ret {result} {text}")
        elif results:
            whole = "undef"
            result = f"{{ {', '.join(kind for kind, _ in results)} }}"
            for place, (kind, text) in enumerate(results):
                value = body.new()
                body.line(f"{value} = insertvalue {result} {whole}, {kind} {text}, {place}")
                whole = value
            body.line(f"ret {result} {whole}")
        else:
            result = "void"
            body.line("ret void")
        parameters = ", ".join(f"{type_text(v.type)} %{v.name}" for v in function.parameters)
        head = f"{linkage} {result}" if linkage else result
        inlined = "alwaysinline" if is_inlined else "noinline"
        self.define(f"{head} @{name or function.name}({parameters}) {inlined}", body)
        return self

    def kernel(self, kernel: ir.Kernel) -> _Module:
        if kernel.runs_once:
            return self.run_once(kernel)
        body = _Body(self, kernel.body, _reads(kernel, pointers=False))
        body.line("ret i64 0")
        pointers = _reads(kernel, pointers=True)
        parameters = ", ".join(f"ptr noalias %{name}" for name in [*pointers, "table"])
        self.define(f"internal i64 @{kernel.name}({parameters}, ptr %frame) noinline", body)
        given = ", ".join(f"ptr %{name}" for name in [*pointers, "table", "frame"])
        self.definitions += [
            f"define i64 @{kernel.name}_entry(ptr %table, ptr %frame) nounwind {{",
            *(f"  {line}" for lines in pointers.values() for line in lines),
            f"  %code = call i64 @{kernel.name}({given})",
            "  ret i64 %code",
            "}",
        ]
        return self

    def run_once(self, kernel: ir.Kernel) -> _Module:
        """Write a kernel as one function.

        For values that live from the beginning to the end, and one condition after the other, LLVM
        takes the square of their number.
        """
        reads = _reads(kernel, pointers=False) | _reads(kernel, pointers=True)
        body = _Body(self, kernel.body, reads)
        body.line("ret i64 0")
        effort = "" if any(isinstance(s, ir.For) for s in ir.walk(kernel.body)) else " optnone"
        head = f"i64 @{kernel.name}_entry(ptr %table, ptr %frame)"
        self.define(f"{head} noinline{effort}", body)
        return self

    def define(self, head: str, body: _Body) -> None:
        self.definitions += [f"define {head} {self.attributes} {{", "entry:"]
        self.definitions += [f"  {line}" for line in body.slots]
        self.definitions += ["  br label %start", "start:", *_flat(body.lines), "}"]

    def declare(self, text: str) -> None:
        self.declarations[f"declare {text}"] = None


def _reads(kernel: ir.Kernel, pointers: bool) -> dict[str, list[str]]:
    """Return the instructions that read parameters from the table, pointers or others, by name."""
    reads = {}
    for value, slot in zip(kernel.parameters, kernel.slots, strict=True):
        if slot in (ir.TABLE, ir.CALLED_WITH) or (value.type == ir.POINTER) != pointers:
            continue  # the two have those names
        kind, memory = type_text(value.type), type_text(value.type, in_memory=True)
        name, place = value.name, f"%{value.name}.place"
        word = name if kind == memory else f"{name}.word"
        reads[name] = [f"{place} = getelementptr i8, ptr %table, i64 {8 * slot}"]
        reads[name].append(f"%{word} = load {memory}, ptr {place}, align 8")
        if kind != memory:
            reads[name].append(f"%{name} = icmp ne {memory} %{word}, 0")
    return reads


class _Progression(NamedTuple):
    """What grows by the same number from pass to pass of a loop: how it begins, but for a number
    that is known, and its step."""

    first: str
    step: str
    known: int = 0


@dataclass(eq=False)
class _Passes:
    """A `for` that is being written: how many loops are around its block, the labels that lead to a
    pass, and what begins and ends each.

    `progressions` holds what grows with the index, `places` the names of what is added up.
    """

    depth: int
    index: str
    before: str
    latch: str
    progressions: dict[str, _Progression] = field(default_factory=dict)
    places: dict[tuple[str, str], str] = field(default_factory=dict)
    begin: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)


class _Body:
    """The instructions of one function.

    What depends on nothing that a loop makes is written before the loop, and what an instruction
    before has computed is not computed again. Multiples of a loop's index are added up: LLVM's own
    pass for that takes two fifths of the time in which it makes machine code.

    `reads` has the instructions that make values; they are written before the statement of the
    block that needs the value first.
    """

    def __init__(
        self, module: _Module, block: ir.Block, reads: Mapping[str, list[str]] | None = None
    ) -> None:
        self.module = module
        self.lines: list[Any] = []  # or lists of lines
        self.before: list[list[Any]] = []  # each loop around this place, the outermost first
        self.depths: dict[str, int] = {}  # how many loops are around what makes a value
        self.known: list[tuple[int, dict[str, str]]] = [(0, {})]  # made in each block around
        self.same: dict[ir.Value, str] = {}  # values that an instruction before has made
        self.passes: list[_Passes] = []  # of short loops and innermost ones around this place
        self.slots: list[str] = []  # what is on the stack
        self.made: set[ir.Value] = set()
        self.count = 0
        missing = dict(reads or {})
        for statement in block.statements:
            start = len(self.lines)
            self.write(statement)
            if missing:
                names = dict.fromkeys(_NAME.findall("\n".join(_flat(self.lines[start:]))))
                needed = [name for name in names if name in missing]
                self.lines[start:start] = [line for name in needed for line in missing.pop(name)]

    # Text

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")
        if text[0] == "%":
            self.depths[text[1 : text.index(" ")]] = len(self.before)

    def compute(self, text: str, name: str = "") -> str:
        """Write an instruction without effects, unless it is known; return the name of its result.

        It stands before all loops that make none of its operands.
        """
        for _, known in self.known:
            if text in known:
                return known[text]
        depth = len(self.before)
        if not text.startswith(_TRAPS):
            depth = max((self.depths.get(read, 0) for read in _NAME.findall(text)), default=0)
        lines = [*self.before, self.lines][depth]
        name = name or self.new()
        lines.append(f"  {name} = {text}")
        self.depths[name[1:]] = depth
        next(known for own, known in reversed(self.known) if own == depth)[text] = name
        return name

    def make(self, result: ir.Value, text: str) -> None:
        self.same[result] = self.compute(text, f"%{result.name}")

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def new(self) -> str:
        self.count += 1
        return f"%t{self.count}"

    def names(self, *prefixes: str) -> list[str]:
        """Return new labels."""
        self.count += 1
        return [f"{prefix}{self.count}" for prefix in prefixes]

    def read(self, value: ir.Value) -> str:
        """Return the text of an operand."""
        if isinstance(value, ir.Constant):
            return constant_text(value)
        if isinstance(value, ir.Local):
            name = self.new()
            self.line(f"{name} = load {type_text(value.type)}, ptr %{value.name}.slot")
            return name
        return self.same.get(value, f"%{value.name}")

    def address(self, pointer: ir.Value, offset: ir.Value) -> str:
        return self.place(self.read(pointer), self.read(offset))

    # What grows with loops

    def passes_of(self, text: str) -> _Passes | None:
        """Return the loop with whose passes an integer grows."""
        return next((p for p in self.passes if text in p.progressions), None)

    def integer(self, operation: str, one: str, other: str, name: str = "") -> str:
        """Return a sum, a difference or a product; multiples of what grows are added up."""
        if "%" not in one + other:
            return str(_wrapped(_INTEGER[operation](int(one), int(other))))
        nothing = "1" if operation == "mul" else "0"
        if other == nothing or (one == nothing and operation != "sub"):
            return one if other == nothing else other
        fixed, grows = sorted([one, other], key=self.depth_of)
        passes = self.passes_of(grows)
        if passes is None or self.depth_of(fixed) >= passes.depth:
            return self.compute(f"{operation} i64 {one}, {other}", name)
        first, step, known = passes.progressions[grows]
        if operation == "mul":
            step = self.integer("mul", step, fixed)
            if "%" in fixed:
                first = self.integer("mul", self.integer("add", first, str(known)), fixed)
                result = self.growing(passes, "i64", first, f"add i64 {{}}, {step}")
                passes.progressions[result] = _Progression(first, step)
                return result
            known = _wrapped(known * int(fixed))
            found = _Progression(self.integer("mul", first, fixed), step, known)
        else:
            sign = "add"
            if operation == "sub" and grows == other:
                first, step = (self.integer("sub", "0", text) for text in (first, step))
                known = -known
            elif operation == "sub":
                sign = "sub"
            if "%" in fixed:
                found = _Progression(self.integer(sign, first, fixed), step, known)
            else:
                found = _Progression(first, step, _wrapped(_INTEGER[sign](known, int(fixed))))
        result = self.compute(f"{operation} i64 {one}, {other}", name)
        passes.progressions[result] = found
        return result

    def place(self, start: str, offset: str) -> str:
        """Return an address so many bytes after another."""
        if offset == "0":
            return start
        passes = self.passes_of(offset)
        if passes is None or self.depth_of(start) >= passes.depth:
            return self.compute(f"getelementptr i8, ptr {start}, i64 {offset}")
        first, step, known = passes.progressions[offset]
        if "%" in step:
            following = f"getelementptr i8, ptr {{}}, i64 {step}"
            place = self.growing(passes, "ptr", self.place(start, first), following)
        else:
            index = passes.progressions[passes.index]
            times = int(step) / int(index.step)
            if times in _SCALES:
                first = self.integer("sub", first, self.integer("mul", index.first, f"{times:.0f}"))
                grows = self.compute(f"mul i64 {passes.index}, {times:.0f}")
            else:
                grows = self.growing(passes, "i64", "0", f"add i64 {{}}, {step}")
            place = self.compute(f"getelementptr i8, ptr {self.place(start, first)}, i64 {grows}")
        return self.compute(f"getelementptr i8, ptr {place}, i64 {known}") if known else place

    def growing(self, passes: _Passes, kind: str, first: str, following: str) -> str:
        """Return what is `first` in the first pass, and after each pass what follows it."""
        if (first, following) not in passes.places:
            name = self.new()
            pairs = f"[ {first}, %{passes.before} ], [ {name}.next, %{passes.latch} ]"
            passes.begin.append(f"  {name} = phi {kind} {pairs}")
            passes.end.append(f"  {name}.next = {following.format(name)}")
            self.depths[name[1:]] = passes.depth
            passes.places[first, following] = name
        return passes.places[first, following]

    def depth_of(self, operand: str) -> int:
        """Return how many loops are around what makes an operand."""
        return self.depths.get(operand[1:], 0)

    # Statements

    def block(self, block: ir.Block) -> None:
        self.known.append((len(self.before), {}))
        for statement in block.statements:
            self.write(statement)
        self.known.pop()

    @contextmanager
    def inside_loop(self) -> Iterator[None]:
        """Write a loop; what `compute` moves out of it comes here."""
        before: list[Any] = []
        self.lines.append(before)
        self.before.append(before)
        yield
        self.before.pop()

    def write(self, statement: ir.Statement) -> None:
        match statement:
            case ir.Apply(result, operation, operands):
                self.operation(operation, result, operands, [self.read(v) for v in operands])
            case ir.Load(result, pointer, offset):
                self.load(result, self.address(pointer, offset))
            case ir.Store(pointer, offset, value):
                type, text, place = value.type, self.read(value), self.address(pointer, offset)
                memory = type_text(type, in_memory=True)
                if type.dtype == "bool":
                    wide = self.new()
                    self.line(f"{wide} = zext {type_text(type)} {text} to {memory}")
                    text = wide
                self.line(f"store {memory} {text}, ptr {place}, align {type.itemsize}")
            case ir.Prefetch(pointer, offset):
                place = self.address(pointer, offset)
                self.module.declare("void @llvm.prefetch.p0(ptr, i32, i32, i32)")
                self.line(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")
            case ir.Move(pointer, source, count):
                self.module.declare("void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)")
                given = f"ptr {self.read(pointer)}, ptr {self.read(source)}, i64 {self.read(count)}"
                self.line(f"call void @llvm.memmove.p0.p0.i64({given}, i1 false)")
            case ir.Scratch(result, dtype, count):
                items = f"[{count} x {type_text(ir.Type(dtype), in_memory=True)}]"
                self.slots.append(f"%{result.name} = alloca {items}, align 64")
            case ir.Assign(local, value):
                kind = type_text(local.type)
                if local not in self.made:
                    self.made.add(local)
                    self.slots.append(f"%{local.name}.slot = alloca {kind}")
                self.line(f"store {kind} {self.read(value)}, ptr %{local.name}.slot")
            case ir.For(index, start, stop, step, body):
                self.loop(index.name, (self.read(start), self.read(stop)), step, body)
            case ir.While(before, condition, body):
                head, inside, end = self.names("while", "body", "end")
                with self.inside_loop():
                    self.line(f"br label %{head}")
                    self.label(head)
                    self.block(before)
                    self.line(f"br i1 {self.read(condition)}, label %{inside}, label %{end}")
                    self.label(inside)
                    self.block(body)
                    self.line(f"br label %{head}")
                self.label(end)
            case ir.If(condition, body, otherwise):
                then, other, end = self.names("then", "else", "end")
                self.line(f"br i1 {self.read(condition)}, label %{then}, label %{other}")
                for label, block in ((then, body), (other, otherwise)):
                    self.label(label)
                    self.block(block)
                    self.line(f"br label %{end}")
                self.label(end)
            case ir.Call(results, target, operands):
                self.call(results, target, operands)
            case ir.Poll(steps):
                self.poll(steps)
            case ir.Fail(code, values):
                self.frame_words(ir.NUMBERS, values)
                self.line(f"ret i64 {code}")
                self.label(self.names("unreachable")[0])
            case _:
                raise NotImplementedError(statement)

    def operation(
        self, operation: str, result: ir.Value, operands: tuple[ir.Value, ...], texts: list[str]
    ) -> None:
        kinds = [value.type for value in operands]
        last, kind = kinds[-1], type_text(kinds[-1])
        columns = ir.OPERATIONS[operation].llvm.split("/")
        text = columns[0 if len(columns) == 1 or last.is_float else 1 if last.is_signed else 2]
        if operation == "fma" and not has_fused_multiply_add():
            product = self.compute(f"fmul {kind} {texts[0]}, {texts[1]}")
            self.make(result, f"fadd {kind} {product}, {texts[2]}")
        elif operation == "not":
            ones = True if last.dtype == "bool" else ~np.dtype(last.dtype).type(0)
            self.make(result, f"xor {kind} {texts[0]}, {constant_text(ir.Constant(last, ones))}")
        elif operation == "copy" or (operation == "cast" and last == result.type):
            self.same[result] = texts[0]
        elif operation == "cast":
            self.make(result, _cast(last, result.type, texts[0]))
        elif operation == "splat":
            self.splat(result, texts[0])
        elif text.startswith("llvm."):
            self.intrinsic(result, text, last, texts)
        elif operation == "opaque":
            self.line(f"%{result.name} = {text.format(*texts, k=kind)}")
        elif last == ir.INT64 and operation in _INTEGER:
            self.same[result] = self.integer(operation, texts[0], texts[1], f"%{result.name}")
        elif "{" in text:
            given = {"k": kind, "k0": type_text(kinds[0]), "r": type_text(result.type)}
            zero = "0" if last.lanes == 1 else "zeroinitializer"
            self.make(result, text.format(*texts, zero=zero, **given))
        else:
            self.make(result, f"{text} {kind} {texts[0]}, {texts[1]}")

    def intrinsic(self, result: ir.Value, name: str, type: ir.Type, texts: list[str]) -> None:
        kind, bits = type_text(type), 8 * type.itemsize
        whole = f"{name}.f{bits}" if type.lanes == 1 else f"{name}.v{type.lanes}f{bits}"
        self.module.declare(f"{kind} @{whole}({', '.join([kind] * len(texts))})")
        given = ", ".join(f"{kind} {text}" for text in texts)
        self.make(result, f"call {kind} @{whole}({given})")

    def splat(self, result: ir.Value, text: str) -> None:
        type = result.type
        kind, item = type_text(type), type_text(ir.Type(type.dtype))
        first = self.compute(f"insertelement {kind} undef, {item} {text}, i64 0")
        mask = f"<{type.lanes} x i32> zeroinitializer"
        self.make(result, f"shufflevector {kind} {first}, {kind} undef, {mask}")

    def load(self, result: ir.Value, place: str) -> None:
        type, name = result.type, f"%{result.name}"
        memory = type_text(type, in_memory=True)
        if type.dtype != "bool":
            self.line(f"{name} = load {memory}, ptr {place}, align {type.itemsize}")
            return
        read = self.new()
        self.line(f"{read} = load {memory}, ptr {place}, align 1")
        zero = "0" if type.lanes == 1 else "zeroinitializer"
        self.line(f"{name} = icmp ne {memory} {read}, {zero}")

    def loop(self, index: str, ends: tuple[str, str], step: int, block: ir.Block) -> None:
        head, body, latch, end = self.names("for", "body", "latch", "end")
        (first, last), before = ends, f"before_{head}"
        passes = _Passes(len(self.before) + 1, f"%{index}", before, latch)
        passes.progressions[f"%{index}"] = _Progression(first, str(step))
        is_long = any(True for _ in islice(ir.walk(block), _SHORT, None))
        if not (is_long and any(isinstance(s, ir.For | ir.While) for s in ir.walk(block))):
            self.passes.append(passes)
        with self.inside_loop():
            self.line(f"br label %{before}")
            self.label(before)
            self.line(f"br label %{head}")
            self.label(head)
            self.line(f"%{index} = phi i64 [ {first}, %{before} ], [ %{index}.next, %{latch} ]")
            self.lines.append(passes.begin)
            inside = self.new()
            self.line(f"{inside} = icmp slt i64 %{index}, {last}")
            self.line(f"br i1 {inside}, label %{body}, label %{end}")
            self.label(body)
            self.block(block)
            self.line(f"br label %{latch}")
            self.label(latch)
            self.lines.append(passes.end)
            self.line(f"%{index}.next = add nsw i64 %{index}, {step}")
            self.line(f"br label %{head}")
        self.label(end)
        if passes in self.passes:
            self.passes.remove(passes)

    def call(
        self,
        results: tuple[ir.Value, ...],
        target: ir.Function | str | ir.Value,
        operands: tuple[ir.Value, ...],
    ) -> None:
        given = ", ".join(f"{type_text(v.type)} {self.read(v)}" for v in operands)
        kinds = [type_text(value.type) for value in results]
        whole = f"{{ {', '.join(kinds)} }}" if kinds else "void"
        whole = kinds[0] if len(kinds) == 1 else whole
        if isinstance(target, ir.Value):
            name = self.read(target)
        else:
            name = f"@{symbol_of(target) if isinstance(target, ir.Function) else target}"
            if isinstance(target, str) or target.is_shared:
                types = ", ".join(type_text(value.type) for value in operands)
                self.module.declare(f"{whole} {name}({types})")
        called = f"call {whole} {name}({given})"
        if len(kinds) == 1:
            self.line(f"%{results[0].name} = {called}")
            return
        name = self.new()
        self.line(f"{name} = {called}" if kinds else called)
        for place, value in enumerate(results):
            self.line(f"%{value.name} = extractvalue {whole} {name}, {place}")

    def poll(self, steps: tuple[ir.Value, ...]) -> None:
        (ask, leave, go) = self.names("ask", "leave", "go")
        function, known, answer, wanted = (self.new() for _ in range(4))
        self.line(f"{function} = load ptr, ptr %frame")
        self.line(f"{known} = icmp ne ptr {function}, null")
        self.line(f"br i1 {known}, label %{ask}, label %{go}")
        self.label(ask)
        self.frame_words(ir.PROGRESS, steps)
        self.line(f"{answer} = call i32 {function}(ptr %frame)")
        self.line(f"{wanted} = icmp ne i32 {answer}, 0")
        self.line(f"br i1 {wanted}, label %{leave}, label %{go}")
        self.label(leave)
        self.line(f"ret i64 {ir.INTERRUPTED}")
        self.label(go)

    def frame_words(self, first: int, values: Sequence[ir.Value]) -> None:
        """Write values into words of the frame."""
        for place, value in enumerate(values, first):
            slot = self.new()
            self.line(f"{slot} = getelementptr i8, ptr %frame, i64 {8 * place}")
            self.line(f"store {type_text(value.type)} {self.read(value)}, ptr {slot}, align 8")


def _wrapped(number: int) -> int:
    """Return what an int64 holds of a number."""
    return (number + 2**63) % 2**64 - 2**63


def _flat(lines: list[Any]) -> Iterator[str]:
    """Yield lines, and those of lists among them."""
    for line in lines:
        if isinstance(line, str):
            yield line
        else:
            yield from _flat(line)


def _cast(old: ir.Type, new: ir.Type, text: str) -> str:
    """Return the instruction of a conversion."""
    before, after = type_text(old), type_text(new)
    if new.dtype == "bool":
        zero = constant_text(ir.Constant(old, 0))
        return f"{'fcmp une' if old.is_float else 'icmp ne'} {before} {text}, {zero}"
    if old.is_float and new.is_float:
        instruction = "fpext" if new.itemsize > old.itemsize else "fptrunc"
    elif old.is_float:
        instruction = "fptosi" if new.is_signed else "fptoui"
    elif new.is_float:
        instruction = "sitofp" if old.is_signed else "uitofp"
    elif _bits(new) == _bits(old):
        return f"bitcast {before} {text} to {after}"
    elif _bits(new) < _bits(old):
        instruction = "trunc"
    else:
        instruction = "sext" if old.is_signed else "zext"
    return f"{instruction} {before} {text} to {after}"
