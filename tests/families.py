"""Loops of one channel that belong to recurrence families, each written once for arrays and graphs.

A step takes the namespace of its functions first (`numpy`, or `SYMBOLIC`), then what `scan` gives
it: rows, past values, non-sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from scanlib.ops.logaddexp import logaddexp
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from tests.reference import reference_scan

SYMBOLIC = SimpleNamespace(
    maximum=pt.maximum, minimum=pt.minimum, where=pt.switch, logaddexp=logaddexp, exp=pt.exp
)
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 511, 512, 513, 1025, 2049)


@dataclass(frozen=True)
class Family:
    """A loop over vectors.

    Attributes
    ----------
    step : callable
        One step; returns a list.
    n_rows : int
        How many sequences there are.
    taps : tuple
        For each result of a step the taps that are read, or None for an output.
    families : tuple of str
        What the loop's recurrences are found to be, in any order.
    weights : tuple of float
        Values of the non-sequences.
    dtype : str
    low, high : float
        Sequences are drawn from this interval.
    """

    step: Callable
    n_rows: int
    taps: tuple
    families: tuple[str, ...]
    weights: tuple[float, ...] = ()
    dtype: str = "float64"
    low: float = -0.9
    high: float = 0.9

    def render(self, constant_start: bool = False) -> tuple[list, list]:
        """Return the inputs (sequences, non-sequences, initial values) and the traces."""
        rows = [pt.vector(f"x{i}", dtype=self.dtype) for i in range(self.n_rows)]
        weights = [pt.scalar(f"w{i}", dtype=self.dtype) for i in range(len(self.weights))]
        starts, info = [], []
        for k, taps in enumerate(self.taps):
            if taps is None:
                info.append(None)
                continue
            value = self.start(k)
            ndim = 0 if taps == (-1,) else 1
            start = pt.constant(value) if constant_start else pt.tensor(
                f"h{k}", dtype=self.dtype, shape=(None,) * ndim
            )  # fmt: skip
            if not constant_start:
                starts.append(start)
            info.append(start if taps == (-1,) else {"initial": start, "taps": list(taps)})
        traces, _ = scanlib.scan(
            lambda *arguments: self.step(SYMBOLIC, *arguments),
            sequences=rows,
            outputs_info=info,
            non_sequences=weights,
            return_list=True,
        )
        return [*rows, *weights, *starts], traces

    def start(self, k: int) -> np.ndarray:
        """Return initial rows of the result number `k`."""
        depth = -min(self.taps[k])
        rng = np.random.default_rng([3, k])
        value = self.draw(rng, depth)
        return np.asarray(value[0] if self.taps[k] == (-1,) else value)

    def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        if self.dtype == "bool":
            return rng.integers(0, 2, size).astype(bool)
        values = rng.uniform(self.low, self.high, size)
        if self.dtype.startswith("complex"):
            values = values + 1j * rng.uniform(self.low, self.high, size)
        return values.astype(self.dtype)

    def values(self, steps: int, seed: int = 0) -> list[np.ndarray]:
        """Return values of all inputs."""
        rng = np.random.default_rng([seed, steps])
        rows = [self.draw(rng, steps) for _ in range(self.n_rows)]
        weights = [np.asarray(weight, self.dtype) for weight in self.weights]
        starts = [self.start(k) for k, taps in enumerate(self.taps) if taps is not None]
        return [*rows, *weights, *starts]

    def reference(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Run the plain loop."""
        rows, rest = values[: self.n_rows], values[self.n_rows :]
        weights, starts = rest[: len(self.weights)], iter(rest[len(self.weights) :])
        info: list[Any] = [
            None if taps is None else {"initial": next(starts), "taps": taps} for taps in self.taps
        ]
        cast = np.dtype(self.dtype).type

        def step(*arguments: Any) -> list:
            return [cast(v) for v in self.step(np, *(cast(a) for a in arguments))]

        with np.errstate(all="ignore"):
            return reference_scan(
                step, rows, info, weights, rows=[((), self.dtype) for _ in self.taps]
            )


def loops(function: Any) -> list:
    """Return the Ops of a compiled function's loops."""
    nodes = function.maker.fgraph.toposort()
    return [node.op for node in nodes if isinstance(node.op, Scan | ElemwiseScan)]


