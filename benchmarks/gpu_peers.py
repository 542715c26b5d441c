"""Times of scanlib's loops on a GPU, through PyTorch and JAX, beside those of other packages.

The loop is the diagonal linear scan ``h = a h + b`` in float32, and the discounted sum. Packages
are used where they import and see the device.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib

Row = tuple[str, str, float]  # case, who, seconds
CASES = [(65_536, 12_288), (1_000_000, 64), (100_000_000, 1)]
REPEAT = 7
WARM = 2


def linear_graph(gradient: bool = False) -> tuple[list[Any], Any]:
    """Return the inputs and the results of the diagonal linear scan."""
    a, b = pt.fmatrix("a"), pt.fmatrix("b")
    start = pt.fvector("start")
    h = scanlib.scan(lambda a, b, h: a * h + b, [a, b], start, return_updates=False)
    if not gradient:
        return [a, b, start], h
    return [a, b, start], [h, *pytensor.grad((h**2).sum(), [a, b])]


def median_seconds(run: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    """Return the median time of a call, waited for, after a few that do not count."""
    for _ in range(WARM):
        wait(run())
    times = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        wait(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def module(name: str) -> Any:
    """Return a module, None where it does not import."""
    try:
        return importlib.import_module(name)
    except Exception:  # a package may fail in its own ways where it was built for another release
        return None


def torch_rows() -> Iterator[Callable[[], Iterator[Row]]]:
    """Yield what to time under PyTorch."""
    torch = module("torch")
    if torch is None or not torch.cuda.is_available():
        print("PyTorch is not installed, or sees no device.")
        return
    for case in CASES:
        yield partial(torch_case, torch, *case)
    yield partial(discounted_case, torch)


def torch_case(torch: Any, steps: int, channels: int) -> Iterator[Row]:
    """Yield times of the diagonal linear scan under PyTorch."""
    name = f"linear scan, {steps:,} x {channels:,}, PyTorch"
    a = torch.rand(steps, channels, device="cuda") * 1.9 - 0.95
    b = torch.rand(steps, channels, device="cuda")
    start = torch.zeros(channels, device="cuda")

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    for gradient, title in ((False, "scanlib"), (True, "scanlib, and its gradient")):
        inputs, outputs = linear_graph(gradient)
        function = pytensor.function(inputs, outputs, mode="PYTORCH").vm.jit_fn
        yield name, title, median_seconds(partial(function, a, b, start), wait)
    higher = module("torch._higher_order_ops.associative_scan")
    if higher is not None:

        def combine(x: Any, y: Any) -> Any:
            return x[0] * y[0], y[0] * x[1] + y[1]

        run = torch.compile(lambda a, b: higher.associative_scan(combine, (a, b), dim=0))
        yield name, "torch's associative_scan", median_seconds(lambda: run(a, b), wait)
    peer = module("accelerated_scan.warp")
    if peer is not None and steps <= 65_536:
        gates, tokens = (x.T.contiguous()[None] for x in (a, b))
        seconds = median_seconds(lambda: peer.scan(gates, tokens), wait)
        yield name, "accelerated-scan (its own layout)", seconds


def discounted_case(torch: Any, steps: int = 100_000, gamma: float = 0.99) -> Iterator[Row]:
    """Yield times of the discounted sum from every step on."""
    name = f"discounted sum, {steps:,}, PyTorch"
    x, y0 = pt.fvector("x"), pt.fscalar("y0")
    y = scanlib.scan(
        lambda x, y: x + np.float32(gamma) * y, x[::-1], y0, return_updates=False
    )[::-1]  # fmt: skip
    function = pytensor.function([x, y0], y, mode="PYTORCH").vm.jit_fn
    values, start = torch.rand(steps, device="cuda"), torch.zeros((), device="cuda")

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    yield name, "scanlib", median_seconds(lambda: function(values, start), wait)
    peer = module("torch_discounted_cumsum")
    if peer is not None:
        run = peer.discounted_cumsum_right
        seconds = median_seconds(lambda: run(values[None], gamma), wait)
        yield name, "torch-discounted-cumsum", seconds


def jax_rows() -> Iterator[Callable[[], Iterator[Row]]]:
    """Yield what to time under JAX."""
    jax = module("jax")
    if jax is None or jax.default_backend() != "gpu":
        print("JAX is not installed, or sees no device.")
        return
    for case in CASES:
        yield partial(jax_case, jax, *case)


def jax_case(jax: Any, steps: int, channels: int) -> Iterator[Row]:
    """Yield times of the diagonal linear scan under JAX."""
    name = f"linear scan, {steps:,} x {channels:,}, JAX"
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.uniform(keys[0], (steps, channels), "float32", -0.95, 0.95)
    b = jax.random.uniform(keys[1], (steps, channels), "float32")
    start = jax.numpy.zeros(channels, "float32")
    for gradient, title in ((False, "scanlib"), (True, "scanlib, and its gradient")):
        inputs, outputs = linear_graph(gradient)
        function = pytensor.function(inputs, outputs, mode="JAX").vm.jit_fn
        seconds = median_seconds(partial(function, a, b, start), jax.block_until_ready)
        yield name, title, seconds

    def combine(x: Any, y: Any) -> Any:
        return x[0] * y[0], y[0] * x[1] + y[1]

    run = jax.jit(lambda a, b: jax.lax.associative_scan(combine, (a, b))[1])
    seconds = median_seconds(lambda: run(a, b), jax.block_until_ready)
    yield name, "lax.associative_scan", seconds


def print_peers(time_left: Callable[[], float]) -> None:
    """Print times and their ratios to scanlib's, as long as there is time."""
    print("\n| loop | by | ms | ratio to scanlib |\n|---|---|---|---|")
    for source in (torch_rows, jax_rows):
        for case in source():
            if time_left() < 60:
                print("| the rest was left out: no time is left | | | |")
                return
            own = np.nan
            try:
                for name, who, seconds in case():
                    own = seconds if who == "scanlib" else own
                    print(
                        f"| {name} | {who} | {seconds * 1e3:.3f} | {seconds / own:.2f} |",
                        flush=True,
                    )
            except Exception as error:  # out of memory, or a peer that does not run here
                print(f"| the rest of this loop does not run: {type(error).__name__} | | | |")
