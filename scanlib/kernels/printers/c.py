"""Kernels as C++ text, for g++ and clang++; functions of single numbers for CUDA's compilers, too.

Lanes are the vectors that the first two know (`vector_size`); truth values of lanes are vectors of
integers as wide as what was compared, zero or all ones. The two functions of a kernel are those of
`scanlib.kernels.printers.llvm`. To be compiled with ``-fwrapv -ffp-contract=off -fno-fast-math``,
or ``-fmad=false`` for CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import singledispatchmethod
from typing import Any

import numpy as np

from scanlib.kernels import language as ir

HEADERS = ("<math.h>", "<stdint.h>", "<string.h>")
ARGUMENTS = ("-fwrapv", "-fno-fast-math", "-ffp-contract=off", "-fno-trapping-math")

_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "quotient": "/",
    "remainder": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
# Functions of one number; with lanes, one after the other, which compilers put together again.
_FUNCTIONS = {
    "fma": "scanlib_fma",
    "sqrt": "sqrt",
    "abs": "fabs",
    "copysign": "copysign",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "rint": "rint",
}

# Integers of these operations wrap around, which C++ leaves open where they have signs.
_WRAPPING = ("add", "sub", "mul", "shl")

# Where the processor has no such instruction, both roundings: a function that has one is slow.
_FMA = """#ifndef SCANLIB_FMA
#define SCANLIB_FMA
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__CUDACC__)
#define scanlib_fma fma
#define scanlib_fmaf fmaf
#else
static inline double scanlib_fma(double x, double y, double z) { return x * y + z; }
static inline float scanlib_fmaf(float x, float y, float z) { return x * y + z; }
#endif
#endif"""


def item_text(dtype: str) -> str:
    """Return the C type of a number."""
    if dtype == "bool":
        return "uint8_t"
    return {"float32": "float", "float64": "double"}.get(dtype, f"{dtype}_t")


def literal(value: Any, dtype: str) -> str:
    """Return a number, to the last bit."""
    if dtype == "bool":
        return "1" if value else "0"
    if dtype not in ("float32", "float64"):
        if int(value) == -(2**63):
            return "(int64_t)(-9223372036854775807LL - 1)"
        return f"({item_text(dtype)}){int(value)}{'ULL' if dtype == 'uint64' else 'LL'}"
    if not np.isfinite(value):
        name = "NAN" if np.isnan(value) else "-INFINITY" if value < 0 else "INFINITY"
        return f"({item_text(dtype)}){name}"
    return f"{float(value).hex()}{'f' if dtype == 'float32' else ''}"


def print_functions(functions: Sequence[ir.Function], declared: str = "static inline") -> str:
    """Return functions and what they call; `declared` is what stands before each."""
    needed = [inner for function in functions for inner in (*ir.functions_of(function), function)]
    return "\n".join(_Module(list(dict.fromkeys(needed)), declared).text())


def print_kernels(*kernels: ir.Kernel) -> str:
    """Return kernels, of different names, their entries, and what they call."""
    module = _Module(list(dict.fromkeys(f for kernel in kernels for f in ir.functions_of(kernel))))
    for kernel in kernels:
        module.kernel(kernel)
    return "\n".join(module.text())


def result_type(function: ir.Function) -> str:
    """Return the C type of what a function returns."""
    if len(function.results) == 1:
        return _Types().text(function.results[0].type)
    return f"{function.name}_results" if function.results else "void"


class _Types:
    """The types of vectors that are needed."""

    def __init__(self) -> None:
        self.vectors: dict[tuple[str, int], None] = {}

    def text(self, type: ir.Type, mask: int = 8) -> str:
        """Return the text of a type; truth values of lanes are `mask` bytes wide."""
        if type == ir.POINTER:
            return "char *"
        if type.lanes == 1:
            return item_text(type.dtype)
        dtype = f"int{8 * mask}" if type.dtype == "bool" else type.dtype
        self.vectors[dtype, type.lanes] = None
        return f"scanlib_{dtype}x{type.lanes}"

    def definitions(self) -> Iterator[str]:
        """Yield the types, each defined once in a file."""
        for dtype, lanes in self.vectors:
            name, item = f"scanlib_{dtype}x{lanes}", item_text(dtype)
            size = np.dtype(dtype).itemsize * lanes
            yield f"#ifndef {name.upper()}\n#define {name.upper()}"
            yield f"typedef {item} {name} __attribute__((vector_size({size})));"
            yield "#endif"