def kernels(backend: str) -> Any:
    """Have lowered loops run by the kernels of one backend, ``numba`` or ``C``, in C mode."""
    return pytensor.config.change_flags(scanlib__perform="auto" if backend == "C" else backend)


def assert_lowered(function: Any, at_least: int = 1) -> list[ElemwiseScan]:
    """Return the loops of a compiled function, all of which are `ElemwiseScan`s."""
    found = loops(function)
    assert len(found) >= at_least
    assert all(isinstance(op, ElemwiseScan) for op in found), [str(op) for op in found]
    return found


def both(inputs: list, outputs: Any, mode: Any) -> tuple[Any, Any]:
    """Compile with lowering, and as the plain Python loop without."""
    from tests.modes import MODES

    function = pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")
    with pytensor.config.change_flags(scanlib__lower=False, scanlib__perform="python"):
        plain = pytensor.function(inputs, outputs, mode=MODES["py"], on_unused_input="ignore")

    def in_python(*values: Any) -> Any:
        with pytensor.config.change_flags(scanlib__perform="python"):
            return plain(*values)

    return function, in_python


def assert_close(actual: np.ndarray, expected: np.ndarray, message: str = "") -> None:
    """Compare a trace with that of the plain loop: errors relative to the largest value so far."""
    expected = np.asarray(expected)
    assert actual.dtype == expected.dtype, message
    assert actual.shape == expected.shape, message
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(actual, expected, err_msg=message)
        return
    largest = np.abs(expected).max(initial=0.0)
    tolerance = 1e-11 if expected.dtype in ("float64", "complex128") else 3e-5
    np.testing.assert_allclose(
        actual, expected, rtol=tolerance, atol=tolerance * largest, err_msg=message
    )


def _coupled(n: int) -> Callable:
    def step(xp: Any, x: Any, *rest: Any) -> list:
        states, weights = rest[:n], rest[n:]
        rows = [weights[n * k : n * (k + 1)] for k in range(n)]
        return [x + sum(w * h for w, h in zip(row, states, strict=True)) for row in rows]

    return step


def _matrix(n: int) -> tuple[float, ...]:
    return tuple(np.random.default_rng(n).uniform(-0.4, 0.4, n * n).tolist())


def _weighted(xp: Any, x: Any, *rest: Any) -> list:
    """An AR(p) with constant coefficients; the taps come first, then as many weights."""
    half = len(rest) // 2
    return [x + sum(w * h for w, h in zip(rest[half:], rest[:half], strict=True))]


ONE, FAR = (-1,), (-1, -12)
AFFINE = ("affine",)
EXTREME = {"low": -5.0, "high": 5.0}

