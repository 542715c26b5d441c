"""Memory and time of gradients with and without checkpoints, against ``pytensor.scan``.

``python -m benchmarks.memory`` measures 10,000 steps of a state of 1,000 numbers, Euler's method
for ``h' = tanh(w h + 0.1)``, alone and with a small matrix product; the cost reads the last row. (A
step moves the state little, so that gradients neither vanish nor turn into subnormal numbers, with
which some processors take a hundred times as long.) Every memory is taken in a process of its own:
the peak of a call above what the process held before, with the function compiled and called once.
Times are medians of calls that take turns in one process.

``--plot FILE`` draws how memory and time of the schedules grow with the number of steps.
Memory is read from ``/proc``, so this runs on Linux alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.scan.checkpoints import scan_checkpoints as classic_checkpoints

import scanlib

STEPS, WIDTH, SMALL = 10_000, 1_000, 4
STEP_SIZE = 1e-3
MIB = 2**20
CALLS = 3  # of which the smallest peak counts
VARIANTS = ("elementwise", "product")
SCHEDULES: dict[str, Any] = {
    "stored": None,
    "sqrt": "sqrt",
    "three levels": scanlib.Levels(3),
    "10 MiB": scanlib.Memory(10 * MIB),
}
CLASSIC, CLASSIC_CHECKPOINTS = "pytensor.scan", "pytensor.scan_checkpoints"
VERSIONS = (*SCHEDULES, CLASSIC, CLASSIC_CHECKPOINTS)


def step_of(variant: str) -> Callable[..., Any]:
    """Return the step of a variant: of the state, its coefficients and a small matrix."""

    def elementwise(h: Any, w: Any, m: Any) -> Any:
        return h + STEP_SIZE * pt.tanh(w * h + 0.1)

    def product(h: Any, w: Any, m: Any) -> Any:
        return h + STEP_SIZE * pt.tanh(w * h + pt.dot(h, m))

    return elementwise if variant == "elementwise" else product


def build(variant: str, version: str) -> Callable[..., Any]:
    """Compile cost and gradient of one version."""
    state = pt.dvector if variant == "elementwise" else pt.dmatrix
    h, w, m = state("h"), state("w"), pt.dmatrix("m")
    steps = pt.lscalar("steps")
    arguments = {
        "outputs_info": h,
        "non_sequences": [w, m],
        "n_steps": steps,
        "return_updates": False,
    }
    if version in SCHEDULES:
        trace = scanlib.scan(step_of(variant), checkpoint=SCHEDULES[version], **arguments)
    elif version == CLASSIC:
        trace = pytensor.scan(step_of(variant), **arguments)
    else:
        # It wants a sequence and all outputs in lists, and a number that divides the steps.
        arguments |= {"outputs_info": [h], "save_every_N": 100, "padding": False}
        trace = classic_checkpoints(step_of(variant), **arguments)
    cost = pt.sqr(trace[-1]).sum()
    wrt = [h, w] if variant == "elementwise" else [h, w, m]
    outputs = [cost, *pytensor.grad(cost, wrt)]
    return pytensor.function([h, w, m, steps], outputs, on_unused_input="ignore")


def values(variant: str, width: int = WIDTH) -> list[np.ndarray]:
    """Return initial state, coefficients and matrix."""
    rng = np.random.default_rng(1)
    shape = (width,) if variant == "elementwise" else (width // SMALL, SMALL)
    return [rng.normal(size=shape), rng.uniform(0.5, 1.2, shape), rng.normal(size=(SMALL, SMALL))]


def memory_of(name: str) -> int:
    """Return a size that the kernel reports for this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak_of_call(
    function: Callable[..., Any], steps: int, variant: str = "elementwise", width: int = WIDTH
) -> int:
    """Return the bytes that a call takes at its peak, above what the process holds."""
    arguments = values(variant, width)
    return min(_peak_above_rest(lambda: function(*arguments, steps)) for _ in range(CALLS))


