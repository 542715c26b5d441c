"""The loops that are timed, each written once and built with either library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from benchmarks import hand

OURS = "scanlib"
THEIRS = "pytensor.scan"


@dataclass(frozen=True)
class Library:
    """The two names that a loop needs from a library."""

    name: str
    scan: Callable[..., Any]
    until: Callable[..., Any]


def load_library(name: str) -> Library:
    """Import a library by the name it has in the table, and nothing of the other one."""
    if name == OURS:
        module = import_module("scanlib")
        return Library(name, module.scan, module.until)
    if name == THEIRS:
        return Library(name, pytensor.scan, import_module("pytensor.scan.utils").until)
    raise ValueError(f"unknown library {name!r}: expected {OURS!r} or {THEIRS!r}")


@dataclass(frozen=True)
class Graph:
    """One loop as a graph: the value of its forward pass, and a cost to differentiate."""

    inputs: Sequence[Variable]
    value: Variable
    cost: Variable
    wrt: Sequence[Variable]

    def compile(self, gradient: bool) -> Any:
        """Compile the value, or the cost with its gradient, in PyTensor's default mode."""
        outputs: Variable | list[Variable] = self.value
        if gradient:
            gradients: Any = pytensor.grad(self.cost, list(self.wrt))
            outputs = [self.cost, *gradients]
        function: Any = pytensor.function(list(self.inputs), outputs)
        function.trust_input = True
        return function


@dataclass(frozen=True)
class Loop:
    """A loop to time.

    Attributes
    ----------
    name
        What ``--loops`` calls it.
    title
        What the table calls it.
    build
        The graph of the loop, written with the given library.
    data
        One array for each input of the graph.
    forward, gradient
        The hand-written loop, see :mod:`benchmarks.hand`.
    compiled
        Whether the hand-written loop is compiled, and so is a scale worth timing.
    cold
        Whether to time its compilation too.
    tolerance
        Largest relative difference from the hand-written loop.
    reference_gradient
        Whether ``pytensor.scan`` computes its gradient as defined here.
    """

    name: str
    title: str
    build: Callable[[Library], Graph]
    data: Callable[[], list[np.ndarray]]
    forward: Callable[..., Any]
    gradient: Callable[..., Any]
    compiled: bool = True
    cold: bool = True
    tolerance: float = 1e-9
    reference_gradient: bool = True


def build_garch(library: Library) -> Graph:
    omega, alpha, beta, first = pt.dscalars("omega", "alpha", "beta", "first")
    squares = pt.dvector("squares")
    variances = library.scan(
        lambda square, variance, omega, alpha, beta: omega + alpha * square + beta * variance,
        sequences=[pt.concatenate([first[None], squares[:-1]])],
        outputs_info=[first],
        non_sequences=[omega, alpha, beta],
        strict=True,
        return_updates=False,
    )
    cost = pt.mean(pt.log(variances) + squares / variances)
    return Graph([omega, alpha, beta, squares, first], variances, cost, [omega, alpha, beta])


def garch_data() -> list[np.ndarray]:
    squares = np.random.default_rng(1).standard_normal(10_000) ** 2
    return [np.array(0.02), np.array(0.10), np.array(0.88), squares, np.array(1.0)]


def build_ar2(library: Library) -> Graph:
    first, second = pt.dscalars("first", "second")
    shocks, start = pt.dvectors("shocks", "start")
    trace = library.scan(
        lambda shock, older, newer, first, second: first * newer + second * older + shock,
        sequences=[shocks],
        outputs_info=[{"initial": start, "taps": [-2, -1]}],
        non_sequences=[first, second],
        strict=True,
        return_updates=False,
    )
    return Graph([first, second, shocks, start], trace, pt.mean(trace**2), [first, second])


def ar2_data() -> list[np.ndarray]:
    shocks = np.random.default_rng(2).standard_normal(100_000)
    return [np.array(0.6), np.array(0.3), shocks, np.array([0.5, -0.5])]


