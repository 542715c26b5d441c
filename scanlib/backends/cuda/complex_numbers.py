"""Operations on complex numbers that PyTensor's scalar Ops have no C code for.

``get_real`` and ``get_imag`` read the parts, and a number is made of two reals: so it is with
PyTensor's class for complex numbers, and with that of the CUDA template.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.scalar as ps
from pytensor.graph.basic import Apply

_EXPRESSIONS = {
    ps.Real: "get_real({x})",
    ps.Imag: "get_imag({x})",
    ps.Conj: "{type}(get_real({x}), -get_imag({x}))",
    ps.Abs: "hypot(get_real({x}), get_imag({x}))",
    ps.TrueDiv: (
        "{out}_w ? {type}((get_real({x}) + get_imag({x}) * {out}_r) / {out}_s,"
        " (get_imag({x}) - get_real({x}) * {out}_r) / {out}_s)"
        " : {type}((get_real({x}) * {out}_r + get_imag({x})) / {out}_s,"
        " (get_imag({x}) * {out}_r - get_real({x})) / {out}_s)"
    ),
}
# The larger part of the divisor is divided by first, so that its square does not overflow (R. L.
# Smith, Algorithm 116, Communications of the ACM 5, 1962).
_QUOTIENT = """
const auto {out}_a = get_real({y}), {out}_b = get_imag({y});
const bool {out}_w = fabs({out}_a) >= fabs({out}_b);
const auto {out}_r = {out}_w ? {out}_b / {out}_a : {out}_a / {out}_b;
const auto {out}_s = {out}_w ? {out}_a + {out}_b * {out}_r : {out}_a * {out}_r + {out}_b;
"""


def complex_operation(
    node: Apply, inputs: Sequence[str], out: str, result_type: str
) -> list[str] | None:
    """Return the statements of an operation on complex numbers, None if it is none of these.

    Parameters
    ----------
    node : Apply
    inputs : sequence of str
        Expressions without side effects.
    out : str
        The name that the result gets.
    result_type : str
        Its C type.
    """
    expression = _EXPRESSIONS.get(type(node.op))
    if expression is None:
        return None
    if not all(inp.type.dtype.startswith("complex") for inp in node.inputs):
        return None
    names = {"x": inputs[0], "y": inputs[-1], "out": out, "type": result_type}
    text = _QUOTIENT if type(node.op) is ps.TrueDiv else ""
    text += f"const {{type}} {{out}} = {expression};"
    return text.format(**names).strip().splitlines()
