"""Loops under PyTensor's C linker.

A backend registers with `register_c_printer` a function from a node to its `CCode`, which raises
`NoCCodeError` where there is none. Such a node runs through `perform`, as all do where the flag
``scanlib__perform`` asks for something else than ``auto``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.link.c.op import COp

# Stands for the name that PyTensor gives to a node.
NODE_NAME = "SCANLIB_NODE"


class NoCCodeError(NotImplementedError):
    """A loop has no C code."""


@dataclass(frozen=True)
class CCode:
    """The C code of a node.

    Attributes
    ----------
    helpers : str
        Functions that many loops share, guarded against being defined twice.
    functions : str
        ``NODE_NAME_call`` takes the inputs and the addresses of the outputs, and returns 0, or -1
        with a Python exception set; `NODE_NAME` stands for the name of the node.
    version : tuple
        Changes with the code; see `COp.c_code_cache_version`.
    make_thunk : callable
        What `COp.make_c_thunk` is: it compiles no C code. Whoever makes one module of a whole
        function needs the code all the same.
    """

    helpers: str
    functions: str
    version: tuple[Hashable, ...]
    make_thunk: Callable[..., Any]


Printer = Callable[[Apply], CCode]
_printers: list[Printer] = []
_codes: WeakKeyDictionary[Apply, dict[Hashable, CCode | NoCCodeError]] = WeakKeyDictionary()


def register_c_printer(printer: Printer) -> Printer:
    """Make `printer` the one that writes the C code of loops."""
    _printers[:] = [printer]
    return printer


class PrintedOp(COp):
    """An Op the C code of whose nodes a registered printer writes."""

    def code_of(self, node: Apply) -> CCode:
        """Return the C code of a node.

        Raises
        ------
        NoCCodeError
            If it has none, or is not wanted.
        """
        if not _printers or config.scanlib__perform != "auto":
            raise NoCCodeError(f"{self} runs through perform")
        flags = config.scanlib__threads, config.scanlib__parallel_channels
        known, key = _codes.setdefault(node, {}), (*flags, config.scanlib__parallel_steps)
        if key not in known:
            try:
                known[key] = _printers[0](node)
            except NoCCodeError as error:
                known[key] = error
        code = known[key]
        if isinstance(code, NoCCodeError):
            raise NoCCodeError(*code.args)
        return code

    def has_code(self, node: Apply) -> bool:
        """Whether a node has C code, under the flags as they are."""
        try:
            self.code_of(node)
        except NoCCodeError:
            return False
        return True

    def make_c_thunk(self, node: Apply, *arguments: Any, **options: Any) -> Any:
        return self.code_of(node).make_thunk(node, *arguments, **options)

    def c_code(
        self, node: Apply, name: str, inputs: list[str], outputs: list[str], sub: dict[str, str]
    ) -> str:
        self.code_of(node)
        arguments = ", ".join([*inputs, *(f"&{out}" for out in outputs)])
        return f"if ({name}_call({arguments})) {{ {sub['fail']} }}"

    def c_code_cache_version_apply(self, node: Apply) -> tuple[Hashable, ...]:
        return self.code_of(node).version if self.has_code(node) else ()

    def c_support_code_apply(self, node: Apply, name: str) -> str:
        code = self.code_of(node)
        return code.helpers + code.functions.replace(NODE_NAME, name)
