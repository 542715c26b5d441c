"""Errors that a running loop raises.

They are raised from compiled code too, where a message can only be a constant and its numbers
travel beside it; the class puts them together. All are kinds of `ValueError`, but for
`SpecifiedShapeError`, an `AssertionError` as that of PyTensor's `specify_shape`.
"""

BETWEEN = "\0"


class LoopError(ValueError):
    """Base of the errors a running loop raises: a template and the numbers for its ``{}``.

    There may be several templates, with `BETWEEN` them; the first number says which is meant.
    """

    def __str__(self) -> str:
        template, *numbers = self.args or ("",)
        if BETWEEN in str(template):
            template = str(template).split(BETWEEN)[int(numbers.pop(0))]
        return str(template).format(*numbers) if numbers else str(template)


class SpecifiedShapeError(AssertionError):
    """An array has not the shape that `specify_shape` says it has."""

    __str__ = LoopError.__str__


class StepCountError(LoopError):
    """The number of steps is negative."""


class SequenceLengthError(LoopError):
    """A sequence does not have the rows that the steps of the loop need."""


class InitialRowsError(LoopError):
    """A state has too few initial rows for its taps."""


class ConvergenceError(LoopError):
    """A loop that is solved for all its steps at once has not converged."""


class StepShapeError(LoopError):
    """A step returned a value whose shape differs from that of the steps before it."""
