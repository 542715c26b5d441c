r"""The logarithm of a sum of two exponentials as one scalar operation.

    logaddexp(x, y) = log(exp x + exp y) = max(x, y) + log(1 + exp(-|x - y|))

PyTensor writes it as the first of these expressions and counts on a rewrite to avoid the
overflow; inside the body of a loop it must be right as it stands. With ``s = 1 / (1 + exp(y - x))``
the derivatives are `s` and ``1 - s``. They are written with the difference of the arguments, not
with ``exp(x - logaddexp(x, y))``, which loses digits where the arguments are large. Two equal
infinities have no difference; there, both derivatives are one half and the second ones zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.scalar import basic as ps
from pytensor.scalar.math import sigmoid
from pytensor.tensor.elemwise import Elemwise

from scanlib.source_keys import source_key


class LogAddExp(ps.BinaryScalarOp):
    """``log(exp(x) + exp(y))`` of two real numbers, without overflow."""

    commutative = True
    associative = True
    identity = -np.inf
    nfunc_spec = ("logaddexp", 2, 1)

    def impl(self, x: Any, y: Any) -> Any:
        return np.logaddexp(x, y)

    def c_code(
        self, node: Any, name: str, inputs: Sequence[str], outputs: Sequence[str], sub: Any
    ) -> str:
        x, y = inputs
        (z,) = outputs
        # The second test is false for NaN; equal infinities never reach their difference.
        return f"""
        if ({x} == {y}) {z} = {x} + 0.69314718055994530942;
        else if ({x} > {y}) {z} = {x} + log1p(exp({y} - {x}));
        else {z} = {y} + log1p(exp({x} - {y}));
        """

    def c_code_cache_version(self) -> tuple[str, ...]:
        return (source_key("ops/logaddexp.py"),)

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], gout: Sequence[Variable]
    ) -> list[Variable]:
        x, y = inputs
        (gz,) = gout
        return [gz * sigmoid(_difference(x, y)), gz * sigmoid(_difference(y, x))]


def _difference(x: Variable, y: Variable) -> Variable:
    """Return ``x - y``, zero where both are the same infinity."""
    same = ps.and_(ps.eq(x, y), ps.isinf(x))
    return ps.switch(same, x.zeros_like(), x - y)


log_add_exp = LogAddExp(ps.upgrade_to_float, name="log_add_exp")
logaddexp = Elemwise(log_add_exp)
