"""C++ code of `scanlib.codegen.vector_math`: elementary functions that compilers vectorize.

The functions are written once, in Python, with plain arithmetic, comparisons and choices. Here
their text is translated statement by statement; numbers and functions that they close over
become literals and functions of their own. What is not arithmetic, the bits of numbers and
polynomials, has C++ code below.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from scanlib.backends.c.source import c_type, literal
from scanlib.codegen.vector_bits import (
    FORMATS,
    Format,
    coefficients_of,
    pairwise,
    power_of_two,
    split,
)
from scanlib.codegen.vector_math import VECTOR_FUNCTIONS

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.USub: "-",
    ast.BitOr: "|",
    ast.Lt: "<",
    ast.Gt: ">",
    ast.Eq: "==",
}

_BITS = r"""
static inline T power_of_two(T rounded) {
  U bits;
  memcpy(&bits, &rounded, sizeof(T));
  bits = (bits << MANTISSA) + ((U)BIAS << MANTISSA);
  memcpy(&rounded, &bits, sizeof(T));
  return rounded;
}
static inline void split(T x, T &m, T &k) {
  U bits;
  memcpy(&bits, &x, sizeof(T));
  const U moved = bits + (((U)BIAS << MANTISSA) - ROOT);
  bits = (moved >> MANTISSA) | ((U)(BIAS + MANTISSA) << MANTISSA);
  memcpy(&k, &bits, sizeof(T));
  k -= LARGE;
  bits = (moved & (((U)1 << MANTISSA) - 1)) + ROOT;
  memcpy(&m, &bits, sizeof(T));
}
"""


@cache
def vector_functions(dtype: str) -> str:
    """Return the C++ code of all functions of a dtype, in a struct of static ones."""
    (form,) = (form for form in FORMATS if np.dtype(form.dtype).name == dtype)
    return _Translation(form).text()


def vector_call(name: str, dtype: str, arguments: list[str]) -> str:
    """Return the call of a function in the code of `vector_functions`."""
    return f"scanlib_vector_{dtype}::{name}({', '.join(arguments)})"


class _Translation:
    """Writes the functions of one format, each after those that it calls."""

    def __init__(self, form: Format) -> None:
        self.form = form
        self.dtype = np.dtype(form.dtype).name
        self.item = c_type(self.dtype)
        self.names: dict[Any, str] = {power_of_two: "power_of_two", split: "split"}
        self.counts = {"split": 2}  # of results, where there are several
        self.lines: list[str] = []

    def text(self) -> str:
        """Return all functions."""
        for (_, dtype), function in VECTOR_FUNCTIONS.items():
            if dtype == self.dtype:
                self.name_of(function)
        form, name = self.form, f"scanlib_vector_{self.dtype}"
        constants = {
            "MANTISSA": str(form.mantissa),
            "BIAS": str(form.bias),
            "ROOT": f"(U){form.root:#x}",
            "LARGE": literal(form.large, self.dtype),
        }
        bits = _BITS
        for word, value in constants.items():
            bits = bits.replace(word, value)
        guard = name.upper()
        return "\n".join(
            [
                f"#ifndef {guard}",
                f"#define {guard}",
                f"struct {name} {{",
                f"typedef {self.item} T;",
                f"typedef npy_uint{form.width} U;",
                f"static inline T size_of(T x) {{ return __builtin_fabs{self.suffix}(x); }}",
                bits,
                *self.lines,
                "};",
                "#endif",
            ]
        )

    @property
    def suffix(self) -> str:
        return "f" if self.dtype == "float32" else ""

    def name_of(self, function: Any) -> str:
        """Return the name of a function, which is written first if it is new."""
        if function in self.names:
            return self.names[function]
        coefficients = coefficients_of(function)
        if coefficients is not None:
            name = f"polynomial{len(self.names)}"
            terms = [literal(self.form.number(c), self.dtype) for c in coefficients]
            body = [f"return {_polynomial(terms)};"]
            self.define(f"T {name}(T x)", body)
        else:
            name = function.py_func.__name__
            if name not in self.names.values():
                self.translate(name, function.py_func)
        self.names[function] = name
        return name

    def define(self, head: str, body: list[str]) -> None:
        self.lines += [f"static inline {head} {{", *(f"  {line}" for line in body), "}"]

    def translate(self, name: str, function: Any) -> None:
        """Write a function of Python as one of C++."""
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(definition, ast.FunctionDef)
        body = list(_Body(self, function).statements(definition))
        arguments = [f"T {argument.arg}" for argument in definition.args.args]
        last = definition.body[-1]
        assert isinstance(last, ast.Return)
        if isinstance(last.value, ast.Tuple):
            self.counts[name] = len(last.value.elts)
            arguments += [f"T &result{i}" for i in range(self.counts[name])]
        kind = "void" if name in self.counts else "T"
        self.define(f"{kind} {name}({', '.join(arguments)})", body)


class _Body:
    """The statements of one function."""

    def __init__(self, translation: _Translation, function: Any) -> None:
        self.translation = translation
        known = inspect.getclosurevars(function)
        self.outside = {**known.globals, **known.nonlocals}
        self.declared: set[str] = set()

    def statements(self, definition: ast.FunctionDef) -> Iterator[str]:
        self.declared = {argument.arg for argument in definition.args.args}
        for statement in definition.body:
            if isinstance(statement, ast.Return):
                yield from self.result(statement.value)
            elif isinstance(statement, ast.Assign):
                yield from self.assignment(statement.targets[0], statement.value)
            else:
                raise NotImplementedError(ast.unparse(statement))

    def result(self, value: ast.expr | None) -> Iterator[str]:
        assert value is not None
        if isinstance(value, ast.Tuple):
            for i, item in enumerate(value.elts):
                yield f"result{i} = {self.text(item)};"
        else:
            yield f"return {self.text(value)};"

    def assignment(self, target: ast.expr, value: ast.expr) -> Iterator[str]:
        names = [item.id for item in ast.walk(target) if isinstance(item, ast.Name)]
        if isinstance(target, ast.Tuple):
            assert isinstance(value, ast.Call)
            yield f"T {', '.join(names)};"
            function = self.translation.name_of(self.outside[ast.unparse(value.func)])
            yield f"{function}({', '.join([*map(self.text, value.args), *names])});"
        else:
            kind = "bool" if isinstance(value, ast.Compare) else "T"
            new = "" if names[0] in self.declared else f"{kind} "
            yield f"{new}{names[0]} = {self.text(value)};"
        self.declared.update(names)

    def text(self, value: ast.expr) -> str:
        """Return an expression."""
        if isinstance(value, ast.Name):
            if value.id in self.declared:
                return value.id
            return literal(self.outside[value.id], self.translation.dtype)
        if isinstance(value, ast.BinOp):
            return f"({self.text(value.left)} {_operator(value.op)} {self.text(value.right)})"
        if isinstance(value, ast.UnaryOp):
            return f"({_operator(value.op)}{self.text(value.operand)})"
        if isinstance(value, ast.Compare):
            left, right = value.left, value.comparators[0]
            return f"({self.text(left)} {_operator(value.ops[0])} {self.text(right)})"
        if isinstance(value, ast.IfExp):
            chosen, other = self.text(value.body), self.text(value.orelse)
            return f"({self.text(value.test)} ? {chosen} : {other})"
        if isinstance(value, ast.Call):
            called = ast.unparse(value.func)
            outside = self.outside.get(called)
            name = "size_of" if called == "abs" else self.translation.name_of(outside)
            return f"{name}({', '.join(map(self.text, value.args))})"
        raise NotImplementedError(ast.unparse(value))


def _operator(op: ast.AST) -> str:
    return _OPERATORS[type(op)]


def _polynomial(terms: list[str]) -> str:
    """Return the polynomial in ``x`` with these coefficients, the lowest first."""
    return pairwise(
        terms, "x", lambda low, high, power: f"({low} + {high} * {power})", lambda x: f"({x} * {x})"
    )
