"""What both schedules of an elementwise loop share: checks, storage, how items are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort

from scanlib._compat import thaw_graph
from scanlib.backends.numba.loop import LoopWriter
from scanlib.ops.channels import ChannelPlan, Place, Target
from scanlib.ops.elemwise_scan import Axes, ElemwiseScan
from scanlib.ops.messages import Messages
from scanlib.ops.positions import PositionalOp


class ElemwiseWriter(LoopWriter):
    """Writes the function of one elementwise loop."""

    version = "scanlib-elemwise-10"

    def __init__(self, op: ElemwiseScan) -> None:
        self.start(op.scan)
        self.lowered = op
        self.layout = op.layout
        self.graph = thaw_graph(op.body)
        self.inner = self.signature.split_body_inputs(self.graph.inputs)
        self.result = self.signature.split_body_outputs(self.graph.outputs)
        self.in_registers = [False] * self.signature.n_states
        self.messages = Messages(op.signature, op.scan.labels, op.scan.name)
        self.parts = self._input_parts()
        self.plan = ChannelPlan(self.signature, self.layout, self.inner, self.result)
        self.sizes: dict[tuple[int, int], str] = {}  # of a target and an axis

    def escaping_values(self) -> set[Variable]:
        return set()

    def _input_parts(self) -> dict[Variable, tuple[str, Axes]]:
        """Return, for rows and non-sequences, the array that holds them and its axes."""
        parts = {}
        for i, row in enumerate(self.inner.rows):
            parts[row] = (self.outer.sequences[i], self.layout.sequences[i])
        for i, variable in enumerate(self.inner.non_sequences):
            parts[variable] = (self.outer.non_sequences[i], self.layout.non_sequences[i])
        return parts

    # Sizes

    def write_sizes(self, targets: Sequence[Target], level: int) -> None:
        """Write the lengths of all loops over channels, and the checks that inputs agree."""
        for group in self.plan.groups(targets, level):
            name = self.source.name("size")
            places = self.plan.group_places(group, level)
            sizes = [f"{place.array}.shape[{place.along(level)}]" for place in places]
            self.source.line(f"{name} = {sizes[0] if sizes else 1}")
            for place, text in list(zip(places, sizes, strict=True))[1:]:
                self.check_size(place, level, text, name)
            self.sizes.update({(id(target), level): name for target in group})
            self.write_sizes(group, level + 1)

    def check_size(self, place: Place, level: int, text: str, size: str) -> None:
        """Write the check that an array has as many channels as the others."""
        with self.source.block(f"if steps > 0 and {text} != {size}:"):
            if place.owned is None:
                message = "Incompatible Elemwise input shapes inside a scan"
                self.source.line(f"raise ValueError('{message}')")
            else:
                message = self.messages.state_shape(place.owned, place.axes.index(level))
                self.raise_error("StepShapeError", message, "np.int64(0)", text, size)

    # Names of items

    def item(self, array: str, axes: Axes, indices: list[str], *lead: str) -> str:
        """Return the text of an item: `lead` indices first, then one for every axis.

        What has neither is a number, which may come as an array.
        """
        places = [*lead, *("0" if axis is None else indices[axis] for axis in axes)]
        return f"{array}[{', '.join(places)}]" if places else f"as_scalar({array})"

    # Emitting parts of scalar graphs

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget, afterwards, which names hold which variables."""
        values = dict(self.emitter.values)
        yield
        self.emitter.values = values

    def write_positional(self, node: Apply) -> None:
        """Write an operation that reads rows at computed places."""
        raise NotImplementedError(f"{node.op} is not written by this schedule")

    def load(self, variable: Variable, indices: list[str], *lead: str) -> None:
        """Write the read of a row's or a non-sequence's item."""
        array, axes = self.parts[variable]
        name = self.source.name("s")
        self.source.line(f"{name} = {self.item(array, axes, indices, *lead)}")
        self.emitter.bind_scalar(variable, name)

    def emit(self, outputs: list[Variable]) -> None:
        """Write the statements that compute `outputs` from what is bound."""
        bound = [variable for variable in self.emitter.values if not isinstance(variable, Constant)]
        for node in toposort(outputs, blockers=bound):
            if all(out in self.emitter.values for out in node.outputs):
                continue
            if isinstance(node.op, PositionalOp):
                self.write_positional(node)
            else:
                results = self.emitter._scalar_op(
                    node.op, node, [self.emitter.scalar(inp) for inp in node.inputs]
                )
                for out, name in zip(node.outputs, results, strict=True):
                    self.emitter.bind_scalar(out, name)
