"""Fixtures for compilation modes, and Hypothesis profiles."""

import pytensor
import pytest
from hypothesis import HealthCheck, settings

import scanlib  # noqa: F401 -- defines the configuration flags
from tests.modes import MODES

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
