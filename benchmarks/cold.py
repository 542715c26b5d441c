"""Time from the loop's graph to its first result, with nothing compiled before.

Each measurement is a process of its own with an empty compile directory. The clock starts when the
library and PyTensor are imported, and stops when the compiled function has returned once. What it
measures is the time to build the graph, differentiate it, rewrite it, compile it and run it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.loops import LOOPS, OURS, THEIRS, load_library


def time_here(loop_name: str, library_name: str, gradient: bool) -> float:
    """Seconds to the first result in this process."""
    loop = LOOPS[loop_name]
    library = load_library(library_name)
    data = loop.data()
    start = perf_counter()
    loop.build(library).compile(gradient)(*data)
    return perf_counter() - start


def time_cold(loop_name: str, library_name: str, gradient: bool) -> float:
    """Seconds to the first result in a fresh process with empty caches."""
    command = [sys.executable, "-m", "benchmarks.cold", loop_name, library_name]
    if gradient:
        command.append("--gradient")
    with tempfile.TemporaryDirectory(prefix="cold-") as empty:
        flags = [os.environ.get("PYTENSOR_FLAGS", ""), f"base_compiledir={empty}"]
        environment = {
            **os.environ,
            "PYTENSOR_FLAGS": ",".join(flag for flag in flags if flag),
            "NUMBA_CACHE_DIR": f"{empty}/numba-cache",
        }
        done = subprocess.run(
            command,
            env=environment,
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{' '.join(command[1:])}: {last_line}")
    return float(done.stdout.splitlines()[-1])


def take_cold_turns(loop_name: str, gradient: bool, rounds: int) -> dict[str, list[float]]:
    """Time both libraries in turns; see :func:`benchmarks.timing.take_turns`."""
    samples: dict[str, list[float]] = {OURS: [], THEIRS: []}
    order = [THEIRS, OURS]
    for _ in range(rounds):
        for name in order:
            samples[name].append(time_cold(loop_name, name, gradient))
        order.reverse()
    return samples


def main() -> None:
    """Print the seconds of one measurement in this process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold", description=__doc__)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("library", choices=[OURS, THEIRS])
    parser.add_argument("--gradient", action="store_true")
    options = parser.parse_args()
    print(time_here(options.loop, options.library, options.gradient))


if __name__ == "__main__":
    main()
