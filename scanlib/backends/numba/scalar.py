"""Scalar code: PyTensor's scalar Ops as expressions of numba source."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import (
    direct_cast,
    numba_funcify_and_cache_key,
    numba_funcify_ensure_cache,
)
from pytensor.scalar.basic import (
    EQ,
    GE,
    GT,
    LE,
    LT,
    NEQ,
    Add,
    Cast,
    Composite,
    Mul,
    Reciprocal,
    Sub,
    Switch,
    TrueDiv,
)

from scanlib.backends.elementary_names import vector_name
from scanlib.backends.numba.kernel_functions import vector_intrinsic
from scanlib.backends.numba.source import Source


@intrinsic
def as_scalar(typingctx: Any, value: Any) -> Any:
    """Return the item of a 0-d array, or a scalar as it is (compiled code only)."""
    if not isinstance(value, types.Array):
        return value(value), lambda context, builder, signature, arguments: arguments[0]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(value)(context, builder, arguments[0])
        return context.unpack_value(builder, value.dtype, array.data)

    return value.dtype(value), codegen


@intrinsic
def divide(typingctx: Any, x: Any, y: Any) -> Any:
    """Return the quotient of two floats of one type, by IEEE's rules (compiled code only)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fdiv(*arguments)

    return x(x, x), codegen


_MOST_TERMS = 16  # of one line

_SIGNS: dict[type[Op], str] = {
    EQ: "==",
    NEQ: "!=",
    LT: "<",
    LE: "<=",
    GT: ">",
    GE: ">=",
    Sub: "-",
}


def vector_function(source: Source, name: str, dtype: str) -> str:
    """Return the name, in a source, of a function that compilers vectorize."""
    return source.function(*vector_intrinsic(name, dtype))


class ScalarCode:
    """Writes scalar code into a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def function(self, op: Op, node: Apply) -> str:
        """Register the function of a node and return its name.

        It is that of PyTensor's numba dispatch, which may use the number and the static types of
        inputs; its own keys leave those out.
        """
        function, key = numba_funcify_ensure_cache(op, node=node)
        if key is not None:
            key = f"{key}{[variable.type for variable in [*node.inputs, *node.outputs]]}"
        return self.source.function(function, key)

    def dtype(self, variable: Variable) -> str:
        dtype = np.dtype(variable.type.dtype)
        return self.source.object(f"np_{dtype.name}", dtype.type)

    def write(self, op: Op, node: Apply, items: list[str]) -> list[str]:
        """Write scalar code and return the names of the results, each of its exact dtype."""
        if isinstance(op, Composite):
            return self._composite(op, items)
        while isinstance(op, Add | Mul) and len(items) > _MOST_TERMS:
            # From the left, as it would be written on one line.
            first = op.make_node(*(inp.type() for inp in node.inputs[:_MOST_TERMS]))
            if first.outputs[0].type != node.outputs[0].type:
                break
            items = [*self.write(op, first, items[:_MOST_TERMS]), *items[_MOST_TERMS:]]
            rest = [node.outputs[0], *node.inputs[_MOST_TERMS:]]
            node = op.make_node(*(variable.type() for variable in rest))
        results = [self.source.name("s") for _ in node.outputs]
        name = self._vector_function(op, node)
        call = self._inlined(op, node, items) if name is None else None
        if call is None:
            name = name or self.function(op, node)
            call = f"{name}({', '.join(items)})"
        if len(results) == 1:
            self.source.line(f"{results[0]} = {self.dtype(node.outputs[0])}({call})")
            return results
        raw = [self.source.name("s") for _ in node.outputs]
        self.source.line(f"{', '.join(raw)} = {call}")
        for out, result, value in zip(node.outputs, results, raw, strict=True):
            self.source.line(f"{result} = {self.dtype(out)}({value})")
        return results

    def _inlined(self, op: Op, node: Apply, items: list[str]) -> str | None:
        """Return scalar code as an expression where PyTensor's function is just one.

        A function of its own for every addition is most of the time a small loop takes to
        compile.
        """
        plain = self._plain(op, node, items)
        if plain is not None:
            return plain
        function, key = numba_funcify_and_cache_key(op, node=node)
        if key is None:
            return None
        identity = f"{key}{[variable.type for variable in [*node.inputs, *node.outputs]]}"
        expression = _Inliner(self.source, identity).expression(function, _names(items))
        return None if expression is None else ast.unparse(expression)

    def _plain(self, op: Op, node: Apply, items: list[str]) -> str | None:
        """Return scalar code that Python has a sign for, or that is one instruction.

        PyTensor's functions for these call others of NumPy's, which numba writes as ufuncs.
        """
        dtypes = {inp.type.dtype for inp in node.inputs}
        if isinstance(op, Cast):
            return items[0]  # the caller casts
        if isinstance(op, Switch):
            return f"({items[1]} if {items[0]} else {items[2]})"
        if type(op) in _SIGNS and {np.dtype(dtype).kind for dtype in dtypes} <= {"i", "f"}:
            return f"({items[0]} {_SIGNS[type(op)]} {items[1]})"
        made = node.outputs[0].type.dtype
        if isinstance(op, Reciprocal) and made in ("float32", "float64"):
            # PyTensor's function divides 1 in float32, also by int64.
            kind = self.dtype(node.outputs[0])
            return f"{self.source.object('divide', divide)}({kind}(1), {kind}({items[0]}))"
        if made in ("float32", "float64") and isinstance(op, TrueDiv):
            # NumPy converts both first; numba divides integers by float32 in float32.
            kind = self.dtype(node.outputs[0])
            dtypes.add(made)
            sides = items if len(dtypes) == 1 else [f"{kind}({item})" for item in items]
            return f"{self.source.object('divide', divide)}({', '.join(sides)})"
        return None

    def _vector_function(self, op: Op, node: Apply) -> str | None:
        """Return scanlib's own code for a function that numba does not vectorize, if any."""
        known = vector_name(op, node)
        return None if known is None else vector_function(self.source, *known)

    def _composite(self, op: Composite, items: list[str]) -> list[str]:
        """Write the nodes of a fused Op one by one, each result with its own dtype."""
        held = dict(zip(op.fgraph.inputs, items, strict=True))

        def text(variable: Variable) -> str:
            if variable not in held:
                assert isinstance(variable, Constant)
                dtype = np.dtype(variable.type.dtype)
                held[variable] = self.source.constant(dtype.type(np.asarray(variable.data).item()))
            return held[variable]

        for inner in op.fgraph.toposort():
            results = self.write(inner.op, inner, [text(inp) for inp in inner.inputs])
            held.update(zip(inner.outputs, results, strict=True))
        return [text(out) for out in op.fgraph.outputs]


