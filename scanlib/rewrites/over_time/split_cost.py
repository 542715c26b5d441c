"""The cost rule of the split: what leaves a loop, and what stays.

A step's operation is of one of four kinds:

========  =================================================  ====================================
kind      operations                                         in a batch over time
========  =================================================  ====================================
product   a matrix product with a side that is the same at   one large product: its matrix is read
          every step; a solve with such a matrix             once, not once per step. Pays always.
pairs     a product of two values that both differ from      the same work; pays where it is
          step to step                                       summed, as ``Σ X_t Y_t`` is one product
light     elementwise work, reductions, indices, shapes      one more pass over memory. In a step it
                                                             works on rows that are in the cache.
heavy     factorizations, solves, sorts, searches            the same work: as long in a loop; stays
bound     loops, random draws, all that is not known         not possible
========  =================================================  ====================================

Let `T` be the number of steps. A loop moves, for every step, the rows it reads and writes; a value
that crosses the border between a loop and a batch is written once and read once, ``2 T`` rows.

1. **A product pays for its rows.** It takes as many multiplications per item of its result as its
   matrix has rows, so both passes over the result cost less than what a large product saves over
   `T` small ones. It leaves the loop, before it if it reads no state, after it if no state reads
   it, with the light work it needs. A product over an axis of one item is light work. Before a
   loop that holds for vectors alone: where a step multiplies many rows at once, as for a batch of
   series, it reads its matrix once for all of them, and small rows make large results.
2. **Light work stays if there is a loop.** It costs no pass over memory there. It leaves with a
   product it feeds; and if there is nothing else left, the loop disappears. What a product before
   the loop feeds stays.
3. **A batch after the loop reads what is there.** Rows of sequences and of stored states cost
   nothing more; arithmetic on them is done again. All else that it needs is stored by the loop: an
   item, a sum or a product with a row of an array in place of the array.
4. **Sums run in constant memory.** ``c + f(x_t, h_t)`` leaves the loop if it is a product (one
   matrix product over all steps), or if its rows are stored anyway. Sums of elementwise work on
   sequences are a loop of their own, which stores nothing.
5. **Functions are computed by kernels.** Numba's, C's and, on one CPU, JAX's linkers fuse batches.
   For others, those that hold ``exp`` or ``tanh`` become a loop over the steps for each result.
6. **A recurrence in matrices** is lowered to a kernel that reads a matrix for each step. Where
   these would have to be made from fixed matrices and rows, as ``diag(1 - h_t²) U`` for each item
   of a batch, the step multiplies instead (`lower.linear_recurrence`).
7. **What the forward loop computed, the backward loop reads** if it is a product, or a function
   with more than arithmetic of one: it takes two passes over the rows, and computing it
   again takes the product as well (`split.reuse`).
"""

from collections.abc import Callable, Iterable

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import basic as ps
from pytensor.scalar.math import Sigmoid, Softplus
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    ExtractDiag,
    Eye,
    Join,
    MakeVector,
    Nonzero,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp, Repeat, SearchsortedOp
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import AdvancedSubtensor, IncSubtensor, Subtensor

from scanlib._compat import INDEX_READS, INDEXED_BY_VECTOR, LOG_SUM_EXP, split_of
from scanlib.lengths.numbers import indices_of
from scanlib.ops.graph import CHEAP, applies, core_op, is_dense, is_linear_algebra, is_tensor
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan

PRODUCT, PAIRS, LIGHT, HEAVY, BOUND = "product", "pairs", "light", "heavy", "bound"

_VIEWS = (DimShuffle, Subtensor, SpecifyShape, ScalarFromTensor, TensorFromScalar)
# Operations that a batch computes in one pass over memory, as the steps did.
_ONE_PASS: tuple[type, ...] = (
    *(Alloc, Argmax, CAReduce, DimShuffle, Elemwise, Eye, IncSubtensor, Join, LogSoftmax),
    *(MakeVector, Reshape, Shape, Shape_i, Softmax, SpecifyShape, Subtensor),
    *([] if LOG_SUM_EXP is None else [LOG_SUM_EXP]),
)
_ORDERS = (SortOp, ArgSortOp, SearchsortedOp)
_LIGHT = (*_VIEWS, *_ONE_PASS, ARange, CheckAndRaise, CumOp, ExtractDiag)

# Which input is the first of those that say how large a result is.
_FIRST_SIZES: dict[type, int] = {
    **dict.fromkeys((AllocEmpty, ARange, Eye, Nonzero), 0),
    **dict.fromkeys((Alloc, Repeat, Reshape), 1),
}

# Functions that kernels of elementwise loops compute for several items at once.
FUNCTIONS = (ps.Exp, ps.Expm1, ps.Log, ps.Log1p, ps.Tanh, Sigmoid, Softplus)


def batch_rank(node: Apply) -> int:
    """Return how many axes of a node's result belong to a batch around its Op."""
    return node.op.batch_ndim(node) if isinstance(node.op, Blockwise) else 0


def kind(node: Apply, varies: Callable[[Variable], bool]) -> str:
    """Return the kind of a node of a body; `varies` says what differs from step to step."""
    if not all(map(is_dense, (*node.inputs, *node.outputs))):
        return BOUND
    op = core_op(node)
    if isinstance(op, Dot):
        return _kind_of_product(node, varies)
    if isinstance(op, SolveBase) and not varies(node.inputs[0]) and not batch_rank(node):
        return PRODUCT
    if is_linear_algebra(op) or isinstance(op, _ORDERS):
        return HEAVY
    if isinstance(node.op, Blockwise):
        return BOUND
    if isinstance(op, (AdvancedSubtensor, *INDEXED_BY_VECTOR)):
        return LIGHT if _is_lookup(node, varies) else BOUND
    if isinstance(op, Split):
        _, axis, sizes = split_of(node)
        return BOUND if axis is None or varies(sizes) else LIGHT
    if isinstance(op, Subtensor | IncSubtensor):
        places = node.inputs[2 if isinstance(op, IncSubtensor) else 1 :]
        moves = any(map(varies, places)) and not varying_index(node, varies)
        return BOUND if moves else LIGHT
    return LIGHT if isinstance(op, _LIGHT) and not any(map(varies, _sizes(node))) else BOUND


