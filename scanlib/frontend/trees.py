"""Trees: values in nested containers, such as the carry of a loop.

A tree is a leaf, None (which holds nothing), or a tuple, list, named tuple, dict or dataclass of
trees. `flatten` gives its leaves in order and its `Tree`, from which `Tree.build` makes a tree
again with other leaves. Everything else is a leaf. A field of a dataclass whose metadata has
``static=True`` is no part of the tree and stays what it is, as in JAX.
"""

import copy
import dataclasses
import difflib
from collections.abc import Iterator
from itertools import repeat
from numbers import Number
from pprint import pformat
from typing import Any

import numpy as np
from pytensor.graph.basic import Variable


@dataclasses.dataclass(frozen=True)
class Tree:
    """The structure of a tree: its kind of container, and the structures of what it holds.

    Dicts whose items come in another order have the same structure; `example` has the order.
    """

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    children: "tuple[Tree, ...]" = ()
    is_leaf: bool = False
    static: tuple[tuple[str, Any], ...] = ()
    example: Any = dataclasses.field(default=None, compare=False, repr=False)

    def build(self, leaves: Iterator[Any]) -> Any:
        """Return a tree of this structure with the leaves that an iterator gives."""
        if self.is_leaf:
            return next(leaves)
        if self.kind is None:
            return None
        parts = [child.build(leaves) for child in self.children]
        found = dict(zip(self.keys, parts, strict=True))
        if self.kind is dict:
            return {key: found[key] for key in self.example}
        if dataclasses.is_dataclass(self.kind):
            result = copy.copy(self.example)
            for key, part in found.items():
                object.__setattr__(result, key, part)
            return result
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)

    def paths(self, root: str) -> list[str]:
        """Return where each leaf stands, as one would write it: ``init["level"][0]``."""
        if self.is_leaf:
            return [root]
        has_names = dataclasses.is_dataclass(self.kind) or hasattr(self.kind, "_fields")
        places = [f"[{key!r}]" if not isinstance(key, str) else f'["{key}"]' for key in self.keys]
        places = [f".{key}" for key in self.keys] if has_names else places
        pairs = zip(places, self.children, strict=True)
        return [path for place, child in pairs for path in child.paths(f"{root}{place}")]


def variables_of(result: Any, expected: str, advice: str = "") -> list[Variable]:
    """Return the variables that a loop returned: of trees the leaves, of lags the rows, of updates
    the values. A `TypeError` says what was `expected`, and what was given with `advice` on it."""
    found: list[Variable] = []
    for leaf in flatten(result)[0]:
        value = getattr(leaf, "rows", leaf)
        found += value.values() if isinstance(value, dict) else [value]
    for value in found:
        if not isinstance(value, Variable):
            what = type(result).__name__
            held = "" if value is result else f" that holds a value of type {type(value).__name__}"
            raise TypeError(f"{expected}, or a tree of variables, got {what}{held}{advice}")
    return found


class _Leaf:
    """What stands for a leaf in messages."""

    def __repr__(self) -> str:
        return "*"


def _parts(value: Any) -> dict[Any, Any]:
    """Return what a container holds, by key, field or position."""
    if isinstance(value, dict):
        return {key: value[key] for key in sorted(value, key=repr)}
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if not _is_static(field)]
        return {field.name: getattr(value, field.name) for field in fields}
    return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))


def _is_static(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("static", False))


def flatten(value: Any, of_arrays: bool = False) -> tuple[list[Any], Tree]:
    """Return the leaves of a tree, and its structure; of arrays, lists of numbers are leaves."""
    if value is None:
        return [], Tree()
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    is_container = type(value) in (tuple, list, dict) or hasattr(value, "_fields")
    if not is_data and not is_container:
        return [value], Tree(is_leaf=True)
    parts = _parts(value)
    leaves: list[Any] = []
    children = []
    for part in parts.values():
        is_leaf = of_arrays and _holds_numbers(part)
        inside, child = ([part], Tree(is_leaf=True)) if is_leaf else flatten(part, of_arrays)
        leaves += inside
        children.append(child)
    static = tuple(
        (field.name, getattr(value, field.name))
        for field in (dataclasses.fields(value) if is_data else ())
        if _is_static(field)
    )
    example = value if is_data or isinstance(value, dict) else None
    return leaves, Tree(type(value), tuple(parts), tuple(children), False, static, example)


def _holds_numbers(value: Any) -> bool:
    """Whether a value is a list or tuple of numbers, or of such lists."""
    return type(value) in (list, tuple) and all(
        isinstance(item, Number | np.generic) or _holds_numbers(item) for item in value
    )


def difference(expected: Tree, given: Tree) -> str:
    """Return two structures as one text: lines of the first alone have -, of the second alone +."""
    trees = [tree.build(repeat(_Leaf())) for tree in (expected, given)]
    before, after = (pformat(tree, width=1).splitlines() for tree in trees)
    lines = [line.rstrip() for line in difflib.ndiff(before, after) if line[0] != "?"]
    return "\n".join(["- expected, + returned, * any value", *lines])