def _names(items: list[str]) -> list[ast.expr]:
    return [ast.parse(item, mode="eval").body for item in items]


class _Inliner(ast.NodeTransformer):
    """Rewrites the body of a generated scalar function for use at the place of a call."""

    def __init__(self, source: Source, identity: str) -> None:
        self.source = source
        self.identity = identity
        self.arguments: dict[str, ast.expr] = {}
        self.globals: dict[str, Any] = {}

    def expression(self, function: Any, items: list[ast.expr]) -> ast.expr | None:
        """Return the value of a call as an expression, None if the function is more than one."""
        plain = getattr(function, "py_func", None)
        text = getattr(plain, "__source__", None)
        if text is None or plain is None:
            return None
        definition = ast.parse(text.strip()).body[0]
        if not isinstance(definition, ast.FunctionDef) or len(definition.body) != 1:
            return None
        statement = definition.body[0]
        names = [argument.arg for argument in definition.args.args]
        if not isinstance(statement, ast.Return) or statement.value is None:
            return None
        if len(names) != len(items) or definition.args.vararg is not None:
            return None
        inner = _Inliner(self.source, self.identity)
        inner.arguments = dict(zip(names, items, strict=True))
        inner.globals = plain.__globals__
        used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if not used <= inner.arguments.keys() | inner.globals.keys():
            return None
        return inner.visit(statement.value)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Inline calls of other generated functions; drop casts, which callers make anyway."""
        callee = self.globals.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if callee is direct_cast:
            return self.visit(node.args[0])
        items = [self.visit(argument) for argument in node.args]
        inlined = None if callee is None or node.keywords else self.expression(callee, items)
        if inlined is not None:
            return inlined
        return ast.Call(self.visit(node.func), items, node.keywords)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Put in arguments, and register what a function reads from its module."""
        if node.id in self.arguments:
            return self.arguments[node.id]
        name = self.source.function(self.globals[node.id], f"{self.identity} {node.id}")
        return ast.Name(name, ast.Load())
