"""Chooses the schedule of an elementwise loop, and puts its C code together."""

from __future__ import annotations

from pytensor.configdefaults import config

from scanlib.backends.c.base import LoopPrinter
from scanlib.backends.c.block import BlockPrinter, fits_blocks
from scanlib.backends.c.chunks import ChunkPrinter
from scanlib.backends.c.decays import COMPOSE, DecayPrinter
from scanlib.backends.c.fetching import FETCHING
from scanlib.backends.c.helpers import HELPERS, THREADS
from scanlib.backends.c.kernels import KERNELS
from scanlib.backends.c.log_kernels import LOG_KERNELS
from scanlib.backends.c.nest import NestPrinter
from scanlib.backends.c.prefixes import COMPOSE_LOGS, COMPOSE_PICKS, PrefixPrinter
from scanlib.backends.c.threads import threads_available
from scanlib.backends.c.widths import WidthPrinter
from scanlib.ops.c_code import CCode, register_c_printer
from scanlib.ops.elemwise_scan import ElemwiseScan, schedule
from scanlib.ops.parts import chunks_by

VERSION = 28  # of everything in this folder that changes the code
THREADS_VERSION = 4  # of what changes code for several threads alone
# Lanes of a sum may be added in any order, of which the compiler chooses one; integers wrap around.
# Choices between values are no branches, though comparing NaN may raise a floating-point flag.
ARGUMENTS = (
    "-fopenmp-simd",
    "-fwrapv",
    "-fno-fast-math",
    "-ffp-contract=fast",
    "-fno-trapping-math",
)


def printer_for(op: ElemwiseScan) -> LoopPrinter:
    """Return what writes a loop: the schedule that fits it."""
    if not fits_blocks(op):
        return NestPrinter(op)
    if schedule(op) != "blocks":
        return WidthPrinter(op)
    found = chunks_by(op) if threads_available() else None
    return {None: BlockPrinter, "decay": DecayPrinter, "all steps": PrefixPrinter}[found](op)


@register_c_printer
def print_loop(op: ElemwiseScan) -> CCode:
    """Return the C code of an elementwise loop.

    Raises
    ------
    NoCCodeError
        If an operation of its body has none.
    """
    printer = printer_for(op)
    functions = printer.write()
    if isinstance(printer, ChunkPrinter) and not printer.fits():
        printer = BlockPrinter(op)
        functions = printer.write()
    scalar_ops = tuple(printer.scalars.ops)
    threads = config.scanlib__threads if threads_available() else 1
    # Names are part of messages, but not of what makes two loops equal.
    own: tuple[str | int, ...] = ("scanlib", VERSION, str((op.scan.name, *op.scan.labels)))
    if threads > 1:
        sizes = config.scanlib__parallel_channels, config.scanlib__parallel_steps
        own += (THREADS_VERSION, threads, *sizes)
    versions = printer.scalars.version()
    helpers = [HELPERS, *([THREADS] if threads > 1 else []), *printer.scalars.support_code()]
    if isinstance(printer, NestPrinter):
        helpers.append(FETCHING)
    if isinstance(printer, BlockPrinter | WidthPrinter):
        has_logs = any(recurrence.family == "log-affine" for recurrence in op.recurrences)
        helpers += [KERNELS, *([LOG_KERNELS] if has_logs else [])]
    if isinstance(printer, DecayPrinter):
        helpers.append(COMPOSE)
    if isinstance(printer, PrefixPrinter):
        helpers += [COMPOSE_PICKS, *([COMPOSE_LOGS] if has_logs else [])]
    return CCode(
        helpers="\n".join(helpers),
        functions=functions,
        scalar_ops=scalar_ops,
        compile_args=ARGUMENTS + (("-pthread",) if threads > 1 else ()),
        version=(own, versions) if versions or not scalar_ops else (),
    )
