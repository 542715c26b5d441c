"""Fixtures for compilation modes, and Hypothesis profiles."""

from pathlib import Path
from zlib import crc32

import numpy as np
import pytensor
import pytest
from hypothesis import HealthCheck, settings

import scanlib  # noqa: F401 -- defines the configuration flags
from tests.c_nodes import Switch, leave_c_code_to_scanlib
from tests.modes import MODES
from tests.precompiled import use_precompiled_headers

# The examples of the default profile are the same at every run. The thorough profile draws new
# ones at every run, ten times as many: `pytest --hypothesis-profile=thorough`.
COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, max_examples=100, **COMMON)
settings.register_profile("thorough", derandomize=False, max_examples=1000, **COMMON)
settings.load_profile("ci")

# An error in a rewrite ends no user's compilation, but it ends a test.
pytensor.config.on_opt_error = "raise"


@pytest.fixture(autouse=True)
def own_numbers(request):
    """Start a module's generator anew, so that no test's numbers depend on what ran before it."""
    generator = getattr(request.module, "rng", None)
    if isinstance(generator, np.random.Generator):
        seed = crc32(request.node.nodeid.encode())
        generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state


@pytest.fixture(params=list(MODES))
def mode(request):
    """Every linker that all loops must run on; ``py`` without any compiled loop."""
    perform = "python" if request.param == "py" else "auto"
    with pytensor.config.change_flags(scanlib__perform=perform):
        yield MODES[request.param]


@pytest.fixture
def fast_mode():
    """One linker, for what is known before a linker sees it."""
    return MODES["c"]


@pytest.fixture
def python_kernels():
    """Loops and recurrences run in Python: nothing to compile, which is tested elsewhere."""
    with pytensor.config.change_flags(scanlib__perform="python"):
        yield


# What stands in for CUDA devices: see `tests.cuda_device`.


@pytest.fixture
def cuda_on_host(monkeypatch):
    """Kernels are compiled for this machine's processor."""
    from scanlib.backends.cuda import launch
    from tests.cuda_device import compile_for_host

    monkeypatch.setattr(launch, "compile_kernels", compile_for_host())


@pytest.fixture
def cuda_in_chunks(cuda_on_host, monkeypatch):
    """The same, and matrix recurrences are cut into five chunks."""
    from scanlib.backends.cuda import linear_launch
    from tests.cuda_linear import cut

    monkeypatch.setattr(linear_launch, "choose_linear", cut(5))


@pytest.fixture
def torch_on_device(monkeypatch):
    """CPU tensors count as CUDA tensors."""
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.test_cuda_torch import tensors_on_device

    with tensors_on_device(monkeypatch):
        yield


@pytest.fixture(params=["compiled", "python"])
def jax_on_device(request, monkeypatch):
    """XLA's CPU client runs what is meant for CUDA, by one of the two handlers."""
    pytest.importorskip("jax", reason="jax is not installed")
    from tests.test_cuda_jax import arrays_on_device

    with arrays_on_device(monkeypatch, request.param):
        yield


# Tests that run on every linker, in every mode: outside numba mode a loop is the same compiled
# function, without the function around it, and compiling that takes most of their time. Of those of
# the `mode` fixture, and of these modules, a share runs in numba mode.
SAMPLED = {
    "test_associative_op",
    "test_elemwise_scan",
    "test_extreme_values",
    "test_families",
    "test_linear_scan",
    "test_logaddexp",
    "test_more_families",
}
SHARE = 4
# Functions of which one test took longer than three seconds when all were timed, by
# `pytest --durations=0 --durations-min=3`. They are marked as slow.
SLOW = frozenset(Path(__file__).with_name("slow_tests.txt").read_text().split())


def pytest_configure(config):
    """Before the worker processes start, which find what this process has made."""
    use_precompiled_headers()
    leave_c_code_to_scanlib()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    Switch.set_for(item.module.__name__)


def pytest_addoption(parser):
    parser.addoption(
        "--all-modes",
        action="store_true",
        help=f"run all tests in numba mode; by default one in {SHARE} of the modules that are long",
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        help="run the Kth of N parts of the tests, drawn by name, and all of PyMC's",
    )
    parser.addoption(
        "--slow-part",
        metavar="K/N",
        help="run all tests but those that are marked as slow, and the Kth of N parts of these",
    )


def pytest_collection_modifyitems(config, items):
    """Mark slow tests; leave out most in numba mode, and other parts than the one asked for."""
    for item in items:
        if item.nodeid.split("[")[0] in SLOW:
            item.add_marker("slow")
    part, slow_part = part_of(config, "--part"), part_of(config, "--slow-part")

    def is_left_out(item):
        if not config.getoption("--all-modes") and is_repetition(item):
            return True
        is_slow = item.get_closest_marker("slow") is not None
        return (is_slow and not is_in(slow_part, item)) or (
            not is_in(part, item) and module_of(item) != "test_pymc"
        )

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        kept = set(items).difference(left_out)
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)


def part_of(config, option):
    """Return which part of the tests an option asks for, and of how many: one of one by default."""
    text = config.getoption(option) or "1/1"
    position, parts = map(int, text.split("/"))
    if not 1 <= position <= parts:
        raise pytest.UsageError(f"{option}: K/N with K from 1 to N, got {text}")
    return position, parts


def is_in(part, item):
    """Whether a test is drawn for a part."""
    position, parts = part
    # Not the remainder: the sampling of repetitions has used it.
    return crc32(item.nodeid.encode()) // SHARE % parts == position - 1


def module_of(item):
    return item.nodeid.split("::")[0].rsplit("/")[-1].removesuffix(".py")


def is_repetition(item):
    """Whether a test in numba mode is one of the many that run on other linkers as well."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    in_numba = {name for name, value in parameters.items() if str(value) == "numba"}
    if not in_numba or (in_numba != {"mode"} and module_of(item) not in SAMPLED):
        return False
    return crc32(item.nodeid.encode()) % SHARE != 0
