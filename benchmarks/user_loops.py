"""Loops that users might write, from `benchmarks.users`, beside `lax.scan` under `jit` in JAX.

``python -m benchmarks.user_loops`` prints a table: the median time of a call and its ratio to
JAX's, forward and with the gradient of the sum of the squared value; whether values and
derivatives agree; and the processor time until the first results of both, compiled code that is
kept from earlier runs taken as it is. Calls take turns in one process. ``--adopted`` adds the same
loops by `pytensor.scan` with adoption on, and their ratios to `scanlib.scan`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

import scanlib
from benchmarks.cold import processor_seconds
from benchmarks.compile import JAX, MODES
from benchmarks.machine import environment
from benchmarks.measure import first_line
from benchmarks.model import OURS, THEIRS, Array, load_library
from benchmarks.report import draw, show_ratio, yes
from benchmarks.timing import median, paired_ratio, take_turns
from benchmarks.users import LOOPS
from benchmarks.users.declared import UserLoop
from benchmarks.users.dialects import in_jax

ADOPTED = "adopted"
Call = Callable[[], list[Any]]


def ready(loop: UserLoop, subject: str, gradient: bool, linker: str) -> Call:
    """Return a call of one pass by one subject, which has computed all when it returns."""
    data: list[Any] = loop.data()
    if subject == JAX or linker == "jax":
        jax = in_jax().jax
        data = [jax.device_put(array) for array in data]
    if subject == JAX:
        function = loop.compile_jax(gradient)
    else:
        library = load_library(OURS if subject == OURS else THEIRS)
        function = loop.compile(library, gradient, MODES[linker])
    if subject == JAX or linker == "jax":
        return lambda: jax.block_until_ready(function(*data))
    return lambda: function(*data)


def farthest(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Return the largest difference, relative to the largest number of an array or to one."""

    def distance(a: Array, b: Array) -> float:
        if a.shape != b.shape or not np.isfinite(a).all():
            return np.inf
        return float(np.max(np.abs(a - b), initial=0.0) / max(1.0, np.max(np.abs(b), initial=0.0)))

    pairs = zip(found, wanted, strict=True)
    return max(distance(np.asarray(a), np.asarray(b)) for a, b in pairs)


def cells_of_pass(
    loop: UserLoop, subjects: Sequence[str], gradient: bool, linker: str, rounds: int
) -> tuple[list[str], dict[str, float]]:
    """Return the cells of one pass, and the processor time until first results of each subject."""
    calls: dict[str, Call] = {}
    results, cold = {}, {}
    for subject in subjects:
        start = processor_seconds()
        try:
            call = ready(loop, subject, gradient, linker)
            results[subject] = call()
        except Exception as error:
            print(f"{subject}: {first_line(error)}", file=sys.stderr)
            continue
        calls[subject], cold[subject] = call, processor_seconds() - start
    samples = take_turns(calls, rounds)
    cells = [f"{1e6 * median(samples[OURS]):.0f}" if OURS in calls else "failed"]
    for subject in subjects[1:]:
        if OURS not in calls or subject not in calls:
            cells += ["failed", ""]
            continue
        pair = (OURS, JAX) if subject == JAX else (ADOPTED, OURS)
        ratio = paired_ratio(*(samples[name] for name in pair)).median
        difference = farthest(results[OURS], results[subject])
        agree = yes(difference <= loop.tolerance)
        cells += [show_ratio(ratio), agree if agree == "yes" else f"no: {difference:.0e}"]
    return cells, cold


def row(name: str, subjects: Sequence[str], linker: str, rounds: int) -> list[str]:
    """Return a line of the table."""
    loop = LOOPS[name].make()
    cells, cold = cells_of_pass(loop, subjects, False, linker, rounds)
    more, later = [""] * len(cells), dict.fromkeys(subjects, 0.0)
    if loop.has_gradient:
        more, later = cells_of_pass(loop, subjects, True, linker, rounds)
    seconds = [f"{cold.get(k, 0.0) + later.get(k, 0.0):.2f}" for k in subjects]
    return [LOOPS[name].title, *cells, *more, *seconds]


def headings(subjects: Sequence[str]) -> list[str]:
    """Return the names of the columns."""
    names = ["loop"]
    for title in ("forward", "with gradient"):
        names.append(f"{title}, µs")
        for subject in subjects[1:]:
            ratio = f"/ {JAX}" if subject == JAX else f"{ADOPTED} / {OURS}"
            names += [ratio, "equal"]
    return [*names, *(f"compile {subject}, s" for subject in subjects)]


def warm_up(subjects: Sequence[str], linker: str) -> None:
    """Compile a first loop, so that what is imported then is in no loop's time."""
    for subject in subjects:
        ready(LOOPS["threshold_ar"].make(), subject, True, linker)()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.user_loops", description=__doc__)
    add = parser.add_argument
    add("--loops", nargs="+", choices=LOOPS, metavar="LOOP", default=list(LOOPS))
    add("--linker", choices=("numba", "c", "jax"), default="numba", help="PyTensor's")
    add("--rounds", type=int, default=11, help="samples of each (default: 11)")
    add("--adopted", action="store_true", help="by pytensor.scan as well, adopted")
    add("--list", action="store_true", help="print the names of the loops alone")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name}: {loop.title}" for name, loop in LOOPS.items()))
        return 0
    subjects = [OURS, *([JAX] if find_spec("jax") else [])]
    subjects += [ADOPTED] * options.adopted
    lines = []
    with scanlib.enabled(options.adopted):
        warm_up(subjects, options.linker)
        for name in options.loops:
            print(f"{name} ...", file=sys.stderr, flush=True)
            lines.append(row(name, subjects, options.linker, options.rounds))
    print(draw(headings(subjects), lines, left=1))
    print("\n" + ", ".join(f"{name} {value}" for name, value in environment().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
