"""Ops that are applied to each item of a batch: loops over the leading axes."""

from functools import partial

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.blockwise import Blockwise

from scanlib.kernels.arrays.array_step import Destination, Step, rule
from scanlib.kernels.arrays.nests import common_sizes, deliver, over, stretched
from scanlib.kernels.arrays.sizes import Size, unchanging
from scanlib.kernels.arrays.workspace import Place
from scanlib.kernels.language import INT64, Block, Value
from scanlib.lengths.batches import common

BATCHES = "Incompatible sizes of the batches of an operation on matrices, {} and {}"
RESULTS = "Items of a batch have results of different shapes"


@rule(Blockwise)
def write_batch(step: Step, node: Apply) -> None:
    """Write the loops over the leading axes of a node, with the rule of one item inside.

    Memory for its results is taken before the loops, when that rule says how large they are.
    """
    w, ndim, signature = step.writer, node.op.batch_ndim(node), node.op.inputs_sig
    core = node.op._create_dummy_core_node(node.inputs)
    core.inputs = list(map(_known_item, node.inputs, core.inputs))
    leads = [v.type.ndim - len(sig) for v, sig in zip(node.inputs, signature, strict=True)]
    batched = [(v, step.place(v).sizes[:n]) for v, n in zip(node.inputs, leads, strict=True) if n]
    sizes = common_sizes(step, ndim, batched, "ValueError", BATCHES)
    inputs = []
    for outer, inner, lead in zip(node.inputs, core.inputs, leads, strict=True):
        if isinstance(inner, Constant):
            continue
        if not lead:
            step.alias(inner, outer)
            continue
        place = step.place(outer)
        unchanging(place.sizes)
        inputs.append((inner, place, lead, stretched(step, outer, place.along(range(lead)), sizes)))
    first, found = Block(), {}

    def item(inner: Variable, outer: Variable, own: tuple[Size, ...]) -> Place:
        """Return where a result of one item belongs in those of all."""
        if inner not in found:
            with w.inside(first):
                found[inner] = step.target(outer, [*sizes, *unchanging(own)])
        whole = found[inner]
        offset: Value = w.constant(0, INT64)
        for index, stride in zip(loops, whole.strides, strict=False):
            offset = offset + step.bytes(index, stride)
        return whole.along(range(ndim, whole.ndim), w.offset(whole.pointer, offset))

    for inner, outer in zip(core.outputs, node.outputs, strict=True):
        texts = (RESULTS,) * inner.type.ndim
        step.destinations[inner] = Destination(partial(item, inner, outer), "ValueError", texts)
    block, before = w.block, len(w.block.statements)
    with over(step, [walk for _, _, _, walk in inputs], sizes) as loops, step.scope():
        for inner, place, lead, walk in inputs:
            pointer = w.offset(place.pointer, w.as_value(walk.offset, INT64))
            step.bind_place(inner, place.along(range(lead, place.ndim), pointer))
        step.apply(core)
        for inner in core.outputs:
            deliver(step, inner, step.destinations[inner])
    block.statements[before:before] = first.statements
    for inner, outer in zip(core.outputs, node.outputs, strict=True):
        step.bind_place(outer, found[inner])


def _known_item(outer: Variable, inner: Variable) -> Variable:
    """Return what an Op is given of one item: a number that is known to be the same for all, such
    as an axis in releases of PyTensor before 3.3."""
    is_integer = inner.type.dtype.startswith("int") and inner.type.ndim == 0
    known = common(outer, outer.type.ndim) if is_integer and isinstance(outer, Constant) else None
    return inner if known is None else known
