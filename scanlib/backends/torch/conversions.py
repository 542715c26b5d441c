"""Ops around loops: PyTensor's own where torch reads them otherwise or not at all, and small ones.

Rewrites take out of loops what does not depend on earlier steps. What ran compiled within the loop
is then an Op of the graph, which PyTorch has to know: `argmax` of all rows, say. What PyTensor and
this module do not convert runs as under other linkers (`scanlib.backends.torch.host`).

**Elementwise.** PyTensor calls torch's function of the same name. For some Ops there is none, for
some dtypes it raises an error, and where integers, truth values or several dtypes meet it computes
in another dtype than NumPy: the logarithm of int64 in float32, a sum of three int8 in int64. Here a
node is tried on one item when it is converted. If the result has the dtype that the node says, the
conversion stays as it is; if not, the inputs are first converted to the dtype in which NumPy
computes; and if torch cannot, the CPU does.

**Slices with negative steps**, which tensors do not have: the axis is flipped and sliced forward::

    x[start:stop:-s] = flip(x)[n-1-start : n-1-stop : s]
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify, pytorch_typify
from pytensor.scalar.basic import (
    EQ,
    Cast,
    Composite,
    Conj,
    Mod,
    Pow,
    RoundHalfToEven,
    Second,
    Sign,
    Switch,
)
from pytensor.scalar.loop import ScalarLoop
from pytensor.scalar.math import Log1mexp, Softplus
from pytensor.tensor.basic import Join
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.extra_ops import CumOp, Unique
from pytensor.tensor.math import Dot, Max, Min, Prod, Sum
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES, IfElse, LegacyScan
from scanlib.backends.torch.host import on_host
from scanlib.backends.torch.operator import torch_dtype
from scanlib.ops.errors import ConvergenceError
from scanlib.ops.graph import is_linear_algebra
from scanlib.ops.row_ops.checked_rows import CheckedConvergence, CheckedSizes
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.step_products import StepProducts

Function = Callable[..., Any]
Rule = Callable[..., Function]


def function_for(kind: type) -> Callable[[Function], None]:
    """Register a function of an Op and of tensors."""
    return lambda function: pytorch_funcify.register(kind)(
        lambda op, **kwargs: partial(function, op)
    )


# Dtypes


def in_dtypes(function: Function, node: Apply, first: int = 0) -> Function:
    """Return a function that computes in NumPy's dtype, from the `first` input on, and returns
    those of the node. `NotImplementedError` if torch has no such dtype."""
    dtypes = [variable.type.dtype for variable in (*node.inputs[first:], *node.outputs)]
    common = torch_dtype(str(np.result_type(*dtypes)))
    wanted = [torch_dtype(out.type.dtype) for out in node.outputs]
    if len(set(dtypes)) == 1 and (common.is_floating_point or common.is_complex):
        return function

    def converted(*inputs: Any) -> Any:
        given = (torch.as_tensor(x).to(common) for x in inputs[first:])
        results = function(*inputs[:first], *given)
        if len(wanted) == 1:
            return results.to(wanted[0])
        return tuple(x.to(dtype) for x, dtype in zip(results, wanted, strict=True))

    return converted


def or_on_host(rule: Rule, first: int | None) -> Rule:
    """Return the conversion of an Op that PyTensor refuses, or torch, for some nodes.

    Where `first` is a number, inputs from there on are converted to one dtype: products of matrices
    are of one dtype in torch (PyTensor 3.3.8 converts those of `Dot`), and sums of small integers
    always int64.
    """

    def convert(op: Any, node: Apply, **kwargs: Any) -> Function:
        dtypes = {getattr(variable.type, "dtype", None) for variable in node.inputs}
        if dtypes & UNSIGNED or (isinstance(op, Dot | BatchedDot) and "bool" in dtypes):
            return on_host(op, node, **kwargs)
        try:
            function = rule(op, node=node, **kwargs)
            return function if first is None else in_dtypes(function, node, first)
        except NotImplementedError:
            return on_host(op, node, **kwargs)

    return convert


UNSIGNED = {"uint16", "uint32", "uint64"}  # torch has few functions of these
REFUSED: dict[type, int | None] = {
    **dict.fromkeys((*INDEX_WRITES, LogSoftmax, Max, Min, Softmax, Unique)),
    **dict.fromkeys((BatchedDot, CumOp, Dot, Prod, Sum), 0),
    Join: 1,
}
VMAPPED = (*INDEX_READS[1:], *INDEX_WRITES[1:], BatchedDot, CumOp, Dot, LogSoftmax, Softmax)


def funcify_blockwise(op: Blockwise, node: Apply, **kwargs: Any) -> Function:
    """Return the function of a batch, on the CPU if `torch.vmap` may not be able to run the items:
    where sizes or places are read from a tensor, say."""
    core, dtypes = op.core_op, {getattr(inp.type, "dtype", None) for inp in node.inputs}
    known = isinstance(core, VMAPPED) or is_linear_algebra(core)
    if pytorch_funcify.dispatch(type(core)) is on_host or not known or dtypes & {"bool", *UNSIGNED}:
        return on_host(op, node, **kwargs)
    return _blockwise(op, node=node, **kwargs)


# Elementwise Ops


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 - exp(x))`` for negative numbers."""
    near = torch.log(-torch.expm1(x))
    return torch.where(x > -0.6931471805599453, near, torch.log1p(-torch.exp(x)))


