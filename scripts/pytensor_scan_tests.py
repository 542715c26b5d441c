"""PyTensor's own tests of loops, with scanlib's loops in place of `pytensor.scan`.

    python scripts/pytensor_scan_tests.py CHECKOUT [--left-out] [options of pytest]

`CHECKOUT` is a checkout of PyTensor's sources at the release that is installed: its tests run
against the installed package. Tests that look inside PyTensor's loops are left out, as the
table `LEFT_OUT` says; `--left-out` runs those alone.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("test_basic", "test_checkpoints", "test_views")

# By part of a test's name: why it says nothing about scanlib.
LEFT_OUT: dict[str, str] = {}


class InPlace:
    """Puts scanlib's functions where PyTensor has its own, before tests import them."""

    def __init__(self, left_out: bool) -> None:
        self.left_out = left_out

    def pytest_configure(self) -> None:
        import pytensor
        import pytensor.scan

        import scanlib

        names = ["scan", "map", "reduce", "foldl", "foldr", "filter", "scan_checkpoints", "until"]
        modules = [pytensor, pytensor.scan]
        modules += [
            importlib.import_module(f"pytensor.scan.{name}")
            for name in ("basic", "checkpoints", "utils", "views")
        ]
        for name in names:
            for module in modules:
                if callable(getattr(module, name, None)):
                    setattr(module, name, getattr(scanlib, name))

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        kept = [item for item in items if self.is_left_out(item) == self.left_out]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @staticmethod
    def is_left_out(item: Any) -> bool:
        return any(name in item.nodeid for name in LEFT_OUT)


def main(arguments: list[str]) -> int:
    """Run the tests of a checkout; the exit status of pytest."""
    checkout, *options = arguments
    left_out = "--left-out" in options
    options = [option for option in options if option != "--left-out"]
    with tempfile.TemporaryDirectory() as folder:
        # The checkout's tests without its package, which is not the installed one.
        os.symlink(Path(checkout).resolve() / "tests", Path(folder) / "tests")
        os.chdir(folder)
        sys.path[:0] = [folder, str(ROOT)]
        modules = [f"tests/scan/{name}.py" for name in MODULES]
        return int(pytest.main(["-p", "no:cacheprovider", *modules, *options], [InPlace(left_out)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
