"""Lines of scalar code as few statements.

    s1 = np_float64(a * b)                s2 = expression(a, b, c)
    s2 = np_float64(s1 + c)

numba finds the type of every operation among a dozen candidates and writes each for itself: a line
of four operations takes it two milliseconds, and a function that does the same, written by us, a
quarter of that. So before a function is compiled, a value that only one later line reads is written
into that line, and what a line computes becomes one such function, which emits the same
instructions in the same order. Only lines whose outermost operation is a cast to a dtype are meant:
that is how scalar code is written; calls of other functions stay as they are.

What is cast to integers wraps around as NumPy's integers do. In numba's own code a sum that leaves
the range of its dtype is undefined: LLVM may take its sign for that of the sum which did not wrap.

Products of real numbers keep their order: of ``(x * 0) * y`` and ``x * y * 0`` with large `x` and
`y`, the second is NaN. Sums may be regrouped, which makes lanes of them.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from pytensor.configdefaults import config

from scanlib._compat.numba import TypingError, cgutils
from scanlib.backends.numba.vectors import IN_ORDER, fused

_BINARY: dict[type, tuple[str, Any]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.BitAnd: ("", operator.and_),
    ast.BitOr: ("", operator.or_),
}
_COMPARED: dict[type, tuple[str, Any]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
_ASSIGNED = re.compile(r"^( *)([A-Za-z_]\w*(?:\[[^=]*\])?) = (.+)$")
_CAST = re.compile(r"^np_(float|int|uint|bool|complex)\d*\(")
_WORD = re.compile(r"[A-Za-z_]\w*")
_OWN = ("divide", "multiply_add")  # functions of ours that take numbers of one type
MOST_PARTS = 250  # of one expression: Python reads no more than two hundred nested parentheses


@dataclass
class _Line:
    """A line ``target = text``; `code` is the parsed text where it is scalar code."""

    indent: str
    target: str
    text: str
    code: ast.expr | None


def compact(lines: Sequence[str], register: Callable[[str, Any], str]) -> list[str]:
    """Return the lines of a function with its scalar code as few statements.

    `register` makes a function known under a prefix and returns its name.
    """
    uses = Counter(word for line in lines for word in _WORD.findall(line))
    done: list[str] = []
    run: list[_Line] = []
    for text in lines:
        line = _parse(text)
        if line is None or (run and line.indent != run[0].indent):
            done += _finish(run, uses, register)
            run = []
        if line is None:
            done.append(text)
        else:
            run.append(line)
    return done + _finish(run, uses, register)


def _parse(text: str) -> _Line | None:
    found = _ASSIGNED.match(text)
    if found is None:
        return None
    indent, target, value = found.groups()
    code = None
    if _CAST.match(value):
        tree = ast.parse(value, mode="eval").body
        code = tree if _is_scalar_code(tree) else None
    return _Line(indent, target, value, code)


def _is_scalar_code(node: ast.expr, chosen: bool = False) -> bool:
    """Whether there is code here for an expression; `chosen` inside of a choice of two."""
    if isinstance(node, ast.Name):
        return True
    if isinstance(node, ast.Subscript):
        return not chosen  # where it is not chosen, the place may not exist
    if isinstance(node, ast.BinOp):
        known = type(node.op) in _BINARY
        return known and _is_scalar_code(node.left, chosen) and _is_scalar_code(node.right, chosen)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_scalar_code(node.operand, chosen)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        known = len(sides) == 2 and type(node.ops[0]) in _COMPARED
        return known and all(_is_scalar_code(side, chosen) for side in sides)
    if isinstance(node, ast.IfExp):
        return _is_scalar_code(node.test, chosen) and all(
            _is_scalar_code(side, True) for side in (node.body, node.orelse)
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        is_cast = _CAST.match(f"{node.func.id}(") is not None and len(node.args) == 1
        known = is_cast or node.func.id in _OWN
        return known and all(_is_scalar_code(argument, chosen) for argument in node.args)
    return False


def _finish(run: list[_Line], uses: Counter[str], register: Callable[[str, Any], str]) -> list[str]:
    """Return the lines of a run of assignments that stand one behind the other."""
    places = _Places(run)
    waiting: dict[str, tuple[int, ast.expr]] = {}  # what one later line may compute with its own
    done: list[tuple[int, _Line]] = []
    for number, line in enumerate(run):
        if line.code is not None:
            put = _Put(waiting, MOST_PARTS - _size(line.code))
            line.code = put.visit(line.code)
            done += [(n, _Line(line.indent, name, "", code)) for name, (n, code) in put.left]
        read_later = line.target.isidentifier() and uses[line.target] == 2
        if line.code is not None and read_later and places.may_wait(number, line):
            waiting[line.target] = number, line.code
        else:
            done.append((number, line))
    return [_written(line, register) for _, line in sorted(done, key=itemgetter(0))]


class _Places:
    """Where the lines of a run read and assign names."""

    def __init__(self, run: Sequence[_Line]) -> None:
        self.run = run
        self.read: dict[str, list[int]] = defaultdict(list)
        self.assigned: dict[str, list[int]] = defaultdict(list)
        self.barriers: list[int] = []  # what more is done there than computing numbers
        for number, line in enumerate(run):
            for word in set(_WORD.findall(line.text)):
                self.read[word].append(number)
            self.assigned[line.target].append(number)
            if line.code is None or not line.target.isidentifier():
                self.barriers.append(number)

    def may_wait(self, number: int, line: _Line) -> bool:
        """Whether scalar code behind a line reads its value, and nothing before changes that."""
        reader = _next(self.read[line.target], number)
        if reader is None or self.run[reader].code is None or line.code is None:
            return False
        names = {node.id for node in ast.walk(line.code) if isinstance(node, ast.Name)}
        changes = [_next(self.barriers, number)]
        changes += [_next(self.assigned[name], number) for name in names if name in self.assigned]
        return all(change is None or change >= reader for change in changes)


def _next(places: list[int], number: int) -> int | None:
    """Return the first of some places, which are in order, behind a place."""
    found = bisect_right(places, number)
    return places[found] if found < len(places) else None


class _Put(ast.NodeTransformer):
    """Puts what was waiting in the place of its name, as long as there is room."""

    def __init__(self, waiting: dict[str, tuple[int, ast.expr]], room: int) -> None:
        self.waiting = waiting
        self.room = room
        self.left: list[tuple[str, tuple[int, ast.expr]]] = []  # lines of their own after all

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.waiting:
            return node
        number, code = self.waiting.pop(node.id)
        self.room -= _size(code)
        if self.room >= 0:
            return code
        self.room += _size(code)
        self.left.append((node.id, (number, code)))
        return node


def _size(code: ast.expr) -> int:
    return sum(1 for _ in ast.walk(code))


def _written(line: _Line, register: Callable[[str, Any], str]) -> str:
    text = line.text
    if line.code is not None:
        form = _Form()
        structure = form.of(line.code)
        if form.operations > 1:
            name = register(structure, expression(structure))
            text = f"{name}({', '.join(form.leaves)})"
        else:
            text = ast.unparse(line.code)
    return f"{line.indent}{line.target} = {text}"


@dataclass
class _Form:
    """What an expression does with its leaves, which are numbered."""

    leaves: dict[str, int] = field(default_factory=dict)
    operations: int = 0

    def of(self, node: ast.expr) -> str:
        """Return the structure of an expression as text in Python's own words."""
        if isinstance(node, ast.Name | ast.Subscript):
            text = ast.unparse(node)
            return f"x{self.leaves.setdefault(text, len(self.leaves))}"
        self.operations += 1
        if isinstance(node, ast.BinOp):
            sign = ast.unparse(ast.BinOp(ast.Name("a"), node.op, ast.Name("b")))[2:-2]
            return f"({self.of(node.left)} {sign} {self.of(node.right)})"
        if isinstance(node, ast.UnaryOp):
            return f"(-{self.of(node.operand)})"
        if isinstance(node, ast.Compare):
            sign = _COMPARED[type(node.ops[0])][0]
            return f"({self.of(node.left)} {sign} {self.of(node.comparators[0])})"
        if isinstance(node, ast.IfExp):
            test, body, other = map(self.of, (node.test, node.body, node.orelse))
            return f"({body} if {test} else {other})"
        assert isinstance(node, ast.Call)
        return f"{ast.unparse(node.func)}({', '.join(map(self.of, node.args))})"


