"""From the sizes of a matrix recurrence to launches of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from scanlib.backends.cuda.launch import Call, Kernels
from scanlib.backends.cuda.linear_writer import LinearWriter, item_bytes
from scanlib.backends.cuda.schedule import choose_linear
from scanlib.ops.lowered.linear_loop import check_shapes, count_steps
from scanlib.ops.lowered.linear_scan import LinearScan

Shape = tuple[int, ...]


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


def linear_geometry(op: LinearScan, inputs: Sequence[Any]) -> LinearGeometry:
    """Return the sizes of a matrix recurrence, and check that its arguments agree.

    Raises
    ------
    ValueError
        As the recurrence does on other devices.
    """
    parts = op.parts(inputs)
    steps = count_steps(op, parts)
    check_shapes(op, parts)
    first, *row = parts.initial.shape
    batch = tuple(row[: op.batch_rank(len(row) + 1)])
    size, columns = row[len(batch)], 1
    if not op.vector:
        size, columns = row[-2:] if op.side != "right" else row[:-3:-1]
    rows = first if op.untraced or not first else steps + 1
    return LinearGeometry(steps, size, columns, batch, [(rows, *row)])


class LinearKernels(Kernels):
    """The kernels of a matrix recurrence of one size; see `LinearWriter`."""

    def __init__(
        self, op: LinearScan, dtype: str, ranks: tuple[int, ...], size: int, width: int
    ) -> None:
        self.writer = LinearWriter(op, dtype, ranks, size, width)
        super().__init__(self.writer.write(), self.writer.kernels(), self.writer.parameters)

    def call(
        self, sizes: LinearGeometry, strides: Sequence[tuple[int, ...]], processors: int
    ) -> Call:
        """Return how the kernels are called on a device with so many multiprocessors.

        `strides` are those of the arguments and of the result, in bytes.
        """
        writer = self.writer
        plan = choose_linear(sizes.steps, sizes.vectors, processors, writer.group, writer.columns)
        values = {
            "steps": sizes.steps,
            "channels": sizes.vectors,
            "chunk": plan.chunk,
            "chunks": plan.chunks,
        }
        works, counts = [], {"walk": 1}
        if not writer.both:
            axes = (*sizes.batch, sizes.columns)
            values |= {f"n{axis}": size for axis, size in enumerate(axes)}
            items = sizes.vectors * plan.chunks * writer.size if plan.chunks > 1 else 0
            item = item_bytes(writer.dtype)
            real = item // 2 if np.dtype(writer.dtype).kind == "c" else item
            works = [items * writer.columns * item, 2 * items * writer.columns * real, items * item]
            counts["walk"] = sizes.vectors * (1 if writer.op.untraced else plan.chunks)
        if plan.chunks > 1:
            probed = sizes.vectors * (plan.chunks - 1) * writer.columns
            counts = {"probe": probed, "carry": sizes.vectors} | counts
        if not prod(sizes.outputs[0]):
            counts = {}
        each = writer.threads // max(writer.group, 1)
        jobs = [(name, -(-count // each), writer.threads) for name, count in counts.items()]
        return self.prepared(values, strides, works, jobs)


_kernels = lru_cache(maxsize=256)(LinearKernels)


def linear_kernels(op: LinearScan, inputs: Sequence[Any], dtype: str) -> LinearKernels:
    """Return the kernels for arguments of these sizes, written once for each.

    Raises
    ------
    NoCCodeError
        If the recurrence has no kernel.
    ValueError
        As the recurrence does on other devices.
    """
    sizes, parts = linear_geometry(op, inputs), op.parts(inputs)
    width = sizes.columns if op.side == "both" else 1
    ranks = parts.matrix.ndim, parts.initial.ndim
    return _kernels(op, dtype, ranks, max(sizes.size, 1), max(width, 1))
