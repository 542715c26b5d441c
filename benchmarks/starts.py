"""Time from a loop's graph to its first result: with empty caches, and in a second process.

Each measurement is a process of its own. The clock starts when the library and PyTensor are
imported, and stops when the compiled function has returned once. What it measures is the time to
build the graph, differentiate it, rewrite it, compile it and run it; numba is imported inside it,
as it is for a user. The cold start has an empty compile directory, the warm start the one that the
cold start filled. A function without any loop shows what PyTensor takes for itself.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from benchmarks.cold import run
from benchmarks.loops import LOOPS
from benchmarks.model import OURS, PASSES, THEIRS, load_library
from benchmarks.timing import median, paired_ratio

TRIVIAL = "no loop"
COLD, WARM = "cold", "warm"

# Goals for forward + gradient of a scalar loop, in seconds.
COLD_GOAL = 3.0
WARM_GOAL_OVER_TRIVIAL = 0.3


@dataclass(frozen=True)
class Start:
    """Seconds to the first result of one loop, by subject and cache."""

    loop: str
    gradient: bool
    samples: dict[tuple[str, str], list[float]]

    def cost(self, subject: str, cache: str) -> float:
        """Median seconds."""
        return median(self.samples[subject, cache])

    def over_trivial(self, subject: str) -> float:
        """Median of the paired differences from a function without a loop, warm."""
        pairs = zip(self.samples[subject, WARM], self.samples[TRIVIAL, WARM], strict=True)
        return median([mine - trivial for mine, trivial in pairs])

    def record(self) -> dict[str, Any]:
        """The measurement as the JSON file holds it."""
        ratio = paired_ratio(self.samples[OURS, COLD], self.samples[THEIRS, COLD])
        return {
            "loop": self.loop,
            "pass": PASSES[self.gradient],
            "cold_goal": COLD_GOAL,
            "warm_goal_over_trivial": WARM_GOAL_OVER_TRIVIAL,
            "warm_over_trivial": {name: self.over_trivial(name) for name in (OURS, THEIRS)},
            "cold_ratio": asdict(ratio),
            "seconds": {f"{name}, {cache}": v for (name, cache), v in self.samples.items()},
        }


def time_here(loop_name: str, subject: str, gradient: bool) -> float:
    """Seconds to the first result in this process."""
    if subject == TRIVIAL:
        load_library(OURS)
        start = perf_counter()
        x = pt.dvector("x")
        pytensor.function([x], 2.0 * x + 1.0)(np.ones(3))
        return perf_counter() - start
    loop = LOOPS[loop_name]
    library = load_library(subject)
    data = loop.pass_data(gradient)
    start = perf_counter()
    loop.build(library).compile(gradient)(*data)
    return perf_counter() - start


def time_process(loop_name: str, subject: str, gradient: bool, directory: str) -> float:
    """Seconds to the first result in a new process with the given compile directory."""
    command = [sys.executable, "-m", "benchmarks.starts", loop_name, subject]
    if gradient:
        command.append("--gradient")
    return float(run(command, directory))


def time_starts(
    loop_name: str, gradient: bool, rounds: int, subjects: Sequence[str] = (TRIVIAL, OURS, THEIRS)
) -> Start:
    """Time the subjects in turns, each first cold and then warm."""
    samples: dict[tuple[str, str], list[float]] = {
        (subject, cache): [] for subject in subjects for cache in (COLD, WARM)
    }
    order = list(subjects)
    for _ in range(rounds):
        for subject in order:
            with tempfile.TemporaryDirectory(prefix="start-") as directory:
                for cache in (COLD, WARM):
                    seconds = time_process(loop_name, subject, gradient, directory)
                    samples[subject, cache].append(seconds)
        order = [*order[1:], order[0]]
    return Start(loop_name, gradient, samples)


def main() -> None:
    """Print the seconds of one measurement in this process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starts", description=__doc__)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("subject", choices=[TRIVIAL, OURS, THEIRS])
    parser.add_argument("--gradient", action="store_true")
    options = parser.parse_args()
    print(time_here(options.loop, options.subject, options.gradient))


if __name__ == "__main__":
    main()
