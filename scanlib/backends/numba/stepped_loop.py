"""A loop that Python walks, around kernels: what `perform` runs where Ops of the step have none.

The nodes of a step that have kernels are gathered into programs; each Op that has none computes its
results in Python, as it does in a loop of PyTensor's under the C linker. Nothing waits for numba,
which needs 3 to 22 s of processor time for PyTensor's functions of LAPACK and the like,
where all of `pytensor.scan` is compiled in 6 to 9 and this in half of one.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.c.op import COp
from pytensor.tensor.random.op import RandomVariable

from scanlib.backends.handler.functions import performed
from scanlib.backends.numba.general_loop import PreparedBody, prepare_body, viewed
from scanlib.backends.numba.graph_function import GraphWriter
from scanlib.ops.execution import LoopOp
from scanlib.ops.python_loop import PythonLoop


class StepWriter(GraphWriter):
    """Writes the function of a step; Python computes the nodes `without_kernels`."""

    def __init__(self, fgraph: FunctionGraph) -> None:
        self.without_kernels: list[Apply] = []
        super().__init__(fgraph, self.in_python, attrgetter("data"))

    def in_python(self, node: Apply) -> Callable[..., Any]:
        """Return the function of a node that has no kernel."""
        self.without_kernels.append(node)
        if type(node.op).make_thunk not in (Op.make_thunk, COp.make_thunk):
            return thunk_function(node)
        node.op.prepare_node(node, None, None, "py")
        return performed(node)

    def add(self, node: Apply) -> None:
        if isinstance(node.op, OpFromGraph):
            self._add_inside(node.op.fgraph, node)
        else:
            super().add(node)


def thunk_function(node: Apply) -> Callable[..., Any]:
    """Return the function of an Op that makes its thunks itself, such as `IfElse`."""
    storage: dict[Any, list[Any]] = {v: [None] for v in (*node.inputs, *node.outputs)}
    thunk = node.op.make_thunk(node, storage, {v: [True] for v in storage}, [], impl="py")

    def call(*inputs: Any) -> Any:
        for variable, value in zip(node.inputs, inputs, strict=True):
            storage[variable][0] = value
        thunk()
        found = [storage[out][0] for out in node.outputs]
        return found[0] if len(found) == 1 else found

    return call


class SteppedLoop(PythonLoop):
    """Runs a `Scan` step by step: kernels, and what Python computes."""

    @cached_property
    def body(self) -> PreparedBody:
        """The step, rewritten as for numba."""
        return prepare_body(self.op)

    @cached_property
    def writer(self) -> StepWriter:
        return StepWriter(self.body.fgraph)

    @property
    def pays_compiled(self) -> bool:
        """Whether numba had better compile the loop: where its steps draw random numbers.

        A draw takes 0.3 microseconds there, 12 in Python, and compiles in 2.5 s: such loops take a
        40th of the time of `pytensor.scan` and half of its compile time. Of other Ops none pays:
        they compile for longer than all of `pytensor.scan`, or take their time in LAPACK. Where
        every node has a kernel, and the loop as a whole none, numba compiles calls of these alone.
        """
        return not self.writer.without_kernels or any(map(draws, self.writer.without_kernels))

    def step_text(self) -> tuple[Sequence[str], list[str], dict[str, Any]]:
        lines, results = [line.strip() for line in self.writer.body()], list(self.writer.results)
        for i in self._borrowed():
            lines.append(f"r{i} = copied({results[i]})")
            results[i] = f"r{i}"
        return lines, results, self.writer.scope

    def _borrowed(self) -> list[int]:
        """Return which results may be views of what is written over before they are read."""
        outputs, n_states = self.body.fgraph.outputs, self.signature.n_states
        borrowed = {n_states + i for i in self.body.views}
        carries = range(n_states, n_states + self.signature.n_carries)
        borrowed |= {i for i in carries if outputs[i] in outputs[n_states:i]}
        if any(self.signature.untraced):
            borrowed |= {i for i in range(n_states) if viewed(outputs[i])[-1].owner is None}
        return sorted(borrowed)


def draws(node: Apply) -> bool:
    """Whether a node draws random numbers, or is a loop whose steps do."""
    if isinstance(node.op, LoopOp):
        return SteppedLoop(node.op.scan).pays_compiled
    return isinstance(node.op, RandomVariable)
