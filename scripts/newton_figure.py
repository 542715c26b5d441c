"""Draw the figure of ``docs/newton.md``: errors over the trajectory, iteration by iteration.

Every iterate is computed by scanlib's own linearization of the loop::

    python scripts/newton_figure.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import numpy as np
import pytensor
import pytensor.tensor as pt
from matplotlib import pyplot as plt

import scanlib
from benchmarks.newton import STATES, gru, weights
from scanlib.ops.loop import Loop
from scanlib.rewrites.newton.iterate import linearize

FILE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "newton-iterations.png"
STEPS, SHOWN = 400, 10


def iterates(scale: float, seed: int, jacobian: str) -> list[np.ndarray]:
    """Return the errors of the first iterates: the largest of all states, at every step."""
    x, w, u = pt.matrix("x"), pt.tensor3("w"), pt.tensor3("u")
    start = pt.zeros(STATES)
    plain, _ = scanlib.scan(gru, x, start, [w, u])
    solved, _ = scanlib.scan(gru, x, start, [w, u], method="newton")
    node = solved.owner.inputs[0].owner
    linear = linearize(Loop.from_op(node.op.scan, node.inputs), jacobian)
    history = pt.matrix("history")
    (correction,), _ = linear.correction([history], None)
    step = pytensor.function([history, x, w, u], correction)
    rows = np.random.default_rng(1).normal(size=(STEPS, STATES))
    arguments = [rows, *weights(scale, seed)]
    expected = pytensor.function([x, w, u], plain)(*arguments)
    found, errors = np.zeros((STEPS + 1, STATES)), []
    for _ in range(SHOWN):
        found[1:] += step(found, *arguments)
        errors.append(np.abs(found[1:] - expected).max(axis=1))
    return errors


def main() -> None:
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.0), sharey=True, layout="constrained")
    cases = [
        ("Newton: contracting", 1.0, 0, "auto"),
        ("diagonal Jacobian: contracting", 1.0, 0, "diagonal"),
        ("Newton: weights three times as large", 3.0, 1, "auto"),
    ]
    colors = plt.get_cmap("viridis")(np.linspace(0.9, 0.05, SHOWN))
    for axes, (title, scale, seed, jacobian) in zip(panels, cases, strict=True):
        for i, error in enumerate(iterates(scale, seed, jacobian)):
            axes.semilogy(np.maximum(error, 1e-17), color=colors[i], lw=1.1, label=f"{i + 1}")
        axes.set(title=title, xlabel="step", ylim=(1e-17, 1e12))
        axes.title.set_fontsize(9.5)
    panels[0].set_ylabel("error of the iterate")
    panels[2].legend(title="iteration", fontsize=6.5, title_fontsize=7, ncols=2, loc="lower right")
    figure.savefig(FILE, facecolor="white", dpi=110)


if __name__ == "__main__":
    main()
