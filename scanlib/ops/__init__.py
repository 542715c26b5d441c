"""The Ops: symbolic loops and what they are made of. Imports no other part of scanlib."""

# Imported for what they give the Ops: their batches, their derivatives.
from scanlib.ops import batching, gradient  # noqa: F401
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan

__all__ = ["ElemwiseScan", "Scan"]
