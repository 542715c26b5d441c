"""Which names the statements of a function read and assign."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

Names = frozenset[str]
_NONE: Names = frozenset()


def names_read(parts: Iterable[ast.AST]) -> Names:
    """Return the names that occur anywhere as values."""
    return _NONE.union(*(_names(part)[0] for part in parts))


def assigned(parts: Iterable[ast.AST]) -> Names:
    """Return the names that are assigned anywhere."""
    return _NONE.union(*(_names(part)[1] for part in parts))


def _names(node: ast.AST) -> tuple[Names, Names]:
    """Return the names that are read in a part of the code and those assigned; it keeps them."""
    found: tuple[Names, Names] | None = getattr(node, "scanlib_names", None)
    if found is None:
        read: set[str] = set()
        written: set[str] = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                (written if isinstance(part.ctx, ast.Store) else read).add(part.id)
        found = frozenset(read), frozenset(written)
        node.scanlib_names = found  # type: ignore[attr-defined]
    return found


def live(body: Sequence[ast.stmt], after: Names) -> list[Names]:
    """Return the names whose values are read, before they are assigned, from each statement on.

    The last item is `after`, the names that are read behind the block.
    """
    found = [after]
    for statement in reversed(body):
        found.append(_before(statement, found[-1]))
    return found[::-1]


def _before(statement: ast.stmt, after: Names) -> Names:
    if isinstance(statement, ast.Assign):
        return (after - _names(statement)[1]) | _names(statement)[0]
    if isinstance(statement, ast.AugAssign):
        return after | _names(statement)[0] | _names(statement)[1]
    if isinstance(statement, ast.For | ast.While):
        return live_in_loop(statement, after)
    if isinstance(statement, ast.If):
        both = live(statement.body, after)[0] | live(statement.orelse, after)[0]
        return both | _names(statement.test)[0]
    if isinstance(statement, ast.Return | ast.Raise):
        return _names(statement)[0]
    return after | _names(statement)[0]


def live_in_loop(loop: ast.For | ast.While, after: Names) -> Names:
    """Return the names that are live before a loop, which are those that are live behind its body.

    Names that a `for` loop assigns itself before each round are not among them.
    """
    if isinstance(loop, ast.For):
        known, own = after | _names(loop.iter)[0], _names(loop.target)[1]
    else:
        known, own = after | _names(loop.test)[0], _NONE
    while True:
        found = known | (live(loop.body, known)[0] - own)
        if found == known:
            return known
        known = found
