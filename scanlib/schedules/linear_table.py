"""What the kernels of a matrix recurrence share: its sizes, its inputs, and where they are."""

from __future__ import annotations

import numpy as np
from pytensor.graph.basic import Apply

from scanlib.kernels.language import INT64, POINTER, Value
from scanlib.kernels.program import ArrayType, Failure, Output, TableKernel, Words
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.schedules.linear_logs import padded

WIDEST = 8  # columns longer than this do not fit the registers
WIDEST_ROW = 4  # of a state with products from both sides
GUESSED_SIZES = (2, 3, 4)  # written for where the size is not known


class Recurrence:
    """What the kernels of one recurrence share."""

    def __init__(self, op: LinearScan, node: Apply, outer: str) -> None:
        self.op, self.outer = op, outer
        parts = op.parts(node.inputs)
        self.places = op.parts(range(len(node.inputs)))
        out = node.outputs[0].type
        self.dtype = out.dtype
        self.half = parts_of(out.dtype)  # the dtype of the parts of complex numbers
        if (self.half or out.dtype) not in ("float32", "float64"):
            raise NoKernelError(f"a matrix recurrence of {out.dtype} has no kernel")
        self.itemsize = int(np.dtype(out.dtype).itemsize)
        self.row_ndim = out.ndim - 1
        self.batch = op.batch_rank(out.ndim)
        self.matrix_batched = op.matrix_batch_rank(parts.matrix.type.ndim) > 0
        self.fixed = op.coefficient == "fixed"
        state = parts.initial.type.shape
        added = state if parts.offset is None else parts.offset.type.shape
        self.size = _first_known(
            *parts.matrix.type.shape[-2:],
            *((s[-1] if op.vector or op.side == "right" else s[-2]) for s in (state, added)),
        )
        self.width: int | None = 1
        if not op.vector:
            rights = () if parts.right is None else parts.right.type.shape[-2:]
            axis = -2 if op.side == "right" else -1
            self.width = _first_known(*rights, state[axis], added[axis])
        types = [variable.type for variable in node.inputs]
        self.inputs = tuple(ArrayType(kind.dtype, kind.ndim) for kind in types)
        self.outputs = [Output(ArrayType(out.dtype, out.ndim))]
        if outer:
            self.inputs += (ArrayType(out.dtype, 2),)
            self.outputs.append(Output(ArrayType(out.dtype, 3)))
        self.words = Words(self.inputs, self.outputs, ())
        self.failures: dict[int, Failure] = {}

    def failure(self, error: str, template: str, count: int = 0) -> int:
        """Return the code of a failure."""
        self.failures[len(self.failures) + 1] = Failure(error, template, count)
        return len(self.failures)

    # Which code there is

    def in_registers(self) -> tuple[int, ...]:
        """Return the sizes of vectors that are kept in registers."""
        op = self.op
        if op.semiring != "real" or not op.vector or self.batch or self.half:
            return ()
        if op.has_mask and op.untraced:
            return ()  # a masked step reads the row before it
        if self.size is None:
            return GUESSED_SIZES
        return (self.size,) if 2 <= self.size <= WIDEST else ()

    def shapes_in_registers(self) -> list[tuple[int, int]]:
        """Return the shapes of states, with products from both sides, kept in registers."""
        if self.op.side != "both" or self.half:
            return []
        if self.size is None or self.width is None:
            known = {self.size, self.width}
            return [(n, n) for n in range(2, WIDEST_ROW + 1) if known <= {n, None}]
        fits = self.size >= 1 and self.width >= 2 and max(self.size, self.width) <= WIDEST_ROW
        return [(self.size, self.width)] if fits else []

    def is_laid_out(self) -> bool:
        """Whether a fixed matrix is copied, so that its rows, or its columns, are contiguous."""
        return self.fixed and not self.half and not self.has_logs()

    def combines_rows(self) -> bool:
        """Whether rows of a matrix are what a product combines, and not its factors."""
        return self.op.vector or self.op.side == "right"

    def has_logs(self) -> bool:
        """Whether steps are products with exponentials."""
        return self.fixed and self.op.semiring == "log" and self.op.vector


def _first_known(*sizes: int | None) -> int | None:
    return next((size for size in sizes if size is not None), None)


