"""NumPy's rules for numbers of several dtypes, and for integers, where C or PyTensor has others.

NumPy converts what an operation is given to the dtype of the result first; C converts two numbers
to a type that it finds itself: int32 and uint32 to uint32, int32 and float32 to float32. PyTensor's
C code takes the larger of two integers, and a power of one, as doubles, and turns around the signs
of what it divides, which the smallest integer does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply

_TO_RESULT = (ps.Add, ps.Sub, ps.Mul, ps.TrueDiv, ps.IntDiv, ps.Mod)
_EXTREMES = {ps.ScalarMaximum: ">", ps.ScalarMinimum: "<"}
_COMPARISONS = {ps.LT: "<", ps.GT: ">", ps.LE: "<=", ps.GE: ">=", ps.EQ: "==", ps.NEQ: "!="}
_DIVISIONS = {ps.IntDiv: "division", ps.Mod: "modulo"}
_DIVISION = (
    "{type} {out} = 0;",
    "if ({y} == 0) {{",
    'PyErr_SetString(PyExc_ZeroDivisionError, "integer {what} by zero");',
    "{fail}",
    "}} else if ({y} != ({type})-1 || {y} > 0) {{",
    "const {type} rest = {x} % {y};",
    "const bool below = rest != 0 && (rest < 0) != ({y} < 0);",
    "{out} = {result};",
    "}} else {{",  # the machine's division of the smallest integer by -1 fails
    "{out} = {negative};",
    "}}",
)
_POWER = (
    "{type} {out} = 1;",
    "{{",
    "{type} base = {x};",
    "auto left = {y};",
    "if (left < 0) {{",  # as the quotient 1 / x**-y, cut off
    "{out} = base == 1 ? 1 : base == ({type})-1 ? (left % 2 ? base : 1) : 0;",
    "}} else {{",
    "for (; left > 0; left /= 2) {{",
    "if (left % 2) {out} = {out} * base;",
    "base = base * base;",
    "}}",
    "}}",
    "}}",
)


def converted(node: Apply, inputs: Sequence[str], c_type: Callable[[str], str]) -> list[str]:
    """Return the inputs of an operation, in the dtype in which NumPy computes it."""
    dtypes = [inp.type.dtype for inp in node.inputs]
    dtype = node.outputs[0].type.dtype
    free = 0
    if type(node.op) in _COMPARISONS:
        dtype = np.result_type(*dtypes).name
    elif isinstance(node.op, ps.Switch):
        free = 1
    elif not isinstance(node.op, _TO_RESULT) and type(node.op) not in _EXTREMES:
        return list(inputs)
    if not _is_number(dtype):
        return list(inputs)
    return [
        text if i < free or own == dtype or not _is_number(own) else f"(({c_type(dtype)}){text})"
        for i, (own, text) in enumerate(zip(dtypes, inputs, strict=True))
    ]


def _is_number(dtype: str) -> bool:
    return np.dtype(dtype).kind in "iuf"


def integer_operation(
    node: Apply, inputs: Sequence[str], out: str, c_type: Callable[[str], str], fail: str
) -> list[str] | None:
    """Return the statements of an operation on integers, None where PyTensor's are right.

    Parameters
    ----------
    node : Apply
    inputs : sequence of str
        Expressions without side effects.
    out : str
        The name that the result gets.
    c_type : callable
        Returns the C type of a dtype.
    fail : str
        What is run where an exception has been raised.
    """
    kinds = [np.dtype(inp.type.dtype).kind for inp in node.inputs]
    if not set(kinds) <= {"i", "u"}:
        return None
    dtype, op = node.outputs[0].type.dtype, type(node.op)
    kind = c_type(dtype)
    if op in _EXTREMES and _is_number(dtype):
        x, y = converted(node, inputs, c_type)
        return [f"const {kind} {out} = {x} {_EXTREMES[op]} {y} ? {x} : {y};"]
    if op in _DIVISIONS and np.dtype(dtype).kind in "iu":
        x, y = converted(node, inputs, c_type)
        is_quotient = op is ps.IntDiv
        names = {"x": x, "y": y, "type": kind, "out": out, "what": _DIVISIONS[op], "fail": fail}
        names["result"] = f"{x} / {y} - below" if is_quotient else f"below ? rest + {y} : rest"
        names["negative"] = f"-{x}" if is_quotient else "0"
        return [line.format(**names) for line in _DIVISION]
    if op is ps.Pow and np.dtype(dtype).kind in "iu":
        names = {"x": inputs[0], "y": inputs[1], "type": kind, "out": out}
        return [line.format(**names) for line in _POWER]
    if op in _COMPARISONS and np.result_type(*[inp.type.dtype for inp in node.inputs]).kind == "f":
        # No integer dtype holds both: what is negative is smaller than all that has no sign.
        (x, y), sign = inputs, _COMPARISONS[op]
        unsigned = c_type("uint64")
        text = (
            f"{x} < 0 ? -1 {sign} 0 : ({unsigned}){x} {sign} {y}"
            if kinds[0] == "i"
            else f"{y} < 0 ? 0 {sign} -1 : {x} {sign} ({unsigned}){y}"
        )
        return [f"const {kind} {out} = {text};"]
    return None