class _Module:
    def __init__(self, functions: list[ir.Function], declared: str = "static inline") -> None:
        self.types, self.declared = _Types(), declared
        self.lines: list[str] = []
        for function in functions:
            self.function(function)

    def text(self) -> Iterator[str]:
        yield _FMA
        yield from self.types.definitions()
        yield from self.lines

    def function(self, function: ir.Function) -> None:
        body = _Body(self.types, function.body, function.parameters)
        texts = [body.read(value) for value in function.results]
        if len(texts) == 1:
            body.line(f"return {texts[0]};")
            result = self.types.text(function.results[0].type)
        elif texts:
            result = f"{function.name}_results"
            fields = [
                f"{self.types.text(value.type)} r{place};"
                for place, value in enumerate(function.results)
            ]
            self.lines.append(f"struct {result} {{ {' '.join(fields)} }};")
            body.line(f"const {result} results = {{{', '.join(texts)}}};")
            body.line("return results;")
        else:
            result = "void"
        given = ", ".join(self.parameter(value) for value in function.parameters)
        how = "__attribute__((noinline)) static" if function.is_shared else self.declared
        self.lines.append(f"{how} {result} {function.name}({given}) {{")
        self.lines += [*body.lines, "}"]

    def parameter(self, value: ir.Value) -> str:
        return f"{self.types.text(value.type)} {value.name}"

    def kernel(self, kernel: ir.Kernel) -> None:
        body = _Body(self.types, kernel.body, kernel.parameters)
        given = [
            f"char *__restrict__ {value.name}"
            if value.type == ir.POINTER
            else self.parameter(value)
            for value in kernel.parameters
        ]
        head = f"static int64_t {kernel.name}({', '.join([*given, 'char *frame'])})"
        self.lines += [f"__attribute__((noinline)) {head} {{", *body.lines, "  return 0;", "}"]
        slots = [
            "table"
            if slot == ir.TABLE
            else f"*({self.types.text(value.type)} *)(table + {8 * slot})"
            for value, slot in zip(kernel.parameters, kernel.slots, strict=True)
        ]
        self.lines += [
            f"static int64_t {kernel.name}_entry(char *table, char *frame) {{",
            f"  return {kernel.name}({', '.join([*slots, 'frame'])});",
            "}",
        ]


