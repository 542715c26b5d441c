"""Power iteration: the importance of pages that link to one another, and what a link is worth.

A vector is multiplied by a matrix and normalized until it stays: it has become the eigenvector of
the largest eigenvalue. The gradient goes through the iteration, so it tells how the importance of
a page depends on every link. The links are simulated, with a fixed seed.

Sources: R. von Mises and H. Pollaczek-Geiringer, "Praktische Verfahren der Gleichungsauflösung",
Zeitschrift für angewandte Mathematik und Mechanik 9, 1929; L. Page et al., "The PageRank citation
ranking", 1999.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

import scanlib

Array = np.ndarray[Any, Any]


def power_iteration(
    matrix: TensorVariable, start: TensorVariable, steps: int = 1000
) -> TensorVariable:
    """All iterates, each of sum one, until they move by less than 1e-12."""

    def step(vector: TensorVariable, _: None) -> Any:
        moved = matrix @ vector
        moved = moved / moved.sum()
        return moved, moved, pt.max(pt.abs(moved - vector)) < 1e-12

    return scanlib.loop(step, start, length=steps)[1]


def surfing(links: TensorVariable, jump: float = 0.15) -> TensorVariable:
    """Probabilities of going from page to page; ``links[i, j]`` weighs the link from j to i."""
    return jump / links.shape[0] + (1 - jump) * links / links.sum(axis=0)


def simulate(pages: int = 30, seed: int = 4) -> Array:
    """Links, of which popular pages get more."""
    rng = np.random.default_rng(seed)
    popular = 0.6 * (np.arange(1, pages + 1) / pages) ** 3
    links = (rng.uniform(size=(pages, pages)) < popular[:, None]).astype(float)
    np.fill_diagonal(links, 0.0)
    links[-1, links.sum(axis=0) == 0] = 1.0
    return links


def draw(path: str | Path) -> None:
    """Rank the pages, and draw how fast that went and what links are worth."""
    from matplotlib import pyplot as plt

    links = simulate()
    pages = len(links)
    variable = pt.dmatrix("links")
    trace = power_iteration(surfing(variable), pt.constant(np.full(pages, 1.0 / pages)))
    best = trace[-1][-1]
    rank = pytensor.function([variable], [trace, pytensor.grad(best, variable)])
    vectors, worth = rank(links)

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(8, 3.0), layout="constrained")
    left.semilogy(np.abs(np.diff(vectors, axis=0)).max(axis=1), color="tab:blue")
    left.set(xlabel="step", title="largest change")
    middle.bar(np.arange(pages), vectors[-1], color="tab:orange")
    middle.set(xlabel="page", title="importance")
    limit = np.abs(worth).max()
    shown = right.imshow(worth, cmap="RdBu_r", vmin=-limit, vmax=limit)
    right.set(xlabel="link from", ylabel="link to", title=f"its worth to page {pages - 1}")
    figure.colorbar(shown, ax=right, shrink=0.8)
    for axes in (left, middle, right):
        axes.title.set_fontsize(10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "power_iteration.png")
