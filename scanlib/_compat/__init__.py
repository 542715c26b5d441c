"""The door to what scanlib takes from outside beyond public names, each with the reason.

Here is what is PyTensor's, and where its releases differ; `xtensor`, `numba`, `jax`, `torch` and
`pymc` have a module of their own, which imports the package it is about.

scanlib supports PyTensor 3.0.7 (the newest for Python 3.11) and the newest release. Each name has
its reason; ``docs/upstream.md`` has what is changed in PyTensor itself, as proposals.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import optdb
from pytensor.graph import features as features_module
from pytensor.graph.basic import Apply, Constant, NominalVariable, Variable
from pytensor.graph.features import Feature
from pytensor.graph.fg import FrozenFunctionGraph, FunctionGraph
from pytensor.graph.replace import _vectorize_node
from pytensor.graph.traversal import toposort
from pytensor.link.c.cmodule import std_lib_dirs, std_libs
from pytensor.scalar import basic as scalar

# The loops of `pytensor.scan`: their class, `ScanInfo` and what splits inputs and outputs are the
# same in all releases. The body is a `FunctionGraph` in 3.0.x and a `FrozenFunctionGraph` later;
# `thaw_graph` copies both.
from pytensor.scan.op import Scan as LegacyScan
from pytensor.tensor import blas, special, subtensor
from pytensor.tensor.basic import Alloc, alloc
from pytensor.tensor.rewriting import ofg, uncanonicalize
from pytensor.tensor.rewriting import shape as shape_rewrites
from pytensor.tensor.rewriting import subtensor as subtensor_rewrites
from pytensor.tensor.rewriting.basic import local_scalar_tensor_scalar, local_tensor_scalar_tensor
from pytensor.tensor.rewriting.blockwise import local_useless_unbatched_blockwise
from pytensor.tensor.rewriting.math import local_mul_canonizer, local_mul_specialize

F = TypeVar("F", bound=Feature)

# What an Op does in a batch is registered with it; the public `vectorize_node` cannot register.
vectorize_rule = _vectorize_node

# How PyTensor calls its C++ compiler: libraries of scanlib's own are compiled the same way.
PYTHON_LIBRARIES, PYTHON_LIBRARY_FOLDERS = std_libs, std_lib_dirs

# Rewrites that the step of an adopted batch needs before the others; named, since the database
# has no query for three of them.
UNBATCH = (
    local_useless_unbatched_blockwise,
    local_scalar_tensor_scalar,
    local_tensor_scalar_tensor,
)

# Writes products with -1 as negatives: one of many rewrites in PyTensor's specialization.
SHORT_PRODUCTS = local_mul_specialize

# A choice between graphs; defined elsewhere in later releases.
try:
    from pytensor import conditional
except ImportError:
    from pytensor.ifelse import IfElse
else:
    IfElse = conditional.op.IfElse

# Later releases write `logaddexp` and `logsumexp` as Ops with a graph inside; None where they
# are plain graphs.
LOG_ADD_EXP = getattr(special, "LogAddExp", None)
LOG_SUM_EXP = getattr(special, "LogSumExp", None)

# The types of nodes that hold a derivative as a graph and are nothing else. Releases from 3.3.8 on
# have one of their own for derivatives of their composite functions.
DERIVATIVE_GRAPHS = {OpFromGraph, getattr(ofg, "FusibleSymbolicOpDerivative", OpFromGraph)}

# The graph of an `OpFromGraph` over the inputs of a node; defined elsewhere in later releases.
inline_ofg_node = ofg.inline_ofg_node

# Scalar Ops of releases before 3.3; None in later ones, which write them with others.
DEG2RAD, RAD2DEG, ANGLE = (getattr(scalar, name, None) for name in ("Deg2Rad", "Rad2Deg", "Angle"))

# The sum of a matrix and an outer product; None in later releases, which have no Op of it.
GER = getattr(blas, "Ger", None)

# What reads items of an array by index, and what writes some. Releases before 3.3 have Ops of their
# own for one vector of indices.
INDEXED_BY_VECTOR: tuple[type, ...] = tuple(
    getattr(subtensor, name)
    for name in ("AdvancedSubtensor1", "AdvancedIncSubtensor1")
    if hasattr(subtensor, name)
)
INDEX_READS: tuple[type, ...] = (
    subtensor.Subtensor,
    subtensor.AdvancedSubtensor,
    *INDEXED_BY_VECTOR[:1],
)
INDEX_WRITES: tuple[type, ...] = (
    subtensor.IncSubtensor,
    subtensor.AdvancedIncSubtensor,
    *INDEXED_BY_VECTOR[1:],
)

# Attached where shapes are asked for: nothing public says that of a variable in a graph.
ShapeFeature = shape_rewrites.ShapeFeature


def kept_sizes(fgraph: FunctionGraph) -> dict[Variable, Any]:
    """Return the sizes that PyTensor keeps for a graph's variables; later releases keep none."""
    feature = getattr(fgraph, "shape_feature", None)
    return {} if feature is None else vars(feature).get("shape_of", {})