def sign(x: torch.Tensor) -> torch.Tensor:
    """Return the sign, which is NaN of NaN and not zero."""
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sgn(x)


# PyTensor goes by NumPy's names of functions: torch has others, or another function of that name.
# Its conjugate is a view that NumPy cannot read, and its softplus is `x` beyond 20.
FUNCTIONS: dict[type, Function] = {
    Conj: torch.conj_physical,
    EQ: torch.eq,
    Log1mexp: log1mexp,
    Mod: torch.remainder,
    Pow: torch.pow,
    RoundHalfToEven: torch.round,
    Sign: sign,
    Softplus: partial(torch.nn.functional.softplus, threshold=40),
}
# These convert by themselves, or have inputs that are no numbers to compute with.
CONVERTING = (Cast, Second, Switch)


@pytorch_funcify.register(Switch)
def funcify_switch(op: Switch, node: Apply, **kwargs: Any) -> Function:
    """Return the choice, also by numbers, which torch refuses, in the dtype of the result."""
    dtype = torch_dtype(node.outputs[0].type.dtype)

    def switch(condition: Any, yes: Any, no: Any) -> Any:
        values = (torch.as_tensor(value).to(dtype) for value in (yes, no))
        return torch.where(torch.as_tensor(condition) != 0, *values)

    return switch


def funcify_elemwise(op: Elemwise, node: Apply, **kwargs: Any) -> Function:
    """Return the function of tensors that an elementwise Op is."""
    if isinstance(op.scalar_op, Composite | ScalarLoop):  # PyTensor's computes item by item
        return on_host(op, node, **kwargs)
    try:
        plain = _elemwise(op, node=node, **kwargs)
        converted = in_dtypes(plain, node)
    except (NotImplementedError, AttributeError, ImportError):
        return on_host(op, node, **kwargs)
    dtypes = {variable.type.dtype for variable in node.inputs}
    tried = [converted, plain]
    if len(dtypes) == 1 or isinstance(op.scalar_op, CONVERTING):
        tried.reverse()
    works = (function for function in tried if _computes(function, node))
    return next(works, None) or on_host(op, node, **kwargs)


def _computes(function: Function, node: Apply) -> bool:
    """Whether torch has the function for these dtypes, and its results have the right ones."""
    try:
        items = [
            torch.ones((1,) * max(inp.type.ndim, 1), dtype=torch_dtype(inp.type.dtype))
            for inp in node.inputs
        ]
        results = function(*items)
        found = [x.dtype for x in (results if isinstance(results, Sequence) else [results])]
        return found == [torch_dtype(out.type.dtype) for out in node.outputs]
    except Exception:  # whatever stops torch
        return False


# Slices and places


