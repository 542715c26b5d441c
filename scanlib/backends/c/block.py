"""Blocks of steps of one channel: elements, scan, map.

A loop of one channel, or of a few, whose parts all belong to recurrence families is run in blocks
of steps. The channels of a block take turns:

1. the elements of a recurrence are computed for all steps of the block: a loop without
   recurrence, which compilers vectorize;
2. a kernel scans them from the state before the block (`kernels`, `lookahead`); where composing
   steps is not safe, the block is run step by step instead;
3. what depends on the states (outputs, sums) is computed for all steps of the block.
"""

from __future__ import annotations

from contextlib import ExitStack

from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from scanlib._compat import thaw_graph
from scanlib.backends.c.scalars import can_fail
from scanlib.backends.c.scans import REALS
from scanlib.backends.c.source import added, c_type, is_reducible
from scanlib.backends.c.storage import BlockStorage
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.elemwise_scan import ElemwiseScan, Recurrence, schedule

STACK = 2**17  # bytes of buffers that may be on the stack
COUPLED = {"affine"}
SINGLE = {"affine", "maximum", "minimum", "clamp", "affine in squares", "log-affine"}


def fits_blocks(op: ElemwiseScan) -> bool:
    """Whether a loop can be run in blocks of steps by the kernels that there are."""
    if schedule(op) not in ("blocks", "by width") or can_fail(thaw_graph(op.body)):
        return False
    inner = op.signature.split_body_inputs(op.body.inputs)
    dtypes = [taps[0].type.dtype for taps in inner.taps] + [c.type.dtype for c in inner.carries]
    for recurrence in op.recurrences:
        (terms, *more) = recurrence.terms
        single = not more and len(terms) == 1 and terms[0].tap == -1
        if recurrence.family not in (SINGLE if single else COUPLED):
            return False
        dtype = dtypes[recurrence.parts[0]]
        if recurrence.family in COUPLED and dtype == "bool":
            return False
        if recurrence.family in ("affine in squares", "log-affine") and dtype not in REALS:
            return False
        for part in recurrence.parts:
            if dtypes[part].startswith("complex"):
                return False
    return True


