"""Recurrence classes: sets of functions of the state that are closed under composition.

A module for each class: its maths, how it is recognized in the body of one channel, the elements
that select one function of the class at each step, and the scan that composes the steps of a block.
`FAMILIES` is the order in which they are tried.
"""

from scanlib.recurrences import affine, clamp, extremes, logaffine, squares
from scanlib.recurrences.form import Component, NotInFamilyError

FAMILIES = (
    affine.recognize,
    extremes.recognize,
    logaffine.recognize,
    clamp.recognize,
    squares.recognize,
)

__all__ = ["FAMILIES", "Component", "NotInFamilyError"]
