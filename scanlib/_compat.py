"""The places where supported PyTensor releases differ, and nothing else.

scanlib supports PyTensor 3.0.7 (the newest for Python 3.11) and the newest release.
"""

from collections.abc import Sequence

from pytensor.graph.basic import Variable
from pytensor.graph.fg import FrozenFunctionGraph


def freeze_graph(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> FrozenFunctionGraph:
    """Return the immutable, hashable graph from `inputs` to `outputs`.

    Later releases replaced the constructor by `FrozenFunctionGraph.from_io`, where
    ``dedup_nodes`` folds equal nodes; 3.0.x always folds them. Canonical bodies hold no
    in-place operations, so folding is safe and makes equal bodies the same object.
    """
    from_io = getattr(FrozenFunctionGraph, "from_io", None)
    if from_io is None:
        return FrozenFunctionGraph(inputs, outputs)
    return from_io(inputs, outputs, dedup_nodes=True)
