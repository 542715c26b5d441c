"""What `benchmarks.gpu` finds, and the tables it prints."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

TOLERANCE = {"float64": 1e-10, "float32": 2e-4, "float16": 2e-2}


@dataclass
class Check:
    """One loop on one shape: the largest error, relative to the largest value."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE[self.dtype]


@dataclass
class Timing:
    """One loop: its time, the bytes it has to move, and the fraction of a copy's bandwidth.

    `schedule` says how it is walked, where there is a choice.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    seconds: float
    bytes: int
    fraction: float
    schedule: str = ""


def error_of(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest error relative to the largest value; infinity for NaN or a wrong shape."""
    if actual.shape != expected.shape or not np.array_equal(np.isnan(actual), np.isnan(expected)):
        return np.inf
    difference = np.abs(actual.astype("float64") - expected)
    return float(difference.max(initial=0.0) / (1 + np.abs(expected).max(initial=0.0)))


def print_checks(checks: Iterator[Check]) -> bool:
    """Print failures and the largest errors; return whether all passed."""
    worst: dict[tuple[str, str], float] = {}
    passed, count = True, 0
    for one in checks:
        count += 1
        key = one.name, one.dtype
        worst[key] = max(worst.get(key, 0.0), one.error)
        if not one.passed:
            passed = False
            print(f"WRONG: {one.name} {one.dtype} {one.shape}: error {one.error:.2g}", flush=True)
    print("\n| loop | " + " | ".join(TOLERANCE) + " |\n|---|" + "---|" * len(TOLERANCE))
    for name in dict.fromkeys(name for name, _ in worst):
        cells = [f"{worst[name, dtype]:.1e}" for dtype in TOLERANCE if (name, dtype) in worst]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\n{count} checks, {'all passed' if passed else 'SOME FAILED'}.\n", flush=True)
    return passed


def print_timings(found: Iterator[Timing]) -> None:
    """Print a row for each; sizes of matrices stand behind the number of channels."""
    print("| loop | dtype | steps x channels | schedule | ms | GB | of a copy |")
    print("|---|---|---|---|---|---|---|")
    for one in found:
        shape = " x ".join(f"{size:,}" for size in one.shape)
        print(
            f"| {one.name} | {one.dtype} | {shape} | {one.schedule} | {one.seconds * 1e3:.3f} | "
            f"{one.bytes / 1e9:.3f} | {one.fraction:.2f} |",
            flush=True,
        )
