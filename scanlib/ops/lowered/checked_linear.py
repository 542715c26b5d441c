"""A `LinearScan` whose matrix no step computes, with the loop that it stands for.

``(B h) * w`` is run with the matrix ``diag(w) B``. Where the factors of the matrix are so large or
small that it may not be what the step meets, or a state comes near to overflow or is not finite,
the loop itself is run instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable

from scanlib.ops.derivatives import Variables
from scanlib.ops.lowered.linear_loop import run_in_python
from scanlib.ops.lowered.linear_scan import LinearOptions, LinearScan, Parts, Runner
from scanlib.ops.scan import Scan

# By the bits of a real number: products of four factors with such a state are normal numbers.
FACTORS = {64: 2.0**100, 32: 2.0**14}
STATES = {64: 2.0**500, 32: 2.0**60}


def limits(dtype: Any) -> tuple[float, float]:
    """Return up to which sizes factors (and their inverses), and states, are trusted."""
    bits = 8 * np.zeros((), dtype).real.dtype.itemsize
    return FACTORS.get(bits, FACTORS[32]), STATES.get(bits, STATES[32])


class CheckedLinearScan(LinearScan):
    """A matrix recurrence that is given up where it may not be the loop.

    Parameters
    ----------
    exact : Scan
        The loop: one state, the history of which is the result. Its inputs are the last ones.
    n_factors : int
        How many factors come before them.
    options : LinearOptions
    """

    __props__: tuple[str, ...] = (*LinearScan.__props__, "exact", "n_factors")

    def __init__(self, exact: Scan, n_factors: int, options: LinearOptions) -> None:
        super().__init__(options)
        self.exact, self.n_factors = exact, n_factors

    def __str__(self) -> str:
        return f"Checked{super().__str__()}"

    def n_own(self) -> int:
        """Return how many inputs the recurrence has."""
        return 2 + self.has_offset + self.has_n_steps + self.has_mask + (self.side == "both")

    def parts(self, inputs: Sequence[Any]) -> Parts:
        return super().parts(list(inputs)[: self.n_own()])

    def factors(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the factors among the inputs."""
        return list(inputs)[self.n_own() :][: self.n_factors]

    def of_loop(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs of the loop."""
        return list(inputs)[self.n_own() + self.n_factors :]

    def make_node(self, *inputs: Any) -> Apply:
        plain = super().make_node(*inputs[: self.n_own()])
        outputs = [out.type() for out in plain.outputs]
        return Apply(self, [*plain.inputs, *inputs[self.n_own() :]], outputs)

    def with_options(self, **changes: Any) -> LinearScan:
        raise NotImplementedError(f"{self} stands for one loop")

    def plain(self, node: Apply) -> Apply:
        """Return the recurrence of a node alone, without the loop."""
        return LinearScan(self.options).make_node(*node.inputs[: self.n_own()])

    def _runner(self, choice: str, node: Apply) -> Runner:
        if choice != "python":
            return super()._runner(choice, node)
        made = self.exact.make_node(*self.of_loop(node.inputs))

        def in_python(*inputs: Any) -> np.ndarray:
            parts = self.parts(inputs)
            if not len(parts.initial):  # and no steps
                return run_in_python(self, parts)
            storage: list[list[Any]] = [[None]]
            self.exact.perform(made, self.of_loop(inputs), storage)
            return storage[0][0]

        return in_python

    # Derivatives: those of the loop

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        before = len(node.inputs) - len(self.of_loop(node.inputs))
        made = self.exact.make_node(*self.of_loop(node.inputs))
        return [[False]] * before + self.exact.connection_pattern(made)

    def pullback(
        self, inputs: Variables, outputs: Variables, cotangents: Variables
    ) -> list[Variable]:
        own = self.of_loop(inputs)
        same = self.exact.make_node(*own).outputs
        before = len(inputs) - len(own)
        return [
            *(DisconnectedType()() for _ in range(before)),
            *self.exact.pullback(own, same, cotangents),
        ]
