"""Writes a loop for the CUDA template: one struct with what a channel keeps, and one step.

The template (`scanlib/backends/cuda/template`) holds all schedules. It asks of a loop ``L``

``Fixed``, ``fix``
    the non-sequences of a channel;
``Rows``, ``load`` and ``Results``, ``store``
    what one step reads from sequences, and what it writes;
``State``, ``start``, ``finish``
    past values and carries, before the first step and after the last one;
``Sums``, ``add``, ``keep``
    what a channel sums over the steps of a chunk; the linker adds these up;
``step``
    one step, with a function of the kernel language; whether the loop ends after it;
``Summary``, ``lift``, ``compose``, ``extend``, ``apply``, ``moderate``
    several steps as one function, for loops whose recurrences compose.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.resources import files

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from scanlib._compat import thaw_graph
from scanlib.backends.cuda.composition import SummaryWriter, composed_recurrences
from scanlib.backends.cuda.parameters import Array, Parameters
from scanlib.backends.cuda.scalar_code import Code, ScalarUnit, computed, item_type, memory_type
from scanlib.kernels.printers.c import Source
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.channel_plan import ChannelPlan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan

DEPTH = 8  # of states whose past values are kept in registers
KINDS = "biufc"
SHARED = 44 * 1024  # bytes of shared memory of a block: all devices have that much
ROWS = 256  # bytes of the rows that a thread keeps, in registers
LIGHT = 192  # bytes of rows and results with which a thread takes few registers
LANES = 32
TEMPLATES = {"serial": (), "walk": ("walk",), "look_back": ("walk", "look_back")}
KERNELS = {
    "serial": {
        "serial_4": "FLAT_KERNEL(serial_4, (scanlib_serial<Loop, 4>(p, index)))",
        "serial_16": "FLAT_KERNEL(serial_16, (scanlib_serial<Loop, 16>(p, index)))",
    },
    "walk": {"walk": "BLOCK_KERNEL(walk, scanlib_walk<Loop>(p, block))"},
    "look_back": {
        "reset": "FLAT_KERNEL(reset, scanlib_reset(p, index))",
        "look_back": "CONCURRENT_KERNEL(look_back, 512, scanlib_look_back<Loop>(given))",
        "look_back_dense": "CONCURRENT_KERNEL(look_back_dense, SCANLIB_RESIDENT, "
        "Params p = given; Loop::dense(p); scanlib_look_back<Loop>(p))",
        "mend": "FLAT_KERNEL(mend, scanlib_mend<Loop>(p, index))",
    },
}
Member = tuple[str, str, str]  # its name in a struct, its array, its row
WORKS = ("summaries", "states", "flags")  # of blocks that look back
TAKEN = "taken"  # the number of steps of a loop that ends by a condition, its last result
# The dtypes in which a channel collects sums, wider than the items are.
TOTALS = {"f": "float64", "i": "int64", "u": "uint64", "c": "complex128"}


class LoopWriter:
    """Writes the translation units of one loop: one for schedules that share code.

    `composed` is None for loops that are walked by one thread per channel only. `totals` are
    results of which kernels write terms, with all axes of the channels and one of chunks or steps
    before them; it says how many axes of these the result has: it sums over the others. A block
    that shares steps has `threads`, with `items` steps of each at a time. `NoCCodeError` if the
    loop has no kernel.
    """

    def __init__(self, op: ElemwiseScan) -> None:
        self.op = op
        self.signature, self.layout = op.signature, op.layout
        self.graph = thaw_graph(op.body)
        self.inner = self.signature.split_body_inputs(self.graph.inputs)
        self.result = self.signature.split_body_outputs(self.graph.outputs)
        self.plan = ChannelPlan(self.signature, self.layout, self.inner, self.result)
        self._check_supported()
        self.composed = None if self.signature.has_stop else composed_recurrences(op)
        self.source, self.unit = Source(), ScalarUnit()
        self.loaded = set(ancestors(self.graph.outputs))
        self.sums = [i for i, is_sum in enumerate(self.layout.sums) if is_sum]
        self.carried = [i for i, is_sum in enumerate(self.layout.sums) if not is_sum]
        self.traced = [i for i, gone in enumerate(self.signature.untraced) if not gone]
        self.totals: dict[str, int] = {}
        self.parameters = Parameters(
            self.layout.ndim,
            *self._given(),
            [Array(name, "uint8", 0, ()) for name in WORKS if self.composed is not None],
            reverse=self.signature.reverse,
        )
        self.arrays = {array.name: array for array in self.parameters.arrays}
        self.threads, self.items = self._block()
        try:
            self.loop = self._loop()
        except NoKernelError as error:
            raise NoCCodeError(str(error)) from error

    def _check_supported(self) -> None:
        """Raise an error if the loop has no kernel."""
        if not self.plan.has_same_channels():
            raise NoCCodeError("channels that need one another have no CUDA kernel")
        if any(depth > DEPTH for depth in self.signature.depths):
            raise NoCCodeError(f"a state of more than {DEPTH} past values has no CUDA kernel")
        for variable in (*self.graph.inputs, *self.graph.outputs):
            dtype = getattr(variable.type, "dtype", None)
            if dtype is None or np.dtype(dtype).kind not in KINDS:
                raise NoCCodeError(f"a value of type {variable.type} has no CUDA kernel")
        if any(target.adds and target.value.type.dtype == "bool" for target in self.plan.targets):
            raise NoCCodeError("a sum of truth values has no CUDA kernel")

    # Arrays, and the sizes of what a thread keeps

    def _given(self) -> tuple[list[Array], list[Array]]:
        """Return the arrays of inputs and of results, in order."""
        inputs, outputs = [], []
        for name, dtype, lead, axes in self.plan.arrays():
            if name[0] != "x":
                outputs.append(self._written(Array(name, dtype, lead, axes)))
                continue
            inputs.append(Array(name, dtype, lead, axes))
        if self.signature.has_stop:
            outputs.append(Array(TAKEN, "int64", 0, ()))
        return sorted(inputs, key=lambda array: int(array.name[1:])), outputs

    def _written(self, array: Array) -> Array:
        """Return what kernels write for a result: itself, or for all channels what it sums."""
        number = int(array.name[1:])
        adds = array.name[0] == "c" and self.layout.sums[number]
        if not adds and not (array.name[0] == "z" and self.layout.output_reductions[number]):
            return array
        kept = [axis for _, axis in array.kept]
        others = [axis for axis in range(self.layout.ndim) if axis not in kept]
        self.totals[array.name] = len(kept)
        return Array(array.name, computed(array.dtype), 1, (*kept, *others))

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
        rows, size = _struct_bytes(self.inner.rows), max(self._row_bytes(), 4)
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

    def _row_bytes(self, together: bool = False) -> int:
        """Return the size of what a step reads or writes, or of both."""
        stored = [self.result.states[i] for i in self.traced] + self.result.outputs
        sizes = _struct_bytes(self.inner.rows), _struct_bytes(stored)
        return sum(sizes) if together else max(sizes)

    def _timed(self) -> Iterator[str]:
        """Yield the arrays of which every step has a row."""
        yield from self.plan.outer.sequences
        yield from (f"h{i}" for i in self.traced)
        yield from (f"z{i}" for i in range(self.signature.n_outputs))

    # The whole

    def units(self) -> list[str]:
        """Return what can be compiled apart: the kernels of some schedules."""
        return ["serial"] if self.composed is None else list(TEMPLATES)

    def write(self, unit: str) -> str:
        """Return the translation unit of some schedules."""
        # So many threads a multiprocessor shall hold: they share its registers.
        is_light = self.items * self._row_bytes(together=True) <= LIGHT
        variables = [*self.graph.inputs, *self.graph.variables, *self.graph.outputs]
        has_complex = any(v.type.dtype.startswith("complex") for v in variables)
        numbers = {
            "THREADS": self.threads,
            "ITEMS": self.items,
            "ITEM_BITS": self.items.bit_length() - 1,
            "LANES": LANES,
            "RESIDENT": 768 if is_light else 512,
        }
        parts = [
            *(f"#define SCANLIB_{name} {number}" for name, number in numbers.items()),
            template("device"),
            *([template("complex")] if has_complex else []),
            self.unit.text(),
            self.parameters.struct(),
            *(template(name) for name in ("channel", "serial", *TEMPLATES[unit])),
            self.loop,
            *(f"SCANLIB_{kernel}" for kernel in KERNELS[unit].values()),
        ]
        return "\n".join([*parts, ""])

    def _loop(self) -> str:
        with self.source.struct("Loop"):
            self.write_fixed()
            self.write_rows()
            self.write_results()
            self.write_state()
            self.write_sums()
            self.write_step()
            if self.composed is not None:
                self.write_dense()
                SummaryWriter(self, self.composed).write()
        return self.source.text()

    def method(self, head: str) -> AbstractContextManager[None]:
        return self.source.block(f"SCANLIB_METHOD static {head}")

    @contextmanager
    def function(self, head: str) -> Iterator[Code]:
        """Write a method that calls a function of the kernel language."""
        with self.method(head):
            yield Code(self.unit, f"scanlib_{head[: head.index('(')].split()[-1]}_function")

    def members(self, name: str, members: list[tuple[str, str]]) -> None:
        """Write a struct."""
        text = " ".join(f"{kind} {member};" for kind, member in members)
        self.source.line(f"struct {name} {{ {text} }};")

    # Items of arrays

    def write_struct(self, name: str, items: list[Member]) -> None:
        members = [(item_type(self.arrays[array].dtype), member) for member, array, _ in items]
        self.members(name, members)

    def read_all(self, target: str, items: list[Member]) -> None:
        for member, array, row in items:
            dtype, place = self.arrays[array].dtype, _item_place(array, row)
            text = f"{item_type(dtype)}(scanlib_fetch<{memory_type(dtype)}>({place}))"
            self.source.line(f"{target}.{member} = {text};")

    def store_all(self, source: str, items: list[Member]) -> None:
        for member, array, row in items:
            kind = memory_type(self.arrays[array].dtype)
            place = _item_place(array, row)
            self.source.line(f"*({kind} *)({place}) = {kind}({source}.{member});")

    def read_items(self, variables: list[Variable], names: list[str]) -> list[tuple[int, str]]:
        """Return which inputs have an item of the channel that is read, and their arrays: others
        are there for their sizes."""
        pairs = enumerate(zip(variables, names, strict=True))
        return [(k, name) for k, (variable, name) in pairs if variable in self.loaded]

    def write_fixed(self) -> None:
        names = self.read_items(self.inner.non_sequences, self.plan.outer.non_sequences)
        items = [(f"w{k}", name, "0") for k, name in names]
        self.write_struct("Fixed", items)
        with self.method("void fix(const Params &p, const scanlib_channel &l, Fixed &w)"):
            self.read_all("w", items)

    def write_rows(self) -> None:
        names = self.read_items(self.inner.rows, self.plan.outer.sequences)
        items = [(f"v{k}", name, "t") for k, name in names]
        self.write_struct("Rows", items)
        with self.method("void load(const scanlib_channel &l, int64_t t, Rows &x)"):
            self.read_all("x", items)

    def write_results(self) -> None:
        depths = self.signature.depths
        items = [(f"h{i}", f"h{i}", f"(t + {depths[i]})") for i in self.traced]
        items += [(f"z{i}", f"z{i}", "t") for i in range(self.signature.n_outputs)]
        self.write_struct("Results", items)
        with self.method("void store(const scanlib_channel &l, int64_t t, const Results &y)"):
            self.store_all("y", items)

    def write_dense(self) -> None:
        """Write what is known of one channel without gaps in time."""
        with self.method("void dense(Params &p)"):
            self.source.line("p.channels = p.lanes = 1;")
            self.source.line("p.lane_bits = 0;")
            self.source.line("p.chunk = SCANLIB_THREADS * SCANLIB_ITEMS;")
            for name in self._timed():
                size = np.dtype(self.arrays[name].dtype).itemsize
                stride = -size if self.signature.reverse else size
                self.source.line(f"p.at[Params::{name}].t = {stride};")

    # Past values and carries

    def past(self) -> Iterator[tuple[int, int, int]]:
        """Yield all past values: the state, how many steps back, and the row of ``K`` rows."""
        for i, depth in enumerate(self.signature.depths):
            for k in range(1, depth + 1):
                yield i, k, depth - k

    def write_state(self) -> None:
        outer, line = self.plan.outer, self.source.line
        given = [(f"r{i}_{k}", outer.initials[i], str(row)) for i, k, row in self.past()]
        given += [(f"c{i}", outer.carries[i], "0") for i in self.carried]
        self.write_struct("State", given)
        head = "const scanlib_channel &l, State &s, bool write"
        with self.method(f"void start({head})"):
            self.read_all("s", given)
            line("if (!write) return;")
            self.store_all("s", [
                (f"r{i}_{k}", f"h{i}", str(row)) for i, k, row in self.past() if i in self.traced
            ])  # fmt: skip
        with self.method("void finish(const scanlib_channel &l, const State &s, int64_t taken)"):
            last = [(f"r{i}_{k}", f"h{i}", str(row))
                    for i, k, row in self.past() if i not in self.traced]  # fmt: skip
            self.store_all("s", last + [(f"c{i}", f"c{i}", "0") for i in self.carried])
            if self.signature.has_stop:
                line(f"*(int64_t *)l.at[Params::{TAKEN}] = taken;")

    # Sums

    def write_sums(self) -> None:
        """Write the partial sums of a thread, and how they are added and kept."""
        items = [(f"s{i}", f"c{i}", "chunk") for i in self.sums]
        kinds = [np.dtype(self.result.carries[i].type.dtype).kind for i in self.sums]
        self.members(
            "Sums", [(item_type(TOTALS[k]), m) for k, (m, *_) in zip(kinds, items, strict=True)]
        )
        self.source.line(f"enum {{ SUMS = {int(bool(items))} }};")
        with self.method("void add(Sums &sums, const Sums &other)"):
            for member, _, _ in items:
                self.source.line(f"sums.{member} += other.{member};")
        with self.method("void keep(const scanlib_channel &l, int64_t chunk, const Sums &sums)"):
            self.store_all("sums", items)

    # One step

    def bind(self, code: Code, inputs: list[Variable], outputs: list[Variable]) -> None:
        """Say where the inputs of the body, or of a copy of it, are that some values need."""
        inner, needed = self.signature.split_body_inputs(inputs), set(ancestors(outputs))
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
        with self.function(f"bool step({head})") as code:
            stop = [] if result.stop is None else [result.stop]
            outputs = [*result.states, *result.carries, *result.outputs, *stop]
            self.bind(code, self.graph.inputs, outputs)
            code.scalars.emit(outputs)
            numbers = code.numbers(outputs)
            if stop:
                numbers[-1] = code.scalars.truth(numbers[-1])
            for i, k, _ in self.past():
                if k > 1:
                    line(f"const auto p{i}_{k} = s.r{i}_{k - 1};")
            targets = [f"s.r{i}_1 =" for i in range(len(result.states))]
            targets += [f"sums.s{i} +=" if i in self.sums else f"s.c{i} ="
                        for i in range(len(result.carries))]  # fmt: skip
            targets += [f"y.z{i} =" for i in range(len(result.outputs))]
            targets += ["const bool ends ="] * len(stop)
            code.write(self.source, numbers, targets)
            for i, k, _ in self.past():
                if k > 1:
                    line(f"s.r{i}_{k} = p{i}_{k};")
            for i in self.traced:
                line(f"y.h{i} = s.r{i}_1;")
            line(f"return {'ends' if stop else 'false'};")


def _item_place(name: str, row: str) -> str:
    """Return the text of the address of a channel's item in a row."""
    time = "" if row == "0" else f" + {row} * l.t[Params::{name}]"
    return f"l.at[Params::{name}]{time}"


def _struct_bytes(members: list[Variable]) -> int:
    """Return a bound of the size of a struct, gaps included."""
    sizes = [np.dtype(member.type.dtype).itemsize for member in members]
    return len(sizes) * max([4, *sizes])


def template(name: str) -> str:
    return files("scanlib.backends.cuda").joinpath("template", f"{name}.cuh").read_text()
