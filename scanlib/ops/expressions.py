"""Values of a graph as one would write them: ``(phi * y) + x``, in messages and reports."""

import re
from collections.abc import Mapping

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import Subtensor

from scanlib.ops.graph import core_op, index_text

MAX_STEPS, MAX_NAME = 6, 40  # of the expression that names a variable
UNKNOWN = "..."  # stands for a value that has no name
SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "true_div": "/", "int_div": "//", "mod": "%", "pow": "**",
    "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "neq": "!=",
}  # fmt: skip


class Expressions:
    """Writes values in terms of what has a name: its own, or one in `names`.

    At most `depth` operations stand in one another, with `operands` operands each, of `length`
    characters.
    """

    def __init__(
        self,
        names: Mapping[Variable, str] | None = None,
        depth: int = 3,
        operands: int = 4,
        length: int = 80,
    ) -> None:
        self.names, self.depth, self.operands, self.length = names or {}, depth, operands, length
        self.written: dict[tuple[Variable, int], str] = {}

    def value(self, variable: Variable, depth: int | None = None) -> str:
        """Return a value as an expression, `UNKNOWN` where it cannot be told."""
        depth = self.depth if depth is None else depth
        name = self.names.get(variable) or variable.name
        if name:
            return name
        if isinstance(variable, Constant):
            text = str(variable.data)
            is_short = np.size(variable.data) == 1 or len(text) <= 20
            return text if is_short and "\n" not in text else UNKNOWN
        node = variable.owner
        if node is None or depth == 0:
            return UNKNOWN
        loop = getattr(node.op, "scan", node.op)
        if hasattr(loop, "labels"):
            return f"{loop.labels.result(node.outputs.index(variable))} of {loop.name or 'loop'}"
        if (variable, depth) not in self.written:
            self.written[variable, depth] = self.node(node, depth)
        return self.written[variable, depth]

    def node(self, node: Apply, depth: int | None = None) -> str:
        """Return what a node computes as an expression."""
        depth = self.depth if depth is None else depth
        op = core_op(node)
        if isinstance(op, TensorFromScalar | ScalarFromTensor) or getattr(op, "is_check", False):
            return self.value(node.inputs[0], depth)
        if isinstance(op, DimShuffle):
            text = self.value(node.inputs[0], depth)
            turned = tuple(reversed(range(op.input_ndim)))
            return f"{operand(text)}.T" if op.new_order == turned and len(turned) > 1 else text
        given = [self.value(inp, depth - 1) for inp in node.inputs[: self.operands]]
        given = [text if len(text) <= self.length else UNKNOWN for text in given]
        if isinstance(op, Subtensor):
            has_slice = any(isinstance(index, slice) for index in op.idx_list)
            return f"{operand(given[0])}[{index_text(node) if has_slice else ', '.join(given[1:])}]"
        given += [UNKNOWN] * (len(node.inputs) > self.operands)
        kind = op.scalar_op if isinstance(op, Elemwise) else op
        name = getattr(kind, "name", None) or type(kind).__name__
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
        symbol = "@" if isinstance(op, Dot) else SYMBOLS.get(name)
        if symbol is not None:
            return f" {symbol} ".join(map(operand, given))
        return f"-{operand(given[0])}" if name == "neg" else f"{name}({', '.join(given)})"


def operand(text: str) -> str:
    """Return a text as a part of an expression."""
    return f"({text})" if re.search(r" [-+*/%@<>=!]+ (?![^(\[]*[)\]])", text) else text


def describe(variable: Variable) -> str | None:
    """Return a short text for a variable, None if there is none.

    A named variable is its name; a slice of one is ``x[1:]``; a result of a loop is
    ``state 0 of ar1``; what is computed is an expression.
    """
    text = Expressions(depth=MAX_STEPS).value(variable)
    return None if UNKNOWN in text or len(text) > MAX_NAME else text
