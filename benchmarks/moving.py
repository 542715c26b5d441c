"""Time loops against moving the same bytes, in one process, taking turns.

``python -m benchmarks.moving``: a loop of `benchmarks.loops` over two arrays that writes one is
held against ``np.add`` of them into fresh memory, one with its gradient against a sum, a product
and a copy, and a running maximum against a copy. Below one, the loop takes less. The column
``/ copy`` of ``python -m benchmarks`` is against a copy into memory that is there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.loops import LOOPS
from benchmarks.machine import environment
from benchmarks.model import OURS, PASSES, load_library
from benchmarks.timing import median, paired_ratio, take_turns

Array = np.ndarray[Any, Any]


def add(a: Array, x: Array, *_: Array) -> object:
    """Move what a loop over two arrays does."""
    return np.add(a, x)


def add_multiply_copy(a: Array, x: Array, *_: Array) -> object:
    """Move what a loop over two arrays and its gradient do."""
    return np.add(a, x), np.multiply(a, x), a.copy()


CASES = (
    ("affine_1e6", False, add),
    ("affine_1e6", True, add_multiply_copy),
    ("affine_1e6_f32", False, add),
    ("affine_1e6_f32", True, add_multiply_copy),
    ("affine_256", False, add),
    ("cummax", False, np.copy),
)


def main() -> None:
    """Print a line for each loop."""
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    print("| loop | pass | milliseconds | of moving the bytes |\n|---|---|---|---|")
    for name, gradient, move in CASES:
        loop = LOOPS[name]
        data = loop.pass_data(gradient)
        function = loop.build(load_library(OURS)).compile(gradient)
        calls = {"loop": partial(function, *data), "move": partial(move, *data)}
        samples = take_turns(calls, rounds=25)
        ratio = paired_ratio(samples["loop"], samples["move"])
        took = f"{1e3 * median(samples['loop']):.2f} | {ratio.median:.2f}"
        print(f"| {loop.title} | {PASSES[gradient]} | {took} |")


if __name__ == "__main__":
    main()
