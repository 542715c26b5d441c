"""Matrix recurrences for `benchmarks.gpu`: the forms of `LinearScan`, checked and timed."""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import pytensor.tensor as pt

from benchmarks.gpu_device import Device, fill, prepared, run_twice
from benchmarks.gpu_results import TOLERANCE, Check, Timing, error_of
from scanlib.backends.cuda.linear import LinearGeometry, LinearKernels, check_linear
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.linear_scan import LinearOptions, LinearScan, Parts, history_of

FORMS = {
    "matrix": LinearOptions("real", "steps"),
    "fixed-matrix": LinearOptions("real", "fixed", "right", reverse=True),
    "matrix-of-matrices": LinearOptions("real", "steps", "right", vector=False),
    "last-vector": LinearOptions("real", "fixed", untraced=True),
    "log-matrix": LinearOptions("log", "steps"),
    "max-matrix": LinearOptions("max", "fixed", reverse=True),
    "min-matrix": LinearOptions("min", "steps", untraced=True),
}
COLUMNS = 3  # of states that are matrices
# Steps, batch and rows of the matrix: vectors walked whole and cut, by each of the templates.
SHAPES = [(0, 2, 3), (1, 5, 8), (777, 3, 3), (12_289, 1, 8), (31, 20_000, 3), (4_097, 1, 17),
          (60, 700, 17), (600, 2, 64)]  # fmt: skip
TIMED = [  # name, steps, batch, rows of the matrix, dtype
    ("matrix", 4_096, 16_384, 2, "float32"),
    ("matrix", 4_096, 16_384, 4, "float32"),
    ("matrix", 1_000_000, 1, 4, "float32"),
    ("matrix", 1_000_000, 1, 8, "float64"),
    ("matrix", 1_024, 1_024, 32, "float32"),
    ("matrix", 100_000, 1, 16, "float32"),
    ("fixed-matrix", 4_096, 65_536, 4, "float32"),
    ("fixed-matrix", 1_000_000, 1, 4, "float32"),
    ("fixed-matrix", 100_000, 1, 64, "float32"),
    ("log-matrix", 1_000_000, 1, 4, "float32"),
    ("log-matrix", 10_000, 4_096, 4, "float32"),
]


def shapes_of(op: LinearOptions, steps: int, batch: int, size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices, the offset, the initial state (in order), the result."""
    time = (steps,) if op.coefficient == "steps" else ()
    row: tuple[int, ...] = (batch, size)
    if not op.vector:
        row = (batch, size, COLUMNS) if op.side == "left" else (batch, COLUMNS, size)
    square = (*time, batch, size, size)
    rows = 1 if op.untraced else steps + 1
    names = op.in_order(Parts(None, "matrix", "offset", "initial"))
    shapes = {"matrix": square, "offset": (steps, *row), "initial": (1, *row)}
    return {name: shapes[name] for name in names} | {"result": (rows, *row)}


def operation(options: LinearOptions, dtype: str) -> LinearScan:
    """Return the recurrence."""
    ranks = [3 + (options.coefficient == "steps"), *[3 if options.vector else 4] * 2]
    matrix, offset, initial = (pt.tensor(dtype=dtype, shape=(None,) * rank) for rank in ranks)
    return history_of(options, Parts(None, matrix, offset, initial)).owner.op


def sizes_of(op: LinearOptions, steps: int, batch: int, size: int) -> LinearGeometry:
    """Return the sizes of a call."""
    result = shapes_of(op, steps, batch, size)["result"]
    return LinearGeometry(steps, size, 1 if op.vector else COLUMNS, (batch,), [result])


def values(
    op: LinearOptions, steps: int, batch: int, size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return random arguments, with matrices that let states not grow without bound."""
    shapes = shapes_of(op, steps, batch, size)
    del shapes["result"]
    drawn = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if op.semiring != "real":
        return list(drawn.values())
    sizes = abs(drawn["matrix"])
    sums = [sizes.sum(axis=axis, keepdims=True).max((-1, -2), keepdims=True) for axis in (-1, -2)]
    drawn["matrix"] *= 0.95 / np.maximum(*sums)
    return list(drawn.values())


def check(
    device: Device, names: Sequence[str], shapes: Sequence[tuple[int, int, int]] = ()
) -> Iterator[Check]:
    """Yield how recurrences on the device differ from the plain loop on the CPU, in float64."""
    rng = np.random.default_rng()
    for name in names:
        op = FORMS[name]
        for shape in shapes or SHAPES:
            drawn = values(op, *shape, rng)
            for dtype in TOLERANCE:
                try:
                    check_linear(dtype, shape[2])
                except NoCCodeError:
                    continue
                given = [value.astype(dtype) for value in drawn]
                kernels = LinearKernels(operation(op, dtype), shape[2])
                (actual,) = run_twice(device, kernels, given, sizes_of(op, *shape))
                wide = [value.astype("float64") for value in given]
                (expected,) = operation(op, "float64").python_loop()(*wide)
                yield Check(name, dtype, shape, error_of(actual, expected))


def timings(
    device: Device, cases: Sequence[tuple[str, int, int, int, str]], bandwidth: float
) -> Iterator[Timing]:
    """Yield the times of recurrences; what does not fit into the memory has fewer steps."""
    rng = np.random.default_rng()
    for name, steps, batch, size, dtype in cases:
        op, item = FORMS[name], np.dtype(dtype).itemsize
        each = sum(prod(shape) for shape in shapes_of(op, 2, batch, size).values())
        each -= sum(prod(shape) for shape in shapes_of(op, 1, batch, size).values())
        steps = min(steps, int(0.7 * device.free_bytes()) // (max(each, 1) * item))
        shapes = shapes_of(op, steps, batch, size)
        moved = item * sum(map(prod, shapes.values()))
        del shapes["result"]
        kernels = LinearKernels(operation(op, dtype), size)
        sizes = sizes_of(op, steps, batch, size)
        given = list(shapes.values())
        with prepared(device, kernels, given, sizes) as (loop, places):
            for place, shape in zip(places, given, strict=True):
                fill(device, place, prod(shape), dtype, rng)
            seconds = device.seconds(loop.run)
        fraction = moved / seconds / bandwidth
        yield Timing(name, dtype, (steps, batch, size), seconds, moved, fraction)
