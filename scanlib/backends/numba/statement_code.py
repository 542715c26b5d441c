"""The code of joined statements: types first, then instructions (compiled code only).

A name that is assigned in one place only is the value that is computed there. One that has several
values, before a loop and in it, or in either part of a choice, has a place on the stack, which LLVM
turns into a register; its type is what numba would make of the types of all its values. Arrays are
never made here: those that statements read belong to the caller, who holds them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from numba import types
from numba.extending import intrinsic
from pytensor.link.numba.dispatch.basic import numba_njit

from scanlib._compat.numba import Dispatcher, NumbaError, cgutils
from scanlib.backends.numba.expressions import Values
from scanlib.backends.numba.liveness import Names, assigned, live, live_in_loop
from scanlib.backends.numba.statement_values import WORD, NotScalarError, StatementValues

_MANY = 25  # arguments

Emit = Callable[[Any, Any, Values], None]
"""Writes the instructions of a statement, and notes what it assigns."""


def statements(
    body: Sequence[ast.stmt],
    numbers: Sequence[str],
    results: Sequence[str],
    known: dict[str, Any],
    structures: dict[str, str],
) -> Any:
    """Return a function of compiled code that runs statements.

    Parameters
    ----------
    body : sequence of statements
        What it does.
    numbers, results : sequence of str
        The names that it takes as arguments, and those whose values it returns.
    known : dict
        The globals of the function in which they stand.
    structures : dict
        The structures of the expressions among them, by name.
    """

    def typed(typingctx: Any, groups: Sequence[types.Type]) -> Any:
        many = len(numbers) > _MANY
        arguments = [
            types.Tuple(list(map(types.unliteral, group))) if many else types.unliteral(group)
            for group in groups
        ]
        own = [part for group in arguments for part in group] if many else arguments
        kinds = dict(zip(numbers, own, strict=True))
        try:
            plan = plan_of(typingctx, kinds)
        except (NotScalarError, NumbaError):
            code = _by_numba(body, numbers, results, known)
            function = types.Dispatcher(code)
            signature = typingctx.resolve_function_type(function, tuple(own), {})
            result, write = signature.return_type, partial(_called, code, signature, numbers)
        else:
            result, write = plan.returned(results), partial(_written, plan, numbers, results)
        return result(*arguments), write

    def plan_of(typingctx: Any, kinds: dict[str, types.Type]) -> _Statements:
        held = _held(body, frozenset(results))
        places: dict[str, types.Type] = {name: kinds[name] for name in held if name in kinds}
        while True:
            plan = _Statements(typingctx, dict(kinds), known, structures, held, dict(places))
            plan.emit = plan.block(body)
            if plan.places == places:
                return plan
            places = plan.places

    text = ", ".join(f"x{i}" for i in range(len(grouped(numbers))))
    return intrinsic(
        eval(f"lambda typingctx, {text}: typed(typingctx, [{text}])", {"typed": typed})
    )


def grouped(names: Sequence[str]) -> list[str]:
    """Return arguments as the texts of a call's: tuples, where there are many.

    Python calls a function of more than thirty arguments by a tuple that grows one by one, for
    which numba makes a type, and copies of all that it holds, for each.
    """
    if len(names) <= _MANY:
        return list(names)
    parts = [names[i : i + _MANY] for i in range(0, len(names), _MANY)]
    return [f"({', '.join(part)},)" for part in parts]


def _ungrouped(builder: Any, names: Sequence[str], arguments: Sequence[Any]) -> list[Any]:
    """Return the values of a call's arguments; see `grouped`."""
    if len(names) <= _MANY:
        return list(arguments)
    return [part for group in arguments for part in cgutils.unpack_tuple(builder, group)]


