"""What a loop that a user might write consists of, and the loop in PyTensor and in JAX.

Loops are declared by functions under `@user_loop`, which take a random generator and return a
`UserLoop`; the name of the function is the name of the loop, the first line of its docstring the
title.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from benchmarks.model import Array, Graph, Library
from benchmarks.users.dialects import PyTensorFunctions, in_jax


@dataclass(frozen=True)
class Given:
    """An initial state that the compiled function takes; others are constants of the graph."""

    value: Array


@dataclass(frozen=True)
class Lagged:
    """Initial rows of a state that the step reads as it was as many steps before."""

    rows: Array


State = Any  # an array, Given, Lagged, or None for what the step returns beside its states


@dataclass(frozen=True)
class UserLoop:
    """A loop, and the arrays to call it with.

    Attributes
    ----------
    step
        ``step(m, *rows, *states, *parameters)`` returns the next states and outputs, with the
        functions `m` of :mod:`benchmarks.users.dialects`.
    rows, states, parameters
        Arrays; a state may be `Given` or `Lagged`, and is None for an output.
    n_steps
        How many steps, where there are no rows.
    keep, last
        Which of what the step returns is the value, and whether only its last row is.
    sized
        Whether the types of the inputs have the sizes of the arrays.
    has_gradient
        Whether the sum of the squared value is differentiated, by all inputs of floating point.
    tolerance
        Largest difference from JAX, relative to the largest number of an array.
    """

    step: Callable[..., Any]
    rows: Sequence[Any] = ()
    states: Sequence[State] = ()
    parameters: Sequence[Any] = ()
    n_steps: int | None = None
    keep: int = 0
    last: bool = False
    sized: bool = False
    has_gradient: bool = True
    tolerance: float = 1e-7

    def data(self) -> list[Array]:
        """The arrays that the compiled function takes."""
        given = [state.value for state in self.states if isinstance(state, Given)]
        return [np.asarray(value) for value in (*self.rows, *given, *self.parameters)]

    def graph(self, library: Library) -> Graph:
        """The loop in PyTensor, by either library."""
        data = self.data()
        inputs = [self._input(value, k < len(self.rows)) for k, value in enumerate(data)]
        rest = iter(inputs)
        rows = [next(rest) for _ in self.rows]
        states = [_in_pytensor(state, rest) for state in self.states]
        functions = PyTensorFunctions(library)
        values = library.scan(
            lambda *arguments: self.step(functions, *arguments),
            sequences=rows,
            outputs_info=states,
            non_sequences=list(rest),
            n_steps=self.n_steps,
            return_updates=False,
        )
        value = values[self.keep] if isinstance(values, list) else values
        value = value[-1] if self.last else value
        wrt = [x for x in inputs if x.type.dtype.startswith("float")] if self.has_gradient else []
        return Graph(inputs, value, wrt, cost=(value**2).sum())

    def _input(self, value: Array, is_rows: bool) -> Any:
        shape = value.shape if self.sized else (None,) * value.ndim
        return pt.tensor(dtype=value.dtype, shape=(None, *shape[1:]) if is_rows else shape)

    def compile(self, library: Library, gradient: bool, mode: Any = None) -> Any:
        """Compile the value, or the cost with its derivatives."""
        graph = self.graph(library)
        outputs: list[Variable] = [graph.value]
        if gradient:
            assert graph.cost is not None
            derivatives: Any = pytensor.grad(
                graph.cost, list(graph.wrt), disconnected_inputs="ignore"
            )
            outputs = [graph.cost, *derivatives]
        function: Any = pytensor.function(list(graph.inputs), outputs, mode=mode)
        function.trust_input = True
        return function

    def compile_jax(self, gradient: bool) -> Any:
        """Return the same in JAX under `jit`, to be compiled by the first call."""
        jax = in_jax().jax
        if not gradient:
            return jax.jit(lambda *data: [self._in_jax(*data)])
        wrt = [k for k, x in enumerate(self.data()) if x.dtype.kind == "f"]
        cost = jax.value_and_grad(lambda *data: (self._in_jax(*data) ** 2).sum(), wrt)

        def flat(*data: Any) -> list[Any]:
            value, derivatives = cost(*data)
            return [value, *derivatives]

        return jax.jit(flat)

    def _in_jax(self, *data: Any) -> Any:
        m, rest = in_jax(), iter(data)
        rows = tuple(next(rest) for _ in self.rows)
        first = [_carried(state, rest) for state in self.states if state is not None]
        parameters = list(rest)
        kinds = self.states

        def body(carry: list[Any], row: tuple[Any, ...]) -> tuple[list[Any], Any]:
            carried = zip((kind for kind in kinds if kind is not None), carry, strict=True)
            states = [h[0] if isinstance(kind, Lagged) else h for kind, h in carried]
            found = self.step(m, *row, *states, *parameters)
            found = list(found) if isinstance(found, list | tuple) else [found]
            following, held = [], iter(carry)
            for kind, value in zip(kinds, found, strict=True):
                if isinstance(kind, Lagged):
                    following.append(m.concatenate([next(held)[1:], value[None]]))
                elif kind is not None:
                    following.append(value.astype(next(held).dtype))
            return following, None if self.last else found[self.keep]

        final, trace = m.jax.lax.scan(body, first, rows, self.n_steps)
        return final[self.keep] if self.last else trace


def _in_pytensor(state: State, rest: Any) -> Any:
    if isinstance(state, Given):
        return next(rest)
    if isinstance(state, Lagged):
        return {"initial": pt.as_tensor(state.rows), "taps": [-len(state.rows)]}
    return None if state is None else pt.as_tensor(np.asarray(state))


def _carried(state: State, rest: Any) -> Any:
    if isinstance(state, Given):
        return next(rest)
    return in_jax().asarray(state.rows if isinstance(state, Lagged) else state)


@dataclass(frozen=True)
class Declared:
    """A loop by name and title, whose data is drawn when it is asked for."""

    name: str
    title: str
    draw: Callable[[np.random.Generator], UserLoop]

    def make(self) -> UserLoop:
        """Return the loop, with the same data each time."""
        return self.draw(np.random.default_rng(0))


LOOPS: dict[str, Declared] = {}


def user_loop(draw: Callable[[np.random.Generator], UserLoop]) -> Declared:
    """Declare a loop."""
    name, title = draw.__name__, (draw.__doc__ or "").strip().rstrip(".")
    LOOPS[name] = Declared(name, title, draw)
    return LOOPS[name]
