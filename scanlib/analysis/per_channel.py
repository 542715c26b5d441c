"""Updates at an index, seen from the channel that is updated.

``h'[c] = f(h[i]) if c = i else h[c]`` reads one channel in all of them, but where the item counts,
it is the channel's own: ``f(h[c]) if c = i else h[c]`` is the same function, with a coefficient
that is one-hot. Kernels prefer the first form, which computes `f` once; families are found in the
second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytensor.scalar as ps
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors, toposort

from scanlib.ops.graph import substitute
from scanlib.ops.lowered.elemwise_scan import Axes
from scanlib.ops.lowered.positions import Item, places_compared


def per_channel(outputs: Sequence[Variable], axes: Mapping[Variable, Axes]) -> list[Variable]:
    """Return scalars in which items read at the place of the channel are those of the channel.

    Parameters
    ----------
    outputs : sequence of Variable
        The results of a step, scalars.
    axes : mapping of Variable to Axes
        The channels' axes of the inputs.
    """
    replacements: dict[Variable, Variable] = {}
    for node in toposort(list(outputs)):
        if not isinstance(node.op, ps.Switch):
            continue
        here = {position: axis for axis, position in places_compared(node.inputs[0]).items()}
        if not here:
            continue
        own = {
            item: item.owner.inputs[0]
            for item in ancestors(node.inputs[1:2])
            if item.owner is not None
            and isinstance(item.owner.op, Item)
            and _is_own(item, here, axes)
        }
        if own:
            (value,) = substitute([node.inputs[1]], own)
            new = node.op.make_node(node.inputs[0], value, node.inputs[2])
            replacements[node.outputs[0]] = new.outputs[0]
    return substitute(list(outputs), replacements) if replacements else list(outputs)


def _is_own(item: Variable, here: Mapping[Variable, int], axes: Mapping[Variable, Axes]) -> bool:
    row, *positions = item.owner.inputs
    given = iter(positions)
    places = [here.get(next(given)) if p == "at" else p for p in item.owner.op.places]
    return tuple(places) == axes[row]
