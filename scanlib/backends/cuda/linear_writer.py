r"""Writes a matrix recurrence for its CUDA templates: where the items of vectors are.

``h_t = A_t ⊗ h_{t-1} + b_t`` in the forms of `ops.lowered.linear_scan`. A matrix at the right is
its transpose at the left of the transposed state, so that each column of the state, for each item
of the batch, is one vector ``x`` of `size` items, and ``x_t = A_t x_{t-1} + b_t``. Numbers of a
kernel (see `parameters`) are named by array and axis:

=====  =======================  =====  ============================================
array  is                       axis   runs along
=====  =======================  =====  ============================================
``a``  the matrix               ``0``  the rows of the matrix, the items of a vector
``r``  the one at the right     ``1``  the columns of the matrix
``b``  the offset               ``2``  the columns of the state
``x``  the initial state        ``3``  a batch, and those after it; where there are
``k``  the mask                        matrices at both sides, the rows of ``r``
``y``  the result               ``t``  time
=====  =======================  =====  ============================================

Up to `REGISTERS` items, one thread walks a vector (``linear.cuh``); up to `LARGEST`, a thread for
each item (``linear_rows.cuh``). With matrices at both sides one block walks the state
(``linear_both.cuh``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scanlib.backends.cuda.cpp_lines import Source
from scanlib.backends.cuda.parameters import Array, Parameters
from scanlib.backends.cuda.printer import SHARED, template
from scanlib.backends.cuda.scalar_code import computed, item_type, memory_type
from scanlib.kernels.elementary import vector_function
from scanlib.kernels.printers.c import print_functions
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.elemwise_scan import Axes
from scanlib.ops.lowered.linear_scan import LinearScan

REGISTERS = 8  # items of a vector
REGISTER_BYTES = 512  # of a matrix that one thread keeps
LARGEST = 64
LARGEST_BYTES = 512  # of a row of the matrix
HELD_BYTES = 512  # of what a thread keeps, and of what it reads before it is needed
DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


def check_linear(op: LinearScan, dtype: str, size: int = 1, width: int = 1) -> None:
    """Raise an error if a matrix recurrence has no kernel.

    Parameters
    ----------
    op : LinearScan
    dtype : str
        Of the state.
    size : int
        The rows of the matrix.
    width : int
        The columns of the state, which count where matrices are at both its sides.

    Raises
    ------
    NoCCodeError
    """
    if dtype not in DTYPES:
        raise NoCCodeError(f"a matrix recurrence of dtype {dtype} has no CUDA kernel")
    both = op.side == "both"
    most = largest_size(dtype)
    if max(size, width if both else 1) > most:
        raise NoCCodeError(f"a {dtype} matrix of more than {most} rows has no CUDA kernel")
    if both and 2 * size * width * item_bytes(dtype) > SHARED:
        raise NoCCodeError(f"a state of {size} x {width} items has no CUDA kernel")


def largest_size(dtype: str) -> int:
    """Return how many rows a matrix may have."""
    return min(LARGEST, LARGEST_BYTES // item_bytes(dtype))


def item_bytes(dtype: str) -> int:
    """Return the size of an item as a kernel computes with it."""
    return max(4, np.dtype(dtype).itemsize)


class LinearWriter:
    """Writes the translation unit of one matrix recurrence.

    Parameters
    ----------
    op : LinearScan
    dtype : str
        Of the state.
    ranks : sequence of int
        How many axes the matrix and the initial state have.
    size : int
        The rows of the matrix.
    width : int, optional
        The columns of the state, needed where matrices are at both its sides.

    Attributes
    ----------
    group : int
        How many threads walk one vector; 0 where one block walks the whole state.
    columns : int
        From how many vectors a chunk is walked to know what it does; 0 where chunks are not known.

    Raises
    ------
    NoCCodeError
        If the recurrence has no kernel.
    """

    def __init__(
        self, op: LinearScan, dtype: str, ranks: Sequence[int], size: int, width: int = 1
    ) -> None:
        check_linear(op, dtype, size, width)
        self.op, self.dtype, self.size, self.width = op, dtype, size, width
        self.both, self.steps = op.side == "both", op.coefficient == "steps"
        matrix_rank, rank = ranks
        self.batch = op.batch_rank(rank)
        self.batched = bool(op.matrix_batch_rank(matrix_rank))
        self.group = self._group()
        self.columns = size + (op.semiring == "real" and op.has_offset)
        if self.both:
            self.group = self.columns = 0
        self.threads = 256 if self.both else max(32, self.group)
        inputs, outputs = self._arrays()
        works = [] if self.both else ["columns", "bounds", "states"]
        self.parameters = Parameters(3 + max(self.batch, 1), inputs, outputs, works)
        self.arrays = {array.name: array for array in [*inputs, *outputs]}

    def _group(self) -> int:
        held = self.size**2 * item_bytes(self.dtype)
        if self.size <= REGISTERS and held <= REGISTER_BYTES:
            return 1
        return 1 << (self.size - 1).bit_length()

    @property
    def ahead(self) -> int:
        """How many steps are read before they are needed; rows of matrices: whether they are."""
        matrix, row = self.size**2, self.size
        if self.group != 1:
            matrix, row = self.size, 0  # one row, and one item
        held = (not self.steps) * matrix
        coming = self.steps * matrix + self.op.has_offset * row
        left = HELD_BYTES // item_bytes(self.dtype) - held
        return min(8, left // (2 * max(coming, 1)))

    # Arrays

    def _arrays(self) -> tuple[list[Array], list[Array]]:
        op, dtype = self.op, self.dtype
        batch: Axes = tuple(range(3, 3 + self.batch))
        turned = op.side == "right"
        square: Axes = (1, 0) if turned else (0, 1)
        state: Axes = (0,) if op.vector else (2, 0) if turned else (0, 2)
        lead = int(self.steps)
        inputs = [Array("a", dtype, lead, (*(batch if self.batched else ()), *square))]
        if self.both:
            inputs.append(Array("r", dtype, lead, (3, 2)))
        if op.has_offset:
            inputs.append(Array("b", dtype, 1, (*batch, *state)))
        inputs.append(Array("x", dtype, 1, (*batch, *state)))
        if op.has_mask:
            inputs.append(Array("k", "bool", 0, square))
        return inputs, [Array("y", dtype, 1, (*batch, *state))]

    # The whole

    def write(self) -> str:
        """Return the translation unit."""
        source = Source()
        with source.block("struct Recurrence"):
            self.write_constants(source)
            self.write_places(source)
            self.write_items(source)
        source.lines[-1] += ";"
        for name, call, kind in self._kernels():
            source.line(f"SCANLIB_{kind}_KERNEL({name}, {call}<Recurrence>(p, {kind.lower()}))")
        parts = ["linear_both"] if self.both else ["linear"]
        parts += ["linear_rows"] if self.group > 1 else []
        head = [
            f"#define SCANLIB_THREADS {self.threads}",
            template("device"),
            *([template("complex")] if self.dtype.startswith("complex") else []),
            self.parameters.struct(),
            *self.functions(),
            template("semirings"),
            *(template(part) for part in parts),
        ]
        return "\n".join([*head, source.text()]).replace("(p, flat)", "(p, index)")

    def functions(self) -> list[str]:
        """Return the functions of scalars that the semiring needs."""
        if self.op.semiring != "log":
            return []
        exp, log = (vector_function(name, computed(self.dtype), 1) for name in ("exp", "log"))
        names = f"#define scanlib_exp {exp.name}\n#define scanlib_log {log.name}"
        return [print_functions([exp, log], "SCANLIB_DEVICE"), names]

    def _kernels(self) -> list[tuple[str, str, str]]:
        """Return the names of the kernels, what they call, and their kind."""
        if self.both:
            return [("walk", "scanlib_walk_both", "BLOCK")]
        if self.group == 1:
            return [
                ("walk", "scanlib_walk_vectors", "FLAT"),
                ("probe", "scanlib_probe", "FLAT"),
                ("carry", "scanlib_carry_vectors", "FLAT"),
            ]
        return [(name, f"scanlib_{name}_groups", "BLOCK") for name in ("walk", "probe", "carry")]

    def kernels(self) -> list[str]:
        """Return the names of the kernels."""
        return [name for name, _, _ in self._kernels()]

    def write_constants(self, source: Source) -> None:
        op, real = self.op, self.op.semiring == "real"
        source.line(f"typedef {item_type(self.dtype)} Item;")
        source.line("typedef scanlib_real<Item>::type Real;")
        source.line(f"typedef scanlib_{op.semiring}_products<Item> Semiring;")
        numbers = {
            "SIZE": self.size,
            "WIDTH": self.width,
            "GROUP": self.group,
            "COLUMNS": self.columns,
            "AHEAD": self.ahead,
            "STEPS": self.steps,
            "OFFSET": op.has_offset,
            "MASKED": op.has_mask,
            "LAST": op.untraced,
            "ONE_POWER": real and not self.steps,
        }
        text = ", ".join(f"{name} = {int(value)}" for name, value in numbers.items())
        source.line(f"enum {{ {text} }};")

    def write_places(self, source: Source) -> None:
        """Write where the items of a vector are, and which rows belong to a step."""
        back = self.op.reverse
        for name, given, row in (
            ("row", "int64_t steps, int64_t i", "steps - 1 - i" if back else "i"),
            ("before", "int64_t steps", "steps" if back else "0"),  # of the result
            ("after", "int64_t t", "t" if back else "t + 1"),
        ):
            source.line(f"SCANLIB_METHOD static int64_t {name}({given}) {{ return {row}; }}")
        members = " ".join(f"char *{name};" for name in self.arrays)
        source.line(f"struct Channel {{ {members} }};")
        head = "SCANLIB_METHOD static void locate(const Params &p, int64_t s, Channel &l)"
        with source.block(head):
            axes = [] if self.both else [*range(3, 3 + self.batch), 2]
            for axis in reversed(axes):
                source.line(f"const int64_t e{axis} = s % p.n{axis};")
                source.line(f"s /= p.n{axis};")
            for array in self.arrays.values():
                kept = [axis for _, axis in array.kept if axis in axes]
                terms = "".join(f" + e{axis} * p.{array.name}_{axis}" for axis in kept)
                source.line(f"l.{array.name} = (char *)p.{array.name}{terms};")

    def write_items(self, source: Source) -> None:
        """Write how items are read and written."""
        state, place = "int i", " + i * p.{0}_0"
        if self.both:
            state, place = "int i, int c", " + i * p.{0}_0 + c * p.{0}_2"
        self._reader(source, "matrix", "a", "int64_t t, int i, int j", " + i * p.a_0 + j * p.a_1")
        if self.both:
            self._reader(source, "right", "r", "int64_t t, int j, int c",
                         " + j * p.r_3 + c * p.r_2")  # fmt: skip
        self._reader(source, "offset", "b", f"int64_t t, {state}", place.format("b"))
        self._reader(source, "initial", "x", state, place.format("x"))
        memory = memory_type(self.dtype)
        head = f"static void store(const Params &p, const Channel &l, int64_t t, {state}, Item v)"
        to = f"l.y + t * p.y_t{place.format('y')}"
        source.line(f"SCANLIB_METHOD {head} {{ *({memory} *)({to}) = {memory}(v); }}")
        head = "static uint64_t kept(const Params &p, const Channel &l, int i)"
        with source.block(f"SCANLIB_METHOD {head}"):
            source.line("uint64_t bits = 0;")
            if "k" in self.arrays:
                source.line("for (int j = 0; j < SIZE; j++)")
                item = "scanlib_fetch<uint8_t>(l.k + i * p.k_0 + j * p.k_1)"
                source.line(f"  bits |= uint64_t({item} != 0) << j;")
            source.line("return bits;")

    def _reader(self, source: Source, name: str, letter: str, given: str, place: str) -> None:
        array = self.arrays.get(letter)
        value = "Item(0)"
        if array is not None:
            time = f" + t * p.{letter}_t" if array.lead and name != "initial" else ""
            value = f"Item(scanlib_fetch<{memory_type(array.dtype)}>(l.{letter}{time}{place}))"
        head = f"static Item {name}(const Params &p, const Channel &l, {given})"
        source.line(f"SCANLIB_METHOD {head} {{ return {value}; }}")
