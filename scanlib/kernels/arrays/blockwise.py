"""Ops that are applied to each item of a batch: loops over the leading axes."""

from __future__ import annotations

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.blockwise import Blockwise

from scanlib.kernels.arrays.array_step import Destination, Step, rule
from scanlib.kernels.arrays.nests import common_sizes, deliver, over, stretched
from scanlib.kernels.arrays.sizes import Size
from scanlib.kernels.arrays.workspace import Place
from scanlib.kernels.language import INT64, Block, Value
from scanlib.lengths.batches import common

BATCHES = "Incompatible sizes of the batches of an operation on matrices, {} and {}"
RESULTS = "Items of a batch have results of different shapes"


class Batch:
    """A node, with the loops over its leading axes.

    Memory for its results is taken before the loops, when the rule of one item says how large they
    are.
    """

    def __init__(self, step: Step, node: Apply) -> None:
        self.step, self.node = step, node
        self.ndim = node.op.batch_ndim(node)
        self.core = node.op._create_dummy_core_node(node.inputs)
        self.core.inputs = list(map(_known_item, node.inputs, self.core.inputs))
        inputs = zip(node.inputs, node.op.inputs_sig, strict=True)
        batched = [
            (v, step.place(v).sizes[:n]) for v, sig in inputs if (n := v.type.ndim - len(sig))
        ]
        self.sizes = common_sizes(step, self.ndim, batched, "ValueError", BATCHES)
        self.first = Block()
        self.whole: dict[Variable, Place] = {}

    def write(self) -> None:
        step, w = self.step, self.step.writer
        inputs = []
        for outer, inner, signature in zip(
            self.node.inputs, self.core.inputs, self.node.op.inputs_sig, strict=True
        ):
            lead = outer.type.ndim - len(signature)
            if isinstance(inner, Constant):
                continue
            if not lead:
                step.alias(inner, outer)
                continue
            place = step.place(outer)
            batch = place.along(range(lead))
            inputs.append((inner, place, lead, stretched(step, outer, batch, self.sizes)))
        for inner, outer in zip(self.core.outputs, self.node.outputs, strict=True):
            self._give_destination(inner, outer)
        block, before = w.block, len(w.block.statements)
        walks = [walk for _, _, _, walk in inputs]
        with over(step, walks, self.sizes) as self.loops, step.scope():
            for inner, place, lead, walk in inputs:
                pointer = w.offset(place.pointer, w.as_value(walk.offset, INT64))
                item = place.along(range(lead, place.ndim), pointer)
                step.bind_place(inner, item)
            step.apply(self.core)
            for inner in self.core.outputs:
                deliver(step, inner, step.destinations[inner])
        block.statements[before:before] = self.first.statements
        for inner, outer in zip(self.core.outputs, self.node.outputs, strict=True):
            step.bind_place(outer, self.whole[inner])

    def _give_destination(self, inner: Variable, outer: Variable) -> None:
        """Let the results of one item go where they belong in those of all."""
        step = self.step

        def place(sizes: tuple[Size, ...]) -> Place:
            if inner not in self.whole:
                with step.writer.inside(self.first):
                    self.whole[inner] = step.target(outer, [*self.sizes, *sizes])
            whole = self.whole[inner]
            offset: Value = step.writer.constant(0, INT64)
            for index, stride in zip(self.loops, whole.strides, strict=False):
                offset = offset + step.bytes(index, stride)
            pointer = step.writer.offset(whole.pointer, offset)
            return whole.along(range(self.ndim, whole.ndim), pointer)

        step.destinations[inner] = Destination(place, "ValueError", (RESULTS,) * inner.type.ndim)


def _known_item(outer: Variable, inner: Variable) -> Variable:
    """Return what an Op is given of one item: a number that is known to be the same for all, such
    as an axis in releases of PyTensor before 3.3."""
    is_integer = inner.type.dtype.startswith("int") and inner.type.ndim == 0
    known = common(outer, outer.type.ndim) if is_integer and isinstance(outer, Constant) else None
    return inner if known is None else known


@rule(Blockwise)
def write_batch(step: Step, node: Apply) -> None:
    Batch(step, node).write()
