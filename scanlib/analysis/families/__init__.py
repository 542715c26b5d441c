"""Recurrence families: sets of functions of the state that are closed under composition.

Every module recognizes one family in the body of one channel, a graph of scalars, by propagating a
symbolic form of the recurrent values through it, and returns the elements that select a function
of the family at each step. `FAMILIES` is the order in which they are tried; to add a family, add a
module and an entry, and teach a backend to compose its elements (or leave it: loops of a family
that a backend does not know run step by step).
"""

from scanlib.analysis.families import affine, clamp, extremes, logaffine, squares
from scanlib.analysis.families.form import Component, NotInFamilyError

FAMILIES = (
    affine.recognize,
    extremes.recognize,
    logaffine.recognize,
    clamp.recognize,
    squares.recognize,
)

__all__ = ["FAMILIES", "Component", "NotInFamilyError"]
