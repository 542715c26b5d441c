"""Batches of small matrices: one nest of plain loops over the batch, around a kernel.

    X_k = solve(A_k, B_k)        for all places k of the batch

A batch of loops has factorizations and solves of batches in its step, and so has the graph around a
loop from which they were taken. The function that PyTensor's numba dispatch makes for such a node
takes five to ten seconds to compile, the second derivative of a filter has a dozen of them, and
matrices of a few rows are not what LAPACK is for. Here, a node is a nest of loops that calls a
kernel of `small_linalg`, which is compiled once for all nodes. Matrices with more than `LARGE` rows
go to PyTensor's function, which is compiled when the first one comes.

Products of integers come here in every size: PyTensor's function computes them in floating point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import (
    numba_funcify_and_cache_key,
    numba_funcify_ensure_cache,
    numba_njit,
)
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise, BlockwiseWithCoreShape
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.decomposition.lu import LUFactor, PivotToPermutations
from pytensor.tensor.linalg.inverse import MatrixInverse
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.math import Dot
from pytensor.tensor.sort import ArgSortOp
from pytensor.tensor.subtensor import AdvancedSubtensor

from scanlib.backends.numba import lazy, small_linalg
from scanlib.backends.numba.contiguous import any_layout, contiguous
from scanlib.backends.numba.pointers import keep, pointer, shift
from scanlib.backends.numba.small_linalg import LARGE
from scanlib.backends.numba.source import Source, may_cache
from scanlib.backends.numba.vectors import new_array
from scanlib.ops.reductions import StepProducts
from scanlib.source_keys import source_key

VERSION = source_key(__name__)
REAL = {"float32", "float64"}
SQUARE = "Last 2 dimensions of A must be square"
CONFORM = "Dimensions of A and B do not conform"
SIZES = "Incompatible sizes of matrices that are multiplied"
BATCHES = "Incompatible sizes of the batches of an operation on matrices"


@dataclass
class Core:
    """What is done at each place of a batch.

    `kernel` is the name of a function of `small_linalg`. It takes the inputs, each as its start and
    its strides, with the sizes and flags that `text` puts between them. `shapes` are the rows of
    the results, `checks` what the sizes must be, with an error; `spare` is how much memory the
    kernel needs.
    """

    kernel: str
    text: str
    shapes: list[list[str]]
    checks: list[tuple[str, str, str]]
    spare: str | None = None
    limited: bool = True  # to matrices of `LARGE` rows


def batch_function(op: Op, node: Apply) -> tuple[Callable[..., Any], str] | None:
    """Return the function of a batch of small matrices and its key, None for other nodes."""
    if isinstance(op, Dot | BatchedDot):
        return integer_products(node) if _makes_integers(node) else _products(op, node)
    if isinstance(op, BlockwiseWithCoreShape):
        (inner,) = op.fgraph.apply_nodes
    elif isinstance(op, Blockwise):
        inner = node
    else:
        return None
    core = _core(inner.op.core_op, inner, node)
    if core is None:
        return None
    lead = inner.op.batch_ndim(inner)
    # Without the shapes of its results, a batch has no compiled function of PyTensor's.
    limited = core.limited and inner is not node
    other = _pytensors(op, node) if limited else None
    if limited and other is None:
        return None
    return _function(core, node, len(inner.inputs), lead, other)


def integer_products(node: Apply) -> tuple[Callable[..., Any], str] | None:
    """Return the function of a node that multiplies matrices of integers, or batches of them."""
    return _function(_INTEGER_PRODUCT, node, 2, node.outputs[0].type.ndim - 2, None)


def _makes_integers(node: Apply) -> bool:
    return np.dtype(node.outputs[0].type.dtype).kind in "iu"


def _function(
    core: Core, node: Apply, count: int, lead: int, other: tuple[Callable[..., Any], str] | None
) -> tuple[Callable[..., Any], str] | None:
    """Return the function that calls the nest around a kernel, and its key."""
    function, key = _nest(core, node, count, lead, other)
    if not may_cache(key):
        return None
    assert key is not None
    call = lazy.lazily(function, key, _results(node), cache=True)
    source = Source()
    source.object("any_layout", any_layout)
    name = source.function(call, key)
    names = [f"x{i}" for i in range(len(node.inputs))]
    source.line(f"return {name}(({', '.join(f'any_layout({x})' for x in names)},))")
    caller, caller_key = source.compile("small_batch", names, VERSION)
    assert caller_key is not None
    return numba_njit(caller), caller_key


def _products(op: Op, node: Apply) -> tuple[Callable[..., Any], str] | None:
    """Return the function of products, which has a kernel for small ones of its own."""
    dtypes = {variable.type.dtype for variable in [*node.inputs, *node.outputs]}
    if isinstance(op, Dot) or len(dtypes) > 1 or not dtypes <= REAL:
        return None
    op = StepProducts()
    function, key = numba_funcify_and_cache_key(op, node=op.make_node(*node.inputs))
    return None if key is None else (function, key)


def _results(node: Apply) -> list[tuple[str, int]]:
    return [(out.type.dtype, out.type.ndim) for out in node.outputs]


# What there is a kernel for. The inputs of a nest are x0, x1, ...

_INTEGER_PRODUCT = Core(
    "integer_product",
    "{0}, {1}, {out0}, n, m, l",
    [["n", "l"]],
    [("k", "m", SIZES)],
    limited=False,
)


def _core(op: Op, inner: Apply, node: Apply) -> Core | None:
    if isinstance(op, PivotToPermutations):
        return _vector("permutation", f"n, {_flag(op.inverse)}")
    if isinstance(op, ArgSortOp):
        before = node.inputs[0].owner
        ordered = before is not None and isinstance(before.op, Blockwise | BlockwiseWithCoreShape)
        # Of other numbers, several may be equal.
        if not ordered or not isinstance(_core_op(before), PivotToPermutations):
            return None
        return _vector("inverse_permutation", "n")
    if isinstance(op, AdvancedSubtensor):
        return _rows(op, inner)
    if isinstance(op, Dot) and _makes_integers(inner):
        return _INTEGER_PRODUCT
    dtypes = {variable.type.dtype for variable in inner.inputs}
    if len(dtypes) > 1 or not dtypes <= REAL or inner.outputs[0].type.dtype not in dtypes:
        return None
    return _matrix(op) or _solve(op)


def _core_op(node: Apply) -> Op:
    """Return what a node does at each place of a batch."""
    (inner,) = node.op.fgraph.apply_nodes if hasattr(node.op, "fgraph") else (node,)
    return inner.op.core_op


def _flag(value: bool) -> str:
    return f"np.int64({int(value)})"


def _vector(kernel: str, sizes: str) -> Core:
    """A function of the numbers of a permutation."""
    return Core(kernel, f"{{0}}, {sizes}, {{out0}}", [["n"]], [], limited=False)


def _rows(op: AdvancedSubtensor, inner: Apply) -> Core | None:
    """Rows of a matrix, or items of a vector, at some places."""
    x, *indices = inner.inputs
    if list(op.idx_list) != [0] or len(indices) != 1 or indices[0].type.dtype != "int64":
        return None
    lead = inner.op.batch_ndim(inner)
    if indices[0].type.ndim != lead + 1 or x.type.ndim not in (lead + 1, lead + 2):
        return None
    is_matrix = x.type.ndim == lead + 2
    text = f"{{0}}{'' if is_matrix else ', one'}, n, {'m' if is_matrix else 'one'}, {{1}}, k"
    shape = ["k", *(["m"] if is_matrix else [])]
    return Core("rows_at", f"{text}, {{out0}}", [shape], [], limited=False)


def _matrix(op: Op) -> Core | None:
    """A function of one square matrix."""
    square = [("m", "n", SQUARE)]
    if isinstance(op, Cholesky):
        text = f"{{0}}, n, {_flag(op.lower)}, {{out0}}, spare"
        return Core("cholesky", text, [["n", "n"]], square, "n * n")
    if isinstance(op, MatrixInverse):
        return Core("inverse", "{0}, n, {out0}, spare", [["n", "n"]], square, "n * n")
    if isinstance(op, LUFactor):
        return Core("lu_factor", "{0}, n, {out0}, {out1}", [["n", "n"], ["n"]], square)
    return None


def _solve(op: Op) -> Core | None:
    """The solution of a system, for one right-hand side or several."""
    if not isinstance(op, Solve | SolveTriangular | CholeskySolve):
        return None
    several = op.b_ndim == 2
    right = f"{{1}}{'' if several else ', one'}, {'l' if several else 'one'}, {{out0}}"
    shapes = [["n", *(["l"] if several else [])]]
    checks = [("m", "n", SQUARE), ("k", "n", CONFORM)]
    lower = _flag(op.lower)
    if isinstance(op, CholeskySolve):
        return Core("cholesky_solve", f"{{0}}, n, {lower}, {right}", shapes, checks)
    if isinstance(op, SolveTriangular):
        unit = _flag(op.unit_diagonal)
        return Core("triangular_solve", f"{{0}}, n, {lower}, {unit}, {right}", shapes, checks)
    if op.assume_a == "pos":
        text = f"{{0}}, n, {lower}, {right}, spare"
        return Core("positive_solve", text, shapes, checks, "n * n")
    if op.assume_a == "gen":
        return Core("general_solve", f"{{0}}, n, {right}, spare", shapes, checks, "n * n")
    return None


# The function


def _pytensors(op: Op, node: Apply) -> tuple[Callable[..., Any], str] | None:
    """Return PyTensor's function, compiled when it is called, and its key."""
    function, key = numba_funcify_ensure_cache(op, node=node)
    if key is None:
        return None
    types = [variable.type for variable in [*node.inputs, *node.outputs]]
    source = Source()
    source.object("contiguous", contiguous)
    name = source.function(function, f"{key}{types}")
    names = [f"x{i}" for i in range(len(node.inputs))]
    results = [f"y{i}" for i in range(len(node.outputs))]
    source.line(f"{', '.join(results)} = {name}({', '.join(names)})")
    source.line(f"return {', '.join(f'contiguous({y})' for y in results)}")
    other, other_key = source.compile("large_batch", names, VERSION)
    if other_key is None or not may_cache(other_key):
        return None
    return lazy.lazily(other, other_key, _results(node), cache=True), other_key


