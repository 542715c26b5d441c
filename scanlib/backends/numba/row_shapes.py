"""The row shapes of stacked outputs, as source that runs before the first step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import toposort

from scanlib._compat import thaw_graph
from scanlib.backends.numba.step_graph import GraphWriter
from scanlib.ops.scan import Scan
from scanlib.ops.shapes import body_input_shapes, output_row_shapes

MAX_NODES = 30  # a shape that takes more to compute is read off the first step


def row_shapes(
    op: Scan, arguments: list[str], non_sequences: list[Variable], emitter: GraphWriter
) -> list[list[str] | None]:
    """Return the row shape of each stacked output as source, None where only a step tells.

    Shapes come from the body as it was before rewriting: they are the same, and stay simple
    expressions. `arguments` names the loop's inputs; `non_sequences` are variables that the
    emitter knows.
    """
    body = thaw_graph(op.body)
    outputs = op.signature.split_body_outputs(body.outputs).outputs
    if not outputs:
        return []
    names: dict[Variable, str] = {}
    shapes: list[Any] = []
    for name, type in zip(arguments, op.outer_input_types(), strict=True):
        if not hasattr(type, "ndim"):
            shapes.append(None)
            continue
        sizes = [pt.lscalar() for _ in range(type.ndim)]
        names.update({size: f"{name}.shape[{axis}]" for axis, size in enumerate(sizes)})
        shapes.append(sizes)
    values: list[Variable | None] = [None] * (len(body.inputs) - len(non_sequences))
    rows = output_row_shapes(
        body.inputs, outputs, body_input_shapes(op.signature, shapes), [*values, *non_sequences]
    )
    return [_row_source(row, names, emitter) for row in rows]


def _row_source(
    row: list[Variable | None], names: dict[Variable, str], emitter: GraphWriter
) -> list[str] | None:
    """Return source for the sizes of a row, if they are simple enough to be worth it."""
    texts = []
    for size in row:
        text = None if size is None else _size_source(size, names, emitter)
        if text is None:
            return None
        texts.append(text)
    return texts


def _size_source(size: Variable, names: dict[Variable, str], emitter: GraphWriter) -> str | None:
    if isinstance(size, Constant):
        return str(int(np.asarray(size.data)))
    if size in names:
        return names[size]
    nodes = list(toposort([size], blockers=list(names)))
    if len(nodes) > MAX_NODES:
        return None
    for variable, name in names.items():
        emitter.bind_scalar(variable, f"np.int64({name})")
    for node in nodes:
        for inp in node.inputs:
            known = isinstance(inp, Constant) or inp in emitter.values
            if inp.owner is None and not known:
                return None
        emitter.emit(node)
    return emitter.scalar(size)
