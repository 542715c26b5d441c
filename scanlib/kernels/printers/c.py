"""Functions of plain numbers as C++ text, for g++, clang++ and CUDA's compilers.

Of several lanes, and of whole kernels, LLVM knows alone. To be compiled with ``-fmad=false`` for
CUDA, or ``-fwrapv -ffp-contract=off -fno-fast-math``.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from scanlib.kernels import language as ir

# Integers of these operations wrap around, which C++ leaves open where they have signs.
_WRAPPING = ("add", "sub", "mul", "shl")
_PLAIN = ("select", "copy")


class Source:
    """Collects lines of C++."""

    def __init__(self, depth: int = 0) -> None:
        self.lines: list[str] = []
        self.depth = depth

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """Put what follows into braces after `head`."""
        self.line(f"{head} {{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line(end)

    def struct(self, name: str) -> AbstractContextManager[None]:
        """Put what follows into a struct."""
        return self.block(f"struct {name}", "};")

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def item_text(dtype: str) -> str:
    """Return the C type of a number."""
    if dtype == "bool":
        return "uint8_t"
    return {"float32": "float", "float64": "double"}.get(dtype, f"{dtype}_t")


def literal(value: Any, dtype: str) -> str:
    """Return a number, to the last bit."""
    if dtype == "bool":
        return "1" if value else "0"
    if dtype not in ir.FLOATS:
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
    each = dict.fromkeys(needed)
    return "\n".join(line for function in each for line in _function(function, declared))


def type_text(type: ir.Type) -> str:
    """Return the text of a type, which has one lane."""
    if type.lanes > 1:
        raise NotImplementedError(f"C++ text has no {type}")
    return "char *" if type == ir.POINTER else item_text(type.dtype)


def _function(function: ir.Function, declared: str) -> Iterator[str]:
    body = _Body(function.body)
    texts = [body.read(value) for value in function.results]
    result = type_text(function.results[0].type) if texts else "void"
    if len(texts) > 1:
        kinds = [type_text(value.type) for value in function.results]
        fields = " ".join(f"{kind} r{place};" for place, kind in enumerate(kinds))
        result = f"{function.name}_results"
        yield f"struct {result} {{ {fields} }};"
        body.line(f"const {result} results = {{{', '.join(texts)}}};")
        texts = ["results"]
    given = ", ".join(f"{type_text(v.type)} {v.name}" for v in function.parameters)
    yield f"{declared} {result} {function.name}({given}) {{"
    yield from body.source.lines
    yield from (f"  return {text};" for text in texts)
    yield "}"


class _Body:
    """The statements of one function."""

    def __init__(self, block: ir.Block) -> None:
        self.source = Source(depth=1)
        self.line = self.source.line
        seen: set[ir.Value] = set()
        for statement in ir.walk(block):
            if isinstance(statement, ir.Assign) and statement.local not in seen:
                seen.add(statement.local)
                self.line(f"{type_text(statement.local.type)} {statement.local};")
        self.block(block)

    # Text

    def block(self, block: ir.Block) -> None:
        for statement in block.statements:
            self.write(statement)

    def braced(self, head: str, block: ir.Block) -> None:
        with self.source.block(head):
            self.block(block)

    def read(self, value: ir.Value) -> str:
        """Return the text of an operand."""
        if not isinstance(value, ir.Constant):
            return value.name
        return literal(value.value, value.type.dtype)

    def define(self, value: ir.Value, text: str) -> None:
        kind = "" if value.type == ir.POINTER else "const "
        self.line(f"{kind}{type_text(value.type)} {value} = {text};")

    # Statements

    def write(self, statement: ir.Statement) -> None:
        match statement:
            case ir.Apply(result, operation, operands):
                self.number(result, operation, operands, [self.read(value) for value in operands])
            case ir.Load(result, pointer, offset):
                place, type = f"{self.read(pointer)} + {self.read(offset)}", result.type
                if type == ir.POINTER:
                    self.line(f"char *{result} = *(char **)({place});")
                else:
                    text = f"*(const {type_text(type)} *)({place})"
                    self.define(result, f"{text} != 0" if type.dtype == "bool" else text)
            case ir.Store(pointer, offset, value):
                text, place = self.read(value), f"{self.read(pointer)} + {self.read(offset)}"
                kind = type_text(value.type)
                self.line(f"*({kind}{'' if kind[-1] == '*' else ' '}*)({place}) = {text};")
            case ir.Scratch(result, dtype, count):
                self.line(f"alignas(64) {item_text(dtype)} {result}_memory[{count}];")
                self.line(f"char *{result} = (char *){result}_memory;")
            case ir.Assign(local, value):
                self.line(f"{local} = {self.read(value)};")
            case ir.For(index, start, stop, step, body):
                first, last = self.read(start), self.read(stop)
                ends = f"int64_t {index} = {first}; {index} < {last}; {index} += {step}"
                self.braced(f"for ({ends})", body)
            case ir.While(before, condition, body):
                with self.source.block("for (;;)"):
                    self.block(before)
                    self.line(f"if (!{self.read(condition)}) break;")
                    self.block(body)
            case ir.If(condition, body, otherwise):
                self.braced(f"if ({self.read(condition)})", body)
                if otherwise.statements:
                    self.braced("else", otherwise)
            case ir.Call(results, target, operands):
                name = target.name if isinstance(target, ir.Function) else str(target)
                text = f"{name}({', '.join(map(self.read, operands))})"
                if len(results) == 1:
                    self.define(results[0], text)
                elif results:
                    whole = f"{results[0]}_all"
                    self.line(f"const {name}_results {whole} = {text};")
                    for k, value in enumerate(results):
                        self.define(value, f"{whole}.r{k}")
                else:
                    self.line(f"{text};")
            case _:
                raise NotImplementedError(statement)

    def number(
        self, result: ir.Value, operation: str, operands: tuple[ir.Value, ...], texts: list[str]
    ) -> None:
        """Write an operation on plain numbers."""
        kind, last = type_text(result.type), operands[-1].type
        known = ir.OPERATIONS[operation].c
        if known:
            if last.is_integer and operation in _WRAPPING:
                # Integers narrower than an int would be computed as ints.
                wide = "uint64_t" if last.itemsize == 8 else "uint32_t"
                texts[0] = texts[0] if kind == wide else f"({wide}){texts[0]}"
            text = known.format(*texts, f="f" * (last.dtype == "float32"))
            whole = last.is_integer and result.type == last and operation not in _PLAIN
            self.define(result, f"({kind})({text})" if whole else text)
        elif operation == "neg":
            zero = f"({kind})(0 - (uint64_t){texts[0]})"
            self.define(result, zero if last.is_integer else f"-{texts[0]}")
        elif operation == "not":
            text = f"!{texts[0]}" if last.dtype == "bool" else f"({kind})(~{texts[0]})"
            self.define(result, text)
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
                self.line(f"const {type_text(last)} {source} = {texts[0]};")
            self.line(f"memcpy(&{result}, &{source}, sizeof({result}));")
        else:
            raise NotImplementedError(operation)
