"""Time two versions of scanlib against each other, loop by loop.

``python -m benchmarks.versions DIRECTORY`` takes the package in ``DIRECTORY/scanlib``, such as an
earlier commit has it (``git archive COMMIT scanlib | tar x -C DIRECTORY``). Each version runs in a
process of its own; the two take turns, a batch of calls each, so that whatever else the machine
does slows both down. A ratio above one means that the version of this checkout is slower. Loops are
those of `benchmarks.loops`, with ``--user-loops`` those of `benchmarks.users`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent.parent
BATCH_SECONDS = 0.02


class Version:
    """A process that has one version of scanlib and times the loops it is told."""

    def __init__(self, directory: Path, linker: str) -> None:
        flags = os.environ.get("PYTENSOR_FLAGS", "")
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join([str(directory), str(HERE)]),
            PYTENSOR_FLAGS=",".join(filter(None, [flags, linker and f"linker={linker}"])),
        )
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--serve"]
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else {"error": "the process has ended"}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def serve() -> None:
    """Answer requests: compile a pass over a loop, or time a batch of calls of the last one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    call: Any = None
    number = 1
    for line in sys.stdin:
        kind, *rest = json.loads(line)
        try:
            if kind == "prepare":
                call, first = prepare(*rest)
                number = max(1, int(BATCH_SECONDS / max(first, 1e-7)))
                answer: Any = first
            else:
                start = time.perf_counter()
                for _ in range(number):
                    call()
                answer = (time.perf_counter() - start) / number
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps(answer), file=answers, flush=True)


def prepare(name: str, gradient: bool) -> tuple[Any, float]:
    """Compile a pass over a loop; return a call of it, and the seconds that a call takes."""
    from benchmarks.loops import LOOPS
    from benchmarks.model import OURS, load_library
    from benchmarks.users import LOOPS as USER_LOOPS

    if name in LOOPS:
        function = LOOPS[name].build(load_library(OURS)).compile(gradient)
        data = LOOPS[name].pass_data(gradient)
    else:
        loop = USER_LOOPS[name].make()
        function, data = loop.compile(load_library(OURS), gradient), loop.data()
    function(*data)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        function(*data)
        seconds.append(time.perf_counter() - start)
    return lambda: function(*data), min(seconds)


def compare(old: Version, new: Version, name: str, gradient: bool, rounds: int) -> str:
    """Return a row of the table."""
    pair = (old, new)
    for version in pair:
        answer = version.ask("prepare", name, gradient)
        if isinstance(answer, dict):
            return f"{'old' if version is old else 'new'}: {answer['error']}"
    times: tuple[list[float], list[float]] = [], []
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(pair[which].ask("time"))
    before, after = map(min, times)
    ratio = median(new / old for old, new in zip(*times, strict=True))
    return f"{before * 1e6:11.1f} {after * 1e6:11.1f} {ratio:7.2f} {after / before:9.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("old", type=Path, nargs="?", help="directory with the other version")
    parser.add_argument("--loops", nargs="+", help="which loops (default: all)")
    parser.add_argument("--user-loops", action="store_true", help="loops that users might write")
    parser.add_argument("--linker", default="", help="PyTensor's linker (default: PyTensor's)")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each version")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return
    if options.old is None or not (options.old / "scanlib").is_dir():
        parser.error("the directory with the other version must hold a folder scanlib")
    from benchmarks.loops import LOOPS
    from benchmarks.users import LOOPS as USER_LOOPS

    print("Microseconds a call: the fastest batch of each version; median of the paired ratios.\n")
    print(f"{'loop':<34} {'old':>11} {'new':>11} {'median':>7} {'fastest':>9}", flush=True)
    for name in options.loops or (USER_LOOPS if options.user_loops else LOOPS):
        old = Version(options.old.resolve(), options.linker)
        new = Version(HERE, options.linker)
        for gradient in (False, True):
            row = compare(old, new, name, gradient, options.rounds)
            title = f"{name} {'gradient' if gradient else 'forward'}"
            print(f"{title:<34} {row}", flush=True)
        old.close()
        new.close()


if __name__ == "__main__":
    main()
