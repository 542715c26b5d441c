"""PyMC's and pymc-extras' own tests, without adoption and with it: the same ones must pass.

    python scripts/adoption_tests.py [--whole [CHECKOUT]]
    python scripts/adoption_tests.py CHECKOUT TESTS...

A few tests run by default, those of `WHOLE` with ``--whole``, and `TESTS` if they are given: files
or folders, or names of tests as pytest takes them. pip downloads the sources of the installed
releases for their tests. PyMC's have few of them: `CHECKOUT` is a copy of its repository, at about
the installed release, or of PyTensor's, whose tests of loops are compared like this. What is tested
are the installed packages.

Each selection runs twice, in two processes at the same time. What passes without adoption must
pass with it, but for the tests in `DIFFERENT`, which must end as it says. Tests that fail both
ways, as those of another release than the installed one may, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIMULATED = "tests/statespace/filters/test_distributions.py"

# By the name of the package on PyPI: what runs in a few minutes, and what `--whole` runs.
FEW = {
    "pymc": ["tests/test_pytensorf.py::TestCompile::test_scan_updates"],
    "pymc-extras": [
        f"{SIMULATED}::test_loglike_vectors_agree[cholesky]",
        f"{SIMULATED}::test_forward_simulation_reads_one_matrix_row_per_timestep",
        "tests/statespace/core/test_statespace.py::test_rebuild_updates_data",
    ],
}
WHOLE = {
    "pymc": [
        "tests/test_pytensorf.py",
        "tests/logprob/test_scan.py",
        "tests/distributions/test_custom.py",
        "tests/distributions/test_simulator.py",
        "tests/distributions/test_timeseries.py",
        "tests/distributions/test_truncated.py",
    ],
    "pymc-extras": ["tests/statespace/filters", "tests/statespace/core"],
}

LOOKS_INSIDE = "it looks for PyTensor's Scan in the compiled function"

# By part of a test's name: what it says with adoption, and why that is no fault of adoption's.
DIFFERENT = {
    "test_lgss_with_time_varying_inputs": (
        "SequenceLengthError",
        "ten steps read a sequence of one row; in numba mode PyTensor reads what lies behind it",
    ),
    "test_truncated_multiple_rngs": ("not enough values to unpack", LOOKS_INSIDE),
    # PyTensor's own.
    "test_hash_equality_after_inner_optimization": ("not enough values to unpack", LOOKS_INSIDE),
    "test_infer_shape_remove_stuff": ("assert 0 == 1", LOOKS_INSIDE),
    "test_inner_storage_leak": ("assert 0 == 1", LOOKS_INSIDE),
    "_memory_consumption": ("assert None is not None", LOOKS_INSIDE),
    "test_monitor_mode": ("assert 0 == 3", "it counts what the function of PyTensor's step calls"),
}
OPTIONS = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]


class Recorder:
    """Notes how each test ended: as nothing, if it passed, or with the last line of its error."""

    def __init__(self) -> None:
        self.ended: dict[str, str | None] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.ended[report.nodeid] = crash.message if crash else str(report.longrepr)
        elif report.when == "call" and report.passed:
            self.ended.setdefault(report.nodeid, None)


def run_here(adopts: bool, tests: list[str], result: Path) -> int:
    """Run tests in this process and write down how they ended."""
    import pytensor

    import scanlib

    assert Path(scanlib.__file__).is_relative_to(ROOT), scanlib.__file__
    pytensor.config.on_opt_error = "raise"
    pytensor.config.scanlib__adopt = adopts
    sys.path[0] = ""  # the folder of the tests, not that of this script
    recorder = Recorder()
    # Their own options may ask for plugins that are not here, and make errors of warnings.
    own = ["-o", "addopts=", "-o", "filterwarnings="]
    status = int(pytest.main([*OPTIONS, *own, *tests], [recorder]))
    result.write_text(json.dumps(recorder.ended))
    return status if status not in (0, 1) else 0


def run_both(folder: Path, tests: list[str]) -> list[dict[str, str | None]]:
    """Run tests without adoption and with it; return how they ended."""
    with tempfile.TemporaryDirectory() as name:
        results = [Path(name) / way for way in ("off", "on")]
        logs = [result.with_suffix(".log").open("w+") for result in results]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--run", result.name, "--to", result, folder, *tests],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for result, log in zip(results, logs, strict=True)
        ]
        statuses = [process.wait() for process in running]
        for result, log, status in zip(results, logs, statuses, strict=True):
            log.seek(0)
            print(f"== adoption {result.name}\n{log.read()}", flush=True)
            log.close()
            if status:
                sys.exit(f"the tests did not run with adoption {result.name} (status {status})")
        return [json.loads(result.read_text()) for result in results]


def compare(off: dict[str, str | None], on: dict[str, str | None]) -> list[str]:
    """Return a line for each test that passes without adoption, and does not end as it should."""
    wrong = []
    for test in [test for test, error in off.items() if error is None]:
        error = on.get(test, "it did not run")
        known = [entry for name, entry in DIFFERENT.items() if name in test]
        if known and known[0][0] not in (error or ""):
            wrong.append(f"{test}: expected {known[0][0]}, as {known[0][1]}; got {error}")
        elif error is not None and not known:
            wrong.append(f"{test}: {error}")
    return wrong


def fetch(package: str, folder: Path) -> Path:
    """Download the sources of the installed release into a folder and return where they are."""
    pinned = f"{package}=={version(package)}"
    options = ["--quiet", "--no-deps", "--no-binary", package, "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, pinned], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(folder, filter="data")
    (sources,) = (path for path in folder.iterdir() if path.is_dir())
    return sources


def only_tests(sources: Path, folder: Path) -> Path:
    """Copy the tests away from the package beside them, which they would import instead."""
    copy = folder / "only_tests"
    shutil.copytree(sources / "tests", copy / "tests")
    (copy / "pytest.ini").touch()  # so that pytest finds its root here
    return copy


def run_package(
    package: str, tests: list[str], checkout: Path | None
) -> list[dict[str, str | None]]:
    """Run tests of a package, as far as its sources have them, without adoption and with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = only_tests(checkout or fetch(package, Path(name)), Path(name))
        absent = [test for test in tests if not (folder / test.split("::")[0]).exists()]
        if absent:
            print(f"the sources of {package} have no", *absent)
        if absent and checkout is not None:
            sys.exit("nothing was run")
        endings = run_both(folder, [test for test in tests if test not in absent])
    off, on = (sum(error is None for error in ending.values()) for ending in endings)
    print(f"{package}: {off} tests pass without adoption, {on} with it", flush=True)
    return endings


def main() -> int:
    """Run the tests that the arguments name; 0 if adoption makes no difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="the tests of WHOLE")
    parser.add_argument("--run", choices=["off", "on"], help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("checkout", nargs="?", type=Path, help="of PyMC, or of what TESTS are of")
    parser.add_argument("tests", nargs="*")
    chosen = parser.parse_args()
    if chosen.run:
        return run_here(chosen.run == "on", chosen.tests, chosen.to)
    endings = []
    if chosen.tests:
        endings.append(run_package("the checkout", chosen.tests, chosen.checkout))
    else:
        for package, tests in (WHOLE if chosen.whole else FEW).items():
            checkout = chosen.checkout if package == "pymc" else None
            endings.append(run_package(package, tests, checkout))
    wrong = [line for off, on in endings for line in compare(off, on)]
    passed = sum(error is None for off, _ in endings for error in off.values())
    for line in wrong:
        print(line)
    print(f"of {passed} that pass without adoption, {len(wrong)} do not end as they should")
    return bool(wrong) or not passed


if __name__ == "__main__":
    sys.exit(main())
