"""Which arrays of a graph have a length that JAX does not know when it compiles."""

from __future__ import annotations

from collections.abc import Sequence

from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.extra_ops import Repeat

from scanlib.backends.jax.static import StaticNumber
from scanlib.lengths.known import KnownLengths


def lengths_in(fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> KnownLengths:
    """Return what is known of lengths in a graph; `data` are inputs that are not known, though they
    may be integers."""
    return KnownLengths(fgraph, data, (StaticNumber,), (Repeat,))
