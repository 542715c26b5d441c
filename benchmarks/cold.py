"""Processes that start cold: nothing is compiled yet, but Python's own bytecode.

Whoever installs a package has the bytecode of its modules from the first import on. Where a
machine keeps none (``PYTHONDONTWRITEBYTECODE``), every process would compile the text of a thousand
modules anew, more than a second of each start; so the bytecode goes into a folder of its own, and
is written before anything is timed.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from time import process_time

ROOT = Path(__file__).parent.parent
_FIRST = """
import numba, numpy, pytensor, pytensor.tensor, pytensor.link.numba.dispatch
import scanlib, scanlib.backends.numba, benchmarks.adoption, benchmarks.compile
pytensor.function([], pytensor.tensor.ones(3).sum(), mode="NUMBA")()
"""


@cache
def _bytecode() -> str:
    """Return a folder that holds the bytecode of what a start imports."""
    folder = tempfile.TemporaryDirectory(prefix="bytecode-")
    _folders.append(folder)
    with tempfile.TemporaryDirectory(prefix="start-") as directory:
        subprocess.run(
            [sys.executable, "-c", _FIRST],
            env=_environment(directory, folder.name),
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    return folder.name


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it has started and awaited."""
    times = os.times()
    return process_time() + times.children_user + times.children_system


_folders: list[tempfile.TemporaryDirectory[str]] = []  # they go when the process ends


def _environment(directory: str, bytecode: str) -> dict[str, str]:
    flags = [os.environ.get("PYTENSOR_FLAGS", ""), f"base_compiledir={directory}"]
    environment = {
        **os.environ,
        "PYTENSOR_FLAGS": ",".join(filter(None, flags)),
        "NUMBA_CACHE_DIR": f"{directory}/numba-cache",
        "PYTHONPYCACHEPREFIX": bytecode,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def run(command: Sequence[str], directory: str) -> str:
    """Run a command whose compiled code is kept in a directory; return the last line it prints.

    Raises
    ------
    RuntimeError
        If it fails, with the last line of its errors.
    """
    done = subprocess.run(
        command,
        env=_environment(directory, _bytecode()),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{' '.join(command[1:])}: {last_line}")
    return done.stdout.splitlines()[-1]
