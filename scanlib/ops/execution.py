"""How `Scan.perform` runs a loop: as a backend does, or in plain Python; what backends bring."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply

from scanlib.lengths.numbers import Steps
from scanlib.ops.python_loop import PythonLoop
from scanlib.ops.signature import Signature

if TYPE_CHECKING:
    from scanlib.ops.scan import Scan

Runner = Callable[..., Sequence[Any]]
Compiler = Callable[["LoopOp", Apply], Runner]
F = TypeVar("F", bound=Callable[..., Any])


class NotCompilableError(Exception):
    """The body of a loop holds something that the backend cannot compile."""


# What backends bring, once they are loaded: from an Op and a node to what `perform` runs
# ("compiler"), from a loop to its body as that compiles it, its `fgraph` ("body"), and from a node
# to what makes its thunk under the C linker, see `scanlib.ops.c_linker` ("thunk").
BROUGHT: dict[str, Callable[..., Any]] = {}
_loaders: list[Callable[[], object]] = []


def brings(what: str) -> Callable[[F], F]:
    """Register a function of a backend."""

    def register(function: F) -> F:
        BROUGHT[what] = function
        return function

    return register


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


def runner_for(op: Any, node: Apply) -> Runner:
    """Return the function that runs the loop `op` on values.

    The flag ``scanlib__perform`` decides: ``auto`` takes what the backend has, ``numba`` insists on
    the compiled loop, ``python`` never compiles.
    """
    if config.scanlib__perform == "python" or "compiler" not in BROUGHT:
        return op.python_loop()
    return BROUGHT["compiler"](op, node)


class LoopOp:
    """An Op that is a loop, in canonical form or lowered. Comes before `Op` among the bases.

    `scan` is the loop in canonical form; `_runners` has the functions that run it, by the flag
    ``scanlib__perform``.
    """

    scan: "Scan"
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
