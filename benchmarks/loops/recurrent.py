"""A recurrent network with `tanh`, in both float dtypes."""

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt

from benchmarks.model import Array, Graph, Library, Loop


def build_rnn(dtype: str) -> Callable[[Library], Graph]:
    """The hidden states, and the mean of their squares."""

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
        return Graph([inputs, start, W_in, W, bias], trace, [W_in, W, bias], cost=cost)

    return build


def rnn_data(dtype: str) -> Callable[[], list[Array]]:
    """1,000 steps of a batch of 32."""

    def data() -> list[Array]:
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


def make_rnn(dtype: str, tolerance: float) -> Loop:
    """The network in one dtype."""
    return Loop(
        name="rnn" + dtype.removeprefix("float"),
        title=f"tanh RNN, 1,000 × 32 × 128, {dtype}",
        build=build_rnn(dtype),
        data=rnn_data(dtype),
        hand=["recurrent.rnn"],
        workspace=lambda data, gradient: [],
        jax="rnn",
        has_cost=True,
        tolerance=tolerance,
        notes=["the hand-written loop is NumPy's"],
    )


LOOPS = (make_rnn("float64", 1e-9), make_rnn("float32", 1e-3))
