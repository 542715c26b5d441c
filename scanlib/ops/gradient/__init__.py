r"""Derivatives of the canonical loop.

For a loop ``y_t = f(x_t, y_{t-1} … y_{t-K}, c, w)`` and a cost ``C`` write
``ȳ_t = ∂C/∂y_t``. The reverse-mode recurrence (Werbos, "Backpropagation through time: what it
does and how to do it", Proceedings of the IEEE 78, 1990) walks the steps backwards. At step `t`

    ȳ_t            = cotangent of row t of the history  +  a_1
    (x̄, d_1 … d_K, c̄, w̄) = transposed Jacobian of f at step t, applied to ȳ_t
    a_j            ← a_{j+1} + d_j          (a_{K+1} = 0)

where ``a_j`` collects what later steps owe to ``y_{t-j}``. So the pullback is a loop of the
same kind with its direction flipped: the ``a_j`` and the sums ``w̄`` are carries, the ``x̄`` are
stacked outputs, and the forward values enter as sequences that are views of the histories.

What a step computed is not computed again where the forward loop has it: the next states and
the outputs are read from their histories. Values that must not be recomputed (random draws)
and carries that a derivative needs are stored by running the same loop with more outputs;
merging makes the two forward loops one.
"""

from collections.abc import Sequence

from pytensor.graph.basic import Variable

from scanlib.ops.gradient.checkpointed import checkpointed_pullback
from scanlib.ops.gradient.pullback import pullback
from scanlib.ops.gradient.pushforward import pushforward
from scanlib.ops.scan import Scan

__all__ = ["checkpointed_pullback", "pullback", "pushforward"]


def pullback_by_schedule(op: Scan, *arguments: Sequence[Variable]) -> list[Variable]:
    """Return the cotangents of a loop's inputs, from what it stored or from its checkpoints."""
    return (pullback if op.checkpoint is None else checkpointed_pullback)(op, *arguments)


Scan.pullback, Scan.pushforward = pullback_by_schedule, pushforward  # type: ignore[assignment, method-assign]
