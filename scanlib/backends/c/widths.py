"""One channel after the other, or all at once: chosen by their number when the loop runs."""

from __future__ import annotations

from scanlib.backends.c.block import BlockPrinter
from scanlib.backends.c.nest import NestPrinter
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.elemwise_scan import MANY_STEPS, few_channels


class FewPrinter(BlockPrinter):
    """Writes the blocks of a loop that another printer writes as a whole."""

    run = f"{NODE}_few"

    def __init__(self, whole: NestPrinter) -> None:
        super().__init__(whole.op)
        self.source, self.scalars = whole.source, whole.scalars


class WidthPrinter(NestPrinter):
    """Writes an elementwise loop whose number of channels is known when it runs."""

    def write_run(self) -> None:
        super().write_run()
        FewPrinter(self).write_run()

    def write_start(self) -> None:
        line, target = self.source.line, self.plan.targets[0]
        sizes = [f"data.size[{self.loops[id(target), axis]}]" for axis in range(self.layout.ndim)]
        width = " * ".join(sizes)
        line(f"if ({width} <= {few_channels(self.op)} && steps >= {MANY_STEPS}) {{")
        line(f"  if ({NODE}_few(data)) return -1;")
        with self.source.block("} else"):
            super().write_start()
