"""Numba code of `ElemwiseScan`.

`block` works on blocks of steps of one channel after the other, with the kernels of `steps`,
`lanes`, `logs` and `lookahead`; other loops are kernels that walk time outside and channels inside
(`scanlib.kernels.schedules.channels`). `apart` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scanlib.backends.numba.elemwise.apart import ScheduleWriter
from scanlib.ops.elemwise_scan import ElemwiseScan


def write_elemwise(op: ElemwiseScan) -> tuple[Callable[..., Any], str | None]:
    """Return the Python source function of an elementwise loop and its key."""
    return ScheduleWriter(op).write()


def only_call(op: ElemwiseScan) -> tuple[Callable[..., Any], str | None] | None:
    """Return what calls the schedule of an elementwise loop, and its key.

    It takes a tuple of the loop's inputs. None where the schedule is chosen when the loop runs.
    """
    return ScheduleWriter(op).only_call()