def _nest(
    core: Core, node: Apply, count: int, lead: int, other: tuple[Callable[..., Any], str] | None
) -> tuple[Callable[..., Any], str | None]:
    """Return the function that walks the batch."""
    source = Source()
    line, block = source.line, source.block
    for function in (keep, new_array, pointer, shift):
        source.object(function.__name__, function)
    names = [f"x{i}" for i in range(len(node.inputs))]
    _write_sizes(source, core, node, count, lead)
    if other is not None:
        name = source.function(*other, "large")
        with block(f"if n > {LARGE}:"):
            line(f"return {name}(({', '.join(names)},))")
    batch = _write_batch(source, node, count, lead)
    results = [f"y{i}" for i in range(len(core.shapes))]
    for name, shape, out in zip(results, core.shapes, node.outputs, strict=True):
        dtype = np.dtype(out.type.dtype)
        source.object(f"np_{dtype.name}", dtype.type)
        line(f"{name} = new_array(np_{dtype.name}, {', '.join([*batch, *shape])})")
    if core.spare is not None:
        dtype = node.outputs[0].type.dtype
        line(f"work = new_array(np_{dtype}, {core.spare})")
        line("spare = pointer(work)")
    _write_places(source, core, node, count, lead, batch)
    for name in [*names[:count], *results, *([] if core.spare is None else ["work"])]:
        line(f"keep({name})")
    line(f"return {', '.join(results)}")
    return source.compile("small_batch", names, VERSION)


