"""Gated recurrent networks in single precision: GRU and LSTM."""

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt

from benchmarks.model import Array, Graph, Library, Loop

STEPS, BATCH, FEATURES, UNITS = 1_000, 32, 16, 128


def build_gru(library: Library) -> Graph:
    """The hidden states of a GRU, and the mean of their squares."""
    inputs = pt.ftensor3("inputs")
    names = ("start", "W_gates", "U_gates", "W", "U")
    start, W_gates, U_gates, W, U = map(pt.fmatrix, names)
    b_gates, b = pt.fvector("b_gates"), pt.fvector("b")

    def step(row, hidden, W_gates, U_gates, b_gates, W, U, b):
        gates = pt.sigmoid(row @ W_gates + hidden @ U_gates + b_gates)
        update, reset = gates[:, :UNITS], gates[:, UNITS:]
        candidate = pt.tanh(row @ W + (reset * hidden) @ U + b)
        return update * hidden + (1 - update) * candidate

    weights = [W_gates, U_gates, b_gates, W, U, b]
    trace = library.scan(
        step,
        sequences=[inputs],
        outputs_info=[start],
        non_sequences=weights,
        strict=True,
        return_updates=False,
    )
    return Graph([inputs, start, *weights], trace, weights, cost=pt.mean(trace**2))


def build_lstm(library: Library) -> Graph:
    """The hidden states of an LSTM, and the mean of their squares."""
    inputs = pt.ftensor3("inputs")
    start, cell, W, U = map(pt.fmatrix, ("start", "cell", "W", "U"))
    b = pt.fvector("b")

    def step(row, hidden, cell, W, U, b):
        joined = row @ W + hidden @ U + b
        parts = [joined[:, k * UNITS : (k + 1) * UNITS] for k in range(4)]
        write, forget, read = (pt.sigmoid(part) for part in parts[:3])
        cell = forget * cell + write * pt.tanh(parts[3])
        return read * pt.tanh(cell), cell

    weights = [W, U, b]
    trace, _ = library.scan(
        step,
        sequences=[inputs],
        outputs_info=[start, cell],
        non_sequences=weights,
        strict=True,
        return_updates=False,
    )
    return Graph([inputs, start, cell, *weights], trace, weights, cost=pt.mean(trace**2))


def weights(rng: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> Array:
    """A matrix that keeps the size of what it is multiplied with."""
    return scale * rng.standard_normal((rows, columns)) / np.sqrt(rows)


def gru_data() -> list[Array]:
    """1,000 steps of a batch of 32."""
    rng = np.random.default_rng(5)
    arrays = [
        rng.standard_normal((STEPS, BATCH, FEATURES)),
        np.zeros((BATCH, UNITS)),
        weights(rng, FEATURES, 2 * UNITS),
        weights(rng, UNITS, 2 * UNITS, 0.5),
        0.1 * rng.standard_normal(2 * UNITS),
        weights(rng, FEATURES, UNITS),
        weights(rng, UNITS, UNITS, 0.5),
        0.1 * rng.standard_normal(UNITS),
    ]
    return [array.astype("float32") for array in arrays]


def lstm_data() -> list[Array]:
    """1,000 steps of a batch of 32."""
    rng = np.random.default_rng(6)
    arrays = [
        rng.standard_normal((STEPS, BATCH, FEATURES)),
        np.zeros((BATCH, UNITS)),
        np.zeros((BATCH, UNITS)),
        weights(rng, FEATURES, 4 * UNITS),
        weights(rng, UNITS, 4 * UNITS, 0.5),
        0.1 * rng.standard_normal(4 * UNITS),
    ]
    return [array.astype("float32") for array in arrays]


def make(name: str, title: str, build: Callable[[Library], Graph], data: Callable) -> Loop:
    """One network."""
    return Loop(
        name=name,
        title=f"{title}, 1,000 × 32 × 128, float32",
        build=build,
        data=data,
        hand=[f"gated.{name}"],
        workspace=lambda data, gradient: [],
        jax=name,
        has_cost=True,
        tolerance=1e-3,
        notes=["the hand-written loop is NumPy's"],
    )


LOOPS = (
    make("gru", "GRU", build_gru, gru_data),
    make("lstm", "LSTM", build_lstm, lstm_data),
)
