"""C code of loops for PyTensor's C linker, written by a backend.

A backend registers a printer with `register_c_printer`: a function from an Op to the `CCode` of its
nodes, which raises `NoCCodeError` where an operation of the body has no C code. `PrintedOp` gives
PyTensor what the printer wrote; a loop that has no C code runs through `perform`, as it does where
the flag ``scanlib__perform`` asks for something else than ``auto``. Where the code depends on the
types of a node's inputs as well, it is `register_node_printer` and `PrintedNodeOp`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.link.c.op import COp

# Stands for the name that PyTensor gives to a node.
NODE_NAME = "SCANLIB_NODE"

# Flags that a program may have set for all of PyTensor's code. Infinities and NaN count here, and a
# lack of memory is an exception that the code catches; PyMC turns exceptions off.
UNWANTED_FLAGS = (
    "-ffast-math",
    "-fno-exceptions",
    "-fno-unwind-tables",
    "-fno-asynchronous-unwind-tables",
)


class NoCCodeError(NotImplementedError):
    """An operation in the body of a loop has no C code."""


@dataclass(frozen=True)
class CCode:
    """The C code of a loop.

    Attributes
    ----------
    helpers : str
        Functions that many loops share, guarded against being defined twice.
    functions : str
        The functions of this loop; `NODE_NAME` stands for the name of the node. One of them,
        ``NODE_NAME_call``, takes the inputs and the addresses of the outputs, and returns 0, or -1
        with a Python exception set.
    scalar_ops : tuple
        The scalar Ops whose headers and libraries the functions need.
    compile_args : tuple of str
    version : tuple
        Changes with the code; see `COp.c_code_cache_version`. Empty if some Op has none.
    """

    helpers: str
    functions: str
    scalar_ops: tuple[Any, ...]
    compile_args: tuple[str, ...]
    version: tuple[Hashable, ...]


Printer = Callable[[Any], CCode]
_printers: list[Printer] = []


def register_c_printer(printer: Printer) -> Printer:
    """Make `printer` the one that writes the C code of loops."""
    _printers[:] = [printer]
    return printer


NodePrinter = Callable[[Any, Apply], CCode]
_node_printers: list[NodePrinter] = []


def register_node_printer(printer: NodePrinter) -> NodePrinter:
    """Make `printer` the one that writes the C code of single nodes."""
    _node_printers[:] = [printer]
    return printer


class _Printed(COp):
    """An Op whose C code is written by a registered printer, as one function per node."""

    def code_of(self, node: Apply) -> CCode:
        """Return the C code of a node; `NoCCodeError` if it has none, or is not wanted."""
        raise NotImplementedError

    def has_code(self, node: Apply) -> bool:
        """Whether a node has C code of its own, under the flags as they are."""
        try:
            self.code_of(node)
        except NoCCodeError:
            return False
        return True

    def make_c_thunk(self, node: Apply, *arguments: Any, **options: Any) -> Any:
        # A module of an earlier compilation would be found without asking for the code.
        self.code_of(node)
        return super().make_c_thunk(node, *arguments, **options)

    def c_code(
        self, node: Apply, name: str, inputs: list[str], outputs: list[str], sub: dict[str, str]
    ) -> str:
        self.code_of(node)
        arguments = ", ".join([*inputs, *(f"&{out}" for out in outputs)])
        return f"if ({name}_call({arguments})) {{ {sub['fail']} }}"


class PrintedOp(_Printed):
    """An Op whose C code a registered printer writes."""

    _printed: dict[Hashable, CCode | NoCCodeError]

    def print_code(self) -> CCode:
        """Return the C code of this loop.

        Raises
        ------
        NoCCodeError
            If it has none, or is not wanted.
        """
        if not _printers or config.scanlib__perform != "auto":
            raise NoCCodeError(f"{self} runs through perform")
        sizes = config.scanlib__parallel_channels, config.scanlib__parallel_steps
        key = (config.scanlib__threads, *sizes)
        if key not in self._printed:
            try:
                self._printed[key] = _printers[0](self)
            except NoCCodeError as error:
                self._printed[key] = error
        code = self._printed[key]
        if isinstance(code, NoCCodeError):
            raise NoCCodeError(*code.args)
        return code

    def printed(self) -> CCode | None:
        """Return the C code of this loop, None if it has none or is not wanted."""
        try:
            return self.print_code()
        except NoCCodeError:
            return None

    def code_of(self, node: Apply) -> CCode:
        return self.print_code()

    def c_code_cache_version(self) -> tuple[Hashable, ...]:
        code = self.printed()
        return () if code is None else code.version

    def c_support_code(self, **kwargs: Any) -> str:
        code = self.printed()
        return "" if code is None else code.helpers

    def c_support_code_apply(self, node: Apply, name: str) -> str:
        code = self.printed()
        return "" if code is None else code.functions.replace(NODE_NAME, name)

    def c_headers(self, **kwargs: Any) -> list[str]:
        return ["<math.h>", "<string.h>", "<stdlib.h>", *self._of_scalar_ops("c_headers", kwargs)]

    def c_header_dirs(self, **kwargs: Any) -> list[str]:
        return self._of_scalar_ops("c_header_dirs", kwargs)

    def c_libraries(self, **kwargs: Any) -> list[str]:
        return self._of_scalar_ops("c_libraries", kwargs)

    def c_lib_dirs(self, **kwargs: Any) -> list[str]:
        return self._of_scalar_ops("c_lib_dirs", kwargs)

    def c_compile_args(self, **kwargs: Any) -> list[str]:
        code = self.printed()
        own = [] if code is None else list(code.compile_args)
        return own + self._of_scalar_ops("c_compile_args", kwargs)

    def c_no_compile_args(self, **kwargs: Any) -> list[str]:
        return [*UNWANTED_FLAGS, *self._of_scalar_ops("c_no_compile_args", kwargs)]

    def _of_scalar_ops(self, method: str, kwargs: dict[str, Any]) -> list[str]:
        code = self.printed()
        if code is None:
            return []
        found = [item for op in code.scalar_ops for item in getattr(op, method)(**kwargs)]
        return list(dict.fromkeys(found))


class PrintedNodeOp(_Printed):
    """An Op with one output, the C code of whose nodes a registered printer writes."""

    def print_code(self, node: Apply) -> CCode:
        """Return the C code of a node.

        Raises
        ------
        NoCCodeError
            If it has none, or is not wanted.
        """
        if not _node_printers or config.scanlib__perform != "auto":
            raise NoCCodeError(f"{self} runs through perform")
        return _node_printers[0](self, node)

    def code_of(self, node: Apply) -> CCode:
        return self.print_code(node)

    def c_code_cache_version_apply(self, node: Apply) -> tuple[Hashable, ...]:
        try:
            return self.print_code(node).version
        except NoCCodeError:
            return ()

    def c_support_code_apply(self, node: Apply, name: str) -> str:
        code = self.print_code(node)
        return code.helpers + code.functions.replace(NODE_NAME, name)

    def c_headers(self, **kwargs: Any) -> list[str]:
        return ["<math.h>", "<string.h>", "<stdlib.h>"]

    def c_compile_args(self, **kwargs: Any) -> list[str]:
        # Infinities and NaN count, and ``a + h - m`` must not be regrouped.
        return ["-fno-fast-math", "-ffp-contract=fast"]

    def c_no_compile_args(self, **kwargs: Any) -> list[str]:
        return list(UNWANTED_FLAGS)
