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
        self._count = 0
        self._names: dict[Any, str] = {}
        self._reserved: set[str] = set()

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
                version,
                f"pytensor {pytensor.__version__}",
                *([] if config.numba__fastmath else ["strict"]),
            ]
            identity = [*versions, text, *self.keys]
            key = sha256("\n".join(identity).encode()).hexdigest()
        function = compile_numba_function_src(text, name, self.globals, cache_key=key)
        return function, key