def _peak_above_rest(call: Callable[[], Any]) -> int:
    """Return the bytes between what the process holds before a call and its peak.

    Pages of code that a call is the first to run count as well, so the first call takes more.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory_of("VmRSS")
    call()
    return memory_of("VmHWM") - before


def peak(variant: str, version: str, steps: int = STEPS) -> int:
    """Return the peak of one version, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--child", variant, version, str(steps)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(output.splitlines()[-1]))


def times(
    functions: dict[str, Callable[..., Any]], variant: str, steps: int, repeat: int
) -> dict[str, list[float]]:
    """Return the seconds of calls that take turns."""
    arguments = values(variant)
    seconds: dict[str, list[float]] = {version: [] for version in functions}
    for turn in range(repeat + 1):
        for version, function in functions.items():
            start = time.perf_counter()
            function(*arguments, steps)
            if turn:
                seconds[version].append(time.perf_counter() - start)
    return seconds


def check(functions: dict[str, Callable[..., Any]], variant: str) -> None:
    """Raise if two versions differ by more than rounding."""
    arguments = values(variant)
    expected = functions["stored"](*arguments, 300)
    for function in functions.values():
        for actual, wanted in zip(function(*arguments, 300), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-8, atol=1e-12)


def table(variant: str, versions: Sequence[str], repeat: int) -> list[str]:
    """Measure one variant; return the lines of a table."""
    functions = {version: build(variant, version) for version in versions}
    check(functions, variant)
    seconds = times(functions, variant, STEPS, repeat)
    peaks = {version: peak(variant, version) for version in versions}
    lines = ["| gradient | memory | of stored | time | of stored |", "|---|---|---|---|---|"]
    for version in versions:
        ratio = median(
            mine / stored for mine, stored in zip(seconds[version], seconds["stored"], strict=True)
        )
        lines.append(
            f"| {version} | {peaks[version] / MIB:.2f} MiB "
            f"| {100 * peaks[version] / peaks['stored']:.1f} % "
            f"| {1000 * median(seconds[version]):.0f} ms | {ratio:.2f} |"
        )
    return lines


def sweep(versions: Sequence[str], repeat: int) -> dict[str, list[tuple[int, int, float]]]:
    """Return steps, bytes and seconds of the elementwise variant, for growing numbers of steps."""
    functions = {version: build("elementwise", version) for version in versions}
    points: dict[str, list[tuple[int, int, float]]] = {version: [] for version in versions}
    for steps in (300, 1_000, 3_000, 10_000, 30_000):
        seconds = times(functions, "elementwise", steps, repeat)
        for version in versions:
            size = peak("elementwise", version, steps)
            points[version].append((steps, size, median(seconds[version])))
    return points


def draw(path: Path, points: dict[str, list[tuple[int, int, float]]]) -> None:
    """Draw memory and time over the number of steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for colour, marker, (version, rows) in zip(colours, "osD^vP", points.items(), strict=False):
        steps = [row[0] for row in rows]
        style = {"color": colour, "marker": marker, "label": version}
        left.loglog(steps, [max(row[1], 1) / MIB for row in rows], **style)
        right.loglog(steps, [1000 * row[2] for row in rows], **style)
    left.set_ylabel("memory of a gradient (MiB)")
    right.set_ylabel("time of a gradient (ms)")
    for axes in (left, right):
        axes.set_xlabel(f"steps of a state of {WIDTH:,} numbers")
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--versions", nargs="+", default=VERSIONS, choices=VERSIONS)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", nargs=3, metavar=("VARIANT", "VERSION", "STEPS"))
    options = parser.parse_args(arguments)
    if options.child:
        variant, version, steps = options.child
        print(json.dumps(peak_of_call(build(variant, version), int(steps), variant)))
        return
    if options.plot is not None:
        draw(options.plot, sweep(options.versions, options.repeat))
        return
    for variant in options.variants:
        print(f"\n{variant}\n")
        print("\n".join(table(variant, options.versions, options.repeat)), flush=True)


if __name__ == "__main__":
    main()
