"""The family of table lookups: the next value is read from a table at a place that the state gives.

    s_t = table[x_t, s_{t-1}]

A finite automaton, or a Markov chain whose draws are given. Functions from a finite set to itself
are closed under composition: the composed table is ``second[first[s]]``, with one entry per state.

W. D. Hillis and G. L. Steele, "Data parallel algorithms", 1986 (automata by scans).
"""

from __future__ import annotations

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from scanlib.analysis.families.form import Component, Elements, NotInFamilyError, only_part
from scanlib.ops.elemwise_scan import Recurrence, Term
from scanlib.ops.positions import Item


def recognize(component: Component) -> Recurrence:
    """Return the table lookup of a component of one integer state.

    Its elements are the other positions at which the table is read.

    Raises
    ------
    NotInFamilyError
        If the next value is no item of a table, or the state does more than give its place.
    """
    part = only_part(component)
    state = component.taps[part][-1]
    if np.dtype(state.type.dtype).kind not in "biu":
        raise NotInFamilyError("only whole numbers give places in a table")
    item = _without_casts(component.nexts[part]).owner
    if item is None or not isinstance(item.op, Item):
        raise NotInFamilyError("the next value is no item of a table")
    table, *positions = item.inputs
    if table is state:
        raise NotInFamilyError("the table is a state itself")
    elements = Elements("int64")
    others = [position for position in positions if state not in ancestors([position])]
    if len(others) == len(positions):
        raise NotInFamilyError("the place in the table does not depend on the state")
    places = tuple(elements.add(position) for position in others)
    return elements.recurrence("table lookup", component, ((Term(part, -1, None),),), places)


def _without_casts(value: Variable) -> Variable:
    """Return what a whole number was before it was cast to other whole numbers."""
    node = value.owner
    while node is not None and isinstance(node.op, ps.Cast | ps.Identity):
        if np.dtype(node.inputs[0].type.dtype).kind not in "biu":
            break
        value = node.inputs[0]
        node = value.owner
    return value
