"""Decompositions: Ops of a step that stand for graphs of others, whose rules write them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import AllocDiag, AllocEmpty, Eye
from pytensor.tensor.blas import BatchedDot, Dot22, Dot22Scalar, Gemm, Gemv
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.linalg.decomposition.eigen import Eigvalsh
from pytensor.tensor.linalg.inverse import MatrixPinv
from pytensor.tensor.linalg.products import Expm
from pytensor.tensor.math import Argmax, Prod, ProdWithoutZeros
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.special import Softmax

from scanlib._compat import GER, inline_ofg_node
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.batching import by_rows
from scanlib.ops.loop import Carry, Loop
from scanlib.ops.row_ops.row_segments import MergeRows
from scanlib.ops.row_ops.step_products import LENGTHS, SIZES, StepProducts


def _step_products(op: StepProducts, x: Variable, y: Variable) -> Variable:
    """Return the products of the matrices of all steps, as few of them as possible.

    The rows of the matrices of all steps are those of one matrix.
    """
    if x.type.ndim == y.type.ndim == 3:
        x = _checked(x, LENGTHS, x, 0, y, 0)
    x = _checked(x, SIZES, x, -1, y, -2)
    if y.type.ndim == 2:
        z = pt.dot(_stacked(x), y) if x.type.ndim == 3 else pt.dot(x, y)
        if x.type.ndim == 2 or x.type.shape[1] == 1:
            return z if x.type.ndim == 2 else z[:, None, :]
        return pt.reshape(z, (*x.shape[:2], y.shape[1]))
    if x.type.ndim == 2 and y.type.shape[2] == 1:
        return pt.dot(y[:, :, 0], x.T)[:, :, None]
    return pt.matmul(x, y)


def _checked(
    value: Variable, text: str, x: Variable, axis: int, y: Variable, other: int
) -> Variable:
    """Return a value, with the check that axes of two arrays have one size."""
    sizes = x.type.shape[axis], y.type.shape[other]
    if None not in sizes and sizes[0] == sizes[1]:
        return value
    return CheckAndRaise(ValueError, text)(value, pt.eq(x.shape[axis], y.shape[other]))


def _stacked(x: Variable) -> Variable:
    """Return the matrices of all steps as one of more rows."""
    if x.type.shape[1] == 1:
        return x[:, 0, :]
    return pt.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


def _softmax(op: Softmax, x: Variable) -> Variable:
    e = pt.exp(x - pt.max(x, axis=op.axis, keepdims=True))
    return e / pt.sum(e, axis=op.axis, keepdims=True)


def _argmax(op: Argmax, x: Variable) -> Variable:
    """Return the first place of what is as large as the largest item, or of what is no number."""
    if x.type.dtype.startswith("complex"):
        raise NoKernelError("the largest of complex numbers has no kernel")
    x = pt.cast(x, "int8") if x.type.dtype == "bool" else x
    axes = range(x.type.ndim) if op.axis is None else [axis % x.type.ndim for axis in op.axis]
    size, place = (pt.constant(number, dtype="int64") for number in (1, 0))
    for axis in axes:
        length = x.shape[axis]
        order: list[Any] = ["x"] * x.type.ndim
        order[axis] = 0
        size, place = size * length, place * length + pt.arange(length).dimshuffle(order)
    text = "attempt to get argmax of an empty sequence"
    x = CheckAndRaise(ValueError, text)(x, pt.gt(size, 0))
    found = pt.eq(x, pt.max(x, axis=tuple(axes), keepdims=True))
    if x.type.dtype.startswith("float"):
        found = found | pt.isnan(x)
    return pt.min(pt.switch(found, place, size), axis=tuple(axes))


def _join_dims(op: JoinDims, x: Variable) -> Variable:
    sizes, end = list(x.shape), op.start_axis + op.n_axes
    joined = pt.prod(pt.stack(sizes[op.start_axis : end])) if op.n_axes else 1
    return pt.reshape(x, [*sizes[: op.start_axis], joined, *sizes[end:]])


def _split_dims(op: SplitDims, x: Variable, shape: Variable) -> Variable:
    sizes, axis = list(x.shape), op.axis
    if shape.type.shape[0] is None:
        raise NoKernelError("a shape that is computed as a vector has no kernel")
    parts = [shape[k] for k in range(shape.type.shape[0])]
    return pt.reshape(x, [*sizes[:axis], *parts, *sizes[axis + 1 :]])


# Numerators of Padé's approximants of the exponential function, and the largest norms of matrices
# for which they err by less than the numbers are rounded (N. Higham, "The scaling and squaring
# method for the matrix exponential revisited", SIAM J. Matrix Anal. Appl. 26, 2005, table 2.3).
_PADE = {
    "float32": ([17297280, 8648640, 1995840, 277200, 25200, 1512, 56, 1], 3.925724783138660),
    "float64": (
        [
            *(64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800),
            *(129060195264000, 10559470521600, 670442572800, 33522128640, 1323241920),
            *(40840800, 960960, 16380, 182, 1),
        ],
        5.371920351148152,
    ),
}


def _expm(op: Expm, a: Variable) -> Variable:
    """Return the exponential of a matrix, by that of a 2ᵏth of it, squared k times."""
    dtype = a.type.dtype
    if dtype not in _PADE:
        raise NoKernelError(f"the exponential of a matrix of {dtype} has no kernel")
    numbers, largest = _PADE[dtype]
    text = "Last 2 dimensions of the array must be square"
    a = CheckAndRaise(np.linalg.LinAlgError, text)(a, pt.eq(a.shape[0], a.shape[1]))
    norm = pt.max(pt.sum(abs(a), axis=0))
    is_small = ~(norm > largest) | pt.isinf(norm)  # or no number, or there are none
    squarings = pt.cast(pt.switch(is_small, 0, pt.ceil(pt.log2(norm / largest))), "int64")
    a = a * pt.cast(pt.exp2(-squarings), dtype)
    square, identity = pt.dot(a, a), pt.eye(a.shape[0], dtype=dtype)
    powers = [identity, square]
    while 2 * len(powers) < min(len(numbers), 8):
        powers.append(pt.dot(powers[-1], square))
    odd, even = _even_polynomial(numbers[1::2], powers), _even_polynomial(numbers[::2], powers)
    odd = pt.dot(a, odd)
    root = Carry(pt.linalg.solve(even - odd, even + odd), x := a.type(), pt.dot(x, x))
    return Loop(n_steps=squarings, carries=[root]).results()[root]


def _even_polynomial(numbers: list[int], powers: list[Variable]) -> Variable:
    """Return ``Σ numbers[i] powers[i]``, the highest powers as products with the last one given."""
    low = numbers[: len(powers)]
    found = sum(float(c) * power for c, power in zip(low, powers, strict=False))
    high = numbers[len(powers) :]
    if high:
        above = sum(float(c) * p for c, p in zip(high, powers[1:], strict=False))
        found = found + pt.dot(powers[-1], above)
    return found


def _eigvalsh(op: Eigvalsh, a: Variable, b: Variable | None = None) -> Variable:
    if b is not None:
        raise NoKernelError("eigenvalues of two matrices have no kernel")
    return pt.linalg.eigh(a, lower=op.lower)[0]


def _pinv(op: MatrixPinv, a: Variable) -> Variable:
    """Return the pseudoinverse, as NumPy does: singular values that are almost none have none."""
    if op.hermitian:
        w, v = pt.linalg.eigh(a)
        largest = pt.maximum(pt.sum(abs(w[:1])), pt.sum(abs(w[-1:])))
        return pt.dot(v * pt.switch(abs(w) <= 1e-15 * largest, 0, 1 / w), v.T)
    u, s, v = pt.linalg.svd(a, full_matrices=False)
    inverse = pt.switch(s <= 1e-15 * pt.sum(s[:1]), 0, 1 / s)
    return pt.dot(v.T * inverse, u.T)


def _sum(a: Variable, product: Variable, b: Variable, z: Variable) -> Variable:
    """Return ``a product + b z``; if `b` is zero, nothing may have been written to `z`."""
    scaled = product if _is_constant(a, 1) else a * product
    return scaled if _is_constant(b, 0) else scaled + (z if _is_constant(b, 1) else b * z)


def _is_constant(variable: Variable, number: int) -> bool:
    return isinstance(variable, Constant) and bool(np.all(variable.data == number))


# Ops that PyTensor compiles slowly, products of the C linker's, and what needs no rule of its own.
DECOMPOSITIONS: dict[Any, Callable[..., Variable]] = {
    GER: lambda op, z, a, x, y: z + a * pt.outer(x, y),
    Dot22: lambda op, x, y: pt.dot(x, y),
    Dot22Scalar: lambda op, x, y, a: a * pt.dot(x, y),
    Gemm: lambda op, z, a, x, y, b: _sum(a, pt.dot(x, y), b, z),
    Gemv: lambda op, z, a, x, y, b: _sum(a, pt.dot(x, y), b, z),
    BatchedDot: lambda op, x, y: (StepProducts() if x.dtype == y.dtype else pt.matmul)(x, y),
    StepProducts: _step_products,
    Eigvalsh: _eigvalsh,
    Expm: _expm,
    MatrixPinv: _pinv,
    Softmax: _softmax,
    Argmax: _argmax,
    JoinDims: _join_dims,
    MergeRows: lambda op, x: _join_dims(JoinDims(0, 2), x),
    SplitDims: _split_dims,
    ProdWithoutZeros: lambda op, x: Prod(axis=op.axis, dtype=op.dtype, acc_dtype=op.acc_dtype)(
        pt.switch(pt.eq(x, 0), np.ones((), x.type.dtype), x)
    ),
    AllocEmpty: lambda op, *sizes: pt.zeros(sizes, dtype=op.dtype),
    Eye: lambda op, n, m, k: pt.cast(
        pt.eq(pt.arange(n)[:, None] + k, pt.arange(m)[None, :]), op.dtype
    ),
}


OF_MATRICES = (Eigvalsh, Expm, MatrixPinv)  # whose batches are loops


def decompose(graph: FunctionGraph) -> None:
    """Put nodes that have rules in the place of Ops that are graphs, and of some others."""
    is_done = False
    while not is_done:
        is_done = True
        for node in graph.toposort():
            outputs = _decomposed(node)  # of inputs that have been decomposed
            if outputs is not None:
                is_done = False
                pairs = list(zip(node.outputs, outputs, strict=True))
                graph.replace_all(pairs, import_missing=True)


def _decomposed(node: Apply) -> list[Variable] | None:
    """Return what takes the place of a node's outputs; None where they stay."""
    op = node.op
    if isinstance(op, Blockwise):
        if not op.batch_ndim(node):
            return op.core_op.make_node(*node.inputs).outputs
        if not isinstance(op.core_op, OF_MATRICES):
            return None
        one = op._create_dummy_core_node(node.inputs)
        pairs = dict(zip(one.inputs, node.inputs, strict=True))
        return by_rows(one.outputs, pairs, op.batch_ndim(node))
    if not is_decomposed(op):
        return None
    rule = DECOMPOSITIONS.get(type(op))
    return inline_ofg_node(node) if rule is None else [rule(op, *node.inputs)]


def is_decomposed(op: Op) -> bool:
    """Whether `decompose` puts other nodes in the place of those of an Op."""
    if isinstance(op, AllocDiag) or (isinstance(op, StepProducts) and op.total):
        return False
    return isinstance(op, OpFromGraph) or type(op) in DECOMPOSITIONS