def _write_sizes(source: Source, core: Core, node: Apply, count: int, lead: int) -> None:
    """Write the sizes of a matrix ``(n, m)`` and of what comes with it ``(k, l)``, and checks."""
    for i, sizes in zip(range(count), ("nm", "kl"), strict=False):
        for axis, size in zip(range(lead, node.inputs[i].type.ndim), sizes, strict=False):
            source.line(f"{size} = x{i}.shape[{axis}]")
    source.line("one = np.int64(1)")
    for size, expected, message in core.checks:
        with source.block(f"if {size} != {expected}:"):
            source.line(f"raise np.linalg.LinAlgError({message!r})")


def _write_batch(source: Source, node: Apply, count: int, lead: int) -> list[str]:
    """Write the sizes of the batch; inputs with one place along an axis have it everywhere."""
    sizes = []
    for axis in range(lead):
        own = [i for i in range(count) if not node.inputs[i].type.broadcastable[axis]]
        source.line(f"s{axis} = {f'x{own[0]}.shape[{axis}]' if own else 'one'}")
        for i in own[1:]:
            with source.block(f"if x{i}.shape[{axis}] != s{axis}:"):
                source.line(f"raise ValueError({BATCHES!r})")
        sizes.append(f"s{axis}")
    return sizes


def _write_places(
    source: Source, core: Core, node: Apply, count: int, lead: int, batch: list[str]
) -> None:
    """Write the nest that calls the kernel."""
    line = source.line
    starts, strides = [], []
    for i, inp in enumerate(node.inputs[:count]):
        for axis in range(inp.type.ndim):
            line(f"x{i}_{axis} = x{i}.strides[{axis}] // x{i}.itemsize")
        moves = [
            f"j{axis} * x{i}_{axis}" for axis in range(lead) if not inp.type.broadcastable[axis]
        ]
        line(f"p{i} = pointer(x{i})")
        starts.append(f"shift(p{i}, {' + '.join(moves)})" if moves else f"p{i}")
        strides.append([f"x{i}_{axis}" for axis in range(lead, inp.type.ndim)])
    place = "np.int64(0)"
    for axis, size in enumerate(batch):
        place = f"({place} * {size} + j{axis})" if axis else "j0"
    results = {}
    for i, shape in enumerate(core.shapes):
        line(f"q{i} = pointer(y{i})")
        results[f"out{i}"] = f"shift(q{i}, {place} * {' * '.join(shape)})"
    inputs = [", ".join([start, *rest]) for start, rest in zip(starts, strides, strict=True)]
    function = getattr(small_linalg, core.kernel)
    kernel = source.function(*lazy.kernel(function, small_linalg.VERSION), core.kernel)
    for axis, size in enumerate(batch):
        line(f"{'    ' * axis}for j{axis} in range({size}):")
    line(f"{'    ' * lead}{kernel}(({core.text.format(*inputs, **results)},))")
