"""Shapes of a loop's results, from the shapes of its inputs alone.

`torch.compile` asks for them before anything is computed. Where they depend on values (a number
of steps computed in the graph, `until`), there is no answer, and the loop runs between two
compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Variable
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import Elemwise

from scanlib.backends.torch.operator import Shapes
from scanlib.lengths.numbers import constant_integer, measured
from scanlib.lengths.steps import Steps
from scanlib.ops.graph import is_numeric
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from scanlib.ops.shapes import body_input_shapes, output_row_shapes

Size = Callable[[Sequence[torch.Tensor]], Any]


def _dim(position: int, axis: int) -> Size:
    return lambda inputs: inputs[position].shape[axis]


def _fixed(value: int) -> Size:
    return lambda inputs: value


def shapes_of_loop(op: Scan | ElemwiseScan | LinearScan, node: Apply) -> Shapes | None:
    """Return the rule for the results of a loop, None if shapes depend on values."""
    steps = op.steps_of(node)
    length = _length(steps, node)
    scan = op.scan if isinstance(op, ElemwiseScan) else op
    rows = _output_rows(scan, node) if isinstance(scan, Scan) else []
    traced = any(each is not None and each.each_step for each in steps.rows)
    if (traced and length is None) or rows is None:
        return None
    like = [None if each is None else node.inputs.index(each) for each in steps.like]

    def shapes(inputs: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
        count = 0 if length is None else length(inputs)
        found: list[tuple[Any, ...]] = []
        stacked = iter(rows)
        for place, own in zip(like, steps.rows, strict=True):
            if place is None:
                found.append((count, *(size(inputs) for size in next(stacked))))
            elif own is None:
                found.append(tuple(inputs[place].shape))
            else:
                found.append((own.others + own.each_step * count, *inputs[place].shape[1:]))
        return found

    return shapes


def _length(steps: Steps, node: Apply) -> Size | None:
    """Return the number of steps, None if a value decides it."""
    if steps.may_stop:
        return None
    known = None if steps.n_steps is None else constant_integer(steps.n_steps)
    if known is not None:
        return _fixed(known)
    return _dim(node.inputs.index(steps.sequences[0]), 0) if steps.sequences else None


def _output_rows(scan: Scan, node: Apply) -> list[list[Size]] | None:
    """Return the sizes of every stacked output's rows."""
    signature = scan.signature
    if not signature.n_outputs:
        return []
    inputs = [type() for type in scan.outer_input_types()]
    shapes = body_input_shapes(signature, [list(variable.shape) for variable in inputs])
    values = [None] * (len(scan.body.inputs) - signature.n_non_sequences)
    values += inputs[len(inputs) - signature.n_non_sequences :]
    outputs = signature.split_body_outputs(scan.body.outputs).outputs
    try:
        rows = output_row_shapes(scan.body.inputs, outputs, shapes, values)
        return [[size_of(dim, inputs) for dim in row] for row in rows]
    except UnknownSizeError:
        return None


class UnknownSizeError(Exception):
    """A size is not a function of the inputs' shapes that is known here."""


_SIZES: dict[type, Callable[..., Any]] = {
    ps.Add: lambda *sizes: sum(sizes),
    ps.Mul: lambda *sizes: _product(sizes),
    ps.Sub: lambda a, b: a - b,
    ps.Neg: lambda a: -a,
    ps.IntDiv: lambda a, b: a // b,
    ps.Mod: lambda a, b: a % b,
    ps.Cast: lambda a: a,
    ps.ScalarMaximum: lambda a, *rest: torch.sym_max(a, rest[0]),
    ps.ScalarMinimum: lambda a, *rest: torch.sym_min(a, rest[0]),
    ps.Switch: lambda condition, a, b: a if condition else b,
    ps.EQ: lambda a, b: a == b,
    ps.NEQ: lambda a, b: a != b,
    ps.LT: lambda a, b: a < b,
    ps.LE: lambda a, b: a <= b,
    ps.GT: lambda a, b: a > b,
    ps.GE: lambda a, b: a >= b,
}


def _product(sizes: Sequence[Any]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def size_of(size: Variable | None, inputs: list[Variable]) -> Size:
    """Return the function of the inputs' shapes that a size is, or a tuple of several sizes.

    Raises
    ------
    UnknownSizeError
        If something else decides it.
    """
    if size is None:
        raise UnknownSizeError
    known = constant_integer(size) if size.type.ndim == 0 else None
    if known is not None:
        return _fixed(known)
    node = size.owner
    if node is None:
        raise UnknownSizeError
    read = measured(size)
    if read is not None and read[0] in inputs:
        return _dim(inputs.index(read[0]), read[1])
    rule = _rule(node)
    parts = [size_of(inp, inputs) for inp in node.inputs]
    return lambda values: rule(*(part(values) for part in parts))


def shapes_read(size: Variable) -> list[Variable]:
    """Return the arrays whose shapes decide a size, or a vector of sizes.

    Raises
    ------
    UnknownSizeError
        If something else decides it.
    """
    if not is_numeric(size):
        raise UnknownSizeError
    if size.type.ndim == 0 and constant_integer(size) is not None:
        return []
    node = size.owner
    if node is None:
        raise UnknownSizeError
    read = measured(size)
    if read is not None:
        return [read[0]]
    _rule(node)
    return list(dict.fromkeys(array for inp in node.inputs for array in shapes_read(inp)))


def _rule(node: Apply) -> Callable[..., Any]:
    """Return how a size is computed from others."""
    if isinstance(node.op, ScalarFromTensor | TensorFromScalar):
        return lambda a: a
    if isinstance(node.op, MakeVector):
        return lambda *sizes: sizes
    scalar = node.op.scalar_op if isinstance(node.op, Elemwise) else node.op
    rule = _SIZES.get(type(scalar))
    out = node.outputs[0].type
    if rule is None or out.ndim or np.dtype(out.dtype).kind not in "iub":
        raise UnknownSizeError
    if isinstance(scalar, ps.IntDiv | ps.Mod) and not constant_integer(node.inputs[1]):
        raise UnknownSizeError  # may be zero
    return rule
