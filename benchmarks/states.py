"""How compile time grows with the number of states of a loop: ``python -m benchmarks.states``.

    h_i = tanh(a h_i + x)

Seconds of processor time for `pytensor.function` and its first call, from an empty cache, each
measurement in a process of its own. ``gradient`` is that of the sum of all squares.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib

SIZES = (50, 200, 500)
KINDS = ("values", "gradient")


def seconds(count: int, kind: str) -> float:
    """Return the seconds that one loop takes to compile in this process."""
    xs, a = pt.dvector("xs"), pt.dscalar("a")
    traces = scanlib.scan(
        lambda x, *hs: [pt.tanh(a * h + x) for h in hs],
        sequences=[xs],
        outputs_info=[np.float64(0.01 * k) for k in range(count)],
        return_updates=False,
    )
    results = list(traces)
    if kind == "gradient":
        cost = pt.add(*[(trace**2).sum() for trace in traces])
        results = [cost, pytensor.grad(cost, a)]
    start = time.process_time()
    function = pytensor.function([xs, a], results, mode="NUMBA")
    function(np.linspace(0, 1, 50), 0.5)
    return time.process_time() - start


def measured(count: int, kind: str) -> float:
    """Return the seconds that one loop takes to compile in a process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('PYTENSOR_FLAGS', '')},base_compiledir={folder}".lstrip(",")
        command = [sys.executable, "-m", "benchmarks.states", kind, str(count)]
        environment = {**os.environ, "PYTENSOR_FLAGS": flags}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    parser.add_argument("count", nargs="?", type=int)
    given = parser.parse_args()
    if given.count is not None:
        print(seconds(given.count, given.kind))
        return
    print("states  " + "  ".join(KINDS))
    for count in SIZES:
        print(f"{count:6}  " + "  ".join(f"{measured(count, k):{len(k)}.1f}" for k in KINDS))


if __name__ == "__main__":
    main()
