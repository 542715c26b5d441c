"""Check and time the CUDA kernels on the first CUDA device.

    python -m benchmarks.gpu

First all kinds of loops, with their gradients, run by all schedules on fresh random numbers, and
are held against the same loops in float64 on the CPU; then all forms of matrix recurrences
(`gpu_linear`). What a kernel writes is poisoned before, and every loop runs twice: the results must
be the same, bit by bit. Then come times, bytes (each input read once, each result written once),
the fraction of the bandwidth of a copy, and the ratio to other packages where they import. It takes
less than eight minutes, and needs a driver and NVRTC; PyTorch and JAX are used where they see the
device.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import chain
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from benchmarks import gpu_linear
from benchmarks.gpu_device import Device, fill, kernels_of, on_device, prepared
from benchmarks.gpu_results import (
    TOLERANCE,
    Check,
    Timing,
    error_of,
    print_checks,
    print_timings,
)
from scanlib.backends.cuda.nvidia import Driver, DriverError, NoCompilerError, find_compiler

BUDGET = 450  # seconds


def linear(a: Any, b: Any, h: Any) -> Any:
    return a * h + b


def decay(a: Any, b: Any, h: Any) -> Any:
    return pt.exp(-pt.abs(a)) * h + b


def recurrent(a: Any, b: Any, h: Any) -> Any:
    return pt.tanh(a * h + b)


def gated(a: Any, b: Any, h: Any) -> Any:
    gate = pt.sigmoid(a + h)
    return gate * h + (1 - gate) * b


def largest(a: Any, b: Any, h: Any) -> Any:
    return pt.maximum(h, a)


def log_sum(a: Any, b: Any, h: Any) -> Any:
    return pt.logaddexp(h + a, b)


def product(a: Any, b: Any, h: Any) -> Any:
    return (1 + a / 64) * h


STEPS: dict[str, Callable[..., Any]] = {
    "affine": linear,
    "decay": decay,
    "product": product,
    "maximum": largest,
    "log-affine": log_sum,
    "tanh": recurrent,
    "gated": gated,
    "until": linear,
}
# So many steps and channels that all schedules are taken, on devices of all sizes.
SHAPES = [(0, 3), (1, 5), (1021, 7), (4097, 1), (70_000, 3), (300, 20_000), (9_001, 700)]
LONG = [(300_001, 7), (20_000_003, 1)]  # so many blocks that look back that regions have an end
CHECKED_LONG = [("affine", "float32"), ("log-affine", "float64")]
TIMED = [  # name, steps, channels, dtype
    ("affine", 65_536, 12_288, "float32"),
    ("affine", 1_000_000, 64, "float32"),
    ("affine", 100_000_000, 1, "float32"),
    ("affine", 1_000_000, 64, "float64"),
    ("affine", 1_000_000, 64, "float16"),
    ("affine", 30_000_000, 4, "float32"),
    ("affine", 1_000_000, 1, "float32"),
    ("log-affine", 1_000_000, 64, "float32"),
    ("maximum", 100_000_000, 1, "float32"),
    ("tanh", 4_096, 262_144, "float32"),
]


def graph(name: str, dtype: str) -> tuple[list[Any], Any]:
    """Return the inputs and the trace of a loop."""
    a, b = pt.matrix("a", dtype=dtype), pt.matrix("b", dtype=dtype)
    start = pt.vector("start", dtype=dtype)
    step = STEPS[name]
    if name == "until":  # one channel, which ends at a number that half precision has as well
        rows = [a[:, 0], b[:, 0]]
        trace = scanlib.scan(
            lambda a, b, h: (linear(a, b, h).astype(dtype), scanlib.until(a > 0.9375)),
            rows, start[0], return_updates=False,
        )  # fmt: skip
        return [a, b, start], trace
    trace = scanlib.scan(
        lambda *rows: step(*rows).astype(dtype), [a, b], start, return_updates=False
    )
    return [a, b, start], trace


def compiled(name: str, dtype: str, mode: Any) -> Any:
    """Return the function of a loop and its gradients; in half precision of the loop alone."""
    inputs, trace = graph(name, dtype)
    outputs = [trace]
    if dtype != "float16":
        outputs += pytensor.grad((trace**2).sum(), inputs, disconnected_inputs="ignore")
    return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")


def values(steps: int, channels: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return random arguments."""
    shape = steps, channels
    return [rng.uniform(-0.95, 0.95, shape), rng.normal(size=shape), rng.normal(size=channels)]


