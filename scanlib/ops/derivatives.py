"""Where the derivatives of Ops are found that are written above them.

A derivative of a loop is another loop: its rule takes loops apart and makes new ones, so it stands
in a module that imports the Ops. Rules register here by class, as rules for batches do with
PyTensor's `vectorize_rule`; an Op that `HasDerivatives` looks its own up. `scanlib.ops` imports
the modules with rules, such as `gradient` for `Scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

from pytensor.graph.basic import Variable

Variables = Sequence[Variable]


@singledispatch
def pullback_rule(
    op: Any, inputs: Variables, outputs: Variables, cotangents: Variables
) -> list[Variable]:
    """Return the cotangents of an Op's inputs."""
    raise NotImplementedError(f"{op} has no pullback")


@singledispatch
def pushforward_rule(
    op: Any, inputs: Variables, outputs: Variables, tangents: Variables
) -> list[Variable]:
    """Return the tangents of an Op's outputs."""
    raise NotImplementedError(f"{op} has no pushforward")


class HasDerivatives:
    """The derivatives of an Op, by the rules that are registered for its class.

    Comes before `Op` among the bases: it replaces methods of it.
    """

    def pullback(
        self, inputs: Variables, outputs: Variables, cotangents: Variables
    ) -> list[Variable]:
        return pullback_rule(self, inputs, outputs, cotangents)

    def pushforward(
        self, inputs: Variables, outputs: Variables, tangents: Variables
    ) -> list[Variable]:
        return pushforward_rule(self, inputs, outputs, tangents)
