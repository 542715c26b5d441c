"""Models of PyMC with adoption off and on: log-density and gradient, compiled and run.

``python -m benchmarks.pymc_adoption`` prints a table: the time of one evaluation of log-density and
gradient (medians of calls that take turns in one process), and the processor time from the model to
the first value with an empty cache of compiled code, in processes of their own. It needs PyMC, and
pymc-extras for two of the models. Models that draw in a loop are built with ``pytensor.scan`` and,
for the second time, with ``scanlib.scan``; nothing is adopted then.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from time import process_time
from typing import Any

import pymc as pm
import pytensor

import scanlib
from benchmarks.adoption import COLD_HEAD, HEAD, ON, cold_columns, compared, print_head
from benchmarks.machine import environment
from benchmarks.pymc_models import EXTRAS, MODELS, WITH_DRAWS

LENGTH = 1_000


def model_of(name: str, length: int, on: bool) -> pm.Model:
    """Return a model, its loop made by scanlib's `scan` or to be adopted with `on`."""
    if name in WITH_DRAWS:
        return WITH_DRAWS[name](length, scanlib.scan if on else pytensor.scan)
    return MODELS[name](length)


def log_density(name: str, model: pm.Model, on: bool) -> tuple[Any, Any]:
    """Return the compiled log-density with its gradient, and a point."""
    adopt = on and name not in WITH_DRAWS
    with scanlib.enabled(adopt):
        function = model.logp_dlogp_function()
        function.set_extra_values({})
    return function, pm.blocking.DictToArrayBijection.map(model.initial_point(random_seed=1))


def child(name: str, length: int, adopt: bool) -> None:
    """Time one start and print it: of this process, whatever else is running."""
    model = model_of(name, length, adopt)
    start = process_time()
    function, point = log_density(name, model, adopt)
    function(point)
    print(process_time() - start)


def row(name: str, length: int, starts: int) -> str:
    """Measure one model."""
    plain = model_of(name, length, False)
    models = plain, model_of(name, length, True) if name in WITH_DRAWS else plain
    (off, point), (on, _) = (log_density(name, models[on], bool(on)) for on in (0, 1))
    text = compared(name, lambda: off(point), lambda: on(point))
    if starts:
        command = [sys.executable, "-m", "benchmarks.pymc_adoption", "--length", str(length)]
        text += cold_columns([*command, "--child", name], starts)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pymc_adoption", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *WITH_DRAWS])
    parser.add_argument("--length", type=int, default=LENGTH, help="steps of each series")
    parser.add_argument("--starts", type=int, default=1, help="cold starts of each (0: none)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.child:
        child(options.child[0], options.length, options.child[1] == ON)
        return 0
    print_head("| model " + HEAD + (COLD_HEAD if options.starts else ""))
    for name in options.models or [*MODELS, *WITH_DRAWS]:
        try:
            print(row(name, options.length, options.starts), flush=True)
        except ImportError as error:
            if MODELS.get(name) not in EXTRAS:
                raise
            print(f"{name}: left out, {error}", file=sys.stderr)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
