"""PyTensor's own tests of loops, with scanlib's functions in place of PyTensor's.

    python scripts/pytensor_scan_tests.py CHECKOUT [--left-out] [options of pytest]

`CHECKOUT` is a checkout of PyTensor's sources at the release that is installed: its tests run with
the installed package. Left out is what looks inside PyTensor's loops, and what scanlib does
differently on purpose; `LEFT_OUT` says why. With `--left-out` these run, and no others.

Compiling takes most of the time. ``PYTENSOR_FLAGS=linker=vm,cxx=`` has everything but scanlib's
kernels run in Python.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytensor
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import scanlib  # noqa: E402

MODULES = ("test_basic", "test_checkpoints", "test_views")
NAMES = ("scan", "map", "reduce", "foldl", "foldr", "filter", "scan_checkpoints", "until")
FLAGS = ("strict", "return_updates")
HOMES = ("scan", "scan.basic", "scan.checkpoints", "scan.utils", "scan.views")

# Reasons, and the test functions, or cases of them, that they hold for.
LEFT_OUT = {
    "looks inside PyTensor's Scan: its class, its maps of inputs, the function of its step": (
        "test_clone",
        "test_connection_pattern",
        "test_connection_pattern_multiple_mitmot",
        "test_grad_duplicate_outputs_connection_pattern",
        "test_grad_multiple_outs_some_uncomputable",
        "test_infer_shape_remove_stuff",
        "test_inner_get_vector_length",
        "test_inner_storage_leak",
        "test_monitor_mode",
        "test_no_steps_nit_sot",
        "test_no_steps_sit_sot",
        "test_oinp_iinp_iout_oout_mappings",
        "test_profile_info",
        "test_ScanInfo_totals",
        "test_sequence_dict",
        "test_foldl_memory_consumption",
        "test_foldr_memory_consumption",
        "test_reduce_memory_consumption",
    ),
    "a generator that is passed and does not move on is an error": (
        "test_non_shaped_input_disconnected_gradient[inside-explicit]",
    ),
    "a loop of one step stays a loop until it is compiled": ("test_single_step_untraced_sit_sot",),
    "an initial value that no step reads has a gradient, zero, and is not disconnected": (
        "test_grad_connectivity_matrix",
    ),
    "an initial value of one column is broadcast to what the step returns": (
        "test_inconsistent_broadcast_error",
    ),
    "updates, too, may read variables that are no arguments": ("test_missing_input_error",),
    "updates are returned for good, so nothing warns of a change": (
        "test_return_updates_api_change",
    ),
    "loops with checkpoints may have taps": ("test_taps_error",),
}


def with_truth_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes everything for a flag, as PyTensor's do.

    Two of the tests give a tuple and a method, by accident; scanlib says so.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        given = {name: bool(options[name]) for name in FLAGS if name in options}
        return function(*arguments, **options | given)

    return call


class InPlace:
    """Puts scanlib's functions where PyTensor has its own, before tests import them."""

    def __init__(self, left_out: bool) -> None:
        self.left_out = left_out

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "slow: takes long")
        homes = [pytensor, *(importlib.import_module(f"pytensor.{name}") for name in HOMES)]
        for home in homes:
            for name in NAMES:
                if callable(getattr(home, name, None)):
                    setattr(home, name, with_truth_values(getattr(scanlib, name)))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        names = {name for group in LEFT_OUT.values() for name in group}
        others = [
            item for item in items if bool(names & {item.name, item.originalname}) != self.left_out
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def main(arguments: list[str]) -> int:
    """Run the tests of a checkout; return the exit status of pytest."""
    if not arguments:
        print(__doc__)
        return 2
    tests = Path(arguments[0]).resolve() / "tests"
    options = [option for option in arguments[1:] if option != "--left-out"]
    with tempfile.TemporaryDirectory() as folder:
        # The tests of the checkout without its package, which is not the installed one.
        (Path(folder) / "tests").symlink_to(tests)
        os.chdir(folder)
        sys.path.insert(0, folder)
        modules = [f"tests/scan/{name}.py" for name in MODULES]
        plugin = InPlace("--left-out" in arguments)
        return int(pytest.main(["-p", "no:cacheprovider", *modules, *options], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
