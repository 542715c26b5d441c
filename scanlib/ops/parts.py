"""Which elementwise loops can be taken in parts that several threads work on at the same time.

Backends write what is said here, and `scanlib.explain` shows it.
"""

from __future__ import annotations

from pytensor.configdefaults import config

from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.positions import has_positions

LEAST_ROW = 128


def can_slice(op: ElemwiseScan) -> bool:
    """Whether slices of the channels, along their first axis, are independent of one another.

    That takes results which all have this axis, or are sums over it, and steps that raise nothing.
    """
    if not op.layout.ndim or op.signature.has_stop or has_positions(op.body.outputs):
        return False
    return all(0 in target.kept or 0 in target.reduced for target in op.plan().targets)


def least_row() -> int:
    """Return how many channels a slice needs at least.

    Threads that write to neighbouring places of a short row wait for one another in every step.
    """
    return min(LEAST_ROW, config.scanlib__parallel_channels)
