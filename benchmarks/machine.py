"""What the figures depend on: the machine, the versions, the number of threads."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("pytensor", "numba", "llvmlite", "numpy", "scipy", "jax")


def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed(package: str) -> str:
    """The version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def environment() -> dict[str, str]:
    """All of it, for the table's foot and the JSON file."""
    return {
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "BLAS threads": os.environ.get("OPENBLAS_NUM_THREADS", "not set"),
        "system": platform.platform(),
    }
