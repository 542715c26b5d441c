"""Elementwise Ops under PyTorch, in the dtypes that PyTensor says.

PyTensor calls torch's function of the same name. For some Ops there is none, for some dtypes it
raises an error, and where integers, truth values or several dtypes meet it computes in another
dtype than NumPy: the logarithm of int64 in float32, a sum of three int8 in int64. Here a node is
tried on one item when it is converted. If PyTensor's conversion gives the dtype of the node's
result, it stays as it is; if not, the inputs are first converted to the dtype in which NumPy
computes; and if torch cannot, `scanlib.backends.torch.host` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify
from pytensor.scalar.basic import Cast, Composite, Second, Switch
from pytensor.scalar.loop import ScalarLoop
from pytensor.tensor.elemwise import Elemwise

from scanlib.backends.torch.host import on_host
from scanlib.backends.torch.portable import torch_dtype

# These convert by themselves, or have inputs that are no numbers to compute with.
_CONVERTING = (Cast, Second, Switch)

_elemwise = pytorch_funcify.dispatch(Elemwise)


@pytorch_funcify.register(Elemwise)
def funcify_elemwise(op: Elemwise, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of tensors that an elementwise Op is."""
    plain = _of_torch(op, node, **kwargs)
    if plain is None:
        return on_host(op, node, **kwargs)
    dtypes = {variable.type.dtype for variable in node.inputs}
    alike = len(dtypes) == 1 or isinstance(op.scalar_op, _CONVERTING)
    if alike and _computes(plain, node):
        return plain
    converted = _converted(plain, node)
    if _computes(converted, node):
        return converted
    return plain if not alike and _computes(plain, node) else on_host(op, node, **kwargs)


def _of_torch(op: Elemwise, node: Apply, **kwargs: Any) -> Callable[..., Any] | None:
    """Return PyTensor's conversion, None if it has none."""
    if isinstance(op.scalar_op, Composite | ScalarLoop):
        return None  # it computes item by item
    try:
        return _elemwise(op, node=node, **kwargs)
    except (NotImplementedError, AttributeError, ImportError):
        return None


def _computes(function: Callable[..., Any], node: Apply) -> bool:
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


def _converted(function: Callable[..., Any], node: Apply) -> Callable[..., Any]:
    """Return the function of inputs converted to one dtype."""
    dtypes = [variable.type.dtype for variable in (*node.inputs, *node.outputs)]
    try:
        common = torch_dtype(str(np.result_type(*dtypes)))
        wanted = [torch_dtype(out.type.dtype) for out in node.outputs]
    except NotImplementedError:
        return function

    def converted(*inputs: torch.Tensor) -> Any:
        results = function(*(torch.as_tensor(x).to(common) for x in inputs))
        if len(wanted) == 1:
            return results.to(wanted[0])
        return tuple(x.to(dtype) for x, dtype in zip(results, wanted, strict=True))

    return converted