class _Body:
    """The statements of one function."""

    def __init__(self, types: _Types, block: ir.Block, parameters: tuple[ir.Value, ...]) -> None:
        self.types = types
        self.lines: list[str] = []
        self.depth = 1
        # How wide truth values of lanes are, in bytes.
        self.masks: dict[ir.Value, int] = {}
        seen: set[ir.Value] = set()
        for statement in ir.walk(block):
            if isinstance(statement, ir.Assign) and statement.local not in seen:
                seen.add(statement.local)
                self.line(f"{self.types.text(statement.local.type)} {statement.local};")
        self.block(block)

    # Text

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def block(self, block: ir.Block) -> None:
        for statement in block.statements:
            self.write(statement)

    def braced(self, head: str, block: ir.Block) -> None:
        self.line(f"{head} {{")
        self.depth += 1
        self.block(block)
        self.depth -= 1
        self.line("}")

    def read(self, value: ir.Value) -> str:
        """Return the text of an operand."""
        if not isinstance(value, ir.Constant):
            return value.name
        dtype, items = value.type.dtype, value.by_lane
        if value.type.lanes == 1:
            return literal(items[0], dtype)
        texts = [str(-int(i)) if dtype == "bool" else literal(i, dtype) for i in items]
        return f"({self.types.text(value.type)}){{{', '.join(texts)}}}"

    def define(self, value: ir.Value, text: str) -> None:
        kind = self.types.text(value.type, self.masks.get(value, 8))
        self.line(f"{'' if value.type == ir.POINTER else 'const '}{kind} {value} = {text};")

    def mask(self, value: ir.Value, size: int) -> str:
        """Return truth values of lanes, `size` bytes wide."""
        text = self.read(value)
        if self.masks.get(value, 8) == size:
            return text
        return f"__builtin_convertvector({text}, {self.types.text(value.type, size)})"

    # Statements

    @singledispatchmethod
    def write(self, statement: ir.Statement) -> None:
        raise NotImplementedError(statement)

    @write.register
    def _(self, statement: ir.Apply) -> None:
        result, operation, operands = statement.result, statement.operation, statement.operands
        if result.type.lanes > 1:
            self.lanes(result, operation, operands)
        elif operation == "lane":
            place = operands[1]
            assert isinstance(place, ir.Constant)
            text = f"{self.read(operands[0])}[{int(place.value)}]"
            self.define(result, f"{text} != 0" if result.type.dtype == "bool" else text)
        else:
            self.number(result, operation, operands, [self.read(value) for value in operands])

    def number(
        self, result: ir.Value, operation: str, operands: tuple[ir.Value, ...], texts: list[str]
    ) -> None:
        """Write an operation on plain numbers."""
        kind, last = self.types.text(result.type), operands[-1].type
        if operation in _OPERATORS:
            if last.is_integer and operation in _WRAPPING:
                # Integers narrower than an int would be computed as ints.
                wide = "uint64_t" if last.itemsize == 8 else "uint32_t"
                texts[0] = texts[0] if kind == wide else f"({wide}){texts[0]}"
            text = f"{texts[0]} {_OPERATORS[operation]} {texts[1]}"
            whole = last.is_integer and result.type == last
            self.define(result, f"({kind})({text})" if whole else text)
        elif operation in _FUNCTIONS:
            self.define(result, f"{_function(operation, last.dtype)}({', '.join(texts)})")
        elif operation == "neg":
            zero = f"({kind})(0 - (uint64_t){texts[0]})"
            self.define(result, zero if last.is_integer else f"-{texts[0]}")
        elif operation == "not":
            text = f"!{texts[0]}" if last.dtype == "bool" else f"({kind})(~{texts[0]})"
            self.define(result, text)
        elif operation == "select":
            self.define(result, f"{texts[0]} ? {texts[1]} : {texts[2]}")
        elif operation == "copy":
            self.define(result, texts[0])
        elif operation == "opaque":
            self.line(f"{kind} {result} = {texts[0]};")
            self.line(f'asm("" : "+r"({result}));')
        elif operation == "cast":
            truth = result.type.dtype == "bool"
            self.define(result, f"{texts[0]} != 0" if truth else f"({kind}){texts[0]}")
        elif operation == "bitcast":
            self.line(f"{kind} {result};")
            source = texts[0]
            if isinstance(operands[0], ir.Constant):
                source = f"{result}_from"
                self.line(f"const {self.types.text(last)} {source} = {texts[0]};")
            self.line(f"memcpy(&{result}, &{source}, sizeof({result}));")
        elif operation == "offset":
            self.define(result, f"{texts[0]} + {texts[1]}")
        else:
            raise NotImplementedError(operation)

    def lanes(self, result: ir.Value, operation: str, operands: tuple[ir.Value, ...]) -> None:
        """Write an operation on several lanes."""
        last, truth = operands[-1].type, result.type.dtype == "bool"
        size = last.itemsize
        if last.dtype == "bool" and operation not in ("splat", "cast"):
            size = max(self.masks.get(value, 8) for value in operands)
        self.masks[result] = size if operation not in ("splat", "cast") else 8
        if operation == "cast" and truth:
            self.masks[result] = size
        truths = last.dtype == "bool"
        texts = [self.mask(v, size) if truths else self.read(v) for v in operands]
        if operation in _OPERATORS:
            self.define(result, f"{texts[0]} {_OPERATORS[operation]} {texts[1]}")
        elif operation in _FUNCTIONS:
            self.one_by_one(result, _function(operation, last.dtype), texts)
        elif operation in ("neg", "not", "copy"):
            sign = {"neg": "-", "not": "~", "copy": ""}[operation]
            self.define(result, f"{sign}{texts[0]}")
        elif operation == "select":
            chosen = self.mask(operands[0], size)
            self.define(result, f"{chosen} ? {texts[1]} : {texts[2]}")
        elif operation == "cast" and truths:
            # All ones are minus one as an integer.
            wide = ir.Type(f"int{8 * result.type.itemsize}", result.type.lanes)
            text = f"-{self.mask(operands[0], wide.itemsize)}"
            target = self.types.text(result.type)
            self.define(result, f"__builtin_convertvector({text}, {target})")
        elif operation == "cast" and truth:
            self.define(result, f"{texts[0]} != {self.read(ir.Constant(last, 0))}")
        elif operation == "cast":
            self.define(
                result, f"__builtin_convertvector({texts[0]}, {self.types.text(result.type)})"
            )
        elif operation == "bitcast":
            self.define(result, f"({self.types.text(result.type)}){texts[0]}")
        elif operation == "splat":
            item = f"-(int64_t){self.read(operands[0])}" if truth else self.read(operands[0])
            kind = self.types.text(result.type)
            self.define(result, f"({kind}){{{', '.join([item] * result.type.lanes)}}}")
        else:
            raise NotImplementedError(operation)

    def one_by_one(self, result: ir.Value, function: str, texts: list[str]) -> None:
        names = []
        for place, text in enumerate(texts):
            names.append(f"{result}_{place}")
            self.line(f"const {self.types.text(result.type)} {names[-1]} = {text};")
        items = [
            f"{function}({', '.join(f'{name}[{lane}]' for name in names)})"
            for lane in range(result.type.lanes)
        ]
        self.define(result, f"{{{', '.join(items)}}}")

    @write.register
    def _(self, statement: ir.Load) -> None:
        result, type = statement.result, statement.result.type
        place = f"{self.read(statement.pointer)} + {self.read(statement.offset)}"
        if type == ir.POINTER:
            self.line(f"char *{result} = *(char **)({place});")
        elif type.lanes == 1:
            text = f"*(const {item_text(type.dtype)} *)({place})"
            self.define(result, f"{text} != 0" if type.dtype == "bool" else text)
        elif type.dtype == "bool":
            item = "((const uint8_t *)({}))[{}]".format(place, "{}")
            items = [f"-(int64_t)({item.format(lane)} != 0)" for lane in range(type.lanes)]
            self.define(result, f"{{{', '.join(items)}}}")
        else:
            self.line(f"{self.types.text(type)} {result};")
            self.line(f"memcpy(&{result}, {place}, sizeof({result}));")

    @write.register
    def _(self, statement: ir.Store) -> None:
        type, text = statement.value.type, self.read(statement.value)
        place = f"{self.read(statement.pointer)} + {self.read(statement.offset)}"
        if type == ir.POINTER:
            self.line(f"*(char **)({place}) = {text};")
        elif type.lanes == 1:
            self.line(f"*({item_text(type.dtype)} *)({place}) = {text};")
        elif type.dtype == "bool":
            for lane in range(type.lanes):
                self.line(f"((uint8_t *)({place}))[{lane}] = {text}[{lane}] != 0;")
        else:
            kind = self.types.text(type)
            self.line(f"{{ const {kind} item = {text}; memcpy({place}, &item, sizeof(item)); }}")

    @write.register
    def _(self, statement: ir.Prefetch) -> None:
        place = f"{self.read(statement.pointer)} + {self.read(statement.offset)}"
        self.line(f"__builtin_prefetch({place}, 0, 3);")

    @write.register
    def _(self, statement: ir.Shuffle) -> None:
        result, lanes = statement.result, statement.first.type.lanes
        size = 8
        if result.type.dtype == "bool":
            size = max(self.masks.get(v, 8) for v in (statement.first, statement.second))
            self.masks[result] = size
        names = []
        for place, value in enumerate((statement.first, statement.second)):
            names.append(f"{result}_{place}")
            text = self.mask(value, size) if value.type.dtype == "bool" else self.read(value)
            self.line(f"const {self.types.text(value.type, size)} {names[-1]} = {text};")
        items = [f"{names[place // lanes]}[{place % lanes}]" for place in statement.places]
        self.define(result, f"{{{', '.join(items)}}}")

    @write.register
    def _(self, statement: ir.Scratch) -> None:
        item, name = item_text(statement.dtype), statement.result.name
        self.line(f"alignas(64) {item} {name}_memory[{statement.count}];")
        self.line(f"char *{name} = (char *){name}_memory;")

    @write.register
    def _(self, statement: ir.Assign) -> None:
        text = self.read(statement.value)
        if statement.local.type.dtype == "bool" and statement.local.type.lanes > 1:
            text = self.mask(statement.value, 8)
        self.line(f"{statement.local} = {text};")

    @write.register
    def _(self, statement: ir.For) -> None:
        index = statement.index
        first, last = self.read(statement.start), self.read(statement.stop)
        head = f"for (int64_t {index} = {first}; {index} < {last}; {index} += {statement.step})"
        self.braced(head, statement.body)

    @write.register
    def _(self, statement: ir.While) -> None:
        self.line("for (;;) {")
        self.depth += 1
        self.block(statement.before)
        self.line(f"if (!{self.read(statement.condition)}) break;")
        self.block(statement.body)
        self.depth -= 1
        self.line("}")

    @write.register
    def _(self, statement: ir.If) -> None:
        self.braced(f"if ({self.read(statement.condition)})", statement.body)
        if statement.otherwise.statements:
            self.braced("else", statement.otherwise)

    @write.register
    def _(self, statement: ir.Call) -> None:
        given = ", ".join(self.read(value) for value in statement.operands)
        text = f"{statement.function.name}({given})"
        if len(statement.results) == 1:
            self.define(statement.results[0], text)
        elif statement.results:
            whole = f"{statement.results[0]}_all"
            self.line(f"const {statement.function.name}_results {whole} = {text};")
            for place, value in enumerate(statement.results):
                self.define(value, f"{whole}.r{place}")
        else:
            self.line(f"{text};")

    @write.register
    def _(self, statement: ir.CallSymbol) -> None:
        given = ", ".join(self.read(value) for value in statement.operands)
        self.define(statement.result, f"{statement.symbol}({given})")

    @write.register
    def _(self, statement: ir.CallPointer) -> None:
        kinds = ", ".join(self.types.text(value.type) for value in statement.operands)
        result = statement.result
        kind = "void" if result is None else self.types.text(result.type)
        given = ", ".join(self.read(value) for value in statement.operands)
        call = f"(({kind} (*)({kinds})){self.read(statement.pointer)})({given})"
        if result is None:
            self.line(f"{call};")
        else:
            self.define(result, call)

    @write.register
    def _(self, statement: ir.Poll) -> None:
        self.frame_words(ir.PROGRESS, statement.steps)
        self.line("{ int (*ask)(void *) = *(int (**)(void *))frame;")
        self.line(f"  if (ask && ask(frame)) return {ir.INTERRUPTED}; }}")

    @write.register
    def _(self, statement: ir.Fail) -> None:
        self.frame_words(ir.NUMBERS, statement.values)
        self.line(f"return {statement.code};")

    def frame_words(self, first: int, values: Sequence[ir.Value]) -> None:
        """Write values into words of the frame."""
        for place, value in enumerate(values, first):
            kind = self.types.text(value.type)
            self.line(f"*({kind} *)(frame + {8 * place}) = {self.read(value)};")

    @write.register
    def _(self, statement: ir.End) -> None:
        self.line(f"return {statement.code};")


def _function(operation: str, dtype: str) -> str:
    return _FUNCTIONS[operation] + ("f" if dtype == "float32" else "")
