"""Conversions of PyTensor's own Ops that its PyTorch linker has none for.

Rewrites take out of loops what does not depend on earlier steps. What ran compiled within the loop
is then an Op of the graph, which PyTorch has to know: `argmax` of all rows, say. Only what PyTensor
itself does not convert is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytensor.graph.basic import Apply
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify
from pytensor.scalar.basic import Composite, Pow, RoundHalfToEven, ScalarOp
from pytensor.scalar.math import Log1mexp
from pytensor.scan.op import Scan as ClassicScan
from pytensor.tensor.basic import ExtractDiag
from pytensor.tensor.math import Argmax

from scanlib.backends.torch.portable import torch_dtype


def funcify_argmax(op: Argmax, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the place of the first greatest item, counted along all reduced axes."""

    def argmax(x: torch.Tensor) -> torch.Tensor:
        axes = list(range(x.ndim)) if op.axis is None else [int(axis) for axis in op.axis]
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        rows = torch.permute(x, [*kept, *axes]).reshape([*(x.shape[axis] for axis in kept), -1])
        # Torch compares no truth values.
        rows = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
        return torch.argmax(rows, dim=-1)  # of equal items the first one, as NumPy's

    return argmax


def funcify_extract_diag(op: ExtractDiag, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the diagonal of a matrix, or of each of some."""
    return lambda x: torch.diagonal(x, op.offset, op.axis1, op.axis2)


def funcify_pow(op: Pow, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the power, which has another name in torch than in NumPy."""
    dtype = torch_dtype(node.outputs[0].type.dtype)
    return lambda x, y: torch.pow(torch.as_tensor(x).to(dtype), torch.as_tensor(y).to(dtype))


def funcify_round(op: RoundHalfToEven, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the nearest integer, which has another name in torch than in NumPy."""
    return torch.round


def funcify_log1mexp(op: Log1mexp, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return ``log(1 - exp(x))`` for negative numbers."""

    def log1mexp(x: torch.Tensor) -> torch.Tensor:
        near = torch.log(-torch.expm1(x))
        return torch.where(x > -0.6931471805599453, near, torch.log1p(-torch.exp(x)))

    return log1mexp


def funcify_composite(op: Composite, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of several operations on items: ``x ** 3`` is one of those."""
    function = pytorch_funcify(op.fgraph, **kwargs)

    def composite(*inputs: Any) -> Any:
        results = function(*inputs)
        return results[0] if len(results) == 1 else results

    return composite


def funcify_classic_scan(op: ClassicScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Say how a loop of `pytensor.scan` is compiled: PyTensor makes them of Jacobians as well."""
    raise NotImplementedError(
        "PyTensor's PyTorch linker has no loops of `pytensor.scan`, which "
        "`pytensor.gradient.jacobian` and `hessian` make, too. Compile the function in `with "
        "scanlib.enabled(True):`, or call `scanlib.enable()` before, and scanlib takes them over"
    )


MISSING: dict[type, Callable[..., Any]] = {
    Argmax: funcify_argmax,
    ClassicScan: funcify_classic_scan,
    Composite: funcify_composite,
    ExtractDiag: funcify_extract_diag,
    Log1mexp: funcify_log1mexp,
    Pow: funcify_pow,
    RoundHalfToEven: funcify_round,
}


def register() -> None:
    """Register what PyTensor does not convert itself."""
    general = pytorch_funcify.dispatch(object), pytorch_funcify.dispatch(ScalarOp)
    for kind, rule in MISSING.items():
        if pytorch_funcify.dispatch(kind) in general:
            pytorch_funcify.register(kind)(rule)


register()
