"""How many threads an elementwise loop uses, and what each of them does."""

from __future__ import annotations

from pytensor.configdefaults import config

from scanlib.kernels.thread_parts import wanted_threads
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.schedules.selection import can_chunk, can_slice, least_row


def threads_of(op: ElemwiseScan, chosen: str) -> tuple[int, str | None]:
    """Return how many threads a loop may use, and the share of each where there are several.

    `chosen` is the schedule of the compiled code; see `scanlib.schedules.selection.schedule`.
    """
    threads = wanted_threads()
    if threads == 1:
        return 1, None
    if chosen in ("channels", "by width") and can_slice(op):
        least = config.scanlib__parallel_channels
        return threads, (
            f"each for some of the channels: {least:,} channels times steps, and "
            f"{least_row(op):,} channels, at least"
        )
    if chosen != "blocks" or not can_chunk(op):
        return 1, None
    return threads, (
        f"each for some of the steps, {config.scanlib__parallel_steps:,} at least, if coefficients "
        "decay: a few steps before give a thread its first value"
    )
