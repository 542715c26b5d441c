"""How `Scan.perform` runs a loop: as a backend does, or in plain Python.

A backend registers a compiler with `register_compiler`; it takes an Op and one of its nodes
and returns a function from input values to output values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph

from scanlib.lengths.numbers import Steps
from scanlib.ops.python_loop import PythonLoop
from scanlib.ops.signature import Signature

if TYPE_CHECKING:
    from scanlib.ops.scan import Scan

Runner = Callable[..., Sequence[Any]]
Compiler = Callable[["LoopOp", Apply], Runner]


class NotCompilableError(Exception):
    """The body of a loop holds something that the backend cannot compile."""


_compilers: list[Compiler] = []
_preparers: list[Callable[[Scan], Any]] = []
_loaders: list[Callable[[], object]] = []


def register_loader(loader: Callable[[], object]) -> None:
    """Have `loader` called when the first loop is made, and with each loop while it returns False.

    Backends import compilers, which takes longer than all the rest of scanlib; a program that
    only imports scanlib does not wait for them.
    """
    _loaders.append(loader)


def load_backends() -> None:
    """Call the registered loaders that are not done."""
    waiting = _loaders[::-1]
    _loaders.clear()  # a loader may make loops
    _loaders.extend(loader for loader in waiting if loader() is False)


def register_compiler(compiler: Compiler) -> Compiler:
    """Make `compiler` the one that `Scan.perform` asks."""
    _compilers[:] = [compiler]
    return compiler


def register_preparer(prepare: Callable[[Scan], Any]) -> Callable[[Scan], Any]:
    """Make `prepare` what gives the body of a loop, its `fgraph`, as it is compiled."""
    _preparers[:] = [prepare]
    return prepare


def compiled_body(op: Scan) -> FunctionGraph:
    """Return the body of a loop as the compiler that `Scan.perform` asks rewrites it."""
    return _preparers[0](op).fgraph


def runner_for(op: Any, node: Apply) -> Runner:
    """Return the function that runs the loop `op` on values.

    The flag ``scanlib__perform`` decides: ``auto`` takes what the backend has, ``numba`` insists on
    the compiled loop, ``python`` never compiles.
    """
    if config.scanlib__perform == "python" or not _compilers:
        return op.python_loop()
    return _compilers[0](op, node)


class LoopOp:
    """An Op that is a loop, in canonical form or lowered. Comes before `Op` among the bases.

    `scan` is the loop in canonical form; `_runners` has the functions that run it, by the flag
    ``scanlib__perform``.
    """

    scan: Scan
    signature: Signature
    _runners: dict[str, Runner]

    @property
    def has_n_steps(self) -> bool:
        """Whether the number of steps is an input, the first one."""
        return self.signature.has_n_steps

    def make_node(self, *inputs: Any) -> Apply:
        """Apply a lowered Op as its loop would be."""
        node = self.scan.make_node(*inputs)
        return Apply(self, node.inputs, [out.type() for out in node.outputs])

    # Graphs that were rewritten may be differentiated, too.

    def pullback(self, *arguments: Any) -> list[Any]:
        return self.scan.pullback(*arguments)

    def pushforward(self, *arguments: Any) -> list[Any]:
        return self.scan.pushforward(*arguments)

    def connection_pattern(self, node: Apply | None = None) -> list[list[bool]]:
        return self.scan.connection_pattern(node)

    def infer_shape(self, *arguments: Any) -> list[Any]:
        return self.scan.infer_shape(*arguments)

    def steps_of(self, node: Apply) -> Steps:
        """Return what the loop says of lengths."""
        return self.signature.steps_of(node.inputs)

    def python_loop(self, kind: type[PythonLoop] = PythonLoop) -> Runner:
        """Return the plain loop; that of a lowered Op is the loop it was lowered from."""
        return kind(self.scan)

    def runner(self, node: Apply) -> Runner:
        """Return the function that runs the loop on values, under the flags as they are."""
        choice = config.scanlib__perform
        if choice not in self._runners:
            self._runners[choice] = runner_for(self, node)
        return self._runners[choice]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        results = self.runner(node)(*inputs)
        for storage, value in zip(output_storage, results, strict=True):
            storage[0] = value
