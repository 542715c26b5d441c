"""Which matrix recurrence a loop is: of one state as it stands, or of all its parts joined."""

from __future__ import annotations

import math

from pytensor.graph.basic import Apply
from pytensor.graph.traversal import ancestors

from scanlib.ops.loop import Loop
from scanlib.rewrites.lower.linear_joined import Joined
from scanlib.rewrites.lower.linear_roles import (
    MatricesCostMoreError,
    NotLinearError,
    Roles,
    canonical_loop,
    shifted,
    sort_parts,
    value_of,
)
from scanlib.rewrites.lower.linear_system import join_parts

SMALL_PRODUCT = 8  # items of a state whose products from both sides are one product with a matrix


def find_recurrence(node: Apply) -> tuple[Loop, Roles, Joined | None]:
    """Return a loop around one matrix recurrence: the one of a node, or that of all its parts.

    Raises
    ------
    NotLinearError
        If the loop is of another form.
    """
    if node.op.recompute:
        raise NotLinearError("its steps are segments of a checkpointed loop")
    loop = canonical_loop(node)
    try:
        parts = shifted(loop)
        if parts is None:
            loop = canonical_loop(node)
            parts = sort_parts(loop)
        if not _is_small_product(loop, parts):
            return loop, parts, None
    except MatricesCostMoreError:
        raise
    except NotLinearError as single:
        try:
            return join_parts(node)
        except NotLinearError as several:
            raise _reason(node, single, several) from several
    try:
        return join_parts(node)
    except NotLinearError:
        return loop, parts, None


def _is_small_product(loop: Loop, parts: Roles) -> bool:
    """Whether fixed matrices on both sides are better taken as one matrix of few items."""
    recurrence = parts.recurrence
    sizes = value_of(parts.recurrent).type.shape
    if recurrence.across is None or None in sizes or math.prod(sizes) > SMALL_PRODUCT:
        return False
    above = set(ancestors([recurrence.matrix, recurrence.across]))
    return not any(sequence.row in above for sequence in loop.sequences)


def _reason(node: Apply, single: NotLinearError, several: NotLinearError) -> NotLinearError:
    """Return the error that says more: of one state, or of all together."""
    if isinstance(several, MatricesCostMoreError):
        return several
    signature = node.op.signature
    alone = signature.n_states + signature.n_carries == 1 and signature.depths in ((), (1,))
    return single if alone else several
