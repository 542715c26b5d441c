"""What the writers of `LinearScan`'s kernels share: names, sizes, and the source."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply

from scanlib.backends.numba.contiguous import contiguous
from scanlib.backends.numba.scalar import as_scalar
from scanlib.backends.numba.source import Source
from scanlib.ops import errors
from scanlib.ops.linear_scan import LinearScan


class LinearBase:
    """The parts of a node by name, and where they lie in memory."""

    def __init__(self, op: LinearScan, node: Apply) -> None:
        self.op, self.node = op, node
        self.source = Source()
        self.line, self.block = self.source.line, self.source.block
        parts = op.parts(node.inputs)
        names = op.parts([f"x{i}" for i in range(len(node.inputs))])
        self.arguments = [f"x{i}" for i in range(len(node.inputs))]
        self.steps_name, self.matrix, self.offset, self.initial, self.mask, self.right = names
        ndim = parts.initial.type.ndim
        self.batch = op.batch_rank(ndim)
        self.row_ndim = ndim - 1
        self.matrix_batched = op.matrix_batch_rank(parts.matrix.type.ndim) > 0
        self.matrix_ndim = parts.matrix.type.ndim
        self.fixed = op.coefficient == "fixed"
        self.dtype = np.dtype(parts.initial.type.dtype)
        sizes = [*parts.matrix.type.shape[-2:], *self._state_size(parts.initial.type.shape)]
        self.size = next((size for size in sizes if size is not None), None)
        self.ks = [f"k{axis}" for axis in range(self.batch)]
        self.source.object("as_scalar", as_scalar)
        self.source.object("contiguous", contiguous)
        for name in ("StepCountError", "SequenceLengthError", "InitialRowsError", "LoopError"):
            self.source.object(name, getattr(errors, name))
        self.source.object("number", self.dtype.type)

    def _state_size(self, shape: Any) -> list[Any]:
        return [shape[-1] if self.op.vector or self.op.side == "right" else shape[-2]]

    def uses_columns(self) -> bool:
        """Whether the columns of a fixed matrix are laid out as rows."""
        return self.op.semiring == "real" and self.fixed and self.op.vector

    def uses_exponentials(self) -> bool:
        return self.op.semiring == "log" and self.fixed and self.op.vector

    def matrix_item(self, i: str, j: str) -> str:
        """Return ``A[i, j]`` of the matrix as it stands at the left of the state."""
        lead = [] if self.fixed else ["t"]
        lead += self.ks if self.matrix_batched else []
        order = [i, j] if self.op.side == "left" else [j, i]
        return f"{self.matrix}[{', '.join([*lead, *order])}]"

    def mask_item(self, i: str, j: str) -> str:
        """Return whether the matrix, as it stands at the left of the state, has an item."""
        order = [i, j] if self.op.side == "left" else [j, i]
        return f"{self.mask}[{', '.join(order)}]"

    def over_matrices(self, stack: ExitStack) -> None:
        """Open loops over the batch of a fixed matrix, if it has one."""
        if self.matrix_batched:
            for axis, name in enumerate(self.ks):
                stack.enter_context(
                    self.block(f"for {name} in range({self.initial}.shape[{1 + axis}]):")
                )

    def laid_out(self, *index: str) -> str:
        return ", ".join([*(self.ks if self.matrix_batched else []), *index])

    def laid_out_shape(self, *sizes: str) -> str:
        batch = [f"{self.initial}.shape[{1 + axis}]" for axis in range(self.batch)]
        return ", ".join([*(batch if self.matrix_batched else []), *sizes])

    def write_columns(self) -> None:
        self.line(f"columns = np.empty(({self.laid_out_shape('d', 'd')},), number)")
        with ExitStack() as stack:
            self.over_matrices(stack)
            with self.block("for i in range(d):"), self.block("for j in range(d):"):
                self.line(f"columns[{self.laid_out('j', 'i')}] = {self.matrix_item('i', 'j')}")

    def bound(self) -> str:
        return "d" if self.size is None else str(self.size)

    def added(self, index: str) -> str:
        return f"add[{index}]" if self.offset is not None else "number(0)"

    def write_views(self, stack: ExitStack) -> None:
        """Open loops over the batch, and name the states and the offset of one step in them."""
        for axis, name in enumerate(self.ks):
            stack.enter_context(self.block(f"for {name} in range(h.shape[{1 + axis}]):"))
        self.line(f"old = h[{', '.join(['before', *self.ks])}]")
        self.line(f"new = h[{', '.join(['after', *self.ks])}]")
        if self.offset is not None:
            self.line(f"add = {self.offset}[{', '.join(['t', *self.ks])}]")
