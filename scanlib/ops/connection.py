"""Structure: which inputs of a loop reach which of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import toposort

from scanlib.ops.graph import is_numeric

if TYPE_CHECKING:
    from scanlib.ops.scan import Scan


def connection_pattern(op: Scan) -> list[list[bool]]:
    """Return, for each input and output of the loop, whether one reaches the other."""
    signature = op.signature
    inputs, outputs = list(op.body.inputs), list(op.body.outputs)
    masks = reached_by(inputs, outputs)
    pattern = np.array([[mask >> i & 1 for mask in masks] for i in range(len(inputs))], dtype=bool)
    pattern = pattern.reshape(len(inputs), len(outputs))
    owner = _owners(op)
    n_recurrent = signature.n_states + signature.n_carries
    first = signature.n_sequences
    # One row per outer input, one column per body output.
    reach = np.zeros((max(owner, default=-1) + 1, pattern.shape[1]), dtype=bool)
    for body_input, part in enumerate(owner):
        reach[part] |= pattern[body_input]
    for recurrent in range(n_recurrent):  # S. Warshall, "A theorem on Boolean matrices", 1962
        reach[reach[:, recurrent]] |= reach[first + recurrent]
    for recurrent in range(n_recurrent):
        reach[first + recurrent, recurrent] = True
    if signature.has_stop:
        reach = reach[:, :-1]
    reach[[not is_numeric(variable) for variable in _first_of_each(op)], :] = False
    rows = [[False] * reach.shape[1]] if signature.has_n_steps else []
    return rows + reach.tolist()


def reached_by(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> list[int]:
    """Return for each output which inputs it is connected to, as the bits of a number.

    PyTensor's `io_connection_pattern` makes a list of all inputs for each node.
    """
    masks = {inp: 1 << i for i, inp in enumerate(inputs)}
    for node in toposort(outputs, blockers=list(inputs)):
        own = [masks.get(inp, 0) for inp in node.inputs]
        find = getattr(node.op, "connection_pattern", None)
        pattern = find(node) if find is not None and any(own) else None
        for k, out in enumerate(node.outputs):
            mask = masks.get(out, 0)
            for i, bits in enumerate(own):
                if bits and (pattern is None or pattern[i][k]):
                    mask |= bits
            masks[out] = mask
    return [masks.get(out, 0) for out in outputs]


def _first_of_each(op: Scan) -> list[Variable]:
    """Return one body input for each outer input (not counting n_steps)."""
    inner = op.signature.split_body_inputs(op.body.inputs)
    return [*inner.rows, *(taps[0] for taps in inner.taps), *inner.carries, *inner.non_sequences]


def _owners(op: Scan) -> list[int]:
    """Return, for each body input, which outer input (not counting n_steps) it belongs to."""
    signature = op.signature
    owner = list(range(signature.n_sequences))
    for state, taps in enumerate(signature.taps):
        owner += [signature.n_sequences + state] * len(taps)
    start = signature.n_sequences + signature.n_states
    return owner + [start + i for i in range(signature.n_carries + signature.n_non_sequences)]