class BlockPrinter(BlockStorage):
    """Writes an elementwise loop of one channel, or of a few, in blocks of steps."""

    run = f"{NODE}_run"

    # The function

    def write_run(self) -> None:
        line = self.source.line
        with self.source.block(f"static int {self.run}({NODE}_data &data)"), self.scalars.scope():
            self.write_numbers()
            first = len(self.source.lines)
            self.write_storage()
            if not self.layout.ndim:
                self.write_constants()
            with self.source.block(f"for (npy_intp i = 0; i < steps; i += {self.block})"):
                line(f"const npy_intp n = steps - i < {self.block} ? steps - i : {self.block};")
                line(f"const npy_intp low = {'steps - i - n' if self.reverse else 'i'};")
                with ExitStack() as stack, self.scalars.scope():
                    target = self.plan.targets[0]
                    for axis in range(self.layout.ndim):
                        size = f"data.size[{self.loops[id(target), axis]}]"
                        head = f"for (npy_intp e{axis} = 0; e{axis} < {size}; e{axis}++)"
                        stack.enter_context(self.source.block(head))
                    if self.layout.ndim:
                        self.write_constants()
                    self.write_block()
            self.write_last_values()
            line("data.taken = steps;")
            line("return 0;")
            self.source.lines[first:first] = self.memory()

    def write_block(self) -> None:
        """Write one block of one channel."""
        self.source.line("int safe = 1;")
        self.write_views()
        for number, recurrence in enumerate(self.op.recurrences):
            self.write_recurrence(number, recurrence)
        for part in self.sums_first:
            self.source.line(f"if (safe) kept{part} = late{part};")
        with self.source.block("if (!safe)"):
            self.write_sequential()
        self.write_map()
        self.move_on()

    def memory(self) -> list[str]:
        """Return the declaration of the buffers' memory, known when all is written."""
        if self.bytes <= STACK:
            return [f"  alignas(64) char memory[{max(self.bytes, 64)}];"]
        return [
            "  scanlib_memory buffers;",
            f"  if (buffers.get({self.bytes})) return -1;",
            "  char *memory = buffers.data;",
        ]

    # One block. `j` counts steps in the order of memory, also where the loop walks backwards.

    def read_inputs(self, outputs: list[Variable], copies: dict[Variable, Variable]) -> None:
        """Write the reads of rows and past values at step `j` that `outputs` need.

        `copies` maps the inputs of the graph in which they are read to the body's own.
        """
        blockers = set(self.scalars.values)
        for variable in dict.fromkeys(ancestors(outputs, blockers=blockers)):
            if variable.owner is not None or variable in blockers:
                continue
            own = copies.get(variable)
            if own in self.taps:
                self.scalars.bind_new(variable, self.value(*self.taps[own]))
            elif own in self.inner.rows:
                self.scalars.bind_stored(variable, f"X{self.inner.rows.index(own)}[j]")

    def write_recurrence(self, number: int, recurrence: Recurrence) -> None:
        self.write_elements(number)
        if recurrence.family == "affine in squares":
            self.write_squares(number, recurrence)
            return
        if recurrence.parts[0] in self.sums_first:
            (part,) = recurrence.parts
            self.source.line(f"{c_type(self.dtype_of(part))} late{part};")
            self.source.line(f"if (safe) safe = {self.sums_kernel(number, recurrence)};")
            return
        kernel = self.kernel(number, recurrence)
        if kernel is not None:
            self.source.line(f"if (safe) safe = {kernel};")
        else:
            self.write_lookahead(number, recurrence)

    def write_elements(self, number: int) -> None:
        """Write the elements of a recurrence for all steps of the block."""
        inputs, outputs, scanned = self.elements_of(number)
        copies = dict(zip(inputs, self.graph.inputs, strict=True))
        computed = {}
        for k, out in enumerate(outputs):
            name = self.elements[number, k]
            if name[0] == "e":
                continue
            if out in copies:
                self.source.line(
                    f"const {c_type(out.type.dtype)} *{name} = {self.view(copies[out])};"
                )
            else:
                computed[k] = out
        if computed:
            self.source.line("#pragma omp simd")
            head = "for (npy_intp j = 0; j < n; j++)"
            with self.source.block(head), self.scalars.scope():
                self.bind_same(inputs)
                for value, part in scanned.items():
                    self.scalars.bind_new(value, self.value(part, 0))
                self.read_inputs(list(computed.values()), copies)
                self.scalars.emit(computed.values())
                for k, out in computed.items():
                    name = self.elements[number, k]
                    self.source.line(f"{name}[j] = {self.scalars.text(out)};")

    def view(self, own: Variable) -> str:
        """Return the values of a row or a past value during the block, as a pointer."""
        if own in self.inner.rows:
            return f"X{self.inner.rows.index(own)}"
        part, offset = self.taps[own]
        return f"H{part} + {self.place_of(part, offset)}"

    def write_sequential(self) -> None:
        """Write the block step by step, with the body as it is."""
        head = "for (npy_intp k = 0; k < n; k++)"
        with self.source.block(head), self.scalars.scope():
            self.source.line(f"const npy_intp j = {'n - 1 - k' if self.reverse else 'k'};")
            sums = {part: found.total for part, found in self.sums_first.items()}
            nexts = [*self.nexts.values(), *sums.values()]
            self.read_inputs(nexts, {v: v for v in self.graph.inputs})
            self.scalars.emit(nexts)
            for part, total in sums.items():
                self.source.line(f"T{part}[j] = {self.scalars.text(total)};")
            values = [(part, self.scalars.text(value)) for part, value in self.nexts.items()]
            for part, name in values:
                self.source.line(f"{self.value(part, 0)} = {name};")

    def write_map(self) -> None:
        """Write what depends on the states, for all steps of the block."""
        sums = [i for i, is_sum in enumerate(self.layout.sums) if is_sum]
        added_up = [self.result.carries[i] for i in sums]
        done = {self.output_of_sums(part) for part in self.sums_first}
        outputs = {i: value for i, value in enumerate(self.result.outputs) if i not in done}
        values = [*added_up, *outputs.values()]
        untraced = enumerate(self.signature.untraced)
        traced = [i for i, is_gone in untraced if not is_gone and not self.is_direct(i)]
        if not values and not traced:
            return
        if all(is_reducible(value.type.dtype) for value in added_up):
            clause = f" reduction(+ : {', '.join(f'c{i}' for i in sums)})" if sums else ""
            self.source.line(f"#pragma omp simd{clause}")
        head = "for (npy_intp j = 0; j < n; j++)"
        with self.source.block(head), self.scalars.scope():
            known = self.scanned_values()
            used = set(ancestors(values, blockers=set(known)))
            for value, text in known.items():
                if value in used:
                    self.scalars.bind_new(value, text)
            self.read_inputs(values, {v: v for v in self.graph.inputs})
            self.scalars.emit(values)
            for i, value in zip(sums, added_up, strict=True):
                total = added(f"c{i}", self.scalars.text(value), value.type.dtype)
                self.source.line(f"c{i} = {total};")
            for i, value in outputs.items():
                self.source.line(f"{self.stored('Z', i)} = {self.scalars.text(value)};")
            for i in traced:
                self.source.line(f"{self.stored('S', i)} = {self.value(i, 0)};")

    def scanned_values(self) -> dict[Variable, str]:
        """Return where the values of step `j` are that have been scanned."""
        values = {found.total: f"T{part}[j]" for part, found in self.sums_first.items()}
        for part, value in self.nexts.items():
            if value.owner is not None and part not in self.sums_first:
                values[value] = self.value(part, 0)
        return values
