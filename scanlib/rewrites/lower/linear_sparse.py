"""Systems of which too much is missing to be joined."""

from __future__ import annotations

from collections.abc import Sequence

from scanlib.ops.connection import reached_by
from scanlib.rewrites.lower.linear_joined import Slot
from scanlib.rewrites.lower.linear_roles import NotLinearError

SMALL = 32  # systems of so many numbers are joined whatever blocks are missing
WASTE = 2.0  # larger ones if the joined matrix has at most so many times their items
FEW_BLOCKS = (
    "its states are coupled by few or sparse matrices: joined, most of the matrix would be zeros"
)


def refuse_sparse(slots: Sequence[Slot]) -> None:
    """Refuse many numbers few of which depend on one another, before anything is computed.

    Raises
    ------
    NotLinearError
    """
    values = [slot.value for slot in slots]
    if len(slots) <= SMALL or any(getattr(v.type, "ndim", 1) for v in values):
        return
    used = sum(mask.bit_count() for mask in reached_by(values, [slot.next for slot in slots]))
    if len(slots) ** 2 > WASTE * used:
        raise NotLinearError(FEW_BLOCKS)
