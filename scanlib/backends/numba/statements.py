"""Statements of scalar code as one function (compiled code only).

    for j in range(n):                    statements(a, b, h, n, start)
        s1 = a[j]
        s2 = expression(s1, b)
        h[j + start] = s2

For each statement numba finds the types of all its parts, looks for variables with several values,
and writes code that it has to simplify later: a millisecond. So runs of statements that do no more
than compute numbers, read and write items of arrays and repeat or choose such statements become one
function each, which emits the same instructions, in the same order. It takes what the statements
read, and returns the numbers that are read after them. What makes arrays or raises stays outside.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scanlib._compat.numba import _Intrinsic
from scanlib.backends.numba.liveness import Names, assigned, live, live_in_loop, names_read
from scanlib.backends.numba.statement_code import grouped, statements
from scanlib.backends.numba.statement_values import CASTS

# Functions whose results are numbers or addresses.
_OF_NUMBERS = {
    "address",
    "as_scalar",
    "computed",
    "divide",
    "larger",
    "least",
    "load",
    "multiply_add",
    "opaque",
    "pointer",
    "reading",
    "shift",
    "smaller",
}
_SIGNS = (
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.BitAnd,
    ast.BitOr,
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
)
_OF_ARRAYS = ("shape", "strides")
_JUMPS = (ast.Break, ast.Continue, ast.Try, ast.With)  # `liveness` does not follow these
_LEAST = 2  # statements that are worth a function
_MOST_RESULTS = 8


def joined(
    text: str, known: dict[str, Any], structures: dict[str, str], register: Callable[[Any], str]
) -> str:
    """Return a function's text with its scalar statements joined.

    Parameters
    ----------
    text : str
        The whole function.
    known : dict
        The function's globals.
    structures : dict
        The structures of those that are expressions, by name.
    register : callable
        Makes a function known, and returns its name.
    """
    tree = ast.parse(text)
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    if any(isinstance(node, _JUMPS) for node in ast.walk(tree)):
        return text
    own = assigned(function.body) | {argument.arg for argument in function.args.args}
    writer = _Joiner(own, known, structures, register)
    function.body = writer.block(function.body, frozenset())
    return ast.unparse(tree)


class _Joiner:
    """Finds runs of statements, and puts calls in their place."""

    def __init__(
        self,
        own: Names,
        known: dict[str, Any],
        structures: dict[str, str],
        register: Callable[[Any], str],
    ) -> None:
        self.own = own
        self.known = known
        self.structures = structures
        self.register = register

    def block(self, body: Sequence[ast.stmt], after: Names) -> list[ast.stmt]:
        """Return the statements of a block; `after` are the names that are read behind it."""
        done: list[ast.stmt] = []
        run: list[ast.stmt] = []
        lives = live(body, after)
        for number, statement in enumerate(body):
            if self.is_scalar(statement):
                run.append(statement)
                continue
            done += self.finish(run, lives[number])
            run = []
            self.inside(statement, lives[number + 1])
            done.append(statement)
        return done + self.finish(run, after)

    def inside(self, statement: ast.stmt, after: Names) -> None:
        """Join what stands inside of a statement that stays."""
        if isinstance(statement, ast.For | ast.While):
            statement.body = self.block(statement.body, live_in_loop(statement, after))
        elif isinstance(statement, ast.If):
            statement.body = self.block(statement.body, after)
            statement.orelse = self.block(statement.orelse, after)

    def finish(self, run: list[ast.stmt], after: Names) -> list[ast.stmt]:
        """Return what takes the place of a run of scalar statements."""
        if len(run) < _LEAST and not any(hasattr(statement, "body") for statement in run):
            return run
        results = sorted(assigned(run) & after)
        if len(results) > _MOST_RESULTS:
            return self.divided(run, after)
        read = live(run, frozenset(results))[0]
        numbers, structures = [], {}
        for name in sorted(read | names_read(run)):
            if name in self.own:
                if name in read:
                    numbers.append(name)
            elif name in self.structures:
                structures[name] = self.structures[name]
            elif name in self.known and not callable(self.known[name]):
                numbers.append(name)
        name = self.register(statements(run, numbers, results, self.known, structures))
        targets = results[0] if len(results) == 1 else f"({', '.join(results)})"
        call = f"{name}({', '.join(grouped(numbers))})"
        return ast.parse(f"{targets} = {call}" if results else call).body

    def divided(self, run: list[ast.stmt], after: Names) -> list[ast.stmt]:
        """Return a run in two parts: numba copies what is returned for each part of it."""
        if len(run) == 1:
            self.inside(run[0], after)
            return run
        half = len(run) // 2
        between = live(run[half:], after)[0]
        return self.finish(run[:half], between) + self.finish(run[half:], after)

    # What is scalar code

    def is_scalar(self, statement: ast.stmt) -> bool:
        """Whether a statement does nothing but what `statements` can write."""
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
            if isinstance(target, ast.Tuple):
                return (
                    isinstance(statement.value, ast.Tuple)
                    and all(isinstance(item, ast.Name) for item in target.elts)
                    and all(self.is_number(item) for item in statement.value.elts)
                )
            if isinstance(target, ast.Subscript):
                return self.is_item(target) and self.is_number(statement.value)
            return isinstance(target, ast.Name) and self.is_number(statement.value)
        if isinstance(statement, ast.AugAssign):
            known = isinstance(statement.op, _SIGNS) and isinstance(statement.target, ast.Name)
            return known and self.is_number(statement.value)
        if isinstance(statement, ast.Expr):
            call = statement.value
            return isinstance(call, ast.Call) and self.is_call(call, set())
        if isinstance(statement, ast.For):
            steps = statement.iter
            return (
                isinstance(steps, ast.Call)
                and isinstance(steps.func, ast.Name)
                and steps.func.id == "range"
                and len(steps.args) <= 2
                and all(self.is_number(item) for item in steps.args)
                and isinstance(statement.target, ast.Name)
                and statement.target.id not in assigned(statement.body)
                and self.are_scalar(statement.body)
            )
        if isinstance(statement, ast.While):
            return self.is_number(statement.test) and self.are_scalar(statement.body)
        if isinstance(statement, ast.If):
            blocks = [*statement.body, *statement.orelse]
            return self.is_number(statement.test) and self.are_scalar(blocks)
        return isinstance(statement, ast.Pass)

    def are_scalar(self, body: Iterable[ast.stmt]) -> bool:
        return all(self.is_scalar(statement) for statement in body)

    def is_number(self, node: ast.expr) -> bool:
        """Whether an expression is a number, or an address."""
        if isinstance(node, ast.Name):
            return True
        if isinstance(node, ast.Constant):
            return isinstance(node.value, bool | int | float)
        if isinstance(node, ast.Subscript):
            return self.is_item(node)
        if isinstance(node, ast.Attribute):
            return isinstance(node.value, ast.Name) and node.attr in ("size", "itemsize")
        if isinstance(node, ast.BinOp):
            known = isinstance(node.op, _SIGNS)
            return known and self.is_operand(node.left) and self.is_operand(node.right)
        if isinstance(node, ast.UnaryOp):
            known = isinstance(node.op, ast.USub | ast.Not)
            return known and self.is_operand(node.operand)
        if isinstance(node, ast.BoolOp):
            return all(self.is_plain(item) for item in node.values)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            known = len(sides) == 2 and isinstance(node.ops[0], _SIGNS)
            return known and all(self.is_number(side) for side in sides)
        if isinstance(node, ast.IfExp):
            sides = [node.body, node.orelse]
            return self.is_number(node.test) and all(self.is_plain(side) for side in sides)
        return isinstance(node, ast.Call) and self.is_call(node, _OF_NUMBERS)

    def is_plain(self, node: ast.expr) -> bool:
        """Whether it makes no difference if a number is computed that is not needed."""
        parts = ast.walk(node)
        return self.is_number(node) and not any(
            isinstance(part, ast.Subscript) or (isinstance(part, ast.Call) and not _is_cast(part))
            for part in parts
        )

    def is_item(self, node: ast.Subscript) -> bool:
        """Whether a subscript is an item of an array, as far as the text tells."""
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not all(self.is_number(index) for index in indices):
            return False
        if isinstance(node.value, ast.Attribute):
            place = node.slice
            return (
                node.value.attr in _OF_ARRAYS
                and isinstance(node.value.value, ast.Name)
                and isinstance(place, ast.Constant)
            )
        return isinstance(node.value, ast.Name)

    def is_call(self, node: ast.Call, of_numbers: set[str]) -> bool:
        """Whether a call gives a number; anything of ours will do where no names are given."""
        if not isinstance(node.func, ast.Name) or node.keywords:
            return False
        name = node.func.id
        if _is_cast(node):
            return self.is_operand(node.args[0])
        function = self.known.get(name)
        if name in self.structures:
            return all(self.is_number(item) for item in node.args)
        if not isinstance(function, _Intrinsic):
            return False
        known = not of_numbers or function._defn.__name__ in of_numbers
        return known and all(self.is_argument(item) for item in node.args)

    def is_operand(self, node: ast.expr) -> bool:
        """Whether a part of an operation is known here: it is a number, whatever computes it."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return self.is_number(node)
        known = callable(self.known.get(node.func.id)) and not node.keywords
        return known and all(self.is_argument(item) for item in node.args)

    def is_argument(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple):
            return all(self.is_argument(item) for item in node.elts)
        return self.is_number(node)


def _is_cast(node: ast.Call) -> bool:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return CASTS.match(name) is not None and len(node.args) == 1 and not node.keywords
