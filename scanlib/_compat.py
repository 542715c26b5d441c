"""The places where supported PyTensor releases differ, and nothing else.

scanlib supports PyTensor 3.0.7 (the newest for Python 3.11) and the newest release.
"""

from collections.abc import Sequence

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph, FunctionGraph
from pytensor.scan.op import Scan as LegacyScan
from pytensor.tensor import special

# Later releases write `logaddexp` and `logsumexp` as Ops with a graph inside; None where they
# are plain graphs.
LOG_ADD_EXP = getattr(special, "LogAddExp", None)
LOG_SUM_EXP = getattr(special, "LogSumExp", None)


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


def thaw_graph(frozen: FrozenFunctionGraph) -> FunctionGraph:
    """Return a mutable copy of a frozen graph, with fresh inputs.

    The `unfreeze` method of 3.0.x cannot copy a graph whose output is a constant.
    """
    inputs = [inp.type() for inp in frozen.inputs]
    memo: dict[Variable, Variable] = dict(zip(frozen.inputs, inputs, strict=True))

    def copy(variable: Variable) -> Variable:
        return variable if isinstance(variable, Constant) else memo[variable]

    for node in frozen.toposort():
        new = Apply(node.op, [copy(inp) for inp in node.inputs], [o.type() for o in node.outputs])
        memo.update(zip(node.outputs, new.outputs, strict=True))
    return FunctionGraph(inputs, [copy(out) for out in frozen.outputs], clone=False)


def is_legacy_scan(op: object) -> bool:
    """Whether an Op is a loop of `pytensor.scan`.

    Its class, `ScanInfo` and the methods that split its inputs and outputs are the same in all
    releases. Its body is a `FunctionGraph` in 3.0.x and a `FrozenFunctionGraph` later;
    `thaw_graph` copies both.
    """
    return isinstance(op, LegacyScan)
