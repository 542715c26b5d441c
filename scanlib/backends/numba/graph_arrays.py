"""Elementwise operations and reductions outside of loops, as nests of plain loops.

    y[i, j] = f(a[i, j], b[i, 0], c[j], …)        s[i] = Σ_j y[i, j]

A node of any number of axes is one nest. Reductions that alone read a result of it are computed in
the same nest, and what nothing else reads is not stored. Where the axes that are reduced stand
behind all others, each row has a local variable; elsewhere the items of the result are added to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar.basic import AND, OR, Add, Maximum, Minimum, Mul
from pytensor.tensor.elemwise import CAReduce, Elemwise

from scanlib.backends.numba.elementwise import Operand
from scanlib.backends.numba.graph_vectors import VectorEmitter
from scanlib.backends.numba.vectors import larger, smaller
from scanlib.ops.reductions import AxesSum

_SIGNS: dict[type, str] = {Add: "+", Mul: "*", AND: "&", OR: "|"}
_EXTREMES = {Maximum: ("larger", larger), Minimum: ("smaller", smaller)}


@dataclass
class Total:
    """A reduction inside a nest.

    `held` is a local variable that is set where `depth` loops are around, or None: then `result`
    holds what is reduced so far.
    """

    node: Apply
    axes: tuple[int, ...]
    dtype: str
    start: str
    depth: int
    held: str | None
    result: str | None

    @property
    def kept(self) -> list[int]:
        ndim = self.node.inputs[0].type.ndim
        return [axis for axis in range(ndim) if axis not in self.axes]


class ArrayEmitter(VectorEmitter):
    """Writes elementwise operations and reductions of any number of axes."""

    def write_walk(
        self, op: Elemwise, node: Apply, totals: Sequence[tuple[int, Apply]] = ()
    ) -> None:
        """Write an elementwise operation, and reductions each of which alone reads an output.

        `totals` holds the number of the output and the reduction.
        """
        self.walks = True
        operands = [self._operand(inp, node.outputs[0].type.ndim) for inp in node.inputs]
        sizes = self._elemwise_sizes(node, operands)
        self._check_sizes(node, operands, sizes)
        names = self._stored(op, node, sizes, {number for number, _ in totals})
        indices = self._new_indices(sizes)
        opened = [self._open(total, sizes) for _, total in totals]

        def write_items() -> None:
            items = [operand.item(indices) for operand in operands]
            results = self._scalar_op(op.scalar_op, op.make_scalar_node(*node.inputs), items)
            for name, result in zip(names, results, strict=True):
                if name is not None:
                    self.source.line(f"{name}[{', '.join(indices)}] = {result}")
            for total, (number, _) in zip(opened, totals, strict=True):
                self._reduce(total, results[number], indices)

        self._write_nest(sizes, indices, write_items, opened)
        for total in opened:
            self._close(total, sizes)
        self.walks = False

    def write_total(self, node: Apply) -> None:
        """Write a reduction of an array."""
        x = node.inputs[0]
        operand = self._operand(x, x.type.ndim)
        sizes = self._sizes_of(x, operand)
        indices, total = self._new_indices(sizes), self._open(node, sizes)

        def write_items() -> None:
            self._reduce(total, operand.item(indices), indices)

        self._write_nest(sizes, indices, write_items, [total])
        self._close(total, sizes)

    def _sizes_of(self, variable: Variable, operand: Operand) -> list[str]:
        """Return the sizes of what an operand walks."""
        return [
            operand.size(axis) if known is None else str(known)
            for axis, known in enumerate(variable.type.shape)
        ]

    def _stored(
        self, op: Elemwise, node: Apply, sizes: list[str], reduced: set[int]
    ) -> list[str | None]:
        """Return the array that each output is stored in, None for those that are not."""
        names: list[str | None] = []
        for number, out in enumerate(node.outputs):
            destroyed = op.inplace_pattern.get(number)
            if number in reduced:
                names.append(None)
            elif destroyed is not None:
                names.append(self.array(node.inputs[destroyed]))
                self.bind_array(out, str(names[-1]))
            else:
                names.append(self._empty(out, *sizes))
        return names

    # Nests of loops

    def _new_indices(self, sizes: Sequence[str]) -> list[str]:
        return ["0" if size == "1" else self.source.name("j") for size in sizes]

    def _write_nest(
        self,
        sizes: Sequence[str],
        indices: Sequence[str],
        body: Callable[[], None],
        totals: Sequence[Total] = (),
        depth: int = 0,
    ) -> None:
        """Write the loops from one depth on, with the reductions that begin there."""
        begun = [total for total in totals if total.held is not None and total.depth == depth]
        for total in begun:
            self.source.line(f"{total.held} = {total.start}")
        if depth == len(sizes):
            body()
        elif indices[depth] == "0":
            self._write_nest(sizes, indices, body, totals, depth + 1)
        else:
            with self.source.block(f"for {indices[depth]} in range({sizes[depth]}):"):
                self._write_nest(sizes, indices, body, totals, depth + 1)
        for total in begun:
            if total.result is not None:
                place = ", ".join(indices[:depth])
                self.source.line(f"{total.result}[{place}] = {self._rounded(total, total.held)}")

    def write_items_of(self, out: str, sizes: Sequence[str], item: Callable[..., str]) -> None:
        """Write a nest that assigns every item of an array; `item` takes the indices."""
        indices = self._new_indices(sizes)
        self._write_nest(
            sizes,
            indices,
            lambda: self.source.line(f"{out}[{', '.join(indices)}] = {item(indices)}"),
        )

    # Reductions

    def _open(self, node: Apply, sizes: list[str]) -> Total:
        """Write what a reduction begins with, before the loops."""
        x, out = node.inputs[0], node.outputs[0]
        axes = axes_of(node)
        kept = [axis for axis in range(x.type.ndim) if axis not in axes]
        dtype = self._acc_dtype(node)
        total = Total(node, axes, dtype, self._start(node), len(kept), None, None)
        if kept != list(range(len(kept))):
            result = total.result = self.source.name("a")
            inside = [sizes[axis] for axis in kept]
            self.source.line(f"{result} = new_array({dtype}, {', '.join(inside)})")
            self.write_items_of(result, inside, lambda indices: total.start)
            return total
        total.held = self.source.name("s")
        if kept:
            total.result = self._empty(out, *(sizes[axis] for axis in kept))
        return total

    def _start(self, node: Apply) -> str:
        """Return what is reduced with nothing, as a constant of the dtype that is used."""
        number = 0 if isinstance(node.op, AxesSum) else node.op.scalar_op.identity
        dtype = np.dtype(acc_name(node))
        return self.source.constant(np.asarray(number).astype(dtype)[()])

    def _reduce(self, total: Total, item: str, indices: Sequence[str]) -> None:
        """Write that an item is added to what a reduction has so far."""
        place = ", ".join(indices[axis] for axis in total.kept)
        cell = total.held or f"{total.result}[{place}]"
        op = total.node.op
        kind = Add if isinstance(op, AxesSum) else type(op.scalar_op)
        if kind in _EXTREMES:
            function = self.source.object(*_EXTREMES[kind])
            self.source.line(f"{cell} = {function}({cell}, {item})")
            return
        dtype = np.dtype(acc_name(total.node))
        if np.dtype(total.node.inputs[0].type.dtype) != dtype:
            item = f"{total.dtype}({item})"
        text = f"{cell} {_SIGNS[kind]} {item}"
        # numba widens small integers.
        self.source.line(
            f"{cell} = {total.dtype}({text})" if dtype.kind in "iu" else f"{cell} = {text}"
        )

    def _close(self, total: Total, sizes: list[str]) -> None:
        """Write what a reduction ends with, after the loops."""
        out = total.node.outputs[0]
        if not total.kept:
            name = self.source.name("s")
            self.source.line(f"{name} = {self._rounded(total, total.held)}")
            self.bind_scalar(out, name)
        elif total.held is None and acc_name(total.node) == out.type.dtype:
            self.bind_array(out, str(total.result))
        elif total.held is None:
            inside = [sizes[axis] for axis in total.kept]

            def rounded(indices: list[str]) -> str:
                return self._rounded(total, f"{total.result}[{', '.join(indices)}]")

            self.write_items_of(self._empty(out, *inside), inside, rounded)

    def _rounded(self, total: Total, text: str | None) -> str:
        out = total.node.outputs[0]
        same = acc_name(total.node) == out.type.dtype
        return str(text) if same else f"{self._dtype(out)}({text})"

    def _acc_dtype(self, total: Apply) -> str:
        dtype = np.dtype(acc_name(total))
        return self.source.object(f"np_{dtype.name}", dtype.type)


def acc_name(node: Apply) -> str:
    """Return the name of the dtype in which a reduction computes."""
    return getattr(node.op, "acc_dtype", None) or node.outputs[0].type.dtype


def axes_of(node: Apply) -> tuple[int, ...]:
    """Return the axes of an array that a reduction reduces."""
    ndim = node.inputs[0].type.ndim
    if isinstance(node.op, AxesSum):
        return node.op.axes
    axes = range(ndim) if node.op.axis is None else node.op.axis
    return tuple(sorted(axis % ndim for axis in axes))


def is_total(node: Apply) -> bool:
    """Whether there is code here for a reduction."""
    if isinstance(node.op, AxesSum):
        return True
    if not isinstance(node.op, CAReduce):
        return False
    x, out = node.inputs[0], node.outputs[0]
    if not x.type.ndim or not axes_of(node):
        return False
    item, total, final = map(np.dtype, (x.type.dtype, acc_name(node), out.type.dtype))
    kind = type(node.op.scalar_op)
    if kind in _EXTREMES:
        return item == total == final and item.kind == "f"
    if kind in (AND, OR):
        return item == total == final and item.kind == "b"
    real = item.kind != "c" or total.kind == final.kind == "c"
    return kind in (Add, Mul) and real and "b" not in (total.kind, final.kind)


def total_behind(fgraph: FunctionGraph, variable: Variable) -> Apply | None:
    """Return the reduction that alone reads a variable, if there is one."""
    clients = fgraph.clients[variable]
    reader = clients[0][0] if len(clients) == 1 else None
    return reader if reader is not None and is_total(reader) else None