class Table:
    """What the writers of `prepare`, `start` and `run` share: how they read the table."""

    def __init__(self, loop: Recurrence, name: str) -> None:
        self.loop, self.op = loop, loop.op
        self.words = loop.words
        self.out = TableKernel(name)
        self.w = self.out.writer

    def number_of(self, name: str) -> int:
        """Return which input a part of the recurrence is."""
        if name == "other":
            return len(self.loop.inputs) - 1
        return int(getattr(self.loop.places, name))

    def data(self, name: str) -> Value:
        return self.out.word(self.words.inputs[self.number_of(name)], POINTER, name)

    def ndim(self, name: str) -> int:
        return self.loop.inputs[self.number_of(name)].ndim

    def dim(self, name: str, axis: int) -> Value:
        """Return a size of an input; axes are counted like those of shapes."""
        axis %= self.ndim(name)
        slot = self.words.inputs[self.number_of(name)] + 1 + axis
        return self.out.number(slot, f"{name}_dim{axis}")

    def stride(self, name: str, axis: int) -> Value:
        axis %= self.ndim(name)
        slot = self.words.inputs[self.number_of(name)] + 1 + self.ndim(name) + axis
        return self.out.number(slot, f"{name}_stride{axis}")

    def result(self, number: int = 0) -> Value:
        return self.out.word(self.words.outputs[number], POINTER, f"out{number}")

    def has(self, name: str) -> bool:
        return getattr(self.loop.places, name) is not None

    @property
    def size(self) -> Value:
        """The size of the matrix."""
        known = self.loop.size
        if known is not None:
            return self.w.constant(known, INT64)
        last = self.op.vector or self.op.side == "right"
        return self.dim("initial", -1 if last else -2)

    @property
    def width(self) -> Value:
        """How many vectors the state has; one if it is a vector."""
        known = self.loop.width
        if known is not None:
            return self.w.constant(known, INT64)
        return self.dim("initial", -2 if self.op.side == "right" else -1)

    def batches(self) -> Value:
        total: Value = self.w.constant(1, INT64)
        for axis in range(self.loop.batch):
            total = total * self.dim("initial", 1 + axis)
        return total

    def spaces(self) -> dict[str, Value]:
        """Return how many items each part of the workspace has."""
        loop, op = self.loop, self.op
        d, m, found = self.size, self.width, {}
        cells = d * m
        if op.untraced:
            found["states"] = cells * self.batches() * 2
        if not loop.half:
            if self.has("offset"):
                found["row"] = cells
            if not loop.fixed or loop.is_laid_out():
                many = loop.is_laid_out() and loop.matrix_batched
                found["matrix"] = d * d * self.batches() if many else d * d
            if op.side == "both":
                found["right"] = m * m
            if loop.has_logs():
                length = padded(self.w, loop.dtype, d, loop.size)
                several = self.batches() if loop.matrix_batched else self.w.constant(1, INT64)
                found["exponentials"] = several * d * length
                found["largest"] = several * length
                found["buffers"] = length * 4
            if loop.outer:
                found["other"] = self.dim("other", 1)
        if op.side == "both":
            found["half"] = cells
        return found


class States(Table):
    """Knows where the states are, and the parts of the workspace."""

    def prepare_memory(self) -> None:
        loop, w = self.loop, self.w
        self.steps = self.out.number(self.words.steps, "steps")
        self.cells = self.size * self.width * loop.itemsize
        self.row_bytes = self.batches() * self.cells
        self.space: dict[str, Value] = {}
        place: Value = w.constant(0, INT64)
        for name, items in self.spaces().items():
            workspace = self.out.word(self.words.workspace, POINTER, "workspace")
            self.space[name] = w.offset(workspace, place)
            place = place + items * loop.itemsize
        self.history = self.space["states"] if self.op.untraced else self.result()

    def row_of(self, n: Value) -> Value:
        """Return where the state before step `n` is; after the last one, where it ends."""
        if self.op.untraced:
            return (n & 1) * self.row_bytes
        return (self.steps - n if self.op.reverse else n) * self.row_bytes

    def time(self, n: Value) -> Value:
        return self.steps - 1 - n if self.op.reverse else n