@cache
def expression(structure: str) -> Any:
    """Return a function of compiled code that computes an expression of numbers ``x0, x1, …``."""
    tree = ast.parse(structure, mode="eval").body

    @intrinsic
    def computed(typingctx: Any, *numbers: Any) -> Any:
        kinds = [types.unliteral(number) for number in numbers]
        names = [f"x{i}" for i in range(len(kinds))]
        result, write = Plan(typingctx, dict(zip(names, kinds, strict=True))).of(tree)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = cgutils.unpack_tuple(builder, arguments[0])
            return write(context, builder, dict(zip(names, values, strict=True)))

        return result(types.StarArgTuple.from_types(kinds)), codegen

    return computed


_signatures: dict[Any, Any] = {}


def _resolved(typingctx: Any, function: Any, own: tuple[types.Type, ...]) -> Any:
    """Return numba's signature of an operator; it tries dozens of candidates to find one."""
    if (function, own) not in _signatures:
        found = typingctx.resolve_function_type(function, own, {})
        if found is None:
            raise TypingError(f"{function} of {own}")
        _signatures[function, own] = found
    return _signatures[function, own]


Values = dict[str, Any]
Writer = Callable[[Any, Any, Values], Any]
"""Writes the instructions that compute something from the values of names."""


class Plan:
    """Finds the type of every part of an expression, and how it is written."""

    def __init__(self, typingctx: Any, kinds: dict[str, types.Type]) -> None:
        self.typingctx = typingctx
        self.kinds = kinds
        self.wraps = False  # numbers of an integer dtype are computed, no places in memory

    def of(self, node: ast.expr) -> tuple[types.Type, Writer]:
        """Return the type of an expression and what writes it."""
        if isinstance(node, ast.Name):
            name = node.id
            return self.kinds[name], lambda context, builder, values: values[name]
        if isinstance(node, ast.BinOp):
            name, general = _BINARY[type(node.op)]
            return self._operation(name, general, node.left, node.right)
        if isinstance(node, ast.UnaryOp):
            return self._general(operator.neg, [self.of(node.operand)])
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.IfExp):
            return self._choice(node)
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        if node.func.id in _OWN:
            return self._own(node.func.id, node.args)
        kind = numba.from_dtype(np.dtype(node.func.id[3:]))
        around, self.wraps = self.wraps, isinstance(kind, types.Integer)
        part = self.of(node.args[0])
        self.wraps = around
        return kind, self._cast(part, kind)

    def _cast(self, part: tuple[types.Type, Writer], kind: types.Type) -> Writer:
        own, write = part
        if own == kind:
            return write
        return lambda context, builder, values: context.cast(
            builder, write(context, builder, values), own, kind
        )

    def _operation(
        self, name: str, general: Any, left: ast.expr, right: ast.expr
    ) -> tuple[types.Type, Writer]:
        parts = [self.of(left), self.of(right)]
        kinds = [own for own, _ in parts]
        kind = kinds[0] if kinds[0] == kinds[1] else None
        if not isinstance(kind, types.Float) and self.wraps:
            kind = _resolved(self.typingctx, general, tuple(kinds)).return_type
        code = {types.Float: f"f{name}", types.Integer: name}.get(kind.__class__) if name else None
        if code is None or (code == name and not self.wraps):
            return self._general(general, parts)
        casts = [self._cast(part, kind) for part in parts]
        # numba gives all liberties that it may take to instructions which have none yet.
        flags = IN_ORDER if code == "fmul" and config.numba__fastmath else ()

        def write(context: Any, builder: Any, values: Values) -> Any:
            sides = [cast(context, builder, values) for cast in casts]
            return getattr(builder, code)(*sides, flags=flags)

        return kind, write

    def _own(self, name: str, nodes: Sequence[ast.expr]) -> tuple[types.Type, Writer]:
        kind, first = self.of(nodes[0])
        others = [self._cast(self.of(node), kind) for node in nodes[1:]]

        def write(context: Any, builder: Any, values: Values) -> Any:
            parts = [part(context, builder, values) for part in (first, *others)]
            return builder.fdiv(*parts) if name == "divide" else fused(builder, *parts)

        return kind, write

    def _comparison(self, node: ast.Compare) -> tuple[types.Type, Writer]:
        parts = [self.of(node.left), self.of(node.comparators[0])]
        sign, general = _COMPARED[type(node.ops[0])]
        (kind, first), (other, second) = parts
        if kind != other or not isinstance(kind, types.Float):
            return self._general(general, parts)

        def write(context: Any, builder: Any, values: Values) -> Any:
            sides = [side(context, builder, values) for side in (first, second)]
            # NaN differs from everything, and is in no other relation to it.
            compare = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
            return compare(sign, *sides)

        return types.boolean, write

    def _choice(self, node: ast.IfExp) -> tuple[types.Type, Writer]:
        test = self._cast(self.of(node.test), types.boolean)
        parts = [self.of(node.body), self.of(node.orelse)]
        kind = self.typingctx.unify_types(*(own for own, _ in parts))
        sides = [self._cast(part, kind) for part in parts]

        def write(context: Any, builder: Any, values: Values) -> Any:
            chosen = test(context, builder, values)
            return builder.select(chosen, *(side(context, builder, values) for side in sides))

        return kind, write

    def _general(
        self, function: Any, parts: Sequence[tuple[types.Type, Writer]]
    ) -> tuple[types.Type, Writer]:
        """Return what numba itself has for an operation."""
        signature = _resolved(self.typingctx, function, tuple(kind for kind, _ in parts))
        casts = [self._cast(part, kind) for part, kind in zip(parts, signature.args, strict=True)]

        def write(context: Any, builder: Any, values: Values) -> Any:
            code = context.get_function(function, signature)
            return code(builder, [cast(context, builder, values) for cast in casts])

        return signature.return_type, write
