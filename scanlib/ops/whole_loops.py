"""Marks on graphs: what their linker wants of the rewrites of loops."""

from pytensor.graph.features import Feature
from pytensor.graph.fg import FunctionGraph


class KeepsLoopsWhole(Feature):
    """Says that the split of loops (`scanlib.rewrites.split`) leaves a graph as it is.

    JAX compiles for known shapes. A loop whose length a value decides runs there with bounded
    buffers; the batches that a split makes of its steps would be arrays of unknown length.
    """


class CompilesStepProducts(Feature):
    """Says that products of all steps may be written as one `StepProducts`.

    In other graphs they are PyTensor's own products, which its rewrites and all linkers know.
    """


def compiles_step_products(fgraph: FunctionGraph) -> bool:
    """Whether a graph may hold `StepProducts`."""
    return any(isinstance(feature, CompilesStepProducts) for feature in fgraph._features)
