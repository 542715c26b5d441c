r"""`AssociativeScan`: a loop whose steps a linker may combine in a tree.

For rows ``x_0 … x_{T-1}`` and a function ∘ that the user promises to be associative,
``(a ∘ b) ∘ c = a ∘ (b ∘ c)``::

    y_0 = x_0,    y_t = y_{t-1} ∘ x_t = x_0 ∘ x_1 ∘ … ∘ x_t        (from the end with `reverse`)

A row may be a tuple of tensors, its parts, and ∘ need not be commutative: its first argument
covers what came earlier in the order of the walk. That is a canonical loop with the mark
`associative`: part `i` is a state that starts from the first row, and the sequence of the others.
One processor does the least work by walking it. A linker for many processors may combine the rows
in a tree of logarithmic depth, as JAX does: G. E. Blelloch, "Prefix sums and their applications",
CMU-CS-90-190, 1990. It asks for this Op in the loop's place, before rewrites change the loop.
"""

from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from scanlib.lengths.numbers import Steps
from scanlib.ops.scan import Scan


class AssociativeScan(Op):
    """All running combinations of rows, in place of the loop that walks them, which has as many
    sequences as states, and nothing else that varies."""

    __props__ = ("scan",)

    def __init__(self, scan: Scan) -> None:
        self.scan = scan

    def __str__(self) -> str:
        return f"AssociativeScan{{{self.scan.name or 'combine'}}}"

    def steps_of(self, node: Apply) -> Steps:
        """Return what the loop says of lengths."""
        return self.scan.steps_of(node)

    def make_node(self, *inputs: Variable) -> Apply:
        node = self.scan.make_node(*inputs)
        return Apply(self, node.inputs, [out.type() for out in node.outputs])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        return self.scan.infer_shape(*arguments)

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        self.scan.perform(self.scan.make_node(*node.inputs), inputs, output_storage)


def combines(op: Op) -> bool:
    """Whether an Op is a loop that is nothing but an associative function of its rows."""
    if not isinstance(op, Scan) or not op.associative:
        return False
    signature = op.signature
    others = signature.n_carries + signature.n_outputs + signature.has_n_steps + signature.has_stop
    return not others and signature.n_sequences == signature.n_states
