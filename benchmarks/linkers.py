"""The diagonal linear scan under the JAX and PyTorch linkers, on the CPU, beside their own loops.

``python -m benchmarks.linkers`` prints times and ratios of ``h = a h + b`` in single and double
precision: scanlib's loop, compiled with ``mode="JAX"``, beside ``lax.scan`` and
``lax.associative_scan`` under ``jit``; and with ``mode="PYTORCH"``, beside torch's associative
scan, as it is and compiled. ``a + b`` of NumPy and of JAX, into fresh memory, reads and writes the
same bytes.
All of one package take turns. `benchmarks.gpu` is for GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from benchmarks.machine import environment
from benchmarks.timing import median, paired_ratio, take_turns

STEPS, CHANNELS = 262_144, 16
DTYPES = ("float32", "float64")
OWN = "scanlib"
SUM = "moving the bytes: JAX's a + b"
Calls = dict[str, Callable[[], Any]]


def arrays(dtype: str, steps: int, channels: int) -> list[np.ndarray]:
    """Return coefficients, inputs and the initial state."""
    rng = np.random.default_rng(0)
    a = rng.uniform(-0.95, 0.95, (steps, channels))
    b = rng.normal(size=(steps, channels))
    return [value.astype(dtype) for value in (a, b, rng.normal(size=channels))]


def compiled(mode: str, dtype: str) -> Callable[..., Any]:
    """Return the function of arrays that the linker made, without PyTensor's call around it."""
    a, b, start = (pt.tensor(dtype=dtype, shape=(None,) * ndim) for ndim in (2, 2, 1))
    h = scanlib.scan(lambda a, b, h: a * h + b, [a, b], start, return_updates=False)
    return pytensor.function([a, b, start], h, mode=mode).vm.jit_fn


def combine(first: Any, second: Any) -> Any:
    """Compose two steps."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def in_jax(dtype: str, values: Sequence[np.ndarray]) -> Calls:
    """Return what is timed under JAX."""
    import jax
    from jax import lax

    jax.config.update("jax_enable_x64", True)
    own = compiled("JAX", dtype)
    given = [jax.numpy.asarray(value) for value in values]

    @jax.jit
    def sequential(a: Any, b: Any, start: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            h = row[0] * h + row[1]
            return h, h

        return lax.scan(step, start, (a, b))[1]

    @jax.jit
    def parallel(a: Any, b: Any, start: Any) -> Any:
        product, rest = lax.associative_scan(combine, (a, b))
        return product * start + rest

    def call(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(function(*given))

    @jax.jit
    def add(a: Any, b: Any, start: Any) -> Any:
        return a + b

    functions: dict[str, Callable[..., Any]]
    functions = {OWN: own, "lax.scan": sequential, "lax.associative_scan": parallel, SUM: add}
    return {name: call(function) for name, function in functions.items()}


def in_torch(dtype: str, values: Sequence[np.ndarray]) -> Calls:
    """Return what is timed under PyTorch."""
    import torch
    from torch._higher_order_ops.associative_scan import associative_scan

    torch.set_num_threads(1)
    own = compiled("PYTORCH", dtype)
    a, b, start = (torch.from_numpy(value) for value in values)

    def parallel(a: Any, b: Any, start: Any) -> Any:
        product, rest = associative_scan(combine, (a, b), dim=0, combine_mode="generic")
        return product * start + rest

    quick = torch.compile(parallel)
    return {
        OWN: lambda: own(a, b, start),
        "associative_scan": lambda: parallel(a, b, start),
        "associative_scan, compiled": lambda: quick(a, b, start),
    }


PACKAGES = {"JAX": in_jax, "PyTorch": in_torch}


def compare(package: str, dtype: str, steps: int, channels: int) -> None:
    """Check and time the loops of one package, and print a line for each."""
    values = arrays(dtype, steps, channels)
    calls = PACKAGES[package](dtype, values)
    loops = [call for name, call in calls.items() if name != SUM]
    first, *others = (np.asarray(_one(call())) for call in loops)
    for other in others:
        np.testing.assert_allclose(first, other, rtol=1e-3, atol=1e-3)
    calls["moving the bytes: NumPy's a + b"] = lambda: np.add(*values[:2])
    samples = take_turns(calls, rounds=11, seconds=3.0)
    for name in calls:
        ratio = paired_ratio(samples[name], samples[OWN])
        print(f"| {package} | {dtype} | {name} | {1e3 * median(samples[name]):.2f} |", end="")
        print(f" {ratio.median:.2f} | {ratio.low:.2f}–{ratio.high:.2f} |", flush=True)


def _one(result: Any) -> Any:
    return result[0] if isinstance(result, tuple | list) else result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linkers", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--channels", type=int, default=CHANNELS)
    options = parser.parse_args(arguments)
    print(
        f"h = a[t] h + b[t], {options.steps:,} steps of {options.channels} channels, on the CPU\n"
    )
    print("| package | dtype | by | ms | time / scanlib's | quartiles |\n|---|---|---|---|---|---|")
    for package in PACKAGES:
        for dtype in DTYPES:
            try:
                compare(package, dtype, options.steps, options.channels)
            except ImportError as error:
                print(f"| {package} | {dtype} | not installed: {error.name} | | | |")
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
