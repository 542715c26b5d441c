"""The Ops: symbolic loops and what they are made of. Imports no other part of scanlib."""

from scanlib.ops import batching, gradient
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Sequence, State
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from scanlib.ops.signature import Signature

__all__ = [
    "AssociativeScan",
    "Carry",
    "ElemwiseScan",
    "Loop",
    "NonSequence",
    "Output",
    "Scan",
    "Sequence",
    "Signature",
    "State",
    "batching",
    "gradient",
]
