"""The functions that steps call, by one name in PyTensor and in JAX.

A step is written once, ``step(m, *rows, *states, *parameters)``, and `m` is one of these. What is
not here has the same name and arguments in `pytensor.tensor` and `jax.numpy`, and is found there.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import pytensor
import pytensor.tensor as pt
from pytensor.tensor import linalg

import scanlib
from benchmarks.model import Library


class PyTensorFunctions:
    """PyTensor's functions, and the loop inside a step by one library."""

    def __init__(self, library: Library) -> None:
        self._scan = library.scan

    def __getattr__(self, name: str) -> Any:
        return getattr(pt, name)

    not_equal = staticmethod(pt.neq)
    equal = staticmethod(pt.eq)
    softmax = staticmethod(pt.special.softmax)
    solve = staticmethod(linalg.solve)
    cholesky = staticmethod(linalg.cholesky)
    cummin = staticmethod(scanlib.cummin)

    def assign(self, x: Any, index: Any, value: Any) -> Any:
        """Return `x` with a part of it replaced."""
        return pt.set_subtensor(x[index], value)

    def add(self, x: Any, index: Any, value: Any) -> Any:
        """Return `x` with something added to a part of it."""
        return pt.inc_subtensor(x[index], value)

    def before(self, x: Any, t: Any, items: int) -> Any:
        """Return so many items of `x` before one."""
        return x[t - items : t]

    def gradient(self, f: Callable[[Any], Any], x: Any) -> Any:
        """Return the gradient of a scalar function."""
        return pytensor.grad(f(x), x)

    def fold(
        self, step: Callable[..., Any], rows: Sequence[Any], state: Any, n_steps: int | None = None
    ) -> Any:
        """Return the last state of a loop."""
        trace = self._scan(step, list(rows), [state], n_steps=n_steps, return_updates=False)
        return trace[-1]


class JaxFunctions:
    """JAX's functions, which are imported when they are first asked for."""

    def __init__(self) -> None:
        self.jax = import_module("jax")
        self.jax.config.update("jax_enable_x64", True)
        # Results are waited for: another thread would wait for a core on a busy machine.
        self.jax.config.update("jax_cpu_enable_async_dispatch", False)
        self._numpy = import_module("jax.numpy")
        nn, special = self.jax.nn, import_module("jax.scipy.special")
        self.softmax, self.softplus, self.logsumexp = nn.softmax, nn.softplus, nn.logsumexp
        self.gammaln = special.gammaln
        self.solve, self.cholesky = self._numpy.linalg.solve, self._numpy.linalg.cholesky
        self.cummin = self.jax.lax.cummin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numpy, name)

    def assign(self, x: Any, index: Any, value: Any) -> Any:
        return x.at[index].set(value)

    def add(self, x: Any, index: Any, value: Any) -> Any:
        return x.at[index].add(value)

    def before(self, x: Any, t: Any, items: int) -> Any:
        return self.jax.lax.dynamic_slice_in_dim(x, t - items, items)

    def gradient(self, f: Callable[[Any], Any], x: Any) -> Any:
        return self.jax.grad(f)(x)

    def fold(
        self, step: Callable[..., Any], rows: Sequence[Any], state: Any, n_steps: int | None = None
    ) -> Any:
        def next_state(h: Any, row: tuple[Any, ...]) -> tuple[Any, None]:
            return step(*row, h), None

        return self.jax.lax.scan(next_state, state, tuple(rows), n_steps)[0]


@cache
def in_jax() -> JaxFunctions:
    """Return JAX's functions."""
    return JaxFunctions()
