"""States that are affine after a change of variable: their square is.

    h_t = √(a_t h_{t-1}² + b_t)

The volatility of a GARCH model is written so (T. Bollerslev, "Generalized autoregressive
conditional heteroskedasticity", 1986). With ``v = h²`` the step is ``a v + b``.
"""

from dataclasses import replace

import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, toposort

from scanlib.kernels.language import BOOL, Value
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.scalars import real
from scanlib.kernels.spans import Total
from scanlib.ops.graph import substitute
from scanlib.ops.lowered.elemwise_scan import Recurrence
from scanlib.recurrences import affine
from scanlib.recurrences.block_scans import StepBlock, Steps
from scanlib.recurrences.form import Component, NotInFamilyError, common_dtype, kind, only_part

FAMILY = "affine in squares"


def scan(block: StepBlock, steps: Steps) -> Value:
    """Write the scan of the square of a state, and its roots; return whether it can be trusted."""
    w, h = block.writer, steps.h
    assert steps.buffer is not None
    squares = steps.buffer()
    given = replace(steps, h=squares, before=steps.before * steps.before)
    _, trusted = affine.scan(block, given)
    count = register_bytes() // h.itemsize
    lost = Total(w, w.constant(False, BOOL), [count])

    def root(j: Value, count: int) -> None:
        square = squares.real(j, count)
        lost.add(~(square >= 0.0))
        h.store(j, w.apply("sqrt", square))

    block.for_all(count, root)
    return trusted & ~real(lost.after())


def recognize(component: Component) -> Recurrence:
    """Return the affine recurrence of a state's square; `NotInFamilyError` if the next value is no
    square root of an affine function of the square."""
    part = only_part(component)
    value, tap = component.nexts[part], component.taps[part][-1]
    common_dtype(component)
    if kind(value) != "f" or value.owner is None or not isinstance(value.owner.op, ps.Sqrt):
        raise NotInFamilyError("the next value is no square root")
    square = tap.type()
    replacements = {node.outputs[0]: square for node in toposort([value]) if _is_square(node, tap)}
    (inside,) = substitute([value.owner.inputs[0]], replacements)
    if tap in ancestors([inside]) or square not in ancestors([inside]):
        raise NotInFamilyError("the state is read other than as its square")
    squared = Component(
        component.inputs, {part: inside}, {part: {-1: square}}, {square: component.names[tap]}
    )
    found = affine.recognize(squared)
    return Recurrence(FAMILY, found.parts, found.elements, found.terms, found.constants)


def _is_square(node: Apply, tap: Variable) -> bool:
    if isinstance(node.op, ps.Sqr):
        return node.inputs[0] is tap
    if isinstance(node.op, ps.Mul):
        return list(node.inputs) == [tap, tap]
    if isinstance(node.op, ps.Pow):
        base, exponent = node.inputs
        return base is tap and isinstance(exponent, Constant) and exponent.data == 2
    return False
