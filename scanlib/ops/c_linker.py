"""Loops under PyTensor's C linker, whose virtual machine calls thunks straight from C.

A backend brings a function from a node to what makes its thunk, which raises `NoCCodeError` where
there is none. Such a node runs through `perform`, as all do where the
flag ``scanlib__perform`` asks for something else than ``auto``.
"""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.link.c.op import COp

from scanlib.ops.execution import BROUGHT


class NoCCodeError(NotImplementedError):
    """A loop has no kernels."""


class MayBeUnfitError(NoCCodeError):
    """An Op has kernels, but they may turn out to be unfit when they run."""


Maker = Callable[..., Any]  # as `COp.make_c_thunk`
_makers: WeakKeyDictionary[Apply, dict[Hashable, Maker | NoCCodeError]] = WeakKeyDictionary()


class PrintedOp(COp):
    """An Op whose thunks a backend makes."""

    def thunk_maker(self, node: Apply) -> Maker:
        """Return what makes the thunk of a node; `NoCCodeError` if there is none, or it is not
        wanted."""
        if "thunk" not in BROUGHT or config.scanlib__perform != "auto":
            raise NoCCodeError(f"{self} runs through perform")
        flags = config.scanlib__threads, config.scanlib__parallel_channels
        known, key = _makers.setdefault(node, {}), (*flags, config.scanlib__parallel_steps)
        if key not in known:
            try:
                known[key] = BROUGHT["thunk"](node)
            except NoCCodeError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, NoCCodeError):
            raise type(found)(*found.args)
        return found

    def do_constant_folding(self, fgraph: Any, node: Apply) -> bool:
        """Loops are compiled with the function they are part of, not run while it is built."""
        return False

    def make_c_thunk(self, node: Apply, *arguments: Any, **options: Any) -> Any:
        return self.thunk_maker(node)(node, *arguments, **options)

    def c_code(
        self, node: Apply, name: str, inputs: list[str], outputs: list[str], sub: dict[str, str]
    ) -> str:
        """Refuse: a loop is no part of one C module of a whole function."""
        raise NotImplementedError(f"{self} has no C code for linker='c'; use linker='cvm'")
