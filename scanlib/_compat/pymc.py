"""What scanlib takes from PyMC beyond its public names: how it derives densities from graphs.

Densities are derived in two stages: rewrites put measurable Ops where a density is known, then
each of them is asked for the density of its values.
"""

import functools
from collections.abc import Callable
from typing import Any

from pymc.distributions.custom import SupportPointRewrite
from pymc.logprob.abstract import MeasurableOp, PromisedValuedRV, ValuedRV, _logprob
from pymc.logprob.basic import conditional_logp
from pymc.logprob.rewriting import measurable_ir_rewrites_db
from pytensor.graph.fg import FunctionGraph

VALUED = (ValuedRV, PromisedValuedRV)
"""What marks a variable whose value is given, or will be by the Op that it is joined in."""

logp_rule = _logprob


def before_support_points(rewrite: Callable[[FunctionGraph, Callable[..., Any]], None]) -> None:
    """Have `rewrite` called on the graph of a distribution whose draws become support points.

    PyMC goes into the steps of PyTensor's loops alone. The second argument does for the graph of
    a step what is done for the whole.
    """
    apply = SupportPointRewrite.apply

    @functools.wraps(apply)
    def apply_with_loops(self: SupportPointRewrite, fgraph: FunctionGraph) -> None:
        rewrite(fgraph, self.rewrite)
        apply(self, fgraph)

    SupportPointRewrite.apply = apply_with_loops