def _by_numba(
    body: Sequence[ast.stmt], numbers: Sequence[str], results: Sequence[str], known: dict[str, Any]
) -> Dispatcher:
    """Return statements as numba's own function: they proved to be more than scalar code."""
    returned = f"return ({', '.join(results)})" if results else "return"
    code = ast.parse(f"def statements({', '.join(numbers)}):\n    {returned}")
    (function,) = code.body
    assert isinstance(function, ast.FunctionDef)
    function.body[:0] = body
    namespace = dict(known)
    exec(compile(ast.fix_missing_locations(code), "<statements>", "exec"), namespace)
    return numba_njit(namespace["statements"])


def _called(
    code: Dispatcher,
    own: Any,
    numbers: Sequence[str],
    context: Any,
    builder: Any,
    signature: Any,
    arguments: Any,
) -> Any:
    """Write the call of a function of numba's."""
    return context.get_function(types.Dispatcher(code), own)(
        builder, _ungrouped(builder, numbers, arguments)
    )


def _written(
    plan: _Statements,
    numbers: Sequence[str],
    results: Sequence[str],
    context: Any,
    builder: Any,
    signature: Any,
    arguments: Any,
) -> Any:
    """Write the instructions of all statements, and what they return."""
    given = dict(zip(numbers, _ungrouped(builder, numbers, arguments), strict=True))
    values: Values = {}
    for name, value in given.items():
        if name not in plan.places:
            values[name] = value
    for name, kind in plan.places.items():
        values[name] = cgutils.alloca_once(builder, context.get_value_type(kind))
        if name in given:
            own = plan.arguments[name]
            builder.store(context.cast(builder, given[name], own, kind), values[name])
    assert plan.emit is not None
    plan.emit(context, builder, values)
    found = []
    for name in results:
        kind, write = plan.of(ast.Name(name))
        value = write(context, builder, values)
        if context.enable_nrt:
            context.nrt.incref(builder, kind, value)
        found.append(value)
    if not found:
        return context.get_dummy_value()
    if len(found) == 1:
        return found[0]
    return context.make_tuple(builder, signature.return_type, found)


def _held(body: Sequence[ast.stmt], after: Names) -> Names:
    """Return the names with several values: assigned in a loop or a choice, and read outside."""
    held: Names = frozenset()
    lives = live(body, after)
    for statement, behind in zip(body, lives[1:], strict=True):
        if isinstance(statement, ast.If):
            held |= assigned([statement]) & behind
            held |= _held(statement.body, behind) | _held(statement.orelse, behind)
        elif isinstance(statement, ast.For | ast.While):
            again = live_in_loop(statement, behind)
            held |= (assigned(statement.body) & again) | (assigned([statement]) & behind)
            held |= _held(statement.body, again)
    return held


