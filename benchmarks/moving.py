"""Time loops against moving the same bytes, in one process, taking turns.

``python -m benchmarks.moving``: a loop that reads two arrays and writes one is held against
``np.add`` of them into fresh memory, one with its gradient against a sum, a product and a copy, and
a running maximum against a copy. Below one, the loop takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from benchmarks.machine import environment
from benchmarks.timing import median, paired_ratio, take_turns

Call = Callable[[], object]


def affine(dtype: str, shape: tuple[int, ...], gradient: bool) -> tuple[Call, Call]:
    """``h = a[t] h + x[t]``, and what moves its bytes."""
    tensors = [pt.tensor(name, dtype=dtype, shape=(None,) * len(shape)) for name in "ax"]
    start = pt.tensor("start", dtype=dtype, shape=(None,) * (len(shape) - 1))
    trace = scanlib.scan(
        lambda a, x, h: a * h + x, sequences=tensors, outputs_info=[start], return_updates=False
    )
    outputs = [trace, *(pytensor.grad(trace.sum(), tensors) if gradient else [])]
    f = pytensor.function([*tensors, start], outputs, mode="NUMBA", trust_input=True)
    rng = np.random.default_rng(0)
    a, x = rng.uniform(-0.9, 0.9, shape).astype(dtype), rng.normal(size=shape).astype(dtype)
    first = np.zeros(shape[1:], dtype)

    def move() -> object:
        if gradient:
            return np.add(a, x), np.multiply(a, x), a.copy()
        return np.add(a, x)

    return lambda: f(a, x, first), move


def running_maximum(steps: int) -> tuple[Call, Call]:
    """The largest number so far, and a copy."""
    x = pt.dvector("x")
    trace = scanlib.cummax(x)
    f = pytensor.function([x], trace, mode="NUMBA", trust_input=True)
    values = np.random.default_rng(0).normal(size=steps)
    return lambda: f(values), values.copy


def cases() -> Iterator[tuple[str, tuple[Call, Call]]]:
    """Yield the loops, and what each is held against."""
    for dtype in ("float64", "float32"):
        for gradient in (False, True):
            name = f"a[t] h + x[t], 1,000,000, {dtype}" + ", gradient" * gradient
            yield name, affine(dtype, (1_000_000,), gradient)
    yield "a[t] h + x[t], 10,000 × 256, float64", affine("float64", (10_000, 256), False)
    yield "running maximum, 1,000,000, float64", running_maximum(1_000_000)


def main() -> None:
    """Print a line for each loop."""
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    print("| loop | milliseconds | of moving the bytes |\n|---|---|---|")
    for name, (loop, move) in cases():
        samples = take_turns({"loop": loop, "move": move}, rounds=25)
        ratio = paired_ratio(samples["loop"], samples["move"])
        print(f"| {name} | {1e3 * median(samples['loop']):.2f} | {ratio.median:.2f} |")


if __name__ == "__main__":
    main()
