"""Time scanlib against ``pytensor.scan``, both in PyTensor's default mode, and print one table.

Ratios below one mean that scanlib is faster. Both libraries take turns in one process (see
``benchmarks/timing.py``) after their values were checked against loops written by hand.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cold import take_cold_turns
from benchmarks.loops import LOOPS, OURS, THEIRS, Loop, load_library
from benchmarks.report import HAND, Row, table
from benchmarks.timing import take_turns

PASSES = {False: "forward", True: "forward + gradient"}


def largest_difference(results: Any, expected: Any) -> float:
    """Largest difference over all results, each relative to its own largest expected entry."""
    if not isinstance(results, list):
        results, expected = [results], [expected]
    differences = [
        np.max(np.abs(result - value)) / max(float(np.max(np.abs(value))), 1e-300)
        for result, value in zip(results, expected, strict=True)
    ]
    return float(max(differences))


def check(loop: Loop, gradient: bool, name: str, results: Any, expected: Any) -> None:
    """Raise when the results of a library are not those of the hand-written loop."""
    if gradient and name == THEIRS and not loop.reference_gradient:
        return
    difference = largest_difference(results, expected)
    if not difference <= loop.tolerance:
        raise ValueError(
            f"{name} disagrees with the hand-written loop on {loop.name}, {PASSES[gradient]}: "
            f"relative difference {difference:.1e}, allowed {loop.tolerance:.0e}"
        )


def time_warm(loop: Loop, gradient: bool, rounds: int) -> Row:
    """Time the compiled functions of both libraries, and the hand-written loop as a scale."""
    data = loop.data()
    by_hand = loop.gradient if gradient else loop.forward
    plain = [array.item() if array.ndim == 0 else array for array in data]
    expected = by_hand(*plain)
    calls: dict[str, Callable[[], object]] = {}
    for name in (THEIRS, OURS):
        function = loop.build(load_library(name)).compile(gradient)
        results = function(*data)
        check(loop, gradient, name, results, expected)
        calls[name] = partial(function, *data)
    if loop.compiled:
        calls[HAND] = partial(by_hand, *plain)
    return Row(loop.title, PASSES[gradient], take_turns(calls, rounds))


def time_cold(loop: Loop, gradient: bool, rounds: int) -> Row:
    """Time both libraries from graph to first result with empty caches."""
    samples = take_cold_turns(loop.name, gradient, rounds)
    return Row(loop.title, f"cold start, {PASSES[gradient]}", samples)


def environment() -> dict[str, str]:
    """What the figures depend on."""
    names = ("pytensor", "numba", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--loops", nargs="+", choices=LOOPS, default=list(LOOPS), help="which loops (default: all)"
    )
    parser.add_argument(
        "--repeat", type=int, default=15, help="rounds of paired timings (default: 15)"
    )
    parser.add_argument(
        "--cold",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time from graph to first result with empty caches (default: yes)",
    )
    parser.add_argument(
        "--cold-repeat", type=int, default=1, help="rounds of cold starts (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all samples there")
    options = parser.parse_args(arguments)
    if min(options.repeat, options.cold_repeat) < 1:
        parser.error("--repeat and --cold-repeat must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks and print the table."""
    options = parse(arguments)
    loops = [LOOPS[name] for name in options.loops]
    jobs = [(time_warm, loop, gradient, options.repeat) for loop in loops for gradient in PASSES]
    if options.cold:
        jobs += [
            (time_cold, loop, gradient, options.cold_repeat)
            for loop in loops
            if loop.cold
            for gradient in PASSES
        ]
    rows: list[Row] = []
    failures: list[str] = []
    for measure, loop, gradient, rounds in jobs:
        print(f"{measure.__name__} {loop.name} {PASSES[gradient]} ...", file=sys.stderr)
        try:
            rows.append(measure(loop, gradient, rounds))
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), "")  # numba's go on for pages
            failures.append(f"{loop.name}, {PASSES[gradient]}: {type(error).__name__}: {reason}")
    if rows:
        print(table(rows))
        print("\n" + ", ".join(f"{name} {number}" for name, number in environment().items()))
    if options.json:
        record = {"environment": environment(), "rows": [row.record() for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