def check(
    device: Device, names: Sequence[str], shapes: Sequence[tuple[int, int]]
) -> Iterator[Check]:
    """Yield how loops and their gradients on the device differ from the CPU's, in float64."""
    rng = np.random.default_rng()
    for name in names:
        on_cpu = compiled(name, "float64", "CVM")
        for dtype in TOLERANCE:
            with on_device(device) as (mode, ran):
                function = compiled(name, dtype, mode)
                for shape in [*shapes, *(LONG if (name, dtype) in CHECKED_LONG else [])]:
                    given = [value.astype(dtype) for value in values(*shape, rng)]
                    expected = on_cpu(*(value.astype("float64") for value in given))
                    errors = map(error_of, function(*given), expected)
                    yield Check(name, dtype, shape, max(errors))
                if not ran:
                    raise AssertionError(f"{name}: no loop ran on the device")


def timings(
    device: Device, cases: Sequence[tuple[str, int, int, str]], bandwidth: float
) -> Iterator[Timing]:
    """Yield the times of loops; what does not fit into the memory has fewer steps."""
    rng = np.random.default_rng()
    for name, steps, channels, dtype in cases:
        item = np.dtype(dtype).itemsize
        kernels = kernels_of(*graph(name, dtype))
        arrays = len(kernels.writer.plan.outer.sequences) + 1  # and the trace
        steps = min(steps, int(0.8 * device.free_bytes()) // (arrays * item * channels))
        shapes = [
            (steps, channels) if array.lead and array.name in kernels.writer.plan.outer.sequences
            else (1, channels)
            for array in kernels.parameters.inputs
        ]  # fmt: skip
        moved = arrays * item * steps * channels
        with prepared(device, kernels, shapes) as (loop, places):
            kind = kernels.schedule(kernels.sizes(shapes), device.processors).kind
            for place, shape in zip(places, shapes, strict=True):
                fill(device, place, int(np.prod(shape)), dtype, rng)
            seconds = device.seconds(loop.run)
        fraction = moved / seconds / bandwidth
        yield Timing(name, dtype, (steps, channels), seconds, moved, fraction, kind)


def find_device() -> Device | str:
    """Return the device, or why there is none."""
    try:
        device = Device(Driver())
        find_compiler()
    except (OSError, DriverError, NoCompilerError) as error:
        return str(error)
    return device


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    every = [*STEPS, *gpu_linear.FORMS]
    parser.add_argument("--loops", nargs="+", choices=every, default=every)
    parser.add_argument("--no-checks", dest="checks", action="store_false")
    parser.add_argument("--no-times", dest="times", action="store_false")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and the timings; return the exit status."""
    options = parse(arguments)
    device = find_device()
    if isinstance(device, str):
        print(f"No CUDA device can be used here: {device}. Nothing was checked or timed.")
        return 0
    started = time.monotonic()
    print(
        f"{device.name}, {device.processors} multiprocessors, {device.architecture}; {date.today()}"
    )
    passed = True
    if options.checks:
        elementwise = [name for name in options.loops if name in STEPS]
        forms = [name for name in options.loops if name in gpu_linear.FORMS]
        passed = print_checks(
            chain(check(device, elementwise, SHAPES), gpu_linear.check(device, forms))
        )
    bandwidth = device.copy_bandwidth(min(1 << 30, device.free_bytes() // 4))
    print(f"A copy moves {bandwidth / 1e9:.0f} GB/s.\n", flush=True)
    if options.times:
        cases = [case for case in TIMED if case[0] in options.loops]
        recurrences = [case for case in gpu_linear.TIMED if case[0] in options.loops]
        found = gpu_linear.timings(device, recurrences, bandwidth)
        print_timings(chain(timings(device, cases, bandwidth), found))
    if options.peers:
        from benchmarks.gpu_peers import print_peers

        print_peers(lambda: BUDGET - (time.monotonic() - started))
    print(f"\n{time.monotonic() - started:.0f} s in all.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
