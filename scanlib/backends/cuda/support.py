"""Which elementwise loops have CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from scanlib.backends.cuda.computed_places import check_places
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.channel_plan import ChannelPlan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan

DEPTH = 8  # of states whose past values are kept in registers
KINDS = "biufc"


def check_supported(op: ElemwiseScan) -> None:
    """Raise an error if a loop has no kernel.

    Raises
    ------
    NoCCodeError
    """
    signature = op.signature
    check_places(op)
    if not _is_independent(op.plan()):
        raise NoCCodeError("channels that need one another have no CUDA kernel")
    if any(depth > DEPTH for depth in signature.depths):
        raise NoCCodeError(f"a state of more than {DEPTH} past values has no CUDA kernel")
    if not all(type.dtype and np.dtype(type.dtype).kind in KINDS for type in _types(op)):
        raise NoCCodeError("an argument of this type has no CUDA kernel")
    if any(target.adds and target.value.type.dtype == "bool" for target in op.plan().targets):
        raise NoCCodeError("a sum of truth values has no CUDA kernel")


def _is_independent(plan: ChannelPlan) -> bool:
    """Whether every result belongs to every channel, or sums over some of their axes."""
    every = set(range(plan.layout.ndim))
    return all({*t.kept, *t.reduced} == every for t in plan.targets) and all(
        len(plan.groups(plan.targets, level)) == 1 for level in every
    )


def _types(op: ElemwiseScan) -> Iterator[Any]:
    for type_ in op.outer_input_types():
        if not hasattr(type_, "dtype"):
            raise NoCCodeError(f"an input of type {type_} has no CUDA kernel")
        yield type_
    yield from (out.type for out in op.body.outputs)