def build_rnn(dtype: str) -> Callable[[Library], Graph]:
    def build(library: Library) -> Graph:
        inputs = pt.tensor3("inputs", dtype=dtype)
        start, W_in, W = (pt.matrix(name, dtype=dtype) for name in ("start", "W_in", "W"))
        bias = pt.vector("bias", dtype=dtype)
        trace = library.scan(
            lambda row, hidden, W_in, W, bias: pt.tanh(row @ W_in + hidden @ W + bias),
            sequences=[inputs],
            outputs_info=[start],
            non_sequences=[W_in, W, bias],
            strict=True,
            return_updates=False,
        )
        cost = pt.mean(trace**2)
        return Graph([inputs, start, W_in, W, bias], trace, cost, [W_in, W, bias])

    return build


def rnn_data(dtype: str) -> Callable[[], list[np.ndarray]]:
    def data() -> list[np.ndarray]:
        steps, batch, features, units = 1_000, 32, 16, 128
        rng = np.random.default_rng(3)
        arrays = [
            rng.standard_normal((steps, batch, features)),
            np.zeros((batch, units)),
            rng.standard_normal((features, units)) / np.sqrt(features),
            0.5 * rng.standard_normal((units, units)) / np.sqrt(units),
            0.1 * rng.standard_normal(units),
        ]
        return [array.astype(dtype) for array in arrays]

    return data


def build_power(library: Library) -> Graph:
    A, k = pt.dvector("A"), pt.lscalar("k")
    powers = library.scan(
        lambda result, A: result * A,
        outputs_info=[pt.ones_like(A)],
        non_sequences=[A],
        n_steps=k,
        strict=True,
        return_updates=False,
    )
    return Graph([A, k], powers[-1], powers[-1].sum(), [A])


def power_data() -> list[np.ndarray]:
    return [np.linspace(0.999, 1.001, 10), np.array(1_000, dtype="int64")]


def build_newton(library: Library) -> Graph:
    target, start = pt.dscalars("target", "start")

    def step(root: Any, target: Any) -> Any:
        better = root - (root**3 - target) / (3.0 * root**2)
        settled = pt.abs(better - root) <= hand.NEWTON_TOLERANCE * pt.abs(better)
        return better, library.until(settled)

    roots = library.scan(
        step,
        outputs_info=[start],
        non_sequences=[target],
        n_steps=100,
        strict=True,
        return_updates=False,
    )
    return Graph([target, start], roots[-1], roots[-1], [target])


def newton_data() -> list[np.ndarray]:
    return [np.array(1e6), np.array(1.0)]


def make_rnn(dtype: str, **options: Any) -> Loop:
    title = f"tanh RNN, {dtype}, T = 1,000, batch 32, 128 units"
    name = "rnn" + dtype.removeprefix("float")
    build, data = build_rnn(dtype), rnn_data(dtype)
    return Loop(name, title, build, data, hand.rnn, hand.rnn_gradient, compiled=False, **options)


_LOOPS = (
    Loop(
        "garch",
        "GARCH, scalar, T = 10,000",
        build_garch,
        garch_data,
        hand.garch,
        hand.garch_gradient,
    ),
    Loop("ar2", "AR(2) by taps, T = 100,000", build_ar2, ar2_data, hand.ar2, hand.ar2_gradient),
    make_rnn("float64"),
    make_rnn("float32", cold=False, tolerance=1e-3),
    Loop(
        "power",
        "A**k at the last step, k = 1,000, 10 wide",
        build_power,
        power_data,
        hand.power,
        hand.power_gradient,
    ),
    Loop(
        "newton",
        "Newton with until, scalar",
        build_newton,
        newton_data,
        hand.newton,
        hand.newton_gradient,
        reference_gradient=False,
    ),
)

LOOPS = {loop.name: loop for loop in _LOOPS}
