"""The chart of the README: a GARCH(1, 1) likelihood with its gradient, three ways.

``python -m benchmarks.first_screen`` measures `pytensor.scan` (numba mode), JAX (`lax.scan` under
`jit`) and scanlib on one core, prints the numbers and draws ``docs/figures/garch-chart.svg``. Times
are of the processor, not of the wall, so that other work on the machine matters less: compiling is
from the graph to the first value, in a process of its own with an empty cache of compiled code, C++
compilers included, but for scanlib's handler (half a second, once on a machine), which is there
before; a call is the median of samples that take turns in one process. It needs JAX and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from benchmarks.cold import processor_seconds, run

STEPS, ROUNDS, SAMPLE = 10_000, 15, 0.05
PARAMETERS = np.array([0.1, 0.1, 0.85])
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "garch-chart.svg"
NAMES = ("pytensor.scan", "JAX", "scanlib")
COLORS = {"pytensor.scan": "#8a94a6", "JAX": "#c98a2b", "scanlib": "#2f7ad1"}
INK = "#808890"  # readable on white and on black


def with_pytensor(scan: Callable[..., Any], data: np.ndarray) -> Callable[[], Any]:
    """Return a compiled likelihood with gradient of a GARCH model, ready to be called."""
    returns, weights = pt.dvector("returns"), pt.dvector("weights")
    variance = scan(
        lambda r, v, w: w[0] + w[1] * r**2 + w[2] * v,
        sequences=returns,
        outputs_info=pt.ones(()),
        non_sequences=weights,
        return_updates=False,
    )
    cost = (pt.log(variance) + returns**2 / variance).sum()
    f = pytensor.function([returns, weights], [cost, pytensor.grad(cost, weights)])
    return lambda: f(data, PARAMETERS)


def with_jax(data: np.ndarray) -> Callable[[], Any]:
    """Return the same in JAX."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def cost(weights: Any, returns: Any) -> Any:
        def step(v: Any, r: Any) -> Any:
            v = weights[0] + weights[1] * r**2 + weights[2] * v
            return v, v

        variance = jax.lax.scan(step, 1.0, returns)[1]
        return jnp.sum(jnp.log(variance) + returns**2 / variance)

    f = jax.jit(jax.value_and_grad(cost))
    given = jnp.asarray(PARAMETERS), jnp.asarray(data)
    return lambda: jax.block_until_ready(f(*given))


def ready(name: str) -> Callable[[], Any]:
    """Return what is timed, by name."""
    data = np.random.default_rng(0).normal(size=STEPS)
    if name == "JAX":
        return with_jax(data)
    return with_pytensor(pytensor.scan if name == "pytensor.scan" else scanlib.scan, data)


def start(name: str) -> float:
    """Return the seconds from the graph to the first value, something trivial compiled before."""
    if name == "JAX":
        import jax

        jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    else:
        pytensor.function([x := pt.dvector()], x.sum(), mode="NUMBA")(np.ones(3))
    if name == "scanlib":
        import_module("scanlib.backends.handler.thunks").library()
    begun = processor_seconds()
    ready(name)()
    return processor_seconds() - begun


def sample(call: Callable[[], Any], number: int) -> float:
    """Return the mean seconds of so many calls."""
    begun = process_time()
    for _ in range(number):
        call()
    return (process_time() - begun) / number


def measure(starts: int) -> dict[str, dict[str, float]]:
    """Return the seconds of a call and of compiling, by name."""
    calls = {name: ready(name) for name in NAMES}
    values = [[np.asarray(value) for value in call()] for call in calls.values()]
    for other in values[1:]:
        for own, wanted in zip(other, values[0], strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-8)
    numbers = {name: max(1, int(SAMPLE / sample(call, 2))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(sample(call, numbers[name]))
    cold: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(starts):
        for name in NAMES:
            with tempfile.TemporaryDirectory(prefix="start-") as directory:
                command = [sys.executable, "-m", "benchmarks.first_screen", "--start", name]
                cold[name].append(float(run(command, directory)))
    return {
        name: {"call": statistics.median(samples[name]), "compile": statistics.median(cold[name])}
        for name in NAMES
    }


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
    """Draw two panels of bars, on a transparent ground."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    style: Any = {
        "font.size": 11,
        "text.color": INK,
        "axes.labelcolor": INK,
        "svg.hashsalt": "scanlib",
    }
    with mpl.rc_context({**style, "xtick.color": INK, "ytick.color": INK}):
        figure, axes = plt.subplots(1, 2, figsize=(9, 2.1), sharey=True, layout="constrained")
        for axis, what, title, unit, scale in (
            (axes[0], "call", "one likelihood with gradient", "ms", 1e3),
            (axes[1], "compile", "compiling, from an empty cache", "s", 1.0),
        ):
            widths = [scale * found[name][what] for name in reversed(NAMES)]
            axis.barh(NAMES[::-1], widths, color=[COLORS[name] for name in reversed(NAMES)])
            axis.set_title(title, color=INK, fontsize=11, loc="left")
            axis.set_xlim(0, 1.2 * max(widths))
            axis.set_xticks([])
            axis.tick_params(left=False)
            for edge in axis.spines.values():
                edge.set_visible(False)
            for place, width in enumerate(widths):
                axis.text(width, place, f"  {width:.3g} {unit}", va="center")
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def main() -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_screen", description=__doc__)
    parser.add_argument("--starts", type=int, default=3, help="cold starts of each")
    parser.add_argument("--start", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(start(options.start))
        return 0
    found = measure(options.starts)
    print(json.dumps(found, indent=2))
    draw(found, FIGURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
