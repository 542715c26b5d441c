"""The loops of `pytensor.scan` that the tests adopt, with adoption off and on.

``python -m benchmarks.adoption`` prints a table: the time of one call that returns values and first
derivatives, medians of calls that take turns in one process. The loops have half a dozen steps, so
this is what a call costs beside its steps; ``python -m benchmarks.pymc_adoption`` has long loops.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from benchmarks.machine import environment
from benchmarks.timing import median, paired_ratio, take_turns
from tests.legacy_loops import LOOPS

OFF, ON = "off", "on"
HEAD = "| off (µs) | on (µs) | times faster | relative difference |"


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
    return f"| {name} | {slow:,.0f} | {fast:,.0f} | {faster:.1f} | {error:.0e} |"


def print_head(text: str) -> None:
    """Print the first two lines of a table."""
    print(text)
    print("|---" * (text.count("|") - 1) + "|")


def row(name: str) -> str:
    """Measure one loop, with its gradient if it has one."""
    case = LOOPS[name]
    inputs = [pt.as_tensor(value).type() for value in case.values]
    outputs = case.build(*inputs)
    if case.order:
        cost = sum(out.sum() for out in outputs)
        outputs = [*outputs, *pytensor.grad(cost, inputs, disconnected_inputs="ignore")]
    functions = []
    for adopt in (False, True):
        with scanlib.enabled(adopt):
            functions.append(pytensor.function(inputs, outputs, on_unused_input="ignore"))
    off, on = functions
    return compared(name, lambda: off(*case.values), lambda: on(*case.values))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adoption", description=__doc__)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print_head("| loop " + HEAD)
    failed = 0
    for name in options.loops:
        try:
            print(row(name), flush=True)
        except Exception as error:
            failed = 1
            print(f"FAILED {name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    return failed


if __name__ == "__main__":
    sys.exit(main())
