"""Matrix recurrences for tests: their inputs in one order, whatever the recurrence."""

from dataclasses import replace

import numpy as np
import pytensor.tensor as pt

from scanlib.ops.lowered.linear_scan import LinearOptions, Parts, history_of


class Recurrence:
    """A form of `LinearScan`, and which inputs it has.

    Inputs are ``[n_steps], matrix, [offset], initial, [mask]``.
    """

    def __init__(self, *options, has_offset=True, has_n_steps=False, has_mask=False, **named):
        self.options = LinearOptions(*options, **named)
        self.has_offset, self.has_n_steps, self.has_mask = has_offset, has_n_steps, has_mask

    def __getattr__(self, name):
        return getattr(self.__dict__["options"], name)

    def __str__(self):
        given = [name for name in ("has_offset", "has_n_steps", "has_mask") if getattr(self, name)]
        return f"{self.options} {given}"

    def __call__(self, *inputs):
        return history_of(self.options, self.parts(map(pt.as_tensor_variable, inputs)))

    def parts(self, inputs):
        """The inputs by role."""
        given = iter(inputs)
        n_steps = next(given) if self.has_n_steps else None
        matrix = next(given)
        offset = next(given) if self.has_offset else None
        initial = next(given)
        return Parts(n_steps, matrix, offset, initial, next(given) if self.has_mask else None)

    def reversed(self):
        """The recurrence that walks in the other direction."""
        has = {key: value for key, value in vars(self).items() if key != "options"}
        options = replace(self.options, reverse=not self.reverse)
        return Recurrence(**vars(options), **has)

    def operation(self, inputs):
        """The Op for inputs like these arrays."""
        kinds = [pt.tensor(dtype=v.dtype, shape=(None,) * v.ndim) for v in map(np.asarray, inputs)]
        return self(*kinds).owner.op

    def applied(self, inputs):
        """The Op for some arrays, and these in its order."""
        return self.operation(inputs), self.options.in_order(self.parts(inputs))

    def walked(self, inputs):
        """The history by the plain loop."""
        op, given = self.applied([np.asarray(value) for value in inputs])
        with np.errstate(all="ignore"):
            (history,) = op.python_loop()(*given)
        return history
