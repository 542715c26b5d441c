"""Loops taken apart: what leaves them, what stays, and that values and gradients stay the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.raise_op import Assert
from pytensor.tensor.math import Dot

import scanlib
from scanlib.ops import ElemwiseScan, Scan
from scanlib.ops.errors import SequenceLengthError
from tests.checks import assert_derivatives, assert_same
from tests.modes import MODES
from tests.reference import reference_scan

T, N, K = 6, 3, 2
FLAGS = ("scanlib__split", "scanlib__split_maps", "scanlib__split_sums", "scanlib__split_affine")


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


def count(function, kind) -> int:
    return sum(isinstance(node.op, kind) for node in function.maker.fgraph.toposort())


def unfused(linker: str):
    """Return a mode that leaves products as they are, so that they can be counted."""
    return MODES[linker].excluding("BlasOpt", "fusion", "inplace")


MAPS = {
    "arithmetic": Case(lambda p, x, z: 2 * x + z**2, ("x", "z")),
    "a function": Case(lambda p, x: p.tanh(x), ("x",), kernels=1),
    "a product": Case(lambda p, x, W: x @ W, ("x",), others=("W",), products=1),
    "a function of a product": Case(
        lambda p, x, W: p.tanh(x @ W + 1) ** 2, ("x",), others=("W",), kernels=1, products=1
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


class TestMaps:
    @pytest.mark.parametrize("name", MAPS)
    def test_no_loop_remains(self, name):
        case = MAPS[name]
        built = build(case)
        function = pytensor.function(built.inputs, built.traces, mode=unfused("c"))
        assert count(function, Scan) == 0
        assert count(function, ElemwiseScan) == case.kernels
        assert count(function, Dot) >= case.products

    @pytest.mark.parametrize("steps", [T, 1, 0])
    @pytest.mark.parametrize("name", MAPS)
    def test_values(self, name, steps):
        built = build(MAPS[name], steps)
        function = pytensor.function(built.inputs, built.traces, mode=MODES["c"])
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

    @pytest.mark.parametrize("name", ["a function of a product", "a lookup", "a check"])
    def test_values_in_numba_mode(self, name):
        built = build(MAPS[name])
        function = pytensor.function(built.inputs, built.traces, mode=MODES["numba"])
        assert count(function, Scan) == 0
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

    def test_a_check_still_fails(self):
        x = pt.dvector("x")
        y = scanlib.map(
            lambda row: Assert("must be positive")(row, row > 0), x, return_updates=False
        )
        function = pytensor.function([x], y, mode=MODES["c"])
        assert count(function, Scan) == 0
        np.testing.assert_array_equal(function([1.0, 2.0]), [1.0, 2.0])
        assert function([]).shape == (0,)
        with pytest.raises(AssertionError, match="must be positive"):
            function([1.0, -2.0, 3.0])

    def test_sequences_of_different_lengths_are_an_error(self):
        x, z, n = pt.dvector("x"), pt.dvector("z"), pt.lscalar("n")
        y = scanlib.scan(lambda a, b: a + b, [x, z], n_steps=n, return_updates=False)
        function = pytensor.function([x, z, n], y, mode=MODES["c"])
        assert count(function, Scan) == 0
        np.testing.assert_array_equal(function(np.ones(4), np.ones(3), 2), [2.0, 2.0])
        with pytest.raises(SequenceLengthError):
            function(np.ones(4), np.ones(3), 4)

    @pytest.mark.parametrize("name", ["a function of a product", "a matrix and a vector"])
    def test_derivatives(self, name, fast_mode):
        case = MAPS[name]
        built = build(case, 3)
        cost = sum(pt.sum(pt.sin(trace)) for trace in built.traces)
        assert_derivatives(
            cost,
            dict(zip(built.inputs, built.values.values(), strict=True)),
            lambda *arrays: sum(float(np.sin(t).sum()) for t in built.walk(*arrays)),
            fast_mode,
        )
