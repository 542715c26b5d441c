"""Numba code of `ElemwiseScan`.

`nest` walks time outside and channels inside; `block` works on blocks of steps of one channel,
with the kernels of `steps`, `lanes`, `logs` and `lookahead`. A loop of one channel that belongs
to no recurrence family is written as any other loop: its states are local variables already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.subtensor import Subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES
from scanlib.backends.numba.elemwise.block import BlockWriter
from scanlib.backends.numba.elemwise.nest import NestWriter
from scanlib.backends.numba.loop import LoopWriter
from scanlib.ops.elemwise_scan import ElemwiseScan, schedule


def write_elemwise(op: ElemwiseScan) -> tuple[Callable[..., Any], str | None]:
    """Return the Python source function of an elementwise loop and its key."""
    return writer_for(op).write()


def writer_for(op: ElemwiseScan) -> LoopWriter:
    """Return what writes an elementwise loop: the schedule that fits it."""
    chosen = schedule(op)
    if chosen == "channels":
        return NestWriter(op)
    if chosen == "blocks":
        return BlockWriter(op)
    return LoopWriter(op.scan) if _is_checked(op) else NestWriter(op)


def _is_checked(op: ElemwiseScan) -> bool:
    """Whether the code of other loops checks all indices that the body uses."""
    unchecked = (Blockwise, *(kind for kind in INDEX_READS if kind is not Subtensor), *INDEX_WRITES)
    return not any(isinstance(node.op, unchecked) for node in op.scan.body.toposort())
