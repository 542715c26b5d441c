"""Models of PyMC with adoption off and on: log-density and gradient, compiled and run.

``python -m benchmarks.pymc_adoption`` prints a table: the time of one evaluation of log-density and
gradient (medians of calls that take turns in one process), and the processor time from the model to
the first value with an empty cache of compiled code, in processes of their own. It needs PyMC, and
pymc-extras for two of the models.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from time import process_time
from typing import Any

import pymc as pm

import scanlib
from benchmarks.adoption import COLD_HEAD, HEAD, ON, cold_columns, compared, print_head
from benchmarks.machine import environment
from benchmarks.pymc_models import EXTRAS, MODELS

LENGTH = 1_000


def log_density(model: pm.Model, adopt: bool) -> tuple[Any, Any]:
    """Return the compiled log-density with its gradient, and a point."""
    with scanlib.enabled(adopt):
        function = model.logp_dlogp_function()
        function.set_extra_values({})
    return function, pm.blocking.DictToArrayBijection.map(model.initial_point(random_seed=1))


def child(name: str, length: int, adopt: bool) -> None:
    """Time one start and print it: of this process, whatever else is running."""
    model = MODELS[name](length)
    start = process_time()
    function, point = log_density(model, adopt)
    function(point)
    print(process_time() - start)


def row(name: str, length: int, starts: int) -> str:
    """Measure one model."""
    model = MODELS[name](length)
    (off, point), (on, _) = (log_density(model, adopt) for adopt in (False, True))
    text = compared(name, lambda: off(point), lambda: on(point))
    if starts:
        command = [sys.executable, "-m", "benchmarks.pymc_adoption", "--length", str(length)]
        text += cold_columns([*command, "--child", name], starts)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pymc_adoption", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--length", type=int, default=LENGTH, help="steps of each series")
    parser.add_argument("--starts", type=int, default=1, help="cold starts of each (0: none)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.child:
        child(options.child[0], options.length, options.child[1] == ON)
        return 0
    print_head("| model " + HEAD + (COLD_HEAD if options.starts else ""))
    for name in options.models:
        try:
            print(row(name, options.length, options.starts), flush=True)
        except ImportError as error:
            if MODELS[name] not in EXTRAS:
                raise
            print(f"{name}: left out, {error}", file=sys.stderr)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
