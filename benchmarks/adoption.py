"""The loops of `pytensor.scan` that the tests adopt, with adoption off and on.

``python -m benchmarks.adoption`` prints a table: the time of one call that returns values and first
derivatives, medians of calls that take turns in one process. The loops have half a dozen steps, so
this is what a call costs beside its steps. ``--long`` measures the loops of
:mod:`benchmarks.adoption_long` instead, with a goal for each, and ``--cold`` adds the seconds from
the graph to the first value with an empty cache of compiled code, in processes of their own.
``python -m benchmarks.pymc_adoption`` has models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from time import process_time
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from benchmarks.adoption_long import LONG
from benchmarks.cold import run
from benchmarks.machine import environment
from benchmarks.timing import median, paired_ratio, take_turns
from tests.legacy_loops import LOOPS

OFF, ON = "off", "on"
HEAD = "| off (µs) | on (µs) | times faster | relative difference |"
COLD_HEAD = " cold, off (s) | cold, on (s) | times faster |"


def difference(one: Sequence[Any], two: Sequence[Any]) -> float:
    """Return the largest difference of results, each relative to its largest item."""
    found = [0.0]
    for a, b in zip(one, two, strict=True):
        if np.size(a):
            scale = max(float(np.max(np.abs(a))), 1e-300)
            found.append(float(np.max(np.abs(np.asarray(a, dtype=np.float64) - b))) / scale)
    return max(found)


def compared(name: str, off: Callable[[], Any], on: Callable[[], Any]) -> str:
    """Return a line with both times, their ratio, and how far the results are apart."""
    error = difference(off(), on())
    samples = take_turns({OFF: off, ON: on}, rounds=15)
    slow, fast = (1e6 * median(samples[version]) for version in (OFF, ON))
    faster = paired_ratio(samples[OFF], samples[ON]).median
    return f"| {name} | {slow:,.0f} | {fast:,.0f} | {faster:.3g} | {error:.0e} |"


def print_head(text: str) -> None:
    """Print the first two lines of a table."""
    print(text)
    print("|---" * (text.count("|") - 1) + "|")


def compiled(
    name: str, adopt: bool, mode: str | None = None, unknown: bool = False
) -> Callable[..., Any]:
    """Compile a short loop, with its gradient if it has one; `unknown`: without static shapes."""
    case = LOOPS[name]
    inputs = [
        pt.tensor(dtype=v.dtype, shape=(None,) * v.ndim if unknown else v.shape)
        for v in case.values
    ]
    outputs = case.build(*inputs)
    if case.order:
        # Not a plain sum of all: its derivatives may be zero, and rounding errors all there is.
        cost = sum((k + 1) * out.sum() for k, out in enumerate(outputs))
        outputs = [*outputs, *pytensor.grad(cost, inputs, disconnected_inputs="ignore")]
    with scanlib.enabled(adopt):
        return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")


def row(name: str, mode: str | None = None, unknown: bool = False, starts: int = 0) -> str:
    """Measure one short loop."""
    values = LOOPS[name].values
    off, on = (compiled(name, adopt, mode, unknown) for adopt in (False, True))
    text = compared(name, lambda: off(*values), lambda: on(*values))
    if starts:
        command = [sys.executable, "-m", "benchmarks.adoption"]
        text += cold_columns([*command, "--child", name], starts)
    return text


def long_row(name: str, starts: int) -> str:
    """Measure one long loop, with its gradient, and `starts` cold starts of it."""
    loop = LONG[name]
    data = loop.data()
    off, on = loop.compile(adopt=False), loop.compile(adopt=True)
    text = compared(f"{loop.title} | {loop.goal:.0f}", lambda: off(*data), lambda: on(*data))
    if starts:
        command = [sys.executable, "-m", "benchmarks.adoption", "--child", name]
        text += cold_columns(command, starts)
    return text


def cold_columns(command: Sequence[str], starts: int) -> str:
    """Return the median seconds of cold starts, off and on in turns, and their ratio.

    `command` prints the seconds of one start when ``off`` or ``on`` is added to it.
    """
    taken: dict[str, list[float]] = {OFF: [], ON: []}
    for _ in range(starts):
        for version, seconds in taken.items():
            seconds.append(cold_start([*command, version]))
    slow, fast = median(taken[OFF]), median(taken[ON])
    return f" {slow:.1f} | {fast:.1f} | {slow / fast:.1f} |"


def cold_start(command: Sequence[str]) -> float:
    """Run a command that prints seconds, with an empty cache of compiled code."""
    with tempfile.TemporaryDirectory() as folder:
        return float(json.loads(run(command, folder)))


def child(name: str, adopt: bool) -> None:
    """Time one start and print it: of this process, whatever else is running."""
    data = LONG[name].data() if name in LONG else LOOPS[name].values
    start = process_time()
    (LONG[name].compile(adopt) if name in LONG else compiled(name, adopt))(*data)
    print(process_time() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adoption", description=__doc__)
    parser.add_argument("--loops", nargs="+", choices=[*LOOPS, *LONG], metavar="NAME")
    parser.add_argument("--long", action="store_true", help="long loops, each with a goal")
    parser.add_argument("--cold", type=int, default=0, help="cold starts of each loop")
    parser.add_argument("--mode", help="of PyTensor, for the short loops: CVM, for one")
    parser.add_argument("--unknown", action="store_true", help="shapes of inputs are not known")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.child:
        child(options.child[0], options.child[1] == ON)
        return 0
    columns = " goal" + HEAD + (COLD_HEAD if options.cold else "")
    print_head("| loop |" + columns if options.long else "| loop" + columns.removeprefix(" goal"))
    failed = 0
    for name in options.loops or (LONG if options.long else LOOPS):
        try:
            if options.long:
                print(long_row(name, options.cold), flush=True)
            else:
                print(row(name, options.mode, options.unknown, options.cold), flush=True)
        except Exception as error:
            failed = 1
            print(f"FAILED {name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    return failed


if __name__ == "__main__":
    sys.exit(main())
