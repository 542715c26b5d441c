"""A Python function in the making: its lines, its globals and what identifies it on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import numpy as np
import pytensor
from pytensor.configdefaults import config
from pytensor.link.numba.dispatch.basic import cache_key_for_constant

from scanlib._compat.numba import compile_numba_function_src
from scanlib.backends.numba import expressions
from scanlib.backends.numba.statements import joined
from scanlib.backends.numba.vectors import least, new_array


def may_cache(key: str | None) -> bool:
    """Whether numba keeps a function on disk: it has a key, and PyTensor wrote a file of it."""
    return key is not None and config.numba__cache


class Source:
    """Lines of source with indentation, and the objects they refer to.

    Every object that the source names is registered with a key that identifies its value
    between processes; if one has none, the function cannot be cached on disk.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        # numba's cache imports the module that a function says it comes from.
        self.globals: dict[str, Any] = {"np": np, "__name__": __name__}
        for function in (least, new_array):
            self.object(function.__name__, function)
        self.keys: list[str] = []
        self.cacheable = True
        self._indent = 1
        self._prelude: tuple[int, int] | None = None
        self._checks: dict[str, list[str]] = {}
        self._after_checks: list[str] = []
        self._count = 0
        self._names: dict[Any, str] = {}
        self._reserved: set[str] = set()
        self._structures: dict[str, str] = {}

    def name(self, prefix: str) -> str:
        """Return a new name."""
        self._count += 1
        while f"{prefix}{self._count}" in self._reserved:
            self._count += 1
        return f"{prefix}{self._count}"

    def reserve(self, prefixes: Iterable[str], count: int) -> None:
        """Keep `name` from giving these prefixes followed by numbers below `count`."""
        self._reserved.update(f"{prefix}{i}" for prefix in prefixes for i in range(count))

    def line(self, text: str) -> None:
        """Add a line at the current indentation."""
        self.lines.append("    " * self._indent + text)

    def mark_prelude(self) -> None:
        """Remember this place: `before_loop` adds lines here."""
        self._prelude = (len(self.lines), self._indent)

    @property
    def has_loop(self) -> bool:
        """Whether `mark_prelude` was called."""
        return self._prelude is not None

    def before_loop(self, text: str) -> None:
        """Add a line at the marked place, or here as long as none is marked."""
        if self._prelude is None:
            self.line(text)
            return
        position, indent = self._prelude
        self.lines.insert(position, "    " * indent + text)
        self._prelude = (position + 1, indent)

    def check_before_loop(self, condition: str, raising: str) -> None:
        """Add a statement that raises if a condition holds, at the end of what is before the loop.

        Conditions with the same statement are tested together: every place that raises releases
        all arrays of the function, and with many arrays that is most of what is compiled.
        """
        conditions = self._checks.setdefault(raising, [])
        if condition not in conditions:
            conditions.append(condition)

    def after_checks(self, text: str) -> None:
        """Add a line before the loop, behind the checks."""
        self._after_checks.append(text)

    def finish_prelude(self, guard: str) -> None:
        """Write the checks, made where `guard` holds, and what follows them."""
        for raising, conditions in self._checks.items():
            # Not `or`, whose every term is a branch of its own.
            either = " | ".join(f"({condition})" for condition in conditions)
            self.before_loop(f"if ({guard}) & ({either}):")
            self.before_loop(f"    {raising}")
        for text in self._after_checks:
            self.before_loop(text)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Add a header and indent what is added inside the context."""
        self.line(header)
        self._indent += 1
        yield
        if self.lines[-1].endswith(":"):
            self.line("pass")
        self._indent -= 1

    def function(self, function: Callable[..., Any], key: str | None, prefix: str = "f") -> str:
        """Register a compiled function and return its name."""
        if key is None:
            self.cacheable = False
        else:
            identity = ("function", key)
            if identity in self._names:
                return self._names[identity]
        name = self.name(prefix)
        self.globals[name] = function
        if key is not None:
            self._names["function", key] = name
            self.keys.append(f"{name}={key}")
        return name

    def constant(self, value: Any) -> str:
        """Register a constant and return its name."""
        key = cache_key_for_constant(value)
        identity = ("constant", type(value).__name__, key)
        if identity not in self._names:
            name = self.name("k")
            self._names[identity] = name
            self.globals[name] = value
            self.keys.append(f"{name}={key}")
        return self._names[identity]

    def object(self, name: str, value: Any) -> str:
        """Register an object that its name alone identifies (a class, a helper)."""
        self.globals[name] = value
        return name

    def compile(
        self, name: str, arguments: list[str], version: str
    ) -> tuple[Callable[..., Any], str | None]:
        """Return the Python function and the key under which it may be cached."""
        text = "\n".join([f"def {name}({', '.join(arguments)}):", *self.lines])
        key = None
        if self.cacheable:
            versions = [
                version,  # the text of this module and of those of expressions included
                f"pytensor {pytensor.__version__}",
                *([] if config.numba__fastmath else ["strict"]),
            ]
            identity = [*versions, text, *self.keys]
            key = sha256("\n".join(identity).encode()).hexdigest()
        lines = expressions.compact(self.lines, self._expression)
        short = "\n".join([text.split("\n", 1)[0], *lines])
        short = joined(short, self.globals, self._structures, self._statements)
        function = compile_numba_function_src(short, name, self.globals, cache_key=key)
        return function, key

    def _expression(self, structure: str, function: Callable[..., Any]) -> str:
        """Make the function of an expression known, which its structure identifies."""
        identity = ("expression", structure)
        if identity not in self._names:
            self._names[identity] = self.name("x")
            self.globals[self._names[identity]] = function
            self._structures[self._names[identity]] = structure
        return self._names[identity]

    def _statements(self, function: Callable[..., Any]) -> str:
        """Make the function of joined statements known."""
        return self.object(self.name("statements"), function)
