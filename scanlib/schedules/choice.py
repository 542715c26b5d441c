"""The program of an elementwise loop: which schedules it has."""

from __future__ import annotations

from scanlib.kernels.program import Kernels, LoopProgram
from scanlib.kernels.thread_parts import wanted_threads
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.schedules.blocks import BlocksRun
from scanlib.schedules.channels import ChannelsRun
from scanlib.schedules.chunks import ChunksRun
from scanlib.schedules.elementwise import ElemwiseLoop
from scanlib.schedules.loop_kernels import prepare, start
from scanlib.schedules.selection import can_chunk, schedule


def elementwise_program(op: ElemwiseScan) -> LoopProgram:
    """Return the kernels of an elementwise loop; `NoKernelError` if an operation or a dtype of its
    body has none."""
    loop = ElemwiseLoop(op, schedule(op))
    run = [ChannelsRun(loop).kernel()] if loop.by_channels else []
    in_chunks = wanted_threads() > 1 and can_chunk(op)
    if in_chunks or loop.by_blocks:
        run.append((ChunksRun if in_chunks else BlocksRun)(loop).kernel())
    kernels = Kernels(prepare(loop), start(loop), tuple(run), last_round=in_chunks)
    shared = tuple(loop.shared_sums()) if loop.slices > 1 else ()
    return loop.program(op.scan.name or "loop", kernels, shared=shared)
