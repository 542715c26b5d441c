"""Newton's method with ``until``: Kepler's equation, for many planets at once.

``E - e sin(E) = M`` has to be solved for ``E`` again at every time ``M``. The loop stops when a
step no longer moves, and its derivative is that of the solution. For many equations the loop is
batched: every row stops by itself.

Source: J. Meeus, "Astronomical algorithms", chapter 30, 1991.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.variable import TensorVariable

import scanlib

Array = np.ndarray[Any, Any]


def eccentric_anomaly(
    mean: TensorVariable, eccentricity: TensorVariable, steps: int = 30
) -> TensorVariable:
    """All iterates, the solution last, for one planet at one time (two scalars)."""

    def step(anomaly: TensorVariable, _: None) -> Any:
        error = anomaly - eccentricity * pt.sin(anomaly) - mean
        better = anomaly - error / (1 - eccentricity * pt.cos(anomaly))
        return better, better, pt.abs(better - anomaly) < 1e-12

    return scanlib.loop(step, mean + eccentricity, length=steps)[1]


def solver(**options: Any) -> Any:
    """Compile the solution for many times and eccentricities, with its derivative by time."""
    mean, eccentricity = pt.dscalars("mean", "eccentricity")
    solution = eccentric_anomaly(mean, eccentricity)[-1]
    slope = pytensor.grad(solution, mean)
    times, shapes = pt.dvectors("times", "shapes")
    batched = vectorize_graph([solution, slope], {mean: times, eccentricity: shapes})
    return pytensor.function([times, shapes], batched, **options)


def draw(path: str | Path) -> None:
    """Solve a period for three orbits, and draw the anomaly and the orbits at equal times."""
    from matplotlib import pyplot as plt

    times = np.linspace(0, np.pi, 200)
    solve = solver()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for eccentricity, name, color in (
        (0.2056, "Mercury", "C0"),
        (0.6, "e = 0.6", "C1"),
        (0.967, "Halley's comet", "C2"),
    ):
        anomaly, _ = solve(times, np.full(200, eccentricity))
        left.plot(times, anomaly, color=color, label=name)
        every = np.linspace(-np.pi, np.pi, 41)
        at, _ = solve(np.abs(every), np.full(41, eccentricity))
        at = np.sign(every) * at
        x, y = np.cos(at) - eccentricity, np.sqrt(1 - eccentricity**2) * np.sin(at)
        right.plot(x, y, ".", color=color, markersize=4)
    right.plot(0, 0, "*", color="k", markersize=9)
    left.set(xlabel="mean anomaly (time)", ylabel="eccentric anomaly")
    left.legend(frameon=False, fontsize=8)
    right.set_aspect("equal")
    right.set(title="places at equal times")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "newton.png")