def _add_whole_writes(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Write what is added into the other addends, where the sum broadcasts and casts neither.

    Releases before 3.3 do so always: ``zeros(n)[1:].inc(v) + x`` becomes ``x[1:].inc(v)`` where `x`
    has length 1, which fails, or gives one item. Gradients of steps have such sums.
    """
    out = node.outputs[0].type

    def is_whole(variable: Variable) -> bool:
        given = variable.type
        return (given.dtype, given.broadcastable) == (out.dtype, out.broadcastable)

    if not all(is_whole(inp) for inp in node.inputs if isinstance(inp.owner_op, INDEX_WRITES)):
        return None
    made = _add_write(fgraph, node)
    return made if made and is_whole(made[0]) else None


def _read_same_write(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Read the value that was set where it is read, repeated as often as there is room for.

    Releases before 3.3 ask the read itself for its shape where the value is to be repeated, which
    keeps what they replace: they replace it for ever.
    """
    made = _read_write(fgraph, node)
    write = node.inputs[0].owner
    if not made or not isinstance(made[0].owner_op, Alloc) or not write.op.set_instead_of_inc:
        return made
    unwritten = node.op(write.inputs[0], *node.inputs[1:])
    return [alloc(made[0].owner.inputs[0], *unwritten.shape)]


def _index_one_item(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Write an index for a slice of one item whose axis is dropped, where that is its first one.

    PyTensor reads ``x[0]`` for ``x[:1:-1]``, whose one item is the last of `x`: the row of a loop
    of one step that goes backwards.
    """
    read = node.inputs[0].owner
    if read is not None and isinstance(read.op, subtensor.Subtensor):
        for place in read.op.idx_list:
            if isinstance(place, slice) and place.start is None and place.step is not None:
                return None
    return _index_dropped(fgraph, node)


def _multiply_exactly(num: list[Any], denum: list[Any], *rest: Any, **options: Any) -> Any:
    """Multiply constants, integers of 64 bits as such.

    PyTensor divides by the product of no denominators, in double precision: what is not to be
    found among the multiples of 2, 4, … from 2**53 on is rounded, as are most multipliers of hashes
    and generators.
    """
    made = _multiply(num, denum, *rest, **options)
    out_type = options.get("out_type")
    if denum or not num or out_type is None or out_type.dtype not in ("int64", "uint64"):
        return made
    with np.errstate(over="ignore"):
        exact = reduce(np.multiply, num, np.asarray(1, out_type.dtype))
    return made and [exact] if options.get("aslist") else exact


_multiply = local_mul_canonizer.calculate
local_mul_canonizer.calculate = _multiply_exactly

_index_dropped = uncanonicalize.local_dimshuffle_subtensor.fn
uncanonicalize.local_dimshuffle_subtensor.fn = _index_one_item

if hasattr(features_module, "inspect"):
    # 3.0.x reads the file of whoever called, and looks at all modules for it, to learn its name.
    features_module.inspect = SimpleNamespace(
        currentframe=inspect.currentframe, getframeinfo=partial(inspect.getframeinfo, context=0)
    )

if INDEXED_BY_VECTOR:
    # In PyTensor itself, not for steps alone: steps that need no loop become part of the graph
    # around it.
    _add_write = subtensor_rewrites.local_add_of_sparse_write.fn
    subtensor_rewrites.local_add_of_sparse_write.fn = _add_whole_writes
    _read_write = subtensor_rewrites.local_read_of_write_same_indices.fn
    subtensor_rewrites.local_read_of_write_same_indices.fn = _read_same_write

# Nodes with a graph inside that later releases make for the numba linker alone, and whose graph may
# as well stand in their place: numbers that are no arrays, and what reads them.
NUMBERS_INSIDE: tuple[Any, ...] = ()
# An elementwise operation together with the reductions and indices around it.
FUSED_ELEMWISE: tuple[Any, ...] = ()
# Nodes with a graph inside that was rewritten with the graph around it; releases before 3.3 rewrite
# such a graph when it is compiled.
READY_GRAPHS: tuple[Any, ...] = ()
try:
    from pytensor.tensor.rewriting import fused_elemwise, scalarize
except ImportError:
    pass
else:
    FUSED_ELEMWISE = (fused_elemwise.FusedElemwise,)
    READY_GRAPHS = (OpFromGraph,)
    NUMBERS_INSIDE = (
        scalarize.ScalarCAReduce,
        scalarize.ScalarSubtensor,
        scalarize.ScalarizedElemwise,
        scalarize.ScalarizedJoin,
    )


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
    inputs, outputs = copy_graph(frozen.inputs, frozen.outputs)
    return FunctionGraph(inputs, outputs, clone=False)


def copy_graph(
    inputs: Sequence[Variable], outputs: Sequence[Variable], onto: Sequence[Variable] | None = None
) -> tuple[list[Variable], list[Variable]]:
    """Return fresh inputs, or those given, and copies of the outputs that read them.

    They do not say where they were made, as `Type.__call__` lets them: it is what takes longest.

    PyTensor infers shapes of copies: frozen graphs share inputs, and what sizes are made of may be
    those of another; in later releases a frozen node cannot be cloned, and inferring shapes may
    clone it; in 3.0.7 no input may be the size of an array that is none.
    """
    fresh = [inp.type.make_variable() for inp in inputs] if onto is None else list(onto)
    memo: dict[Variable, Variable] = dict(zip(inputs, fresh, strict=True))

    def copy(variable: Variable) -> Variable:
        return variable if isinstance(variable, Constant) else memo[variable]

    for node in toposort(outputs, blockers=list(inputs)):
        results = [out.type.make_variable() for out in node.outputs]
        new = Apply(node.op, [copy(inp) for inp in node.inputs], results)
        memo.update(zip(node.outputs, new.outputs, strict=True))
    return fresh, [copy(out) for out in outputs]


def join_of(node: Apply) -> tuple[int | None, list[Variable]]:
    """Return the axis of a `Join` node, None if it is not known, and what is joined.

    Later releases keep the axis in the Op; in 3.0.x it is the first input.
    """
    parts = list(node.inputs)
    axis = _known_axis(parts.pop(0) if not hasattr(node.op, "axis") else node.op.axis)
    ndim = node.outputs[0].type.ndim
    return None if axis is None else axis % ndim, parts


def split_of(node: Apply) -> tuple[Variable, int | None, Variable]:
    """Return what a `Split` node takes apart, the axis, None if not known, and the sizes."""
    whole, *axes, sizes = node.inputs
    axis = _known_axis(axes[0] if axes else node.op.axis)
    return whole, None if axis is None else axis % whole.type.ndim, sizes


def sorted_axis(node: Apply) -> int | None:
    """Return the axis along which a node sorts, None if it is not known or there is no such axis.

    Later releases keep it in the Op; in 3.0.x it is an input.
    """
    op, ndim = getattr(node.op, "core_op", node.op), node.outputs[0].type.ndim
    axis = _known_axis(getattr(op, "axis", node.inputs[-1]))
    return axis % ndim if axis is not None and -ndim <= axis < ndim else None


def _known_axis(axis: Any) -> int | None:
    if isinstance(axis, int):
        return axis
    return int(axis.data) if isinstance(axis, Constant) else None


def variable_number(variable: Variable) -> int:
    """Return a number that is higher for variables that PyTensor has made later."""
    return int(variable.auto_name.removeprefix("auto_"))


def features(fgraph: FunctionGraph, kind: type[F]) -> list[F]:
    """Return the features of a kind that are attached to a graph, which has no public list."""
    attached = getattr(fgraph, "_features", ())  # none of a frozen graph
    return [feature for feature in attached if isinstance(feature, kind)]


def leave_alone(name: str, is_left_alone: Callable[[FunctionGraph], bool]) -> None:
    """Have one of PyTensor's rewrites leave some graphs alone: which rewrites a mode has is fixed
    before there is a graph."""
    rewrite: Any = optdb[name]
    own = rewrite.apply
    rewrite.apply = lambda fgraph: None if is_left_alone(fgraph) else own(fgraph)


def function_inside(f: Any) -> Any:
    """Return the compiled function in what a PyMC model compiles (`compile_logp`,
    `logp_dlogp_function`), which keeps it under names that are not public; all else as it is."""
    inside = getattr(f, "f", None) or getattr(f, "_pytensor_function", None)
    return inside if hasattr(inside, "maker") else f
