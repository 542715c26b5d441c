"""The numbers in joined statements: items of arrays, calls, expressions (compiled code only)."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from numba import types

from scanlib._compat.numba import cgutils, fix_integer_index
from scanlib.backends.numba.expressions import Plan, Values, Writer
from scanlib.backends.numba.liveness import Names

CASTS = re.compile(r"^np_(float|int|uint|bool|complex)\d*$")
WORD = types.intp
_REST = types.StarArgTuple, types.StarArgUniTuple
_UNARY: dict[type, Any] = {ast.Not: operator.not_, ast.USub: operator.neg}


class NotScalarError(Exception):
    """Statements turned out to be none that are written here, when the types were known."""


@cache
def _parsed(structure: str) -> ast.expr:
    return ast.parse(structure, mode="eval").body


class StatementValues(Plan):
    """Finds the types of the numbers that statements compute, and how they are written."""

    def __init__(
        self,
        typingctx: Any,
        kinds: dict[str, types.Type],
        known: dict[str, Any],
        structures: dict[str, str],
        held: Names,
        places: dict[str, types.Type],
    ) -> None:
        super().__init__(typingctx, kinds)
        self.arguments = dict(kinds)
        self.known = known
        self.structures = structures
        self.held = held
        self.places = places
        self.natural: set[str] = set()  # names of numbers that are not negative

    def of(self, node: ast.expr) -> tuple[types.Type, Writer]:
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Constant):
            kind = self.typingctx.resolve_value_type(node.value)
            kind = types.unliteral(kind)
            number = node.value
            return kind, lambda context, builder, values: context.get_constant(kind, number)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.Attribute):
            return self._field(node)
        if isinstance(node, ast.UnaryOp):
            return self._general(_UNARY[type(node.op)], [self.of(node.operand)])
        if isinstance(node, ast.BoolOp):
            return self._both(node)
        if isinstance(node, ast.Tuple):
            return self._tuple(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name in self.structures:
                return self._expression(self.structures[name], node.args)
            if CASTS.match(name) is None:
                return self._call(self.known[name], node.args)
        return super().of(node)

    def _name(self, name: str) -> tuple[types.Type, Writer]:
        if name not in (self.places if name in self.held else self.kinds):
            raise NotScalarError(f"{name} may have no value")
        if name not in self.held:
            return self.kinds[name], lambda context, builder, values: values[name]
        return self.places[name], lambda context, builder, values: builder.load(values[name])

    def truth(self, node: ast.expr) -> tuple[types.Type, Writer]:
        kind, write = self.of(node)
        if kind != types.boolean:
            return self._general(bool, [(kind, write)])
        return kind, write

    def _both(self, node: ast.BoolOp) -> tuple[types.Type, Writer]:
        parts = [self._cast(self.truth(item), types.boolean) for item in node.values]
        name = "and_" if isinstance(node.op, ast.And) else "or_"

        def write(context: Any, builder: Any, values: Values) -> Any:
            first, *others = [part(context, builder, values) for part in parts]
            for other in others:
                first = getattr(builder, name)(first, other)
            return first

        return types.boolean, write

    def _tuple(self, node: ast.Tuple) -> tuple[types.Type, Writer]:
        parts = [self.of(item) for item in node.elts]
        kind = types.Tuple([own for own, _ in parts])

        def write(context: Any, builder: Any, values: Values) -> Any:
            items = [part(context, builder, values) for _, part in parts]
            return context.make_tuple(builder, kind, items)

        return kind, write

    def _expression(self, structure: str, nodes: Sequence[ast.expr]) -> tuple[types.Type, Writer]:
        """Write an expression, each of whose numbers is computed once."""
        parts = [self.of(node) for node in nodes]
        names = [f"x{i}" for i in range(len(parts))]
        kinds = [types.unliteral(kind) for kind, _ in parts]
        plan = Plan(self.typingctx, dict(zip(names, kinds, strict=True)))
        result, write = plan.of(_parsed(structure))

        def whole(context: Any, builder: Any, values: Values) -> Any:
            numbers = [part(context, builder, values) for _, part in parts]
            return write(context, builder, dict(zip(names, numbers, strict=True)))

        return result, whole

    def _call(self, function: Any, nodes: Sequence[ast.expr]) -> tuple[types.Type, Writer]:
        """Write the call of any function whose results are no arrays."""
        parts = [self.of(node) for node in nodes]
        kind = self.typingctx.resolve_value_type(function)
        signature = self.typingctx.resolve_function_type(kind, tuple(own for own, _ in parts), {})
        if signature is None:
            raise NotScalarError(f"{function} of {[own for own, _ in parts]}")
        if any(isinstance(own, types.Omitted) for own in signature.args):
            raise NotScalarError(f"{function} has arguments that are left out")
        if self._holds_memory(signature.return_type):
            raise NotScalarError(f"{function} returns {signature.return_type}")
        fixed, rest, kinds = signature.args, None, list(signature.args)
        if len(fixed) != len(parts) or isinstance(fixed[-1] if fixed else None, _REST):
            # A function that takes any number of arguments gets them as one tuple.
            *fixed, rest = signature.args
            kinds = [*fixed, *rest.types]
        casts = [self._cast(part, own) for part, own in zip(parts, kinds, strict=True)]

        def write(context: Any, builder: Any, values: Values) -> Any:
            items = [cast(context, builder, values) for cast in casts]
            if rest is not None:
                packed = context.make_tuple(builder, rest, items[len(fixed) :])
                items = [*items[: len(fixed)], packed]
            return context.get_function(kind, signature)(builder, items)

        return signature.return_type, write

    # Arrays

    def _holds_memory(self, kind: types.Type) -> bool:
        """Whether values of a type count references to memory that their owner must release."""
        if isinstance(kind, types.BaseTuple):
            return any(map(self._holds_memory, kind))
        return not isinstance(kind, types.Number | types.Boolean | types.CPointer | types.NoneType)

    def _array(self, node: ast.expr) -> tuple[types.Array, Callable[..., Any]]:
        """Return the type of an array, and what reads one of its fields."""
        kind, write = self.of(node)
        if not isinstance(kind, types.Array):
            raise NotScalarError(f"{ast.unparse(node)} is {kind}")

        def field(context: Any, builder: Any, values: Values, name: str) -> Any:
            model = context.data_model_manager[kind]
            place = model.get_field_position(name)
            return builder.extract_value(write(context, builder, values), [place])

        return kind, field

    def _field(self, node: ast.Attribute) -> tuple[types.Type, Writer]:
        _, field = self._array(node.value)
        name = {"size": "nitems"}.get(node.attr, node.attr)
        return WORD, lambda context, builder, values: field(context, builder, values, name)

    def _item(self, node: ast.Subscript) -> tuple[types.Type, Writer]:
        if isinstance(node.value, ast.Attribute):
            return self._size(node.value, node.slice)
        kind, _ = self._array(node.value)
        if kind.ndim > (len(node.slice.elts) if isinstance(node.slice, ast.Tuple) else 1):
            return self._view(node)
        kind, place = self.place(node)

        def write(context: Any, builder: Any, values: Values) -> Any:
            return context.unpack_value(builder, kind.dtype, place(context, builder, values))

        return kind.dtype, write

    def _view(self, node: ast.Subscript) -> tuple[types.Type, Writer]:
        """Write a part of an array, whose owner holds its memory while the statements run."""
        parts = [self.of(node.value), self.of(node.slice)]
        kind, write = self._general(operator.getitem, parts)

        def borrowed(context: Any, builder: Any, values: Values) -> Any:
            view = write(context, builder, values)
            context.nrt.decref(builder, kind, view)
            return view

        return kind, borrowed

    def _size(self, node: ast.Attribute, place: ast.expr) -> tuple[types.Type, Writer]:
        kind, field = self._array(node.value)
        assert isinstance(place, ast.Constant)
        axis = place.value % kind.ndim

        def write(context: Any, builder: Any, values: Values) -> Any:
            return builder.extract_value(field(context, builder, values, node.attr), [axis])

        return WORD, write

    def place(self, node: ast.Subscript) -> tuple[types.Array, Writer]:
        """Return the type of an array and what writes the address of one of its items."""
        kind, field = self._array(node.value)
        nodes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        parts = [self.of(index) for index in nodes]
        if len(parts) != kind.ndim or not all(
            isinstance(own, types.Integer) and not isinstance(own, types.Boolean)
            for own, _ in parts
        ):
            raise NotScalarError(f"{ast.unparse(node)} is no item of {kind}")
        natural = [self.is_natural(index) for index in nodes]

        def write(context: Any, builder: Any, values: Values) -> Any:
            shape, strides = (
                cgutils.unpack_tuple(builder, field(context, builder, values, name))
                for name in ("shape", "strides")
            )
            indices = []
            for (own, part), positive, size in zip(parts, natural, shape, strict=True):
                index = part(context, builder, values)
                if positive:
                    indices.append(context.cast(builder, index, own, WORD))
                else:
                    indices.append(fix_integer_index(context, builder, own, index, size))
            data = field(context, builder, values, "data")
            return cgutils.get_item_pointer2(
                context, builder, data, shape, strides, kind.layout, indices
            )

        return kind, write

    def is_natural(self, node: ast.expr) -> bool:
        """Whether a whole number is known not to be negative."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int) and node.value >= 0
        if isinstance(node, ast.BinOp):
            known = isinstance(node.op, ast.Add | ast.Mult)
            return known and self.is_natural(node.left) and self.is_natural(node.right)
        return isinstance(node, ast.Name) and node.id in self.natural
