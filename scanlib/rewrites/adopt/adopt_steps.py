"""The step of a loop of `pytensor.scan`, as a graph that may be changed."""

from __future__ import annotations

from typing import Any

from pytensor.compile.mode import get_mode, optdb, predefined_modes, predefined_optimizers
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.tensor.elemwise import Elemwise

from scanlib._compat import thaw_graph


def step_of(op: Any) -> FunctionGraph:
    """Return a copy of the step of a loop of `pytensor.scan`, rewritten as its mode asks."""
    body = thaw_graph(op.fgraph)
    undo_in_place(body)
    rewrite_as_asked(body, op.mode)
    return body


def undo_in_place(body: FunctionGraph) -> None:
    """Let no Op of a step overwrite its inputs, as they do where PyTensor compiled the loop before.

    It compiles the very graph that the loop holds, which other functions may share.
    """
    for node in body.toposort():
        if not node.op.destroy_map:
            continue
        properties = node.op._props_dict()
        if isinstance(node.op, Elemwise):
            op: Op = Elemwise(node.op.scalar_op)
        elif "inplace" in properties:
            op = type(node.op)(**properties | {"inplace": False})
        else:
            continue
        body.replace_all(zip(node.outputs, op.make_node(*node.inputs).outputs, strict=True))


def rewrite_as_asked(body: FunctionGraph, mode: Any) -> None:
    """Run the rewrites on a step that the mode of its loop names, beside those of each mode."""
    asked = getattr(get_mode(mode)._optimizer, "include", ()) if mode is not None else ()
    named = set(asked) - _TAGS_OF_MODES
    if named:
        query = RewriteDatabaseQuery(include=["canonicalize", "merge", *sorted(named)])
        optdb.query(query).rewrite(body)


# Tags that stand for a mode, or for a level of rewriting, and not for a rewrite.
_TAGS_OF_MODES = {
    tag
    for each in (*predefined_modes.values(), *predefined_optimizers.values())
    for tag in getattr(getattr(each, "_optimizer", each), "include", ())
} - {"unsafe"}
