"""The function of an elementwise loop: which schedule runs, chosen when it is called.

Each schedule is compiled apart from the function that calls it, when the first loop needs it: one
schedule out of two need not be compiled at all, and a loop is not optimized once more with every
function that it becomes part of.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from scanlib.backends.numba import threads
from scanlib.backends.numba.elemwise.base import ElemwiseWriter
from scanlib.backends.numba.elemwise.block import BlockWriter
from scanlib.backends.numba.elemwise.decays import DecayWriter
from scanlib.backends.numba.elemwise.prefixes import PrefixWriter
from scanlib.backends.numba.lazy import lazily, tuple_text
from scanlib.backends.numba.loop import LoopWriter
from scanlib.backends.numba.programs import call_program, has_compiled_function
from scanlib.kernels.compiled import program_key
from scanlib.kernels.program import LoopProgram
from scanlib.kernels.scalars import NoKernelError
from scanlib.kernels.schedules.channels import channels_program
from scanlib.ops.elemwise_scan import MANY_STEPS, ElemwiseScan, few_channels, schedule
from scanlib.ops.parts import chunks_by

Call = tuple[Callable[..., Any], str | None]


class ScheduleWriter(ElemwiseWriter):
    """Writes the choice of a schedule."""

    def write(self) -> tuple[Callable, str | None]:
        only = self.only_call()
        if only is None:
            with self.source.block(f"if {self.is_narrow()}:"):
                self.write_call("few", *self.call_of("few", BlockWriter(self.lowered)))
            only = self.channels_call()
        self.write_call("steps", *only)
        return self.source.compile("scan_loop", self.arguments, self.version)

    def only_call(self) -> Call | None:
        """Return what calls the schedule of a loop; None if widths choose between two."""
        chosen = schedule(self.lowered)
        if chosen == "by width":
            return None
        if chosen == "blocks":
            return self.call_of("blocks", blocks_writer(self.lowered))
        return self.channels_call()

    def channels_call(self) -> Call:
        """Return what calls the kernels of a loop; its steps as any others' if it has none."""
        program = program_of(self.lowered)
        if program is None:
            return self.call_of("steps", LoopWriter(self.lowered.scan))
        key = f"program {program_key(program)}"
        return call_program(program, key), key

    def is_narrow(self) -> str:
        """Return the test whether there are few channels and many steps."""
        steps = self.outer.n_steps
        steps = f"as_scalar({steps})" if steps else f"{self.outer.sequences[0]}.shape[0]"
        sizes = []
        for axis in range(self.layout.ndim):
            place = self.plan.group_places(self.plan.targets, axis)[0]
            sizes.append(f"{place.array}.shape[{place.along(axis)}]")
        most = few_channels(self.lowered)
        return f"{' * '.join(sizes)} <= {most} and {steps} >= {MANY_STEPS}"

    def write_call(self, name: str, call: Callable[..., Any], key: str | None) -> None:
        """Write that one schedule runs, and that its results are the loop's."""
        name = self.source.function(call, key, name)
        self.source.line(f"return {name}({tuple_text(self.arguments)})")

    def call_of(self, name: str, writer: LoopWriter) -> Call:
        """Return what calls a schedule with a tuple of the loop's inputs, and its key."""
        function, key = writer.write()
        layout, result = self.layout, self.result
        firsts = [taps[0] for taps in self.inner.taps]
        results = chain(
            ((value, len(axes) + 1) for value, axes in zip(firsts, layout.states, strict=True)),
            ((v, len(axes)) for v, axes in zip(self.inner.carries, layout.carries, strict=True)),
            ((v, len(axes) + 1) for v, axes in zip(result.outputs, layout.outputs, strict=True)),
        )
        arrays = [(variable.type.dtype, ndim) for variable, ndim in results]
        call = lazily(function, key or f"function {id(function)}", arrays, key is not None)
        return call, None if key is None else f"{name} {key}"


def program_of(op: ElemwiseScan) -> LoopProgram | None:
    """Return the kernels of a loop whose channels are walked in each step, if there are any."""
    try:
        program = channels_program(op)
    except NoKernelError:
        return None
    return program if all(map(has_compiled_function, program.functions)) else None


def blocks_writer(op: ElemwiseScan) -> BlockWriter:
    """Return what writes a loop in blocks, in chunks where that is asked for and possible."""
    found = chunks_by(op) if threads.wanted_threads() > 1 else None
    writers = {None: BlockWriter, "decay": DecayWriter, "all steps": PrefixWriter}
    return writers[found](op)