class _Statements(StatementValues):
    """Finds the types of what statements compute, and how they are written."""

    emit: Emit | None = None

    def returned(self, results: Sequence[str]) -> types.Type:
        """Return the type of what the statements return."""
        found = [self.of(ast.Name(name))[0] for name in results]
        if not found:
            return types.void
        return found[0] if len(found) == 1 else types.Tuple(found)

    # Statements

    def block(self, body: Sequence[ast.stmt]) -> Emit:
        """Return what writes the statements of a block."""
        parts = [self.statement(statement) for statement in body]

        def emit(context: Any, builder: Any, values: Values) -> None:
            for part in parts:
                part(context, builder, values)

        return emit

    def statement(self, node: ast.stmt) -> Emit:
        """Return what writes a statement."""
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            return self._assign(target, node.value)
        if isinstance(node, ast.AugAssign):
            assert isinstance(node.target, ast.Name)
            changed = ast.BinOp(ast.Name(node.target.id), node.op, node.value)
            return self._assign(node.target, changed)
        if isinstance(node, ast.Expr):
            _, write = self.of(node.value)

            def emit(context: Any, builder: Any, values: Values) -> None:
                write(context, builder, values)

            return emit
        if isinstance(node, ast.For):
            return self._for(node)
        if isinstance(node, ast.While):
            return self._while(node)
        if isinstance(node, ast.If):
            return self._if(node)
        return self.block([])

    def _assign(self, target: ast.expr, value: ast.expr) -> Emit:
        if isinstance(target, ast.Subscript):
            return self._store(target, value)
        if isinstance(target, ast.Name):
            kind, write = self.of(value)
            name = self._set(target.id, kind)

            def emit(context: Any, builder: Any, values: Values) -> None:
                name(context, builder, values, write(context, builder, values))

            return emit
        assert isinstance(target, ast.Tuple)
        assert isinstance(value, ast.Tuple)
        # All are read before any is assigned.
        parts = [self.of(item) for item in value.elts]
        names = [
            self._set(item.id, kind)
            for item, (kind, _) in zip(target.elts, parts, strict=True)
            if isinstance(item, ast.Name)
        ]

        def emit_all(context: Any, builder: Any, values: Values) -> None:
            found = [write(context, builder, values) for _, write in parts]
            for name, item in zip(names, found, strict=True):
                name(context, builder, values, item)

        return emit_all

    def _set(self, name: str, kind: types.Type) -> Callable[[Any, Any, Values, Any], None]:
        """Return what assigns a value of some type to a name."""
        if name not in self.held:
            self.kinds[name] = kind

            def keep(context: Any, builder: Any, values: Values, value: Any) -> None:
                values[name] = value

            return keep
        known = self.places.get(name, kind)
        if known != kind:
            both = self.typingctx.unify_types(known, kind)
            if both is None:
                raise NotScalarError(f"{name} is {known} and {kind}")
            known = both
        self.places[name] = known

        def store(context: Any, builder: Any, values: Values, value: Any) -> None:
            builder.store(context.cast(builder, value, kind, self.places[name]), values[name])

        return store

    def _store(self, target: ast.Subscript, value: ast.expr) -> Emit:
        kind, place = self.place(target)
        write = self._cast(self.of(value), kind.dtype)

        def emit(context: Any, builder: Any, values: Values) -> None:
            item = write(context, builder, values)
            context.pack_value(builder, kind.dtype, item, place(context, builder, values))

        return emit

    def _for(self, node: ast.For) -> Emit:
        assert isinstance(node.iter, ast.Call)
        assert isinstance(node.target, ast.Name)
        *first, last = [self._cast(self.of(item), WORD) for item in node.iter.args]
        natural = not first or self.is_natural(node.iter.args[0])
        index = self._set(node.target.id, WORD)
        with self._known_natural(node.target.id if natural else None):
            body = self.block(node.body)

        def emit(context: Any, builder: Any, values: Values) -> None:
            stop = last(context, builder, values)
            start = first[0](context, builder, values) if first else None
            with cgutils.for_range(builder, stop, start=start) as loop:
                index(context, builder, values, loop.index)
                body(context, builder, values)

        return emit

    @contextmanager
    def _known_natural(self, name: str | None) -> Any:
        added = {name} - self.natural if name is not None else set()
        self.natural |= added
        yield
        self.natural -= added

    def _while(self, node: ast.While) -> Emit:
        test = self._cast(self.truth(node.test), types.boolean)
        body = self.block(node.body)

        def emit(context: Any, builder: Any, values: Values) -> None:
            head, inside, end = (builder.append_basic_block(name) for name in ("head", "in", "end"))
            builder.branch(head)
            builder.position_at_end(head)
            builder.cbranch(test(context, builder, values), inside, end)
            builder.position_at_end(inside)
            body(context, builder, values)
            builder.branch(head)
            builder.position_at_end(end)

        return emit

    def _if(self, node: ast.If) -> Emit:
        test = self._cast(self.truth(node.test), types.boolean)
        before = dict(self.kinds)
        body = self.block(node.body)
        self.kinds = before
        other = self.block(node.orelse)

        def emit(context: Any, builder: Any, values: Values) -> None:
            with builder.if_else(test(context, builder, values)) as (then, otherwise):
                with then:
                    body(context, builder, dict(values))
                with otherwise:
                    other(context, builder, dict(values))

        return emit