FAMILIES = {
    "affine": Family(lambda xp, a, b, h: [a * h + b], 2, (ONE,), AFFINE),
    "affine-f32": Family(lambda xp, a, b, h: [a * h + b], 2, (ONE,), AFFINE, dtype="float32"),
    "affine-fixed": Family(lambda xp, b, h, w: [w * h + b], 1, (ONE,), AFFINE, (0.97,)),
    "affine-fixed-f32": Family(
        lambda xp, b, h, w: [w * h + b], 1, (ONE,), AFFINE, (-0.7,), dtype="float32"
    ),
    "affine-complex": Family(
        lambda xp, a, b, h: [a * h + b], 2, (ONE,), AFFINE, dtype="complex128", high=0.6, low=-0.6
    ),
    "affine-division": Family(
        lambda xp, d, x, h: [x - h / d], 2, (ONE,), AFFINE, low=1.1, high=3.0
    ),
    "affine-switch": Family(
        lambda xp, a, b, h: [xp.where(a > 0, b - h, a * (h + b))], 2, (ONE,), AFFINE
    ),
    "affine-often": Family(
        lambda xp, a, b, h, w: [a * (h * w + b) + w * (b - h) + h], 2, (ONE,), AFFINE, (0.3,)
    ),
    "reset": Family(
        lambda xp, a, b, h: [xp.where(b > 0.5, a, h + b)], 2, (ONE,), AFFINE
    ),
    "cumsum": Family(lambda xp, b, h: [h + b], 1, (ONE,), AFFINE),
    "cumsum-f32": Family(lambda xp, b, h: [h + b], 1, (ONE,), AFFINE, dtype="float32"),
    "cumprod": Family(lambda xp, a, h: [a * h], 1, (ONE,), AFFINE, low=0.96, high=1.03),
    "geometric": Family(lambda xp, x, h, w: [w * h, h + x], 1, (ONE, None), AFFINE, (0.9,)),
    "ar2": Family(_weighted, 1, ((-1, -2),), AFFINE, (0.5, -0.3)),
    "ar2-f32": Family(_weighted, 1, ((-1, -2),), AFFINE, (0.5, -0.3), dtype="float32"),
    "ar3-per-step": Family(
        lambda xp, a, b, x, h1, h2, h3: [x + a * h1 + b * h3 - a * b * h2 * 0.5],
        3, ((-1, -2, -3),), AFFINE, low=-0.5, high=0.5,
    ),
    "ar5": Family(_weighted, 1, ((-1, -2, -3, -4, -5),), AFFINE, (0.3, -0.2, 0.1, 0.2, -0.3)),
    "season": Family(_weighted, 1, (FAR,), AFFINE, (0.4, 0.5)),
    "far": Family(_weighted, 1, ((-1100,),), AFFINE, (0.5,)),
    "arma": Family(
        lambda xp, x, y, e, w, v: [w * y + x + v * e, x], 1, (ONE, ONE), AFFINE * 2, (0.6, 0.4)
    ),
    "two": Family(_coupled(2), 1, (ONE,) * 2, AFFINE, _matrix(2)),
    "three": Family(_coupled(3), 1, (ONE,) * 3, AFFINE, _matrix(3)),
    "two-complex": Family(
        _coupled(2), 1, (ONE,) * 2, AFFINE, _matrix(2), dtype="complex64", low=-0.5, high=0.5
    ),
    "shift-register": Family(
        lambda xp, x, a, b, c, w, v: [w * a + v * c + x, a, b], 1, (ONE,) * 3, AFFINE, (0.5, 0.3)
    ),
    "mixed-taps": Family(
        lambda xp, x, a1, a3, b2, w: [w * a1 - w * b2 + x, a3 * w + x],
        1, ((-1, -3), (-2,)), AFFINE, (0.4,),
    ),
    "delay": Family(lambda xp, x, d: [x, d * 2 + x], 1, (ONE, None), AFFINE),
    "long-delay": Family(
        lambda xp, x, d1, d5: [x * x, d5 - d1], 1, ((-1, -5), None), AFFINE
    ),
    "reads-states": Family(
        lambda xp, a, b, h, s: [a * h + b, s + h * h], 2, (ONE, ONE), AFFINE * 2
    ),
    "maximum": Family(lambda xp, x, h: [xp.maximum(h, x)], 1, (ONE,), ("maximum",)),
    "minimum-f32": Family(
        lambda xp, x, y, h: [xp.minimum(x, xp.minimum(h, y))], 2, (ONE,), ("minimum",),
        dtype="float32",
    ),
    "minimum-i32": Family(
        lambda xp, x, h: [xp.minimum(x, h)], 1, (ONE,), ("minimum",), (), "int32", -999, 999
    ),
    "extremes": Family(
        lambda xp, x, h, g: [xp.maximum(h, x), xp.minimum(g, x)], 1, (ONE, ONE),
        ("maximum", "minimum"),
    ),
    "log-affine": Family(
        lambda xp, a, b, h: [xp.logaddexp(h + a, b)], 2, (ONE,), ("log-affine",), **EXTREME
    ),
    "log-sum": Family(
        lambda xp, b, h: [xp.logaddexp(b, h)], 1, (ONE,), ("log-affine",), **EXTREME
    ),
    "affine-i8": Family(
        lambda xp, a, b, h: [a * h + b], 2, (ONE,), AFFINE, (), "int8", -128, 127
    ),
    "affine-u8": Family(
        lambda xp, a, b, h: [b - a * h], 2, (ONE,), AFFINE, (), "uint8", 0, 255
    ),
    "ar2-i8": Family(
        lambda xp, x, h1, h2: [x * h1 + h2 - x], 1, ((-1, -2),), AFFINE, (), "int8", -128, 127
    ),
    "cumsum-i64": Family(
        lambda xp, x, h: [h + x], 1, (ONE,), AFFINE, (), "int64", -(2.0**62), 2.0**62
    ),
}  # fmt: skip
