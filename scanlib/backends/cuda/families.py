"""Which loops a kernel can compose, and the code of their elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from scanlib.backends.cuda.scalars import item_type
from scanlib.ops.elemwise_scan import ElemwiseScan, Recurrence

TEMPLATES = {
    "affine": "scanlib_affine",
    "log-affine": "scanlib_log_affine",
    "maximum": "scanlib_maximum",
    "minimum": "scanlib_minimum",
}
NUMBERS = {"affine": 4, "log-affine": 2, "maximum": 1, "minimum": 1}  # in the composed function


@dataclass(frozen=True)
class Composed:
    """A recurrence that a kernel composes.

    Attributes
    ----------
    part : int
        The state or carry: states count first.
    template : str
        The C++ type of the function of a step.
    bytes : int
        Its size.
    inputs : list of Variable
        A copy of the body's inputs.
    elements : list of (Variable or str)
        The numbers that select the function, in the order of the type's ``make``.
    """

    part: int
    template: str
    bytes: int
    inputs: list[Variable]
    elements: list[Variable | str]


def composed_recurrences(op: ElemwiseScan) -> list[Composed] | None:
    """Return the recurrences of a loop, None if a kernel cannot compose its steps.

    It can where every recurrent part is of one of the families above, one step deep, and what
    selects its function depends on no recurrent part.
    """
    signature = op.signature
    parts = {part for recurrence in op.recurrences for part in recurrence.parts}
    carried = {i for i, is_sum in enumerate(op.layout.sums) if not is_sum}
    needed = set(range(signature.n_states)) | {signature.n_states + i for i in carried}
    if not op.recurrences or parts != needed or any(taps != (-1,) for taps in signature.taps):
        return None
    found = [_composed(op, number) for number in range(len(op.recurrences))]
    return [one for one in found if one is not None] if None not in found else None


def _composed(op: ElemwiseScan, number: int) -> Composed | None:
    recurrence = op.recurrences[number]
    if recurrence.family not in TEMPLATES or len(recurrence.parts) != 1:
        return None
    (part,) = recurrence.parts
    terms = recurrence.terms[0]
    if len(terms) != 1 or terms[0].tap != -1:
        return None
    inputs, outputs, scanned = op.elements_of(number)
    inner = op.signature.split_body_inputs(inputs)
    recurrent = {tap for taps in inner.taps for tap in taps} | set(inner.carries)
    if scanned or not recurrent.isdisjoint(ancestors(outputs)):
        return None
    results = op.signature.split_body_outputs(op.body.outputs)
    dtype = [*results.states, *results.carries][part].type.dtype
    template = _template(recurrence.family, dtype)
    if template is None:
        return None
    elements = _elements(recurrence, outputs)
    size = max(np.dtype(dtype).itemsize, 4) * NUMBERS[recurrence.family]
    return Composed(part, f"{template}<{item_type(dtype)}>", size, inputs, elements)


def _template(family: str, dtype: str) -> str | None:
    kind = np.dtype(dtype).kind
    if kind == "f" or (kind == "c" and family == "affine"):
        return TEMPLATES[family]
    if kind in "iu" and family != "log-affine":
        return "scanlib_whole_affine" if family == "affine" else TEMPLATES[family]
    return None


def _elements(recurrence: Recurrence, outputs: list[Variable]) -> list[Variable | str]:
    """Return the arguments of ``make``; those that the recurrence leaves out are neutral."""
    (term,) = recurrence.terms[0]
    constant = recurrence.constants[0]
    neutral = ("0", "-NPY_INFINITY") if recurrence.family == "log-affine" else ("1", "0")
    pairs = list(zip((term.coefficient, constant), neutral, strict=True))
    if recurrence.family in ("maximum", "minimum"):
        pairs = pairs[1:]
    return [otherwise if k is None else outputs[k] for k, otherwise in pairs]