def typify_array(data: np.ndarray, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """Return an array as a tensor; torch warns of constants that are not to be written to, which
    PyTensor 3.3.8 prevents itself.

    Arrays that come with a negative stride, like a series that the caller reversed, are copied.
    """
    is_constant = isinstance(kwargs.get("variable"), Constant)
    if (is_constant and not data.flags.writeable) or min(data.strides, default=0) < 0:
        data = data.copy()
    return _typify(data, dtype=dtype, **kwargs)


def _flipped(x: torch.Tensor, indices: Any) -> tuple[list[int], tuple[Any, ...]]:
    """Return the axes to flip, and indices with positive steps."""
    axes, found = [], []
    for axis, index in enumerate(indices):
        if isinstance(index, slice) and index.step is not None and int(index.step) < 0:
            size = x.shape[axis]
            first, last = (None if b is None else int(b) for b in (index.start, index.stop))
            start, stop, step = slice(first, last, int(index.step)).indices(size)
            axes.append(axis)
            # An empty slice may have its stop behind its start.
            index = slice(size - 1 - start, max(size - 1 - stop, size - 1 - start), -step)
        found.append(index)
    return axes, tuple(found)


def with_places(rule: Rule, arrays: int) -> Rule:
    """Return the conversion of an Op whose inputs after the first `arrays` ones are indices.

    Those that are known are numbers: `torch.compile` follows these, and no numbers in tensors.
    Torch takes uint8 for masks, and refuses other small integers.
    """

    def convert(op: Any, node: Apply, **kwargs: Any) -> Function:
        function = rule(op, node=node, **kwargs)
        indices = list(enumerate(node.inputs))[arrays:]
        known = {k: int(inp.data) for k, inp in indices if _is_known(inp)}
        small = {k for k, inp in indices if _is_small(inp)}
        if not known and not small:
            return function

        def place(k: int, value: Any) -> Any:
            return torch.as_tensor(value).long() if k in small else known.get(k, value)

        def indexed(*inputs: Any) -> Any:
            return function(*(place(k, value) for k, value in enumerate(inputs)))

        return indexed

    return convert


def _is_known(index: Variable) -> bool:
    """Whether an index is a whole number that is known."""
    kind = np.dtype(getattr(index.type, "dtype", float)).kind
    return isinstance(index, Constant) and kind in "iu" and np.ndim(index.data) == 0


def _is_small(index: Variable) -> bool:
    dtype = getattr(index.type, "dtype", None)
    return not isinstance(index, Constant) and dtype not in (None, "bool", "int64")


@function_for(Subtensor)
def subtensor(op: Subtensor, x: torch.Tensor, *indices: Any) -> torch.Tensor:
    """Return a slice of a tensor, also backwards."""
    axes, forward = _flipped(x, indices_from_subtensor(indices, op.idx_list))
    return (torch.flip(x, axes) if axes else x)[forward]


@function_for(IncSubtensor)
def inc_subtensor(op: IncSubtensor, x: Any, y: Any, *indices: Any) -> torch.Tensor:
    """Set or increment a slice of a tensor, also backwards."""
    axes, forward = _flipped(x, indices_from_subtensor(indices, op.idx_list))
    changed = torch.flip(x, axes)  # which copies
    if op.set_instead_of_inc:
        changed[forward] = y
    else:
        changed[forward] += y
    return torch.flip(changed, axes) if axes else changed


# Choices, rows that are padded, and checks


@function_for(IfElse)
def if_else(op: IfElse, condition: Any, *values: Any) -> Any:
    """Return the chosen values; PyTensor returns a tuple also where there is one."""
    chosen = values[: op.n_outs] if condition else values[op.n_outs :]
    return chosen[0] if op.n_outs == 1 else chosen


@pytorch_funcify.register(LegacyScan)
def funcify_classic_scan(op: LegacyScan, **kwargs: Any) -> Function:
    """Say how a loop of `pytensor.scan` is compiled: PyTensor makes them of Jacobians as well."""
    raise NotImplementedError(
        "PyTensor's PyTorch linker has no loops of `pytensor.scan`, which "
        "`pytensor.gradient.jacobian` and `hessian` make, too. Compile the function in `with "
        "scanlib.enabled(True):`, or call `scanlib.enable()` before, and scanlib takes them over"
    )


@function_for(PaddedRows)
def padded_rows(op: PaddedRows, rows: Any, stop: Any, length: Any) -> Any:
    """Return rows and zero rows behind them, up to a length."""
    count = len(range(int(length))[: int(stop)])
    if rows.shape[0] != count:
        rows = rows.expand(count, *rows.shape[1:])
    missing = int(length) - count
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


function_for(StepProducts)(
    lambda op, x, y: torch.tensordot(x, y, ([0, 2], [0, 1])) if op.total else torch.matmul(x, y)
)


@function_for(CheckedConvergence)
def checked_convergence(op: CheckedConvergence, rows: Any, failed: Any, *numbers: Any) -> Any:
    """Return rows, after the check that iterations have converged."""
    if failed:
        raise ConvergenceError(op.message, *(number.item() for number in numbers))
    return rows


@function_for(CheckedSizes)
def checked_sizes(op: CheckedSizes, array: Any, steps: Any = None) -> Any:
    """Return an array whose sizes have been checked."""
    sizes = op.larger(array.shape, array.shape[0] if steps is None else int(steps))
    return array if sizes is None else array.new_zeros(sizes)


# PyTensor's own conversions, and what takes their places


_typify = pytorch_typify.dispatch(np.ndarray)
_blockwise, _elemwise = map(pytorch_funcify.dispatch, (Blockwise, Elemwise))


def register() -> None:
    """Register what PyTensor does not convert itself; everything else it refuses is `on_host`."""
    for kind in FUNCTIONS:
        pytorch_funcify.register(kind)(lambda op, **kwargs: FUNCTIONS[type(op)])
    for kinds, arrays in ((INDEX_READS, 1), (INDEX_WRITES, 2)):
        for kind in kinds:
            pytorch_funcify.register(kind)(with_places(pytorch_funcify.dispatch(kind), arrays))
    for kind, first in REFUSED.items():
        pytorch_funcify.register(kind)(or_on_host(pytorch_funcify.dispatch(kind), first))
    pytorch_funcify.register(Blockwise)(funcify_blockwise)
    pytorch_funcify.register(Elemwise)(funcify_elemwise)
    pytorch_funcify.register(object)(on_host)
    pytorch_typify.register(np.ndarray)(typify_array)


register()
