"""One affine loop over several devices, against JAX's own scans on the same mesh.

``python -m benchmarks.devices`` prints, for T steps of C channels whose time axis is cut over D
devices that a CPU stands for: the rows of time that the arrays of one device have, the collective
operations of the forward pass and of value and gradient, how many numbers the largest of them
moves, and times. ``--tile ROWS`` compares with fixed tiles. ``--scaling`` does so for scanlib's
loop on 1, 2, 4 and 8 devices: each is one thread, so that as many cores show what as many devices
do.

Times are medians of calls that take turns in one process.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from math import prod
from statistics import median
from typing import Any

CALLS = 15
KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def device_program(function: Any, arguments: Any) -> str:
    """Return what XLA runs on each device."""
    import jax

    return jax.jit(function).lower(*arguments).compile().as_text() or ""


def rows(text: str, channels: int) -> int:
    """Return the most rows that an array of rows of all channels has on a device."""
    found = re.findall(rf"f64\[(\d+),{channels}\]", text)
    return max(map(int, found), default=0)


def collectives(text: str) -> tuple[int, int]:
    """Return how many collective operations a program has, and the most numbers that one moves."""
    sizes = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) (?:{KINDS})(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", match[1])
            sizes.append(max(prod(map(int, filter(None, s.split(",")))) for s in shapes))
    return len(sizes), max(sizes, default=0)


def timed(functions: dict[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Return the median seconds of functions that take turns."""
    samples: dict[Any, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(CALLS):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            samples[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in samples.items()}


def variants(steps: int, channels: int, devices: int, tile: int | None, alone: bool) -> Any:
    """Return functions of value and of value and gradient, by name, and their arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import pytensor
    import pytensor.tensor as pt
    from jax import lax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import scanlib

    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((devices,), ("time",), axis_types=(AxisType.Auto,))
    x, a = pt.dmatrix("x"), pt.dvector("a")
    h = scanlib.scan(
        lambda x, h, a: a * h + x, x, pt.zeros(channels), non_sequences=a, return_updates=False
    )
    gradients = pytensor.grad((h**2).sum(), [x, a])
    specs = [P("time"), P()]
    options: dict[str, Any] = {"mesh": mesh}
    ours = {"scanlib.shard": options}
    if tile:
        ours[f"scanlib.shard, tile={tile}"] = options | {"tile": tile}

    def compose(earlier: Any, later: Any) -> Any:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    def tree(x: Any, a: Any) -> Any:
        return lax.associative_scan(compose, (jnp.broadcast_to(a, x.shape), x))[1]

    def walk(x: Any, a: Any) -> Any:
        return lax.scan(lambda h, x: (a * h + x,) * 2, jnp.zeros_like(x[0]), x)[1]

    def with_gradient(function: Any) -> Any:
        def cost(x: Any, a: Any) -> Any:
            h = function(x, a)
            return (h**2).sum(), h

        return jax.value_and_grad(cost, (0, 1), has_aux=True)

    rng = np.random.default_rng(0)
    arguments = [
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip(
            (rng.normal(size=(steps, channels)), rng.uniform(-1, 1, channels)), specs, strict=True
        )
    ]
    found: dict[str, Any] = {
        name: (
            scanlib.shard(([x, a], [h]), specs, **chosen),
            scanlib.shard(([x, a], [h, *gradients]), specs, **chosen),
        )
        for name, chosen in ours.items()
    }
    if not tile and not alone:
        found["lax.associative_scan"] = tree, with_gradient(tree)
        found["lax.scan"] = walk, with_gradient(walk)
    return found, arguments


def report(steps: int, channels: int, devices: int, tile: int | None, alone: bool) -> None:
    """Print a table, as Markdown."""
    import jax

    found, arguments = variants(steps, channels, devices, tile, alone)

    def run(function: Any) -> Any:
        return jax.block_until_ready(function(*arguments))

    runs: dict[Any, Callable[[], Any]] = {}
    for name, pair in found.items():
        for k, function in enumerate(pair):
            compiled = jax.jit(function)
            runs[name, k] = partial(run, compiled)
    times = timed(runs)
    print(f"T = {steps}, C = {channels}, D = {devices}\n")
    heads = ["rows a device", *("collectives", "largest, numbers", "ms") * 2]
    print("| |", " | ".join(heads), "|")
    print("|---|---|---|---|---|---|---|---|")
    for name, pair in found.items():
        texts = [device_program(function, arguments) for function in pair]
        cells = [name, f"{max(rows(text, channels) for text in texts):,}"]
        for k, text in enumerate(texts):
            count, largest = collectives(text)
            cells += [str(count), f"{largest:,}", f"{1e3 * times[name, k]:.2f}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="One affine loop over several devices.")
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tile", type=int, help="compare with tiles of so many rows")
    parser.add_argument("--scaling", action="store_true", help="1 to 8 devices, one thread each")
    parser.add_argument("--alone", action="store_true", help="without JAX's own scans")
    given = parser.parse_args()
    if given.scaling:
        for devices in (1, 2, 4, 8):
            command = [sys.executable, "-m", "benchmarks.devices", "--alone"]
            command += [f"--devices={devices}"]
            command += [f"--steps={given.steps}", f"--channels={given.channels}"]
            subprocess.run(command, check=True)
        return
    import jax

    jax.config.update("jax_num_cpu_devices", given.devices)
    report(given.steps, given.channels, given.devices, given.tile, given.alone)


if __name__ == "__main__":
    main()
