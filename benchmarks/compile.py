"""Seconds from graph to first result, beside JAX and `pytensor.scan`.

``python -m benchmarks.compile`` prints them for five loops, with the gradient of a cost.

Each measurement is a process of its own, in which something trivial has been compiled before the
clock starts. Two parts are taken apart: ``function()``, which differentiates the cost and compiles
the value with its gradient, and the first call. First the cache of compiled code is empty, then it
is as the first process left it; JAX keeps none, and compiles at the first call. The handler that
runs functions, which is compiled once on a machine (half a second; under JAX a small one more), is
there before the clock starts. Processor time counts, that of C++ compilers included, of which a
busy machine takes little more; seconds on the clock are in parentheses.

``--linker c``, ``jax`` or ``torch`` takes another linker of PyTensor's than numba, for which there
are no goals beside JAX. ``--without-kernels`` takes steps with an operation that has no kernel, and
adds the processor time of a later call; with ``--linker c`` neither that nor compiling may take
longer than with `pytensor.scan`. ``--many`` shows how compile time grows with the number of states
of a loop.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from benchmarks.cold import processor_seconds, run
from benchmarks.compile_loops import COMPILED, MANY, WITHOUT_KERNELS
from benchmarks.machine import environment
from benchmarks.model import OURS, THEIRS, as_list, load_library
from benchmarks.report import draw, yes
from benchmarks.timing import median

JAX = "JAX"
EMPTY, FILLED = "empty", "filled"
PARTS = ("function()", "first call")
LOOPS = COMPILED | MANY | WITHOUT_KERNELS
LATER_CALLS = 20
MODES = {"numba": "NUMBA", "c": "CVM", "jax": "JAX", "torch": "PYTORCH"}

# Goals for processor time: the whole from an empty cache over JAX's, and seconds from a filled one.
RATIO_GOAL = 2.0
FILLED_GOALS = dict.fromkeys(COMPILED, 0.5) | {"kalman": 1.5}

Part = tuple[float, float]  # processor time, and time on the clock
Samples = dict[tuple[str, str, str], list[list[Part]]]  # by loop, subject and cache


def time_here(name: str, subject: str, gradient: bool, linker: str = "numba") -> list[Part]:
    """Return how long the parts take in this process."""
    mode: Any = MODES[linker]
    loop = LOOPS[name]
    data = loop.data()
    if subject == JAX:
        in_jax = import_module("benchmarks.compile_jax")
        in_jax.warm_up()
        return _timed(lambda: in_jax.compiled(name, gradient), data)
    x = pt.dvector("x")
    pytensor.function([x], [x.sum(), pt.exp(x)], mode=mode)(np.ones(3))
    library = load_library(subject)
    if subject == OURS:  # numba is imported before, under other linkers as well
        import_module("scanlib.ops.execution").load_backends()
        import_module("scanlib.backends.handler.thunks").library()
        if linker == "jax":
            import_module("scanlib.backends.jax.kernels").program_handler()
    graph = loop.build(library)

    def compiled() -> Callable[..., Any]:
        assert graph.cost is not None
        derivatives = pytensor.grad(graph.cost, list(graph.wrt)) if gradient else []
        outputs = [graph.cost, *derivatives]
        function: Any = pytensor.function(list(graph.inputs), outputs, mode=mode)
        return function

    return _timed(compiled, data, calls=LATER_CALLS if name in WITHOUT_KERNELS else 0)


def _timed(
    compiled: Callable[[], Callable[..., Any]], data: Sequence[Any], calls: int = 0
) -> list[Part]:
    """Return the times of making a function and its first call, and of the fastest later one."""
    stamps = [_now()]
    function = compiled()
    stamps.append(_now())
    for result in as_list(function(*data)):
        for value in as_list(result):  # JAX returns gradients as a tuple
            np.asarray(value)  # and before it has computed them
    stamps.append(_now())
    parts = [_between(*pair) for pair in pairwise(stamps)]
    later = [_now()]
    for _ in range(calls):
        function(*data)
        later.append(_now())
    return [*parts, *sorted(_between(*pair) for pair in pairwise(later))[:1]]


def _between(start: Part, end: Part) -> Part:
    return end[0] - start[0], end[1] - start[1]


def _now() -> Part:
    return processor_seconds(), perf_counter()


def time_processes(
    names: Sequence[str], subjects: Sequence[str], gradient: bool, rounds: int, linker: str
) -> Samples:
    """Time loops in new processes, each subject first with an empty cache and then a filled one.

    What a linker cannot compile is left out.
    """
    samples: Samples = {}
    for name in names:
        for _ in range(rounds):
            for subject in subjects:
                command = [sys.executable, "-m", "benchmarks.compile", "--child", name, subject]
                command += ["--linker", linker]
                command += [] if gradient else ["--value"]
                with tempfile.TemporaryDirectory(prefix="compile-") as directory:
                    for cache in (EMPTY, FILLED) if subject != JAX else (EMPTY,):
                        print(f"{name}, {subject}, {cache} cache ...", file=sys.stderr, flush=True)
                        try:
                            parts = json.loads(run(command, directory))
                        except RuntimeError as error:
                            if subject == OURS:
                                raise
                            print(error, file=sys.stderr)
                            break
                        samples.setdefault((name, subject, cache), []).append(parts)
    return samples


def seconds(samples: Samples, place: tuple[str, str, str], part: int | None, clock: int) -> float:
    """Return the median time of a part, or of both that compile."""
    rounds = samples[place]
    return median([sum(p[clock] for p in (r[:2] if part is None else [r[part]])) for r in rounds])


def table(samples: Samples, with_goals: bool) -> str:
    """Return the times of all loops, and which goals they meet."""
    places = dict.fromkeys((name, subject) for name, subject, _ in samples)
    has_calls = all(name in WITHOUT_KERNELS for name, _ in places)
    lines = []
    for name, subject in places:
        line = [LOOPS[name].title, subject]
        for cache in (EMPTY, FILLED):
            for part in (0, 1, None):
                known = (name, subject, cache) in samples
                line.append(_cell(samples, (name, subject, cache), part) if known else "")
        if has_calls:
            line.append(f"{1e3 * seconds(samples, (name, subject, FILLED), 2, 0):.1f}")
        lines.append([*line, *(_goals(samples, name, subject) if with_goals else [])])
    whole = (*PARTS, "both")
    headings = ["loop", "by", *(f"{cache}: {part}" for cache in (EMPTY, FILLED) for part in whole)]
    headings += ["later call, ms"] * has_calls
    goals = ["/ JAX", f"≤ {RATIO_GOAL:g}", "filled goal", "met"] if with_goals else []
    return draw([*headings, *goals], lines, left=2)


def _cell(samples: Samples, place: tuple[str, str, str], part: int | None) -> str:
    cpu, clock = (seconds(samples, place, part, k) for k in (0, 1))
    return f"{cpu:.2f} ({clock:.2f})"


def _goals(samples: Samples, name: str, subject: str) -> list[str]:
    whole = seconds(samples, (name, subject, EMPTY), None, 0)
    cells = ["", "", "", ""]
    if (name, JAX, EMPTY) in samples and subject != JAX:
        ratio = whole / seconds(samples, (name, JAX, EMPTY), None, 0)
        cells[0] = f"{ratio:.1f}"
        cells[1] = yes(ratio <= RATIO_GOAL) if subject == OURS else ""
    if subject == OURS and name in FILLED_GOALS:
        filled = seconds(samples, (name, subject, FILLED), None, 0)
        cells[2:] = [f"≤ {FILLED_GOALS[name]:g}", yes(filled <= FILLED_GOALS[name])]
    return cells


def main() -> None:
    """Print the table, or what one process measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=__doc__)
    add = parser.add_argument
    subjects = [OURS, JAX, THEIRS] if find_spec("jax") else [OURS, THEIRS]
    add("--loops", nargs="+", choices=COMPILED, default=list(COMPILED))
    add("--by", nargs="+", choices=subjects, default=subjects, help="whom to time")
    add("--value", action="store_true", help="without the gradient")
    add("--linker", choices=MODES, default="numba", help="PyTensor's (default: numba)")
    add("--many", action="store_true", help="loops of many states, by scanlib alone")
    add("--without-kernels", action="store_true", help="steps with operations that have no kernel")
    add("--rounds", type=int, default=1, help="medians of so many measurements (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write every sample there")
    add("--child", nargs=2, metavar=("LOOP", "BY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, subject = options.child
        print(json.dumps(time_here(name, subject, not options.value, options.linker)))
        return
    names, by = (list(MANY), [OURS]) if options.many else (options.loops, options.by)
    if options.without_kernels:
        names, by = list(WITHOUT_KERNELS), [OURS, THEIRS]
    gradient = not options.value
    samples = time_processes(names, by, gradient, options.rounds, options.linker)
    print(table(samples, options.linker == "numba" and not options.without_kernels))
    print("\n" + ", ".join(f"{name} {value}" for name, value in environment().items()))
    if options.json:
        record = [
            {"loop": name, "by": by, "cache": cache, "rounds": rounds}
            for (name, by, cache), rounds in samples.items()
        ]
        text = json.dumps({"environment": environment(), "samples": record}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
