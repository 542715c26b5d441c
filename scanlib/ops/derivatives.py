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

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, NullType
from pytensor.graph.basic import Variable

from scanlib.ops.graph import is_differentiable

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
    """Return the tangents of an Op's outputs: where there is no rule, by two pullbacks.

    J. Townsend, "A new trick for calculating Jacobian vector products", 2017: the pullback is
    linear in its cotangents, so pulling it back once more applies the Jacobian itself.
    """
    wrt = {i: out.zeros_like() for i, out in enumerate(outputs) if is_differentiable(out)}
    nothing = pg.disconnected_type()
    found = pullback_rule(op, inputs, outputs, [wrt.get(i, nothing) for i in range(len(outputs))])
    without = DisconnectedType | NullType
    known = {
        pt.tensor_copy(value): pt.cast(tangent, value.type.dtype)
        for value, tangent in zip(found, tangents, strict=True)
        if not isinstance(value.type, without) and not isinstance(tangent.type, without)
    }
    if not known:
        return [nothing for _ in outputs]
    moved = pg.grad(
        cost=None,
        known_grads=known,
        wrt=list(wrt.values()),
        disconnected_inputs="ignore",
        return_disconnected="disconnected",
    )
    by_place = dict(zip(wrt, moved, strict=True))
    return [by_place.get(i, nothing) for i in range(len(outputs))]


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
