"""``python -m scanlib``: versions, linkers, the cache folder and a self-check, for bug reports."""

import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode, get_mode

import scanlib

PACKAGES = ("pytensor", "numpy", "scipy", "numba", "llvmlite", "jax", "torch", "pymc")
STEPS = 1000
TIME_LIMIT = 10.0  # seconds, after which no further linker is tried


def main() -> int:
    """Print the report; return 1 if a linker gave wrong numbers or an error."""
    print(f"scanlib    {scanlib.__version__} ({Path(scanlib.__file__).parent})")
    print(f"Python     {sys.version.split()[0]} ({platform.platform()}, {platform.machine()})")
    for name in PACKAGES:
        print(f"{name:10} {installed(name) or 'not installed'}")
    print(f"compiler   {pytensor.config.cxx or 'none found: the C linker runs Python code'}")
    print(f"cache      {pytensor.config.compiledir}")
    print(f"flags      {changed_flags() or 'all as they come'}")
    print("self-check: a GARCH(1,1) variance and its gradient against a Python loop")
    started, failed = time.perf_counter(), False
    for name, mode in linkers().items():
        if time.perf_counter() - started > TIME_LIMIT:
            print(f"  {name:8} left out, the others took {TIME_LIMIT:.0f} seconds")
            continue
        try:
            told, right = check(mode)
        except Exception as error:
            told, right = f"{type(error).__name__}: {str(error).splitlines()[0]}", False
        print(f"  {name:8} {'ok' if right else 'FAILED'}: {told}")
        failed |= not right
    return int(failed)


def installed(name: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def changed_flags() -> str:
    """Return scanlib's flags that differ from their defaults."""
    flags = [var for var in pytensor.config._config_var_dict.values() if "scanlib" in var.name]
    changed = {
        var.name: value
        for var in flags
        if (value := getattr(pytensor.config, var.name)) != var.default
    }
    return ", ".join(f"{name}={value}" for name, value in changed.items())


def linkers() -> dict[str, Mode]:
    """Return a mode for each linker that can be used here."""
    found = {"numba": get_mode("NUMBA")} if installed("numba") else {}
    found["C" if pytensor.config.cxx else "Python"] = get_mode("CVM")
    for package, mode in (("jax", "JAX"), ("torch", "PYTORCH")):
        if installed(package):
            found[package] = get_mode(mode)
    return found


def check(mode: Mode) -> tuple[str, bool]:
    """Return how long compiling and one call took, and whether the numbers are right."""
    shocks = np.random.default_rng(0).normal(size=STEPS)
    variance, slope = 1.0, 0.0
    for shock in shocks:  # d variance / d beta, by hand
        variance, slope = 0.1 + 0.2 * shock**2 + 0.7 * variance, variance + 0.7 * slope
    e, beta = pt.tensor("e", dtype="float64", shape=(STEPS,)), pt.dscalar("beta")
    trace = scanlib.scan(
        lambda e, v, beta: 0.1 + 0.2 * e**2 + beta * v,
        sequences=e,
        outputs_info=np.float64(1.0),
        non_sequences=beta,
        return_updates=False,
    )
    start = time.perf_counter()
    f = pytensor.function([e, beta], [trace[-1], pytensor.grad(trace[-1], beta)], mode=mode)
    f(shocks, 0.7)
    compiled = time.perf_counter()
    found = [float(value) for value in f(shocks, 0.7)]
    called = time.perf_counter()
    # JAX computes in single precision unless it is told otherwise.
    right = np.allclose(found, [variance, slope], rtol=1e-4)
    return (
        f"compiled in {compiled - start:.1f} s, a call takes {1e6 * (called - compiled):.0f} µs",
        right,
    )


if __name__ == "__main__":
    sys.exit(main())
