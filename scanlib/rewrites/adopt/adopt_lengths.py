"""Lengths that static shapes tell, of what is known as expressions elsewhere."""

from __future__ import annotations

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import Alloc, AllocEmpty
from pytensor.tensor.elemwise import Elemwise

from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt.adopt_forms import Symbol, learn
from scanlib.rewrites.adopt.adopt_rows import Rows, size_of


def learn_lengths(outputs: list[Variable], known: dict[Symbol, int], visited: set[Apply]) -> None:
    """Remember lengths that follow from the static shapes of operands beside them.

    What elementwise operations combine has one length, and so have the sequences of a loop. The
    type of a buffer knows what PyTensor computed of its length.
    """
    rows = Rows(known=known)
    for node in toposort(outputs):
        if node in visited:
            continue
        visited.add(node)
        inputs, length = [], None
        if isinstance(node.op, Elemwise) and node.outputs[0].type.ndim:
            inputs, length = node.inputs, node.outputs[0].type.shape[0]
        elif isinstance(node.op, Scan):
            groups = node.op.signature.split_inputs(node.inputs)
            inputs = groups.sequences
            length = node.op.static_length(node.inputs)
            if groups.n_steps is not None and not node.op.signature.has_stop:
                # Its sequences have as many rows, or the loop raises an error.
                lengths = (each.type.shape[0] for each in groups.sequences)
                if length is None:
                    length = next((each for each in lengths if each is not None), None)
                if length is not None:
                    learn(rows.integer(groups.n_steps), length, known)
        elif isinstance(node.op, Alloc | AllocEmpty) and node.outputs[0].type.ndim:
            rows_made = node.outputs[0].type.shape[0]
            if rows_made is not None:
                learn(rows.integer(size_of(node)), rows_made, known)
        if length is None or length == 1:
            continue
        for inp in inputs:
            if inp.type.shape[0] is None:
                learn(rows.of(inp), length, known)
