"""Sizes that a step asks a value for become inputs of the step.

``zeros_like(h)``, ``h.shape[1]`` and what gradients leave behind, such as a sum over as many rows
as `h` has, depend on the shape of a value alone. As long as they stand in the body, whatever has
that shape seems to be needed. A row or a state keeps its shape in all steps, so its sizes are
those of the loop's own inputs.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import toposort
from pytensor.scalar.basic import Second
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i

from scanlib._compat import ShapeFeature
from scanlib.ops.loop import Loop, NonSequence
from scanlib.rewrites.pytensor_rewrites import run_query

_CANONICAL = RewriteDatabaseQuery(include=["canonicalize", "merge"])


def sizes_from_outside(loop: Loop) -> None:
    """Let a step read sizes of its inputs from outside; `loop` is edited."""
    if not any(_asks_for_a_shape(node) for node in toposort(loop.body_outputs())):
        return
    shapes = ShapeFeature()
    fgraph = FunctionGraph(loop.body_inputs(), loop.body_outputs(), clone=False, features=[shapes])
    for node in fgraph.toposort():
        if _is_fill(node):
            (out,), value = node.outputs, node.inputs[1]
            filled = pt.alloc(value, *shapes.shape_of[node.inputs[0]])
            if out.type.is_super(filled.type):
                fgraph.replace(out, filled)
    run_query(_CANONICAL, fgraph)
    loop.set_body_outputs(list(fgraph.outputs))
    sources = loop.sources()
    replacements: dict[Variable, Variable] = {}
    for node in toposort(loop.body_outputs()):
        if not isinstance(node.op, Shape_i) or node.inputs[0] not in sources:
            continue
        source = sources[node.inputs[0]]
        size = pt.cast(source.array.shape[node.op.i + source.lead], "int64")
        inner = node.outputs[0].type()
        loop.non_sequences.append(NonSequence(size, inner))
        replacements[node.outputs[0]] = inner
    if replacements:
        loop.substitute(replacements)


def _asks_for_a_shape(node: Apply) -> bool:
    return isinstance(node.op, Shape | Shape_i) or _is_fill(node)


def _is_fill(node: Apply) -> bool:
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Second)
