"""Recurrence classes: sets of functions of the state that are closed under composition.

A module for each class: its maths, how it is recognized in the body of one channel, the elements
that select one function of the class at each step, the formulas that compose and apply them, and
the scan that composes the steps of a block. `FAMILIES` is the order in which they are tried,
`CLASSES` what is known of each by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from scanlib.kernels.language import Value
from scanlib.recurrences import affine, clamp, logaffine, squares
from scanlib.recurrences.block_scans import Formulas, StepBlock, Steps
from scanlib.recurrences.form import Component, NotInFamilyError


@dataclass(frozen=True)
class RecurrenceClass:
    """How a class of one state is composed.

    Its formulas act on the state's square where that is what is affine. `scan` writes the scan of a
    block and returns whether all values can be trusted. `is_real` is for real states only, of
    single or double precision.
    """

    formulas: Formulas
    scan: Callable[[StepBlock, Steps], Value]
    is_real: bool = True


CLASSES = {
    "affine": RecurrenceClass(affine.AFFINE, lambda block, steps: affine.scan(block, steps)[1]),
    "maximum": RecurrenceClass(clamp.MAXIMUM, clamp.scan_maximum, is_real=False),
    "minimum": RecurrenceClass(clamp.MINIMUM, clamp.scan_minimum, is_real=False),
    "log-affine": RecurrenceClass(logaffine.LOGS, logaffine.scan),
    "clamp": RecurrenceClass(clamp.CLAMP, clamp.scan),
    squares.FAMILY: RecurrenceClass(affine.AFFINE, squares.scan),
}
FAMILIES = (affine.recognize, clamp.recognize, logaffine.recognize, squares.recognize)

__all__ = ["CLASSES", "FAMILIES", "Component", "NotInFamilyError", "RecurrenceClass"]
