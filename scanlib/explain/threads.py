"""How many threads an elementwise loop uses, and what each of them does."""

from __future__ import annotations

from pytensor.configdefaults import config

from scanlib.kernels.thread_parts import wanted_threads
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.thread_splits import can_slice, chunks_by, least_row

# How a thread finds the value before its steps.
_HOW = {
    "decay": ", if coefficients decay: a few steps before give a thread its first value",
    "all steps": ": a thread first composes all steps before, which takes less than running them",
}


def threads_of(op: ElemwiseScan, chosen: str) -> tuple[int, str | None]:
    """Return how many threads a loop may use, and the share of each where there are several.

    `chosen` is the schedule of the compiled code; see `scanlib.ops.lowered.elemwise_scan.schedule`.
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
    how = chunks_by(op) if chosen == "blocks" else None
    if how is None:
        return 1, None
    return threads, (
        f"each for some of the steps, {config.scanlib__parallel_steps:,} at least{_HOW[how]}"
    )
