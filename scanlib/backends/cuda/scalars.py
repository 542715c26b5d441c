"""Scalar code for kernels, made of PyTensor's own, with half precision computed in single."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytensor.scalar.basic as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort
from pytensor.graph.utils import MethodNotDefined
from pytensor.scalar.basic import Composite, ScalarInnerGraphOp

from scanlib.backends.cuda.complex_numbers import complex_operation
from scanlib.backends.cuda.conversions import converted, integer_operation
from scanlib.backends.cuda.source import Source, literal
from scanlib.ops.c_code import NODE_NAME, NoCCodeError
from scanlib.ops.positions import PositionalOp

# What computes with truth values as numbers.
ARITHMETIC = (ps.Mul, ps.Add, ps.Sub, ps.TrueDiv, ps.Cast)
FLOATS = ("float32", "float64")
# What the code of an operation runs where it has raised an exception.
FAIL = "failed = 1;"
HALF = "float16"


def item_type(dtype: str) -> str:
    """Return the type in which a kernel computes."""
    return f"pytensor_{dtype}" if dtype.startswith("complex") else f"npy_{dtype}"


def memory_type(dtype: str) -> str:
    """Return the type of an item in memory."""
    return "scanlib_half" if dtype == HALF else item_type(dtype)


class Scalars:
    """Writes scalar operations, and remembers which Ops they came from."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: dict[Variable, str] = {}
        self.ops: dict[Any, None] = {}
        self.functions: list[str] = []
        self.can_fail = False
        # Writes what reads rows at computed places.
        self.positional: Callable[[Apply, list[str]], list[str]] | None = None

    def c_type(self, dtype: str) -> str:
        """Return the type in which values of a dtype are computed."""
        return item_type(dtype)

    def literal(self, value: Any, dtype: str) -> str:
        return literal(value, "float32" if dtype == HALF else dtype)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget, afterwards, which names hold which variables."""
        values = dict(self.values)
        yield
        self.values = values

    def bind(self, variable: Variable, text: str) -> None:
        """Say which expression holds a variable."""
        self.values[variable] = text

    def text(self, variable: Variable) -> str:
        """Return the expression of a variable that is bound or constant."""
        if isinstance(variable, Constant):
            return self.literal(variable.data, variable.type.dtype)
        return self.values[variable]

    def emit(self, outputs: Iterable[Variable]) -> None:
        """Write the statements that compute `outputs` from what is bound."""
        bound = [variable for variable in self.values if not isinstance(variable, Constant)]
        for node in toposort(list(outputs), blockers=bound):
            if not all(out in self.values for out in node.outputs):
                # A row that is read at some place has no item to load.
                first = isinstance(node.op, PositionalOp) and bool(node.inputs)
                inputs = ["row"] * first + [self.text(inp) for inp in node.inputs[first:]]
                for out, name in zip(node.outputs, self.apply(node, inputs), strict=True):
                    self.values[out] = name

    def apply(self, node: Apply, inputs: list[str]) -> list[str]:
        """Write one operation; return the names of its results."""
        if isinstance(node.op, Composite):
            return self._composite(node, inputs)
        if isinstance(node.op, PositionalOp):
            return ["0"] if self.positional is None else self.positional(node, inputs)
        if isinstance(node.op, ScalarInnerGraphOp) or node.op.c_init_code():
            raise NoCCodeError(f"{node.op} needs more than an expression")
        inputs = [self._named(*pair) for pair in zip(node.inputs, inputs, strict=True)]
        if isinstance(node.op, ARITHMETIC) and node.outputs[0].type.dtype in FLOATS:
            pairs = zip(node.inputs, inputs, strict=True)
            inputs = [self._number(*pair, node.outputs[0].type.dtype) for pair in pairs]
        names = [self.source.name("s") for _ in node.outputs]
        own = complex_operation(node, inputs, names[0], self.c_type(node.outputs[0].type.dtype))
        if own is None:
            own = integer_operation(node, inputs, names[0], self.c_type, FAIL)
        if own is not None:
            self.can_fail = self.can_fail or FAIL in own
            for line in own:
                self.source.line(line)
            return names
        inputs = converted(node, inputs, self.c_type)
        for out, name in zip(node.outputs, names, strict=True):
            self.source.line(f"{self.c_type(out.type.dtype)} {name};")
        unique = f"{NODE_NAME}_{names[0]}"
        try:
            code = node.op.c_code(node, unique, inputs, names, {"fail": f"{{ {FAIL} }}"})
            functions = node.op.c_support_code_apply(node, unique)
        except (NotImplementedError, MethodNotDefined) as error:
            raise NoCCodeError(f"{node.op} has no C code: {error}") from error
        self.can_fail = self.can_fail or FAIL in code
        self.ops[node.op] = None
        self.functions.append(functions)
        with self.source.block(""):
            for line in code.strip().splitlines():
                self.source.line(line.strip())
        return names

    def _named(self, variable: Variable, text: str) -> str:
        """Return a name for a constant: some Ops paste their inputs into larger expressions."""
        if not isinstance(variable, Constant):
            return text
        name = self.source.name("k")
        self.source.line(f"const {self.c_type(variable.type.dtype)} {name} = {text};")
        return name

    def _number(self, variable: Variable, text: str, dtype: str) -> str:
        """Return a truth value as a number: a choice, which compilers vectorize.

        Lanes of bytes are converted to lanes of numbers, which takes longer than all the rest.
        """
        if variable.type.dtype != "bool":
            return text
        name, kind = self.source.name("k"), self.c_type(dtype)
        self.source.line(f"const {kind} {name} = {text} ? {kind}(1) : {kind}(0);")
        return name

    def _composite(self, node: Apply, inputs: list[str]) -> list[str]:
        graph = node.op.fgraph
        known: dict[Variable, str] = dict(zip(graph.inputs, inputs, strict=True))

        def text(variable: Variable) -> str:
            if isinstance(variable, Constant):
                return self.literal(variable.data, variable.type.dtype)
            return known[variable]

        for inner in graph.toposort():
            results = self.apply(inner, [text(inp) for inp in inner.inputs])
            known.update(zip(inner.outputs, results, strict=True))
        return [text(out) for out in graph.outputs]

    def support_code(self) -> list[str]:
        """Return what the operations need at global scope, each text once."""
        texts = [op.c_support_code() for op in self.ops]
        return [text for text in dict.fromkeys(texts) if text]


def can_fail(graph: FunctionGraph) -> bool:
    """Whether an operation of a graph may raise an exception (and whether all have C code)."""
    trial = Scalars(Source())
    for variable in graph.inputs:
        trial.bind(variable, "x")
    trial.emit(graph.outputs)
    return trial.can_fail
