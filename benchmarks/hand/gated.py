"""Gated recurrent networks in NumPy: its products and functions of whole arrays are fast."""

from typing import Any

import numpy as np

from benchmarks.model import Array


def sigmoid(x: Array) -> Array:
    """The logistic function, which overflows to its limits."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def gru_step(
    row: Array, hidden: Array, W_gates: Array, U_gates: Array, b_gates: Array, W: Array, U: Array,
    b: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Update gate, reset gate and candidate."""
    units = hidden.shape[1]
    gates = sigmoid(row @ W_gates + hidden @ U_gates + b_gates)
    update, reset = gates[:, :units], gates[:, units:]
    return update, reset, np.tanh(row @ W + (reset * hidden) @ U + b)


def gru(inputs: Array, start: Array, *weights: Array) -> Array:
    """Hidden states of a GRU."""
    trace = np.empty((inputs.shape[0], *start.shape), dtype=inputs.dtype)
    hidden = start
    for t, row in enumerate(inputs):
        update, _, candidate = gru_step(row, hidden, *weights)
        hidden = update * hidden + (1 - update) * candidate
        trace[t] = hidden
    return trace


def gru_gradient(inputs: Array, start: Array, *weights: Array) -> tuple[Any, ...]:
    """Mean of ``h**2``, with its derivatives by the weights."""
    trace = gru(inputs, start, *weights)
    _, U_gates, _, _, U, _ = weights
    sums = [np.zeros_like(weight) for weight in weights]
    adjoint = np.zeros_like(start)
    for t in range(inputs.shape[0] - 1, -1, -1):
        row, hidden = inputs[t], trace[t - 1] if t > 0 else start
        update, reset, candidate = gru_step(row, hidden, *weights)
        adjoint = adjoint + (2.0 / trace.size) * trace[t]
        inner = adjoint * (1 - update) * (1 - candidate**2)
        back = inner @ U.T
        d_update = adjoint * (hidden - candidate) * update * (1 - update)
        d_reset = back * hidden * reset * (1 - reset)
        gates = np.concatenate([d_update, d_reset], axis=1)
        parts = [row.T @ gates, hidden.T @ gates, gates.sum(axis=0)]
        parts += [row.T @ inner, (reset * hidden).T @ inner, inner.sum(axis=0)]
        for total, part in zip(sums, parts, strict=True):
            total += part
        adjoint = adjoint * update + back * reset + gates @ U_gates.T
        adjoint = adjoint.astype(start.dtype)
    return float(np.mean(trace**2)), *sums


def lstm_step(
    row: Array, hidden: Array, cell: Array, W: Array, U: Array, b: Array
) -> tuple[list[Array], Array]:
    """The four gates and the new cell."""
    units = hidden.shape[1]
    joined = row @ W + hidden @ U + b
    gates = [sigmoid(joined[:, k * units : (k + 1) * units]) for k in range(3)]
    gates.append(np.tanh(joined[:, 3 * units :]))
    return gates, gates[1] * cell + gates[0] * gates[3]


def lstm_traces(inputs: Array, start: Array, cell: Array, *weights: Array) -> tuple[Array, Array]:
    """Hidden states and cells of an LSTM."""
    shape = (inputs.shape[0], *start.shape)
    trace, cells = np.empty(shape, inputs.dtype), np.empty(shape, inputs.dtype)
    hidden = start
    for t, row in enumerate(inputs):
        gates, cell = lstm_step(row, hidden, cell, *weights)
        hidden = gates[2] * np.tanh(cell)
        trace[t], cells[t] = hidden, cell
    return trace, cells


def lstm(inputs: Array, start: Array, cell: Array, *weights: Array) -> Array:
    """Hidden states of an LSTM."""
    return lstm_traces(inputs, start, cell, *weights)[0]


def lstm_gradient(
    inputs: Array, start: Array, cell: Array, W: Array, U: Array, b: Array
) -> tuple[float, Array, Array, Array]:
    """Mean of ``h**2``, with its derivatives by the weights."""
    trace, cells = lstm_traces(inputs, start, cell, W, U, b)
    d_W, d_U, d_b = np.zeros_like(W), np.zeros_like(U), np.zeros_like(b)
    adjoint, d_cell = np.zeros_like(start), np.zeros_like(start)
    for t in range(inputs.shape[0] - 1, -1, -1):
        hidden, old = (trace[t - 1], cells[t - 1]) if t > 0 else (start, cell)
        (write, forget, read, value), new = lstm_step(inputs[t], hidden, old, W, U, b)
        adjoint = adjoint + (2.0 / trace.size) * trace[t]
        seen = np.tanh(new)
        d_cell = d_cell + adjoint * read * (1 - seen**2)
        parts = (
            d_cell * value * write * (1 - write),
            d_cell * old * forget * (1 - forget),
            adjoint * seen * read * (1 - read),
            d_cell * write * (1 - value**2),
        )
        inner = np.concatenate(parts, axis=1).astype(start.dtype)
        d_W += inputs[t].T @ inner
        d_U += hidden.T @ inner
        d_b += inner.sum(axis=0)
        adjoint, d_cell = inner @ U.T, d_cell * forget
    return float(np.mean(trace**2)), d_W, d_U, d_b