def _sizes(node: Apply) -> list[Variable]:
    """Return the inputs that say how large a node's result is."""
    found = [n for kind, n in _FIRST_SIZES.items() if isinstance(core_op(node), kind)]
    return node.inputs[found[0] :] if found else []


def of_differing_shapes(roots: list[Variable], varying: Iterable[Variable]) -> set[Variable]:
    """Return values that may have another shape at each step; nothing can store these over time.

    Such are what a mask selects, slices and ranges up to numbers that differ, and what is made of
    them, unless its type has a shape. `varying` are the body's inputs that differ; their shapes do
    not.
    """
    found, differ = set[Variable](), set(varying)
    for node in toposort(roots):
        reads_shape = isinstance(node.op, Shape | Shape_i)
        if not (found if reads_shape else differ).isdisjoint(node.inputs):
            differ.update(node.outputs)
        sized = _has_a_size_of_its_own(node, differ.__contains__)
        if sized or not found.isdisjoint(node.inputs):
            found.update(v for v in node.outputs if is_tensor(v) and None in v.type.shape)
    return found


def _has_a_size_of_its_own(node: Apply, varies: Callable[[Variable], bool]) -> bool:
    """Whether the shape of a node's result depends on values that differ from step to step."""
    op = core_op(node)
    if isinstance(op, INDEX_READS):
        indices = indices_of(node)
        slices = [part for part in indices if isinstance(part, slice)]
        masks = [v for v in node.inputs[1:] if is_tensor(v) and v.type.dtype == "bool"]
        bounds = [bound for part in slices for bound in (part.start, part.stop, part.step)]
        return any(isinstance(v, Variable) and varies(v) for v in (*masks, *bounds))
    if isinstance(op, Scan | ElemwiseScan):
        return op.signature.has_stop or (op.signature.has_n_steps and varies(node.inputs[0]))
    return any(map(varies, _sizes(node)))


def _kind_of_product(node: Apply, varies: Callable[[Variable], bool]) -> str:
    left, right = node.inputs
    if left.type.shape[-1] == 1 or right.type.shape[-2] == 1:
        return LIGHT
    if not all(varies(inp) for inp in node.inputs):
        return PRODUCT
    return PAIRS if multiplies_in_batches(node.outputs[0].type.dtype) else BOUND


def multiplies_in_batches(dtype: str) -> bool:
    """Whether there is a product of a batch of matrices: numba has none of integers."""
    return dtype.startswith(("float", "complex"))


def _is_lookup(node: Apply, varies: Callable[[Variable], bool]) -> bool:
    """Whether a node reads rows of an array that is the same at every step."""
    if len(node.inputs) != 2 or varies(node.inputs[0]) or node.inputs[1].type.dtype == "bool":
        return False  # truth values select another number of rows at each step
    if isinstance(node.op, INDEXED_BY_VECTOR):
        return True
    places = node.op.idx_list
    return len(places) == 1 and not isinstance(places[0], slice)


def multiplies_a_vector(node: Apply, varies: Callable[[Variable], bool]) -> bool:
    """Whether a product reads its whole matrix for one row; solves count as such."""
    if not isinstance(core_op(node), Dot):
        return True
    left, right = node.inputs
    return left.type.shape[-2] == 1 if varies(left) else right.type.shape[-1] == 1


def varying_index(node: Apply, differs: Callable[[Variable], bool]) -> bool:
    """Whether a node reads or writes at one place along the first axis that differs by step.

    The other indices take all of their axes.
    """
    if not isinstance(node.op, Subtensor | IncSubtensor):
        return False
    places = node.inputs[1:] if isinstance(node.op, Subtensor) else node.inputs[2:]
    if len(places) != 1 or not differs(places[0]):
        return False
    maker, (first, *rest) = places[0].owner, indices_of(node)
    is_integer = maker is not None and isinstance(maker.op, ScalarFromTensor)
    return is_integer and first is places[0] and all(index == slice(None) for index in rest)


def is_view(node: Apply) -> bool:
    """Whether a node's result is its input, read in another way."""
    return isinstance(node.op, _VIEWS)


def is_arithmetic(node: Apply) -> bool:
    """Whether computing a node's result again costs less than storing it."""
    return (
        applies(node, CHEAP)
        or is_view(node)
        or isinstance(node.op, Alloc | Shape | Shape_i | MakeVector)
    )


def is_function(node: Apply) -> bool:
    """Whether a node is elementwise, and scanlib's kernels are faster at it than PyTensor's."""
    return applies(node, FUNCTIONS)


def is_sum_of_products(node: Apply) -> bool:
    """Whether the sum over time of a node's result is one matrix product."""
    return isinstance(core_op(node), Dot) or outer_factors(node) is not None


def outer_factors(node: Apply) -> tuple[list[Variable], list[Variable]] | None:
    """Return the columns and the rows whose outer product a node computes, None if it does not."""
    if not applies(node, ps.Mul):
        return None
    columns, rows = [], []
    for inp in node.inputs:
        if inp.type.broadcastable in ((False, True), (True, True)):
            columns.append(inp)
        elif inp.type.broadcastable == (True, False):
            rows.append(inp)
        else:
            return None
    spread = any(not column.type.broadcastable[0] for column in columns)
    return (columns, rows) if spread and rows else None
