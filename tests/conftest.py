"""Fixtures for compilation modes, and Hypothesis profiles."""

from zlib import crc32

import numpy as np
import pytensor
import pytest
from hypothesis import HealthCheck, settings

import scanlib  # noqa: F401 -- defines the configuration flags
from scanlib.kernels import compiled
from scanlib.kernels.printers.llvm import print_kernels
from tests.c_nodes import Switch, leave_c_code_to_scanlib
from tests.kernel_verifier import verify
from tests.modes import MODES
from tests.precompiled import use_precompiled_headers

# The examples of a tier are the same at every run. `pytest --hypothesis-profile=new` draws new ones
# at every run, many more.
COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", derandomize=True, max_examples=20, **COMMON)
settings.register_profile("thorough", derandomize=True, max_examples=100, **COMMON)
settings.register_profile("new", derandomize=False, max_examples=1000, **COMMON)
settings.load_profile("default")

# An error in a rewrite ends no user's compilation, but it ends a test.
pytensor.config.on_opt_error = "raise"


@pytest.fixture(autouse=True)
def own_numbers(request):
    """Start a module's generator anew, so that no test's numbers depend on what ran before it."""
    generator = getattr(request.module, "rng", None)
    if isinstance(generator, np.random.Generator):
        # Not the folder: a test that moves to another room keeps its numbers.
        seed = crc32(f"tests/{request.node.nodeid.rpartition('/')[2]}".encode())
        generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state


@pytest.fixture(autouse=True, scope="session")
def verified_kernels():
    """Verify every kernel that is compiled."""

    def print_verified(*kernels, **options):
        for kernel in kernels:
            verify(kernel)
        return print_kernels(*kernels, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "print_kernels", print_verified)
        yield


@pytest.fixture(autouse=True)
def own_adoption():
    """Leave adoption as it was: a page that switches it on does so for its own examples."""
    with pytensor.config.change_flags(scanlib__adopt=pytensor.config.scanlib__adopt):
        yield


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
    from scanlib.backends.cuda import linear
    from tests.cuda_linear import cut

    monkeypatch.setattr(linear, "choose_linear", cut(5))


@pytest.fixture
def torch_on_device(monkeypatch):
    """CPU tensors count as CUDA tensors."""
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.backends.cuda.test_cuda_torch import tensors_on_device

    with tensors_on_device(monkeypatch):
        yield


@pytest.fixture
def jax_on_device(monkeypatch):
    """XLA's CPU client runs what is meant for CUDA."""
    pytest.importorskip("jax", reason="jax is not installed")
    from tests.backends.cuda.test_cuda_jax import arrays_on_device

    with arrays_on_device(monkeypatch):
        yield


# The tests come in two tiers. The default one, `python -m pytest`, takes one form (set of
# parameters) of each test function: one that does not wait for numba's compiler, where there is
# one. Of functions marked `all_forms` it takes all forms, of those marked `slow` none, but at least
# one test of each module. `--thorough` takes everything. Names and marks alone decide.


def pytest_addoption(parser):
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run all tests, slow ones too, on all linkers, with all parameters and more random "
        "loops (a test that is named, MODULE::TEST, has all its forms without this flag)",
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        default="1/1",
        help="run the Kth of N parts of these tests, drawn by name",
    )


def pytest_configure(config):
    """Before the worker processes start, which find what this process has made."""
    if config.getoption("--thorough") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("thorough")
    use_precompiled_headers()
    leave_c_code_to_scanlib()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    Switch.set_for(item.module.__name__)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keep the tier and the part that are asked for, of what `-k` and `-m` have left."""
    is_named = any("::" in argument for argument in config.args)
    tier = items if config.getoption("--thorough") or is_named else default_tier(items)
    part = config.getoption("--part")
    kept = {item for item in tier if is_in_part(item.nodeid, part)}
    left_out = [item for item in items if item not in kept]
    if left_out:
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)


def default_tier(items):
    """Return the tests that run without ``--thorough``, in any order."""
    forms = {}
    for item in sorted(items, key=lambda item: (is_marked(item, "slow"), waits_for_numba(item))):
        takes_all = is_marked(item, "all_forms")
        forms.setdefault(item.nodeid if takes_all else item.nodeid.split("[")[0], item)
    modules = {}
    for item in forms.values():  # the slow ones are the last
        of_module = modules.setdefault(item.path, [])
        if not (of_module and is_marked(item, "slow")):
            of_module.append(item)
    return [item for of_module in modules.values() for item in of_module]


def is_marked(item, mark):
    return item.get_closest_marker(mark) is not None


def waits_for_numba(item):
    return "numba" in item.name.partition("[")[2].lower()


def is_in_part(name, part):
    """Whether a test is drawn for a part, K/N."""
    position, _, parts = part.partition("/")
    if not (position.isdecimal() and parts.isdecimal() and 1 <= int(position) <= int(parts)):
        raise pytest.UsageError(f"--part: K/N with K from 1 to N, got {part}")
    return crc32(name.encode()) % int(parts) == int(position) - 1
