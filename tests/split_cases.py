"""Loops that the tests of the split take apart, in symbols and in NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.raise_op import Assert
from pytensor.tensor.math import Dot

import scanlib
from scanlib.ops import Scan
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.ops.row_ops.step_products import StepProducts
from tests.modes import MODES
from tests.reference import reference_scan

T, N, K = 6, 3, 2


class Numpy:
    """NumPy under the names that the steps below use."""

    tanh, exp, where, outer, sum = np.tanh, np.exp, np.where, np.outer, np.sum
    sigmoid = staticmethod(lambda x: 1 / (1 + np.exp(-x)))
    solve = staticmethod(np.linalg.solve)
    cholesky = staticmethod(np.linalg.cholesky)
    logdet = staticmethod(lambda a: np.linalg.slogdet(a)[1])
    checked = staticmethod(lambda x, condition: x)
    set_first = staticmethod(lambda x, v: np.concatenate([[v], x[1:]]))


class Symbols:
    """PyTensor under the same names."""

    tanh, exp, where, outer, sum = pt.tanh, pt.exp, pt.where, pt.outer, pt.sum
    sigmoid = staticmethod(pt.sigmoid)
    solve = staticmethod(pt.linalg.solve)
    cholesky = staticmethod(pt.linalg.cholesky)
    logdet = staticmethod(lambda a: pt.linalg.slogdet(a)[1])
    checked = staticmethod(lambda x, condition: Assert("must hold")(x, pt.all(condition)))
    set_first = staticmethod(lambda x, v: pt.set_subtensor(x[0], v))


SHAPES = {
    "x": (T, N),
    "z": (T, N),
    "s": (T,),
    "k": (T,),
    "a": (T, N, N),
    "batch": (T, 4, N),
    "W": (N, K),
    "U": (N, N),
    "V": (N, N),
    "b": (N,),
    "h": (N,),
    "g": (N,),
    "H": (4, N),
    "M": (N, N),
    "c": (),
    "c2": (N, K),
    "v": (),
}


def values_of(names: list[str], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for name in names:
        value = 0.5 * rng.standard_normal(SHAPES[name])
        if name == "a":
            value = value @ value.mT + np.eye(N)
        if name == "k":
            value = rng.integers(0, N, T)
        if name == "U":
            value = value + 2 * np.eye(N)
        found[name] = value
    return found


class Case(NamedTuple):
    """A loop in symbols and in NumPy, and how many loops its graph may keep."""

    step: Callable
    sequences: tuple[str, ...]
    initials: tuple[str | None, ...] = (None,)
    others: tuple[str, ...] = ()
    scans: int = 0  # general loops that remain
    kernels: int = 0  # elementwise and matrix kernels
    products: int = 0  # matrix products outside
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def names(self) -> list[str]:
        used = [*self.sequences, *(name for name in self.initials if name), *self.others]
        return list(dict.fromkeys(used))


class Built(NamedTuple):
    inputs: list
    traces: list
    values: dict[str, np.ndarray]
    walk: Callable


def build(case: Case, steps: int = T) -> Built:
    """Return the loop's inputs, traces and values, and the plain loop as a function of values."""
    values = values_of(case.names)
    values |= {name: values[name][:steps] for name in case.sequences}
    variables = {
        name: pt.TensorType(value.dtype, shape=(None,) * value.ndim)(name)
        for name, value in values.items()
    }

    def run(library, scan, given, **options):
        return scan(
            lambda *args: case.step(library, *args),
            sequences=[given[name] for name in case.sequences],
            outputs_info=[None if name is None else given[name] for name in case.initials],
            non_sequences=[given[name] for name in case.others],
            **case.options,
            **options,
        )

    traces = run(Symbols, scanlib.scan, variables, return_updates=False)
    traces = traces if isinstance(traces, list) else [traces]

    def walk(*arrays):
        given = dict(zip(values, arrays, strict=True))
        return reference_scan(
            lambda *args: _listed(case.step(Numpy, *args)),
            sequences=[given[name] for name in case.sequences],
            outputs_info=[None if name is None else given[name] for name in case.initials],
            non_sequences=[given[name] for name in case.others],
            rows=row_types(case),
            **case.options,
        )

    return Built(list(variables.values()), traces, values, walk)


