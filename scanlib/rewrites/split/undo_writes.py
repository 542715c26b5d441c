"""Backward loops take back what the steps of a loop wrote into an array.

    forward    h_t     = h_{t-1} with y_t at the places k_t, stored: k_t and o_t = h_{t-1}[k_t]
    backward   h_{t-1} = h_t with o_t at the places k_t, from the last array on

The gradient reads the array before, or after, each step. Where it reads more of it than some items
(`split.reuse` has the others), the array of each step would be stored: of a cache of `n` rows that
`n` steps fill, that is n² rows. The items that were overwritten are as many as were written, and
the backward loop, which meets the steps in reverse order, has each array from the one after it,
in place and to the last bit.
"""

import math
from dataclasses import dataclass, field

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.basic import ScalarFromTensor

from scanlib._compat import INDEX_WRITES
from scanlib.lengths.numbers import indices_of
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop, State
from scanlib.rewrites.lower.canonical_loop import sizes_from_outside
from scanlib.rewrites.over_time.split_cost import of_differing_shapes
from scanlib.rewrites.split.reuse import (
    ReuseForwardValues,
    are_smaller,
    rows_for_one,
    same_rows,
    store,
)

SMALL = 64  # arrays of so few items are stored


class UndoWrites(ReuseForwardValues):
    """Let backward loops take back what steps wrote; see the module's text."""

    @staticmethod
    def serve(fgraph: FunctionGraph, maker: Apply, reader: Apply) -> Apply | None:
        """Store what the steps of a loop overwrite; return its new node."""
        if not any(isinstance(node.op, INDEX_WRITES) for node in maker.op.body.apply_nodes):
            return None
        source, target = Loop.from_node(maker), Loop.from_node(reader)
        if source.reverse or not target.reverse:
            return None
        places = same_rows(maker, source, target)
        found = [
            undone
            for state, rows in rows_for_one(fgraph, (maker, reader), (source, target))
            if (undone := _undone(source, state, rows, places)) is not None
        ]
        chosen = {twin: value for undone in found for twin, value in undone.stored.items()}
        if not chosen:
            return None

        def applied(loop: Loop) -> Apply:
            sizes_from_outside(loop)
            return loop.apply().node

        target.substitute({row: v for undone in found for row, v in undone.rows.items()})
        last = {undone.state: (undone.after, undone.before) for undone in found}
        loops = source, target
        return store(fgraph, (maker, reader), loops, chosen, applied, "undo_writes", last)


@dataclass
class _Undone:
    """An array that steps write: in the reader's body the one `after` a step and the one `before`
    it, what it reads instead of `rows`, and what of the first loop is stored for that."""

    state: State
    after: Variable
    before: Variable
    rows: dict[Variable, Variable] = field(default_factory=dict)
    stored: dict[Variable, Variable] = field(default_factory=dict)


def _undone(
    source: Loop, state: State, rows: list[Variable], places: dict[Variable, Variable]
) -> _Undone | None:
    """Return how the reader has the rows of a state without a history; None where that does not
    pay, or the steps do not write into the state."""
    values, sizes = [places.get(row) for row in rows], state.type.shape
    is_small = None not in sizes and math.prod(sizes) < SMALL
    known = state.next, *state.taps.values()
    if is_small or not all(value in known for value in values):
        return None
    array, found = state.next, _Undone(state, state.type(), state.type())
    found.before = found.after
    while (node := array.owner) is not None and isinstance(node.op, INDEX_WRITES):
        array, _, *places_in = node.inputs
        items = array[tuple(indices_of(node))]
        index = tuple(indices_of(node, [_twin(place, found.stored) for place in places_in]))
        kept = items.type()
        found.stored[kept] = items
        found.before = found.before[index].set(kept)
        if not are_smaller([items], state.next):
            return None
    differing = of_differing_shapes(list(found.stored.values()), source.varying_inputs())
    if state.taps != {-1: array} or not found.stored or differing:
        return None
    found.rows = {
        row: found.after if value is state.next else found.before
        for row, value in zip(rows, values, strict=True)
    }
    return found


def _twin(place: Variable, stored: dict[Variable, Variable]) -> Variable:
    """Return a part of an index in the reader's body, which is stored if it is no constant."""
    if isinstance(place, Constant):
        return place
    value = place if is_tensor(place) else pt.tensor_from_scalar(place)
    twin = value.type()
    stored[twin] = value
    return twin if is_tensor(place) else ScalarFromTensor()(twin)
