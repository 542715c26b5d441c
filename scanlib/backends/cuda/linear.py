r"""The kernels of matrix recurrences: what is written for the templates, and how they are launched.

``h_t = A_t ⊗ h_{t-1} + b_t`` in the forms of `ops.lowered.linear_scan`. A matrix at the right is
its transpose at the left of the transposed state, so that each column of the state, for each item
of the batch, is one vector ``x`` of `size` items, and ``x_t = A_t x_{t-1} + b_t``. The arrays of a
kernel are ``a``, the matrix; ``b``, the offset; ``x``, the initial state; ``k``, the mask; and
``y``, the result; those that kernels write for one another are said in the template. Beside the
channels' axes, those of the batch and one for the columns of the state, they have one for the rows
of matrices and the items of vectors, and one for the columns of matrices.

Up to `REGISTERS` items, one thread walks a vector; up to `LARGEST`, a thread for each item
(``linear.cuh``).

Several steps are one map: its columns are what the steps make of the identity's columns, and, in
the real semiring, of zero with the offsets. In the other semirings offsets are factors, so a map
has no constant. Composed items may leave the range of their type where single steps do not, so the
state that a map gives is compared with what single steps give. They agree where NaN and infinity
are at the same places, and every other item differs by less than five eighths of the digits of its
own scale, the larger one of what it was after the last two steps. So an item that is small beside
others is not lost, and one that passes through zero is no alarm. Items that are near overflow must
be equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import inf, prod
from typing import Any

import numpy as np
from pytensor.configdefaults import config
from pytensor.graph.op import Op

from scanlib.backends.cuda.launch import Call, KernelLoop, Kernels
from scanlib.backends.cuda.parameters import Array, Parameters
from scanlib.backends.cuda.printer import template
from scanlib.backends.cuda.scalar_code import Code, ScalarUnit, computed, item_type, memory_type
from scanlib.backends.cuda.schedule import choose_linear
from scanlib.kernels.elementary import FORMATS, vector_function
from scanlib.kernels.language import BOOL, Type, Value
from scanlib.kernels.linalg.semiring_products import better
from scanlib.kernels.printers.c import Source, literal
from scanlib.kernels.scalars import Number, each_part, parts, parts_of, times_plus
from scanlib.kernels.spans import load_number
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.errors import LoopError
from scanlib.ops.lowered.elemwise_scan import Axes, ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan, Parts
from scanlib.recurrences import losses

Shape = tuple[int, ...]
REGISTERS = 8  # items of a vector
REGISTER_BYTES = 512  # of a matrix that one thread keeps
LARGEST = 64
LARGEST_BYTES = 512  # of a row of the matrix
HELD_BYTES = 512  # of what a thread keeps, and of what it reads before it is needed
DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


def check_linear(dtype: str, size: int = 1) -> None:
    """Raise `NoCCodeError` if a matrix recurrence has no kernel; the matrix has `size` rows."""
    if dtype not in DTYPES:
        raise NoCCodeError(f"a matrix recurrence of dtype {dtype} has no CUDA kernel")
    most = largest_size(dtype)
    if size > most:
        raise NoCCodeError(f"a {dtype} matrix of more than {most} rows has no CUDA kernel")


def largest_size(dtype: str) -> int:
    """Return how many rows a matrix may have."""
    return min(LARGEST, LARGEST_BYTES // item_bytes(dtype))


def item_bytes(dtype: str) -> int:
    """Return the size of an item as a kernel computes with it."""
    return max(4, np.dtype(dtype).itemsize)


@dataclass(frozen=True)
class LinearGeometry:
    """The sizes of one call: rows of the matrix, columns of the state (1 for vectors), results."""

    steps: int
    size: int
    columns: int
    batch: Shape
    outputs: list[Shape]

    @property
    def vectors(self) -> int:
        return self.columns * prod(self.batch)


class LinearKernels(Kernels):
    """The kernels for matrices of `size` rows, if there are any. `group` threads walk one vector;
    from `columns` vectors on, a chunk is walked to know what it does."""

    def __init__(self, op: LinearScan, size: int) -> None:
        check_linear(op.dtype, size)
        self.op, self.dtype, self.size = op, op.dtype, size
        self.steps = op.coefficient == "steps"
        self.batch = op.batch_rank
        self.batched = bool(op.matrix_batch_rank)
        is_small = size <= REGISTERS and size**2 * item_bytes(self.dtype) <= REGISTER_BYTES
        self.group = 1 if is_small else 1 << (size - 1).bit_length()
        self.columns = size + (op.semiring == "real" and op.has_offset)
        self.threads = max(32, self.group)
        sizes = self.batch + 1
        self.item_axes = sizes, sizes + 1
        self.parameters = Parameters(sizes, *self._arrays(), reverse=op.reverse)
        names = ["walk", "probe", "carry", "mend"]
        super().__init__(self._source(), names, self.parameters)

    def ahead(self, steps: bool, offset: bool) -> int:
        """Return how many steps, with a matrix or an offset, are read before they are needed."""
        matrix, row = self.size**2, self.size
        if self.group != 1:
            matrix, row = self.size, 1  # one row, and one item
        left = HELD_BYTES // item_bytes(self.dtype) - (not steps) * matrix
        return min(8, left // (2 * max(steps * matrix + offset * row, 1)))

    def _arrays(self) -> tuple[list[Array], list[Array], list[Array]]:
        op, dtype, (i, j) = self.op, self.dtype, self.item_axes
        batch: Axes = tuple(range(self.batch))
        turned, column = op.side == "right", self.batch
        square: Axes = (j, i) if turned else (i, j)
        state: Axes = (i,) if op.vector else (column, i) if turned else (i, column)
        lead = int(self.steps)
        matrix = Array("a", dtype, lead, (*(batch if self.batched else ()), *square))
        offset, initial = (Array(name, dtype, 1, (*batch, *state)) for name in "bx")
        mask = Array("k", "bool", 0, square) if op.has_mask else None
        given = Parts(None, matrix, offset if op.has_offset else None, initial, mask)
        inputs: list[Array] = op.options.in_order(given)
        vectors: Axes = (*batch, self.batch)
        works = [
            Array("m", computed(dtype), 1, (*vectors, i, j)),
            Array("s", computed(dtype), 1, (*vectors, i)),
            Array("e", computed(dtype), 1, (*vectors, i)),
            Array("scale", parts_of(computed(dtype)) or computed(dtype), 1, (*vectors, i)),
            Array("near", "int32", 0, vectors),
        ]
        return inputs, [Array("y", dtype, 1, (*batch, *state))], works

    def _source(self) -> str:
        """Return the translation unit."""
        op, real = self.op, self.op.semiring == "real"
        products = RowProducts(op.semiring, self.dtype, self.size, op.has_mask)
        source = Source()
        with source.struct("Recurrence"):
            source.line(f"typedef {item_type(self.dtype)} Item;")
            source.line(f"typedef {memory_type(self.dtype)} Outer;")
            source.line(f"typedef {item_type(products.real)} Real;")
            for name, value in (("zero", products.zero), ("unit", float(real))):
                text = literal(value, products.real)
                source.line(f"SCANLIB_METHOD static Item {name}() {{ return Item({text}); }}")
            alone = self.group == 1
            sizes = {"SIZE": self.size, "GROUP": self.group, "ALONE": alone}
            sizes |= {"ROWS": self.size if alone else 1, "LINEAR": real}
            self.write_numbers(source, sizes | dict(zip("IJ", self.item_axes, strict=True)))
            source.lines += products.source.lines
        walk: dict[str, int | str] = {
            "STEPS": self.steps, "OFFSET": op.has_offset, "MASKED": op.has_mask, "COLUMNS": 1,
            "TRACED": not op.untraced, "MATRIX": "a", "ADDED": "b", "RESULT": "y",
        }  # fmt: skip
        self.write_kernel(source, "Walk", "Outer", walk)
        probe = walk | {"PROBES": 1, "COLUMNS": self.columns, "TRACED": 0}
        self.write_kernel(source, "Probe", "Outer", probe)
        carry = walk | {"CARRIES": 1, "STEPS": 1, "OFFSET": self.columns > self.size}
        carry |= {"MASKED": 0, "TRACED": 1, "MATRIX": "m", "ADDED": "m", "RESULT": "s"}
        self.write_kernel(source, "Carry", "Item", carry | {"ADDED_COLUMN": self.size})
        for name in ("walk", "probe", "carry"):
            call = f"scanlib_walk<{name.capitalize()}>(p, block)"
            source.line(f"SCANLIB_BLOCK_KERNEL({name}, {call})")
        source.line("SCANLIB_BLOCK_KERNEL(mend, scanlib_mend<Walk>(p, block))")
        parts = [
            f"#define SCANLIB_THREADS {self.threads}",
            template("device"),
            *([template("complex")] if self.dtype.startswith("complex") else []),
            self.parameters.struct(),
            products.unit.text(),
            *(template(name) for name in ("channel", "linear")),
        ]
        return "\n".join([*parts, source.text()])

    def write_kernel(
        self, source: Source, name: str, memory: str, options: dict[str, int | str]
    ) -> None:
        """Write what sets a kernel apart: the type of its items in memory, its arrays and steps."""
        ahead = self.ahead(bool(options["STEPS"]), bool(options["OFFSET"]))
        numbers = {"PROBES": 0, "CARRIES": 0, "ADDED_COLUMN": 0, "MASK": "k"}
        with source.struct(f"{name} : Recurrence"):
            source.line(f"typedef {memory} Memory;")
            self.write_numbers(source, numbers | options | {"AHEAD": ahead})

    def write_numbers(self, source: Source, numbers: dict[str, Any]) -> None:
        """Write numbers, and the places of arrays: 0 for one that is not there."""
        names = [array.name for array in self.parameters.arrays]
        places = {name: place for place, name in enumerate(names)}
        texts = [f"{name} = {int(places.get(value, 0) if isinstance(value, str) else value)}"
                 for name, value in numbers.items()]  # fmt: skip
        source.line(f"enum {{ {', '.join(texts)} }};")

    def call(
        self, sizes: LinearGeometry, strides: Sequence[tuple[int, ...]], processors: int
    ) -> Call:
        """Return how the kernels are called; see `KernelLoop.call`."""
        plan = choose_linear(sizes.steps, sizes.vectors, processors, self.group, self.columns)
        values = {
            "steps": sizes.steps,
            "channels": sizes.vectors,
            "chunk": plan.chunk,
            "chunks": plan.chunks,
        }
        axes = (*sizes.batch, sizes.columns)
        values |= {f"n{axis}": size for axis, size in enumerate(axes)}
        states = (plan.chunks if plan.chunks > 1 else 0, *axes, self.size)
        works: list[Shape] = [(*states, self.columns), states, states, states, axes]
        counts = {"walk": sizes.vectors * plan.chunks}
        if plan.chunks > 1:
            probed = sizes.vectors * (plan.chunks - 1) * self.columns
            counts = {"probe": probed, "carry": sizes.vectors, **counts, "mend": sizes.vectors}
        if not prod(sizes.outputs[0]):
            counts = {}
        each = self.threads // self.group
        jobs = [(name, -(-count // each), self.threads) for name, count in counts.items()]
        rows = [1 if own.name == "x" else sizes.steps for own in self.parameters.inputs]
        return self.prepared(values, strides, rows, sizes.outputs, works, jobs)


_kernels = lru_cache(maxsize=256)(LinearKernels)  # written once for each size


def kernels_of(op: Op) -> "KernelLoop | LinearLoop | None":
    """Return the kernels of a loop, None if it has none or flags turn them off."""
    wanted = config.scanlib__cuda and config.scanlib__perform == "auto"
    try:
        if wanted and isinstance(op, LinearScan):
            return LinearLoop(op)
        return KernelLoop(op) if wanted and isinstance(op, ElemwiseScan) else None
    except NoCCodeError:
        return None


class LinearLoop:
    """The kernels of a matrix recurrence, as `launch.KernelLoop` has those of an elementwise loop;
    `NoCCodeError` if it has none."""

    def __init__(self, op: LinearScan) -> None:
        check_linear(op.dtype)
        self.op = op

    def kernels(self, sizes: LinearGeometry) -> LinearKernels:
        """Return the kernels for matrices of a size."""
        return _kernels(self.op, max(sizes.size, 1))

    def sizes(self, shapes: Sequence[Shape], n_steps: int | None = None) -> LinearGeometry:
        """Return the sizes of a call, whose arguments are checked; see `KernelLoop.sizes`."""
        op, messages = self.op, self.op.messages()
        inputs = [*[n_steps] * op.has_n_steps, *shapes]
        lengths = [shape[0] for shape in op.signature.split_inputs(inputs).sequences]
        given, types = op.parts(inputs), op.row_types()
        steps, (first, *row) = messages.count_steps(n_steps, lengths), given.initial
        if steps or first or op.untraced:
            messages.check_initial_rows([first])
        if steps < op.required_steps:
            raise IndexError(messages.missing_steps())
        for pair in op.same_sizes():
            rows = [(getattr(given, name), getattr(types, name).ndim, axis) for name, axis in pair]
            left, right = (shape[len(shape) - rank :][axis] for shape, rank, axis in rows)
            if left != right:
                raise LoopError(op.sizes_differ(pair), left, right)
        batch, size, columns = tuple(row[: op.batch_rank]), row[op.batch_rank], 1
        if not op.vector:
            size, columns = row[-2:] if op.side != "right" else row[:-3:-1]
        check_linear(op.dtype, size)
        outputs = [(first if op.untraced or not first else steps + 1, *row)]
        return LinearGeometry(steps, size, columns, batch, outputs)

    def call(
        self, sizes: LinearGeometry, strides: Sequence[tuple[int, ...]], processors: int
    ) -> Call:
        """Return how the kernels are called; see `LinearKernels`."""
        return self.kernels(sizes).call(sizes, strides, processors)

    def results(self, given: Any, made: Sequence[Any], *more: Any) -> list[Any]:
        """Return what the kernels have written."""
        return list(made)

    def checked(self, results: list[Any], steps: int) -> list[Any]:
        """Return the results: all checks were made before."""
        return results


# The arithmetic of kernels


class RowProducts:
    """Writes functions of rows and vectors of `length` items, as methods of a recurrence; if
    `masked`, bits say which items of a row are there."""

    def __init__(self, semiring: str, dtype: str, length: int, masked: bool) -> None:
        self.semiring, self.length, self.masked = semiring, length, masked
        self.dtype = computed(dtype)
        self.real = parts_of(self.dtype) or self.dtype
        self.zero = {"real": 0.0, "min": inf}.get(semiring, -inf)
        self.unit, self.source = ScalarUnit(), Source()
        self.write_product()
        self.write_scale()
        self.write_agrees()

    def items(self, code: Code, name: str, dtype: str) -> list[Any]:
        pointer, kind = code.pointer(f"(char *){name}"), Type(self.real)
        itemsize = kind.itemsize * (2 if parts_of(dtype) else 1)
        return [
            load_number(code.writer, dtype, pointer, j * itemsize, 1) for j in range(self.length)
        ]

    def terms(self, code: Code) -> list[tuple[Any, ...]]:
        """Return the items of a row and of a vector."""
        arrays = [self.items(code, name, self.dtype) for name in ("a", "x")]
        return list(zip(*arrays, strict=True))

    def kept(self, code: Code, j: int, value: Any, other: Any) -> Any:
        """Return a value where item `j` is there, another one where it is not."""
        if not self.masked:
            return value
        w, bits = code.writer, code.parameter("kept", Type("uint64"))
        there = ((bits >> j) & 1).differs(0)
        return each_part(partial(w.select, there), value, other)

    def method(self, head: str, name: str) -> Code:
        self.source.line(f"SCANLIB_METHOD static {head} {{")
        return Code(self.unit, f"scanlib_{name}")

    def end(self, code: Code, results: list[Number], *targets: str) -> None:
        code.write(self.source, results, [*targets])
        self.source.line("}")

    def write_product(self) -> None:
        code = self.method("Item product(const Item *a, const Item *x, uint64_t kept)", "product")
        w, terms = code.writer, self.terms(code)
        if self.semiring == "real":
            total: Any = code.scalars.constant(0, self.dtype)
            for j, (a, x) in enumerate(terms):
                total = self.kept(code, j, times_plus(w, a, x, total), total)
            self.end(code, [total], "return")
            return
        sums = [a + x for a, x in terms]
        order = "min" if self.semiring == "min" else "max"
        most = reduce(lambda best, value: better(w, order, best, value), sums)
        if self.semiring == "log":  # shifted by the largest term, so that no exponential overflows
            exp, log = (vector_function(name, self.dtype, 1) for name in ("exp", "log"))
            shift = w.select(abs(most) < inf, most, 0.0)
            total = reduce(lambda x, y: x + y, [w.call(exp, value - shift)[0] for value in sums])
            most = shift + w.call(log, total)[0]
        self.end(code, [most], "return")

    def write_scale(self) -> None:
        """Write the larger one of a scale and of an item that is far from overflow."""
        code = self.method("Real scale(Item x, Real most)", "scale")
        new, most = losses.size(code.read("x", self.dtype)), code.read("most", self.real)
        larger = (new > most) & (new < losses.LARGE[self.real])
        self.end(code, [code.writer.select(larger, new, most)], "return")

    def write_agrees(self) -> None:
        """Write whether two items are the same, but for rounding at their scale."""
        code = self.method("bool agrees(Item x, Item y, Real scale)", "agrees")
        scale: Any = code.read("scale", self.real)
        room = scale * 2.0 ** -(FORMATS[self.real].mantissa * 5 // 8)
        good: Value = code.writer.constant(True, BOOL)
        for x, y in zip(*(parts(code.read(name, self.dtype)) for name in "xy"), strict=True):
            same = x.equals(y) | (x.differs(x) & y.differs(y))
            good = good & (same | (abs(x - y) <= room))
        self.end(code, [good], "return")
