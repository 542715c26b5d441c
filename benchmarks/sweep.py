"""How the time of the affine loop grows with its length, and with its width."""

from collections.abc import Iterator, Sequence

from benchmarks.loops.affine import make_affine
from benchmarks.measure import Measurement, measure
from benchmarks.model import Loop

LENGTH, WIDTH = "length", "width"
LENGTHS = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
WIDTHS = (1, 4, 16, 64, 256, 1_024, 4_096)
ELEMENTS = 2**20
"""How many numbers a loop of any width computes."""

Sweeps = dict[str, list[tuple[int, Measurement]]]


def points() -> Iterator[tuple[str, int, Loop]]:
    """The axis, the size and the loop of every point."""
    for length in LENGTHS:
        yield LENGTH, length, make_affine(f"length_{length}", (length,), "float64", {})
    for width in WIDTHS:
        shape = (ELEMENTS // width, width)
        yield WIDTH, width, make_affine(f"width_{width}", shape, "float64", {})


def run_sweep(peers: Sequence[str], rounds: int, seconds: float) -> Sweeps:
    """Time the forward pass at every point."""
    sweeps: Sweeps = {LENGTH: [], WIDTH: []}
    for axis, size, loop in points():
        sweeps[axis].append((size, measure(loop, False, peers, rounds, seconds)))
    return sweeps
