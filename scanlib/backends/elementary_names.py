"""Which scalar Ops the functions of `scanlib.kernels.elementary` stand for."""

from __future__ import annotations

from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.scalar.basic import Exp, Expm1, Log, Log1p, Tanh
from pytensor.scalar.math import Sigmoid, Softplus

from scanlib.kernels.elementary import FORMATS
from scanlib.ops.logaddexp import LogAddExp

_NAMES: dict[type[Op], str] = {
    Exp: "exp",
    Expm1: "expm1",
    Log: "log",
    Log1p: "log1p",
    LogAddExp: "logaddexp",
    Sigmoid: "sigmoid",
    Softplus: "softplus",
    Tanh: "tanh",
}


def vector_name(op: Op, node: Apply) -> tuple[str, str] | None:
    """Return the name and dtype of the function that a scalar Op is, None if there is none."""
    name, dtype = _NAMES.get(type(op)), node.outputs[0].type.dtype
    if name is None or any(inp.type.dtype != dtype for inp in node.inputs):
        return None
    return (name, dtype) if dtype in FORMATS else None
