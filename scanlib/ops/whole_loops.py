"""A mark on graphs whose loops are not taken apart."""

from pytensor.graph.features import Feature


class KeepsLoopsWhole(Feature):
    """Says that the split of loops (`scanlib.rewrites.split`) leaves a graph as it is.

    JAX compiles for known shapes. A loop whose length a value decides runs there with bounded
    buffers; the batches that a split makes of its steps would be arrays of unknown length.
    """
