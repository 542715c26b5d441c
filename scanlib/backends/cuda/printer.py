"""Writes a loop for the CUDA template: one struct with what a channel keeps, and one step.

The template (`scanlib/backends/cuda/template`) holds all schedules. It asks of a loop ``L``

``Channel``, ``locate``, ``advance``, ``dense``
    where the items of one channel are;
``Fixed``, ``fix``
    the non-sequences of a channel;
``Rows``, ``load`` and ``Results``, ``store``
    what one step reads from sequences, and what it writes;
``State``, ``start``, ``finish``
    past values and carries, before the first step and after the last one;
``Sums``, ``add``, ``keep``
    what is summed over steps and channels;
``step``
    one step, with a function of the kernel language; whether the loop ends after it;
``Summary``, ``lift``, ``compose``, ``extend``, ``apply``, ``moderate``
    several steps as one function, for loops whose recurrences compose.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import numpy as np
from pytensor.graph.basic import Variable

from scanlib._compat import thaw_graph
from scanlib.backends.cuda.channel import whole_sums, write_channel
from scanlib.backends.cuda.computed_places import WRONG, PlaceWriter
from scanlib.backends.cuda.cpp_lines import Source
from scanlib.backends.cuda.families import composed_recurrences
from scanlib.backends.cuda.items import write_fixed, write_results, write_rows
from scanlib.backends.cuda.parameters import Array, Parameters
from scanlib.backends.cuda.scalar_code import Code, ScalarUnit, item_type, memory_type
from scanlib.backends.cuda.summary import SummaryWriter
from scanlib.backends.cuda.sums import SumWriter
from scanlib.backends.cuda.support import check_supported
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.channel_plan import ChannelPlan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.positions import has_positions, loaded

SHARED = 44 * 1024  # bytes of shared memory of a block: all devices have that much
ROWS = 256  # bytes of the rows that a thread keeps, in registers
LIGHT = 192  # bytes of rows and results with which a thread takes few registers
LANES = 32
TEMPLATES = {
    "until": (),
    "serial": (),
    "walk": ("walk", "chunks"),
    "look_back": ("walk", "chunks", "look_back"),
}
UNITS = {
    "until": ("until",),
    "serial": ("serial_4", "serial_16"),
    "walk": ("walk", "summarize", "carry", "repair"),
    "look_back": ("reset", "look_back", "look_back_dense", "mend"),
}
KERNELS = {
    "until": "FLAT_KERNEL(until, scanlib_until<Loop>(p, index))",
    "serial_4": "FLAT_KERNEL(serial_4, (scanlib_serial<Loop, 4>(p, index)))",
    "serial_16": "FLAT_KERNEL(serial_16, (scanlib_serial<Loop, 16>(p, index)))",
    "walk": "BLOCK_KERNEL(walk, scanlib_walk<Loop>(p, block))",
    "summarize": "BLOCK_KERNEL(summarize, scanlib_summarize<Loop>(p, block))",
    "carry": "FLAT_KERNEL(carry, scanlib_carry<Loop>(p, index))",
    "repair": "FLAT_KERNEL(repair, scanlib_repair<Loop>(p, index))",
    "reset": "FLAT_KERNEL(reset, scanlib_reset<Loop>(p, index))",
    "look_back": "CONCURRENT_KERNEL(look_back, 512, scanlib_look_back<Loop>(given))",
    "look_back_dense": "CONCURRENT_KERNEL(look_back_dense, SCANLIB_RESIDENT, "
    "Params p = given; Loop::dense(p); scanlib_look_back<Loop>(p))",
    "mend": "FLAT_KERNEL(mend, scanlib_mend<Loop>(p, index))",
}
TAKEN = "taken"  # the number of steps of a loop that ends by a condition, its last result


class LoopWriter:
    """Writes the translation units of one loop: one for schedules that share code.

    Parameters
    ----------
    op : ElemwiseScan

    Attributes
    ----------
    parameters : Parameters
    composed : list of Composed or None
        None for loops that are walked by one thread per channel only.
    threads, items : int
        Of a block that shares steps: its threads, and the steps of each at a time.

    Raises
    ------
    NoCCodeError
        If the loop has no kernel.
    """

    def __init__(self, op: ElemwiseScan) -> None:
        check_supported(op)
        self.op = op
        self.signature, self.layout = op.signature, op.layout
        self.graph = thaw_graph(op.body)
        self.inner = self.signature.split_body_inputs(self.graph.inputs)
        self.result = self.signature.split_body_outputs(self.graph.outputs)
        self.plan = ChannelPlan(self.signature, self.layout, self.inner, self.result)
        self.places = PlaceWriter(self) if has_positions(op.body.outputs) else None
        single = self.signature.has_stop or self.places is not None
        self.composed = None if single else composed_recurrences(op)
        self.source, self.unit = Source(), ScalarUnit()
        self.loaded = loaded(self.graph.outputs)
        self.sums = [i for i, is_sum in enumerate(self.layout.sums) if is_sum]
        self.carried = [i for i, is_sum in enumerate(self.layout.sums) if not is_sum]
        self.traced = [i for i, gone in enumerate(self.signature.untraced) if not gone]
        reductions = enumerate(self.layout.output_reductions)
        self.summed = [i for i, axes in reductions if axes]  # outputs
        works = [f"partial{i}" for i in self.sums] + [f"whole{i}" for i in self.summed]
        if self.composed is not None:
            works += ["summaries", "states", "alarms", "flags"]
        more = [] if self.places is None else self.places.names
        self.parameters = Parameters(
            self.layout.ndim, list(self._inputs()), list(self._outputs()), works, more
        )
        self.arrays = {a.name: a for a in [*self.parameters.inputs, *self.parameters.outputs]}
        self.threads, self.items = self._block()
        try:
            self.loop = self._loop()
        except NoKernelError as error:
            raise NoCCodeError(str(error)) from error

    # Arrays, and the sizes of what a thread keeps

    def _inputs(self) -> Iterator[Array]:
        layout, inner, outer = self.layout, self.inner, self.plan.outer
        for variables, names, lead, axes in (
            (inner.rows, outer.sequences, 1, layout.sequences),
            ([taps[0] for taps in inner.taps], outer.initials, 1, layout.states),
            (inner.carries, outer.carries, 0, layout.carries),
            (inner.non_sequences, outer.non_sequences, 0, layout.non_sequences),
        ):
            for variable, name, own in zip(variables, names, axes, strict=True):
                yield Array(name, variable.type.dtype, lead, own)

    def _outputs(self) -> Iterator[Array]:
        layout = self.layout
        for letter, values, lead, axes in (
            ("h", self.result.states, 1, layout.states),
            ("c", self.result.carries, 0, layout.carries),
            ("z", self.result.outputs, 1, layout.outputs),
        ):
            for i, (value, own) in enumerate(zip(values, axes, strict=True)):
                yield Array(f"{letter}{i}", value.type.dtype, lead, own)
        if self.signature.has_stop:
            yield Array(TAKEN, "int64", 0, ())
        if self.places is not None:
            yield Array(WRONG, "int64", 0, ())

    @property
    def state_bytes(self) -> int:
        kept = [tap for i, taps in enumerate(self.inner.taps)
                for tap in taps[:1] * self.signature.depths[i]]  # fmt: skip
        kept += [self.inner.carries[i] for i in self.carried]
        return sum(max(8, np.dtype(value.type.dtype).itemsize) for value in kept) or 8

    @property
    def summary_bytes(self) -> int:
        sizes = [
            sum(max(4, np.dtype(dtype).itemsize) for dtype in one.members)
            for one in self.composed or ()
        ]
        return sum(-(-size // 8) * 8 for size in sizes)

    def _block(self) -> tuple[int, int]:
        """Return how many threads a block has, and how many steps each of them at a time."""
        if self.composed is None:
            return 256, 1
        stored = [self.result.states[i] for i in self.traced] + self.result.outputs
        rows = _struct_bytes(self.inner.rows)
        size = max(rows, _struct_bytes(stored), 4)
        choices = [items for items in (16, 8, 4, 2) if items * rows <= ROWS or items == 2]
        for threads in (256, 128, 64):
            summaries = (threads + threads // 8 + 2 * (threads // 8 + LANES)) * self.summary_bytes
            least = max(16 * len(self.sums) * threads, summaries)
            fixed = (threads + LANES) * self.state_bytes + LANES * self.summary_bytes + 1024
            for items in choices:
                if fixed + max(threads * (items + 1) * size, least) <= SHARED:
                    if items >= min(8, choices[0]) or threads == 64:
                        return threads, items
                    break
        self.composed = None
        return 256, 1

    def resident(self) -> int:
        """Return how many threads a multiprocessor shall hold: they share its registers."""
        stored = [self.result.states[i] for i in self.traced] + self.result.outputs
        each = self.items * (_struct_bytes(self.inner.rows) + _struct_bytes(stored))
        return 768 if each <= LIGHT else 512

    # The whole

    def units(self) -> list[str]:
        """Return what can be compiled apart: the kernels of some schedules."""
        if self.signature.has_stop:
            return ["until"]
        return ["serial"] if self.composed is None else ["serial", "walk", "look_back"]

    def kernels(self, unit: str) -> dict[str, str]:
        """Return the kernels of a unit: for each name, what a thread or a block does."""
        found = {name: call for name, call in KERNELS.items() if name in UNITS[unit]}
        for k in range(len(self.sums) + len(self.summed)):
            found[f"sum_{k}"] = f"BLOCK_KERNEL(sum_{k}, scanlib_sum<Sum{k}>(p, block))"
            short = f"scanlib_short_sum<Sum{k}>(p, index)"
            found[f"short_sum_{k}"] = f"FLAT_KERNEL(short_sum_{k}, {short})"
        return found

    def write(self, unit: str) -> str:
        """Return the translation unit of some schedules."""
        head = [
            f"#define SCANLIB_THREADS {self.threads}",
            f"#define SCANLIB_ITEMS {self.items}",
            f"#define SCANLIB_ITEM_BITS {self.items.bit_length() - 1}",
            f"#define SCANLIB_LANES {LANES}",
            f"#define SCANLIB_RESIDENT {self.resident()}",
            template("device"),
            *([template("complex")] if self.has_complex() else []),
            self.unit.text(),
            self.parameters.struct(),
            template("until" if self.signature.has_stop else "serial"),
            template("sums"),
        ]
        head += [template(name) for name in TEMPLATES[unit]]
        calls = [f"SCANLIB_{kernel}" for kernel in self.kernels(unit).values()]
        return "\n".join([*head, self.loop, *calls, ""])

    def _loop(self) -> str:
        """Return the struct of the loop, and those of its sums."""
        with self.source.block("struct Loop"):
            write_channel(self)
            write_fixed(self)
            write_rows(self)
            write_results(self)
            self.write_state()
            SumWriter(self).write_members()
            self.write_step()
            if self.composed is not None:
                SummaryWriter(self, self.composed).write()
        self.source.lines[-1] += ";"
        SumWriter(self).write_results()
        return self.source.text()

    def has_complex(self) -> bool:
        variables = [*self.graph.inputs, *self.graph.variables, *self.graph.outputs]
        return any(variable.type.dtype.startswith("complex") for variable in variables)

    # What a channel keeps

    def struct(self, name: str, members: list[tuple[str, str]]) -> None:
        text = " ".join(f"{kind} {member};" for kind, member in members)
        self.source.line(f"struct {name} {{ {text} }};")

    def fetched(self, name: str, row: str = "") -> str:
        """Return the text that reads an item of an input of the loop."""
        array = self.arrays[name]
        place = f"l.{name} + ({row}) * l.{name}_t" if row else f"l.{name}"
        return f"{item_type(array.dtype)}(scanlib_fetch<{memory_type(array.dtype)}>({place}))"

    def stored(self, name: str, row: str, value: str) -> str:
        """Return the statement that writes an item of a result."""
        array = self.arrays[name]
        kind = (item_type if name in whole_sums(self) else memory_type)(array.dtype)
        place = f"l.{name} + ({row}) * l.{name}_t" if row else f"l.{name}"
        return f"*({kind} *)({place}) = {kind}({value});"

    # Past values and carries

    def past(self) -> Iterator[tuple[int, int, str]]:
        """Yield all past values: the state, how many steps back, and the row of ``K`` rows."""
        for i, depth in enumerate(self.signature.depths):
            for k in range(1, depth + 1):
                yield i, k, str(k - 1 if self.signature.reverse else depth - k)

    def write_state(self) -> None:
        outer, line = self.plan.outer, self.source.line
        kinds = [taps[0].type.dtype for taps in self.inner.taps]
        members = [(item_type(kinds[i]), f"r{i}_{k}") for i, k, _ in self.past()]
        members += [(item_type(self.inner.carries[i].type.dtype), f"c{i}") for i in self.carried]
        if self.places is not None:
            members += [("int64_t", name) for name in ("step", "wrong_step", "wrong_index")]
        self.struct("State", members)
        head = "static void start(const Channel &l, int64_t steps, State &s, bool write)"
        with self.source.block(f"SCANLIB_METHOD {head}"):
            for i, k, row in self.past():
                line(f"s.r{i}_{k} = {self.fetched(outer.initials[i], row)};")
            for i in self.carried:
                line(f"s.c{i} = {self.fetched(outer.carries[i])};")
            if self.places is not None:
                line("s.step = s.wrong_index = 0;")
                line("s.wrong_step = -1;")
            line("if (!write) return;")
            for i, k, row in self.past():
                if i in self.traced:
                    place = f"steps + {row}" if self.signature.reverse else row
                    line(self.stored(f"h{i}", place, f"s.r{i}_{k}"))
        with self.source.block(
            "SCANLIB_METHOD static void finish(const Channel &l, const State &s)"
        ):
            for i, k, row in self.past():
                if i not in self.traced:
                    line(self.stored(f"h{i}", row, f"s.r{i}_{k}"))
            for i in self.carried:
                line(self.stored(f"c{i}", "", f"s.c{i}"))
            for k, name in enumerate(("wrong_step", "wrong_index") if self.places else ()):
                line(f"((int64_t *)l.{WRONG})[{k}] = s.{name};")
        if self.signature.has_stop:
            head = "SCANLIB_METHOD static void taken(const Channel &l, int64_t steps)"
            line(f"{head} {{ {self.stored(TAKEN, '', 'steps')} }}")

    # One step

    def bind(self, code: Code, inputs: list[Variable], outputs: list[Variable]) -> None:
        """Say where the inputs of the body, or of a copy of it, are that some values need."""
        inner, needed = self.signature.split_body_inputs(inputs), loaded(outputs)
        pairs = [(row, f"x.v{k}") for k, row in enumerate(inner.rows)]
        for i, taps in enumerate(inner.taps):
            pairs += [
                (tap, f"s.r{i}_{-offset}")
                for offset, tap in zip(self.signature.taps[i], taps, strict=True)
            ]
        pairs += [(inner.carries[i], f"s.c{i}") for i in self.carried]
        pairs += [(value, f"w.w{k}") for k, value in enumerate(inner.non_sequences)]
        for variable, text in pairs:
            if variable in needed:
                code.bind(variable, text)

    def write_step(self) -> None:
        line, result = self.source.line, self.result
        head = "const Fixed &w, const Rows &x, State &s, Sums &sums, Results &y"
        with self.source.block(f"SCANLIB_METHOD static bool step({head})"):
            code = Code(self.unit, "scanlib_step")
            stop = [] if result.stop is None else [result.stop]
            outputs = [*result.states, *result.carries, *result.outputs, *stop]
            self.bind(code, self.graph.inputs, outputs)
            special = None if self.places is None else self.places.bind(code)
            code.scalars.emit(outputs, *([] if special is None else [special]))
            numbers = code.numbers(outputs)
            if stop:
                numbers[-1] = code.scalars.truth(numbers[-1])
            noted = [] if self.places is None else self.places.noted(code)
            texts = iter(code.write(self.source, [*numbers, *noted]))
            for i, depth in enumerate(self.signature.depths):
                for k in range(depth, 1, -1):
                    line(f"s.r{i}_{k} = s.r{i}_{k - 1};")
                line(f"s.r{i}_1 = {next(texts)};")
                if i in self.traced:
                    line(f"y.h{i} = s.r{i}_1;")
            for i in range(len(result.carries)):
                target = f"sums.s{i} +=" if i in self.sums else f"s.c{i} ="
                line(f"{target} {next(texts)};")
            for i in range(len(result.outputs)):
                line(f"y.z{i} = {next(texts)};")
            line(f"const bool ends = {next(texts) if stop else 'false'};")
            if self.places is not None:
                line(f"s.wrong_step = {next(texts)};")
                line(f"s.wrong_index = {next(texts)};")
                line("s.step++;")
            line("return ends;")


def _struct_bytes(members: list[Variable]) -> int:
    """Return a bound of the size of a struct, gaps included."""
    sizes = [np.dtype(member.type.dtype).itemsize for member in members]
    return len(sizes) * max([4, *sizes])


def template(name: str) -> str:
    """Return a part of the template."""
    return files("scanlib.backends.cuda").joinpath("template", f"{name}.cuh").read_text()
