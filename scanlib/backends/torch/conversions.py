"""Conversions of PyTensor's own Ops that its PyTorch linker has none for.

Rewrites take out of loops what does not depend on earlier steps. What ran compiled within the loop
is then an Op of the graph, which PyTorch has to know: `argmax` of all rows, say. What PyTensor and
this table do not convert runs as under other linkers (`scanlib.backends.torch.host`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytensor.graph.basic import Apply
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify
from pytensor.scalar.basic import EQ, Conj, Mod, Pow, RoundHalfToEven, ScalarOp, Sign
from pytensor.scalar.math import Log1mexp, Softplus
from pytensor.tensor.basic import Join
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.extra_ops import CumOp, Unique
from pytensor.tensor.math import Dot, Max, Min, Prod, Sum
from pytensor.tensor.special import LogSoftmax, Softmax

from scanlib._compat import INDEX_READS, INDEX_WRITES, LegacyScan
from scanlib.backends.torch.host import on_host
from scanlib.backends.torch.portable import torch_dtype
from scanlib.ops.graph import is_linear_algebra


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 - exp(x))`` for negative numbers."""
    near = torch.log(-torch.expm1(x))
    return torch.where(x > -0.6931471805599453, near, torch.log1p(-torch.exp(x)))


def sign(x: torch.Tensor) -> torch.Tensor:
    """Return the sign, which is NaN of NaN and not zero."""
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sgn(x)


# PyTensor goes by NumPy's names of functions: torch has others, or another function of that name.
# Its conjugate is a view that NumPy cannot read, and its softplus is `x` beyond 20.
FUNCTIONS: dict[type, Callable[..., Any]] = {
    Conj: torch.conj_physical,
    EQ: torch.eq,
    Log1mexp: log1mexp,
    Mod: torch.remainder,
    Pow: torch.pow,
    RoundHalfToEven: torch.round,
    Sign: sign,
    Softplus: partial(torch.nn.functional.softplus, threshold=40),
}


def funcify_function(op: ScalarOp, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of tensors that an operation on items is."""
    return FUNCTIONS[type(op)]


def funcify_classic_scan(op: LegacyScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Say how a loop of `pytensor.scan` is compiled: PyTensor makes them of Jacobians as well."""
    raise NotImplementedError(
        "PyTensor's PyTorch linker has no loops of `pytensor.scan`, which "
        "`pytensor.gradient.jacobian` and `hessian` make, too. Compile the function in `with "
        "scanlib.enabled(True):`, or call `scanlib.enable()` before, and scanlib takes them over"
    )


def in_dtypes_of_node(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the conversion of an Op with the dtype that the node says.

    Products of matrices are of one dtype in torch, and sums of small integers always int64.
    """

    def convert(op: Any, node: Apply, **kwargs: Any) -> Callable[..., Any]:
        function = rule(op, node=node, **kwargs)
        dtypes = {variable.type.dtype for variable in (*node.inputs, *node.outputs)}
        if len(dtypes) == 1 and dtypes.pop().startswith(("float", "complex")):
            return function
        wanted = torch_dtype(node.outputs[0].type.dtype)
        if len(node.inputs) == 1:
            return lambda x: function(x).to(wanted)
        return lambda *inputs: function(*(x.to(wanted) for x in inputs)).to(wanted)

    return convert


def funcify_join(op: Join, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the arrays one behind the other, in the dtype that NumPy gives them."""
    function, dtype = _join(op, node=node, **kwargs), torch_dtype(node.outputs[0].type.dtype)
    return lambda axis, *arrays: function(axis, *(x.to(dtype) for x in arrays))


def or_on_host(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the conversion of an Op that PyTensor refuses, or torch, for some nodes."""

    def convert(op: Any, node: Apply, **kwargs: Any) -> Callable[..., Any]:
        dtypes = {getattr(variable.type, "dtype", None) for variable in node.inputs}
        if dtypes & UNSIGNED or (isinstance(op, Dot | BatchedDot) and "bool" in dtypes):
            return on_host(op, node, **kwargs)
        try:
            return rule(op, node=node, **kwargs)
        except NotImplementedError:
            return on_host(op, node, **kwargs)

    return convert


def funcify_blockwise(op: Blockwise, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of a batch, on the CPU if `torch.vmap` may not be able to run the items.

    It raises an error where sizes or places are read from a tensor: those of parts, say.
    """
    core, dtypes = op.core_op, {getattr(inp.type, "dtype", None) for inp in node.inputs}
    known = isinstance(core, VMAPPED) or is_linear_algebra(core)
    if pytorch_funcify.dispatch(type(core)) is on_host or not known or dtypes & {"bool", *UNSIGNED}:
        return on_host(op, node, **kwargs)
    return _blockwise(op, node=node, **kwargs)


_blockwise = pytorch_funcify.dispatch(Blockwise)
_join = pytorch_funcify.dispatch(Join)

UNSIGNED = {"uint16", "uint32", "uint64"}  # torch has few functions of these
REFUSED = (
    *INDEX_WRITES,
    BatchedDot,
    Dot,
    LogSoftmax,
    Max,
    Min,
    Softmax,
    Unique,
)
VMAPPED = (*INDEX_READS[1:], *INDEX_WRITES[1:], BatchedDot, CumOp, Dot, LogSoftmax, Softmax)
IN_OTHER_DTYPES = (BatchedDot, CumOp, Dot, Prod, Sum)


def register() -> None:
    """Register what PyTensor does not convert itself; everything else it refuses is `on_host`."""
    for kind in FUNCTIONS:
        pytorch_funcify.register(kind)(funcify_function)
    pytorch_funcify.register(LegacyScan)(funcify_classic_scan)
    for kinds, wrapped in ((IN_OTHER_DTYPES, in_dtypes_of_node), (REFUSED, or_on_host)):
        for kind in kinds:
            pytorch_funcify.register(kind)(wrapped(pytorch_funcify.dispatch(kind)))
    pytorch_funcify.register(Blockwise)(funcify_blockwise)
    pytorch_funcify.register(Join)(funcify_join)
    pytorch_funcify.register(object)(on_host)


register()
