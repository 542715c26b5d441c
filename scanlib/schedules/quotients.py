r"""Quotients by what is the same for all steps of a block, rounded as divisions are, without them.

With the reciprocal ``r ≈ 1 / y``, rounded to the nearest number, and multiply-adds rounded once,

    q₀ = x r,    q₁ = q₀ + r (x - y q₀),    q₂ = q₁ + r (x - y q₁)

`q₁` is one of the two numbers next to ``x / y``, so the remainder ``x - y q₁`` has no error and
`q₂` is the nearest number to the quotient (P. Markstein, "Computation of elementary functions on
the IBM RISC System/6000 processor", 1990; J.-M. Muller et al., "Handbook of floating-point
arithmetic", 2018, section 4.7). In registers of 512 bits, a vector of them takes less than half of
the time of a division; in shorter ones divisions are faster, and stay.

That holds where nothing on the way overflows or underflows: where `x` is zero, whose sign `q₀`
keeps, or within `RANGE`, and `y` is within its square root. If other numbers are found in a block,
which infinities and NaN are, its quotients are computed once more, by divisions.
"""

from collections.abc import Iterable

import pytensor.scalar.basic as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, toposort

from scanlib.kernels.language import BOOL, Type, Value, Writer
from scanlib.kernels.processor import has_fused_multiply_add, register_bytes
from scanlib.kernels.scalars import Scalars, real
from scanlib.recurrences.trust import Found, outside

LONG = 64  # bytes of registers
RANGE = {"float64": 2.0**480, "float32": 2.0**60}  # and one by that; of divisors, its square root


def quotients_in(
    outputs: list[Variable], known: Iterable[Variable], same: Iterable[Variable]
) -> list[Apply]:
    """Return the divisions of real numbers by what is computed from constants and from `same`.

    `known` is what is not computed anew. There are none where divisions take no longer.
    """
    if not has_fused_multiply_add() or register_bytes() < LONG:
        return []
    allowed, blockers = set(same), set(known)

    def is_same(value: Variable) -> bool:
        sources = [v for v in ancestors([value], blockers=blockers) if v.owner is None]
        known_within = blockers & set(ancestors([value], blockers=blockers))
        return not known_within and all(isinstance(v, Constant) or v in allowed for v in sources)

    return [
        node
        for node in toposort(outputs, blockers=blockers)
        if isinstance(node.op, ps.TrueDiv)
        and node.outputs[0].type.dtype in RANGE
        and not is_same(node.inputs[0])
        and is_same(node.inputs[1])
    ]


class Quotients:
    """Writes the quotients of a block by divisors that are bound in `scalars`, one or `lanes` at
    once."""

    def __init__(self, w: Writer, scalars: Scalars, nodes: list[Apply], lanes: int) -> None:
        self.w, self.scalars = w, scalars
        self.divisors: dict[Variable, tuple[Value, Value]] = {}
        self.found: dict[Type, Found] = {}
        self.fine: Value = w.constant(True, BOOL)
        scalars.emit([node.inputs[1] for node in nodes])
        for node in nodes:
            dtype = node.outputs[0].type.dtype
            divisor = real(scalars.number(node.inputs[1]))
            own, most = scalars.convert(divisor, dtype), RANGE[dtype] ** 0.5
            self.fine = self.fine & (abs(own) <= most) & (abs(own) >= 1 / most)
            self.divisors[node.outputs[0]] = (own, 1.0 / own)
            for count in {1, lanes}:
                kind = Type(dtype, count)
                self.found.setdefault(kind, Found(w, kind))

    def write(self, node: Apply) -> bool:
        """Write a node and bind its result, if it is one of the quotients."""
        (out,) = node.outputs[:1]
        if out not in self.divisors:
            return False
        w, scalars = self.w, self.scalars
        x = real(scalars.spread(scalars.number(node.inputs[0])))
        x = scalars.convert(x, out.type.dtype)
        y, r = (w.splat(v, x.type.lanes) if x.type.lanes > 1 else v for v in self.divisors[out])
        limit = RANGE[out.type.dtype]
        self.found[x.type].look(x, outside(1 / limit, limit))
        first = q = x * r
        for _ in range(2):
            q = w.fma(w.fma(-y, q, x), r, q)
        scalars.bind(out, w.apply("copysign", q, first))
        return True

    def are_wrong(self) -> Value:
        """Return whether quotients have to be computed by divisions."""
        found = ~self.fine
        for own in self.found.values():
            found = found | own.anything()
        return found