def _listed(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def row_types(case: Case) -> list:
    """Return the row types of a loop's outputs, found by one step of the plain loop."""
    values = values_of(case.names)
    first = case._replace(sequences=case.sequences)
    arguments = [values[name][0] for name in first.sequences]
    arguments += [values[name] for name in first.initials if name]
    arguments += [values[name] for name in first.others]
    return [(np.shape(row), np.asarray(row).dtype) for row in _listed(case.step(Numpy, *arguments))]


def nodes_of(fgraph):
    """Yield the nodes of a graph, and those that are kernels of one node."""
    for node in fgraph.toposort():
        if isinstance(node.op, KernelGraph):
            yield from nodes_of(node.op.body)
        else:
            yield node


PRODUCTS = (Dot, StepProducts)


def count(function, kind) -> int:
    return sum(isinstance(node.op, kind) for node in nodes_of(function.maker.fgraph))


def loops_of(function) -> list:
    return [node for node in function.maker.fgraph.toposort() if isinstance(node.op, Scan)]


def core(node):
    """Return the Op of a node without the batch around it."""
    return getattr(node.op, "core_op", node.op)


def unfused(linker: str):
    """Return a mode that leaves products as they are, so that they can be counted."""
    return MODES[linker].excluding("BlasOpt", "fusion", "inplace", "scanlib_gather")


MAPS = {
    "arithmetic": Case(lambda p, x, z: 2 * x + z**2, ("x", "z")),
    "a function": Case(lambda p, x: p.tanh(x), ("x",), kernels=1),
    "a product": Case(lambda p, x, W: x @ W, ("x",), others=("W",), products=1),
    "a function of a product": Case(
        lambda p, x, W: p.tanh(x @ W + 1) ** 2, ("x",), others=("W",), products=1
    ),
    "two outputs": Case(lambda p, x, W: [x @ W, x + 1.0], ("x",), (None, None), ("W",), products=1),
    "a check": Case(lambda p, x: p.checked(x, x > -100) * 2, ("x",)),
    "a lookup": Case(lambda p, k, W: W[k] ** 2, ("k",), others=("W",)),
    "a matrix and a vector": Case(lambda p, a, x: a @ x, ("a", "x")),
    "a quadratic form": Case(lambda p, a, x: x @ a @ x, ("a", "x")),
    "matrices": Case(lambda p, x, W: (W * x[:, None]).T @ W, ("x",), others=("W",)),
    "one matrix to solve with": Case(lambda p, x, U: p.solve(U, x), ("x",), others=("U",)),
    "matrices to solve for": Case(lambda p, a, U: p.solve(U, a), ("a",), others=("U",)),
    "a slice that is set": Case(lambda p, x: p.set_first(x, 1.0) * 2, ("x",)),
    "a reduction": Case(lambda p, x, z: (x * z).sum(), ("x", "z")),
    "what is the same at every step": Case(
        lambda p, x, W: [x * 1.0, W.sum(axis=0)], ("x",), (None, None), ("W",)
    ),
    "backwards": Case(
        lambda p, x, W: x @ W, ("x",), others=("W",), products=1, options={"go_backwards": True}
    ),
}


RECURRENT = {
    "a product before": Case(
        lambda p, x, h, V, U: p.tanh(x @ V + h @ U), ("x",), ("h",), ("V", "U"), scans=1, products=1
    ),
    "a product after": Case(
        lambda p, x, h, V, U: [p.tanh(x + h @ U), p.tanh(h @ V)],
        ("x",),
        ("h", None),
        ("V", "U"),
        scans=1,
        products=1,
    ),
    "light work before and after": Case(
        lambda p, x, h, U: [p.tanh(p.exp(x) + h @ U), 2 * h], ("x",), ("h", None), ("U",), scans=1
    ),
    "two matrix recurrences, joined": Case(
        lambda p, x, h, g, U, V: [x + 0.1 * (h @ U), x + h - 0.1 * (g @ V)],
        ("x",),
        ("h", "g"),
        ("U", "V"),
        kernels=1,
    ),
}


def network(kind: str, batch: bool = True, stops: bool = False):
    """Return the inputs, states and weights of a recurrent network, in float64; one that `stops`
    may do so before the end."""
    x, h0 = (pt.dtensor3("x"), pt.dmatrix("h0")) if batch else (pt.dmatrix("x"), pt.dvector("h0"))

    def rnn(x, h, W, U):
        return pt.tanh(x @ W + h @ U)

    def gru(x, h, W, U, V):
        n = h.shape[-1]
        a = x @ W
        gates = pt.sigmoid(a[..., : 2 * n] + h @ U)
        new = pt.tanh(a[..., 2 * n :] + (gates[..., :n] * h) @ V)
        return (1 - gates[..., n:]) * h + gates[..., n:] * new

    def lstm(x, h, c, W, U):
        n = h.shape[-1]
        a = x @ W + h @ U
        i, f, o = (pt.sigmoid(a[..., k * n : (k + 1) * n]) for k in range(3))
        c = f * c + i * pt.tanh(a[..., 3 * n :])
        return [o * pt.tanh(c), c]

    step, columns = {"rnn": (rnn, (1, 1)), "gru": (gru, (3, 2, 1)), "lstm": (lstm, (4, 4))}[kind]
    weights = [pt.dmatrix(name) for name in ("W", "U", "V")[: len(columns)]]
    initial = [h0, pt.zeros_like(h0)] if kind == "lstm" else [h0]

    def stopping(x, *values):
        states = step(x, *values)
        return states, scanlib.until((states[0] if kind == "lstm" else states).sum() > 1.0)

    traces = scanlib.scan(
        stopping if stops else step, x, initial, weights, name=kind, return_updates=False
    )
    states = traces[0] if kind == "lstm" else traces
    rng = np.random.default_rng(0)
    rows = (2,) if batch else ()
    values = [rng.standard_normal((T, *rows, K)), rng.standard_normal((*rows, N))]
    values += [
        0.5 * rng.standard_normal((K if k == 0 else N, c * N)) for k, c in enumerate(columns)
    ]
    return [x, h0, *weights], states, weights, values
