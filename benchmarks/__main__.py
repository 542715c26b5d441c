"""Time scanlib against hand-written loops, ``pytensor.scan``, JAX and SciPy; print one table.

Ratios below one mean that scanlib is faster. All take turns in one process (see
``benchmarks/timing.py``) after their values were checked against loops written by hand. Then come
the errors of the discounted sum in single precision. JAX and matplotlib are used where they are
installed. The time from graph to first result has a table of its own, `benchmarks.compile`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.loops import LOOPS
from benchmarks.machine import environment
from benchmarks.measure import Measurement, first_line, measure
from benchmarks.model import PASSES
from benchmarks.numerics import ErrorRow, measure_errors
from benchmarks.peers import OPTIONAL
from benchmarks.report import errors_table, speed_page, speed_table, sweep_table
from benchmarks.sweep import Sweeps, run_sweep

Result = TypeVar("Result")

QUICK = {"repeat": 7, "seconds": 0.2}
USUAL = {"repeat": 11, "seconds": 0.3}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--loops", nargs="+", choices=LOOPS, help="which loops (default: all)")
    add(
        "--peers",
        nargs="*",
        choices=OPTIONAL,
        default=list(OPTIONAL),
        help="whom to time beside scanlib and the hand-written loop (default: all)",
    )
    add("--repeat", type=int, help=f"rounds of paired timings (default: {USUAL['repeat']})")
    add(
        "--seconds",
        type=float,
        help="how long all samples of one peer may take; slow ones sit out some rounds "
        f"(default: {USUAL['seconds']})",
    )
    add("--quick", action="store_true", help="one loop of each kind, fewer samples")
    add(
        "--numerics",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the errors of the discounted sum in single precision (default: yes)",
    )
    add(
        "--sweep",
        action=argparse.BooleanOptionalAction,
        help="the affine loop by length and by width (default: with --plot)",
    )
    add("--json", type=Path, metavar="FILE", help="write everything there, with all samples")
    add("--page", type=Path, metavar="FILE", help="write the ratios there as a table in Markdown")
    add("--plot", type=Path, metavar="FILE", help="draw all of it (PNG, SVG or PDF)")
    options = parser.parse_args(arguments)
    defaults = QUICK if options.quick else USUAL
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.sweep is None:
        options.sweep = options.plot is not None
    if options.loops is None:
        options.loops = [name for name, loop in LOOPS.items() if loop.quick or not options.quick]
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


class Run:
    """The results so far, and what went wrong on the way."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.measurements: list[Measurement] = []
        self.errors: list[ErrorRow] = []
        self.sweeps: Sweeps | None = None
        self.failures: list[str] = []

    def attempt(self, title: str, job: Callable[[], Result]) -> Result | None:
        """Run a job; a failure is kept for the end, and the run goes on."""
        print(f"{title} ...", file=sys.stderr, flush=True)
        try:
            return job()
        except Exception as error:
            self.failures.append(f"{title}: {first_line(error)}")
            return None

    def run(self) -> None:
        """Take all measurements that were asked for."""
        options = self.options
        for name in options.loops:
            for gradient in PASSES:
                self.measure_pass(name, gradient)
        if options.sweep:
            self.sweeps = self.attempt(
                "sweep", lambda: run_sweep(options.peers, options.repeat, options.seconds)
            )
        if options.numerics:
            self.errors = self.attempt("errors of the discounted sum", measure_errors) or []

    def measure_pass(self, name: str, gradient: bool) -> None:
        """Time one pass over one loop."""
        options = self.options
        result = self.attempt(
            f"{name}, {PASSES[gradient]}",
            lambda: measure(LOOPS[name], gradient, options.peers, options.repeat, options.seconds),
        )
        if result is not None:
            self.measurements.append(result)

    def text(self) -> str:
        """Everything that is printed."""
        parts = []
        if self.measurements:
            parts.append(speed_table(self.measurements))
        if self.sweeps:
            parts.append(sweep_table(self.sweeps))
        if self.errors:
            parts.append(errors_table(self.errors))
        parts.append(", ".join(f"{name} {value}" for name, value in environment().items()))
        return "\n\n".join(parts)

    def record(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        sweeps = self.sweeps or {}
        return {
            "environment": environment(),
            "speed": [measurement.record() for measurement in self.measurements],
            "sweeps": {
                axis: [{axis: size, **m.record()} for size, m in points]
                for axis, points in sweeps.items()
            },
            "errors": [row.record() for row in self.errors],
            "failures": self.failures,
        }


def save_plot(run: Run, path: Path) -> None:
    """Draw the figure, or say why not."""
    try:
        from benchmarks.plot import draw_plot

        draw_plot(path, run.measurements, run.sweeps)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("matplotlib not installed: no plot", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks and print the tables."""
    options = parse(arguments)
    run = Run(options)
    run.run()
    print(run.text())
    if options.json:
        options.json.write_text(json.dumps(run.record(), indent=1) + "\n", encoding="utf-8")
    if options.page:
        options.page.write_text(speed_page(run.measurements) + "\n", encoding="utf-8")
    if options.plot and (run.measurements or run.sweeps):
        save_plot(run, options.plot)
    for failure in run.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
