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
WRITERS = ("scanlib._compat", "scanlib.backends", "scanlib.kernels")
_IMPORT = re.compile(r"^ *from (scanlib[\w.]*) import (\([^)]*\)|[^(\n]*)", re.MULTILINE)


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
            left += [other for other in _imported(name) if other.startswith(WRITERS)]
    return f"{module} {sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]}"


def source_number(module: str) -> int:
    """Return the key of what a module writes, where a number is wanted."""
    return int(source_key(module).split()[1], 16)


@cache
def _digest(module: str) -> str:
    return sha256(text_of(module).encode()).hexdigest()


@cache
def text_of(module: str) -> str:
    """Return the source of a module."""
    path = _path(module)
    assert path is not None, module
    return path.read_text(encoding="utf-8")


@cache
def _path(module: str) -> Path | None:
    """Return the file of a module, None where that is a name in one."""
    place = ROOT.joinpath(*module.split(".")[1:])
    for path in (place / "__init__.py", place.with_suffix(".py")):
        if path.is_file():
            return path
    return None


@cache
def _imported(module: str) -> tuple[str, ...]:
    """Return the modules of scanlib that a module imports."""
    found = []
    for match in _IMPORT.finditer(text_of(module)):
        for name in re.findall(r"\w+", match[2]):
            whole = f"{match[1]}.{name}"
            found.append(match[1] if _path(whole) is None else whole)
    return tuple(found)
