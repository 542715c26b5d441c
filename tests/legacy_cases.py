"""Loops built with `pytensor.scan`, each beside the plain Python loop that says what it computes.

A `LegacyLoop` builds a graph of its inputs with PyTensor's own functions; `plain` computes the
same from arrays, with NumPy and ``for``. The collection has all kinds of loops that PyTensor
knows: states with one and several taps, outputs, untraced states, taps of sequences, `until`,
both directions, nested loops, random draws, and what readers do with results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor

T = 6
RNG = np.random.default_rng(7)


@dataclass(frozen=True)
class LegacyLoop:
    """One loop.

    Attributes
    ----------
    build : callable
        From variables to the list of results, with `pytensor.scan`.
    plain : callable
        From arrays to the same results.
    values : tuple of ndarray
        Where both are evaluated.
    order : int
        The highest derivative that is compared; 0 where there is none.
    """

    build: Callable
    plain: Callable
    values: tuple[np.ndarray, ...]
    order: int = 2


LOOPS: dict[str, LegacyLoop] = {}


def loop(*values: Any, order: int = 2) -> Callable:
    """Register ``(build, plain)``, returned by a function of the loop's name."""

    def register(make: Callable) -> Callable:
        build, plain = make()
        given = tuple(np.asarray(v) for v in values)
        LOOPS[make.__name__] = LegacyLoop(build, plain, given, order)
        return make

    return register


def scan(step, sequences=None, initial=None, *others, **options):
    """`pytensor.scan` without updates, always a list."""
    return pytensor.scan(
        step,
        sequences=sequences,
        outputs_info=initial,
        non_sequences=list(others),
        return_updates=False,
        return_list=True,
        **options,
    )


def uniform(*shape):
    return RNG.uniform(-0.8, 0.8, shape)


X, X2, W = uniform(T), uniform(T, 3), uniform(3, 3)
A, B, C = np.array(0.4), np.array(0.3), np.array(-0.2)


def run(step, y, *rows):
    """The plain loop with one state: all its values after the first."""
    found = []
    for row in zip(*rows, strict=False):
        y = step(*row, y)
        found.append(y)
    return np.array(found)
