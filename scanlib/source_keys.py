"""Keys of compiled code: the text of what writes it.

Code that is kept on disk is known by a key. What writes it changes from release to release, and
from one commit to the next, so the text of the modules that write it is part of the key: of a
module, and of those of the package that it imports and that write code as well, whatever stands
between them. No number has to be raised, and no other code is compiled anew.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent
_WRITERS = ("_compat", "backends", "kernels", "recurrences", "schedules")
_IMPORT = re.compile(
    rf"^from (scanlib\.(?:{'|'.join(_WRITERS)})[\w.]*) import (\([^)]*\)|[^(\n]*)", re.MULTILINE
)


@cache
def source_key(module: str) -> str:
    """Return the key of what a module writes.

    Parameters
    ----------
    module : str
        Its ``__name__``.
    """
    found: dict[str, str] = {}
    left = [module]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = _digest(name)
            left += _imported(name)
    return f"{module} {sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]}"


@cache
def _digest(module: str) -> str:
    return sha256(text_of(module).encode()).hexdigest()


@cache
def text_of(module: str) -> str:
    """Return the source of a module."""
    place = ROOT.joinpath(*module.split(".")[1:])
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return path.read_text(encoding="utf-8")


@cache
def _writers() -> frozenset[str]:
    """Return the modules that may write code."""
    paths = (path for room in _WRITERS for path in (ROOT / room).rglob("*.py"))
    parts = (path.relative_to(ROOT).with_suffix("").parts for path in paths)
    return frozenset(".".join(("scanlib", *part)).removesuffix(".__init__") for part in parts)


@cache
def _imported(module: str) -> list[str]:
    """Return the modules that may write code and that a module imports."""
    found = []
    head = text_of(module).partition("\n\n\n")[0]  # imports stand before the first definition
    for match in _IMPORT.finditer(head):
        names = (f"{match[1]}.{name}" for name in re.findall(r"\w+", match[2]))
        found += [name if name in _writers() else match[1] for name in names]
    return found
