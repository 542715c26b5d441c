"""A recurrent network in NumPy, not numba: NumPy's `tanh` and matrix products are faster."""

import numpy as np

from benchmarks.model import Array


def rnn(inputs: Array, start: Array, W_in: Array, W: Array, bias: Array) -> Array:
    """Hidden states ``h[t] = tanh(inputs[t] @ W_in + h[t-1] @ W + bias)``."""
    trace = np.empty((inputs.shape[0], *start.shape), dtype=inputs.dtype)
    hidden = start
    for t, row in enumerate(inputs):
        hidden = np.tanh(row @ W_in + hidden @ W + bias)
        trace[t] = hidden
    return trace


def rnn_gradient(
    inputs: Array, start: Array, W_in: Array, W: Array, bias: Array
) -> tuple[float, Array, Array, Array]:
    """Mean of ``h**2``, with its derivatives by both weight matrices and the bias."""
    trace = rnn(inputs, start, W_in, W, bias)
    adjoint = np.zeros_like(start)
    d_W_in, d_W, d_bias = np.zeros_like(W_in), np.zeros_like(W), np.zeros_like(bias)
    for t in range(inputs.shape[0] - 1, -1, -1):
        hidden = trace[t]
        inner = (adjoint + 2.0 * hidden / trace.size) * (1.0 - hidden**2)
        inner = inner.astype(hidden.dtype)
        d_W_in += inputs[t].T @ inner
        d_W += (trace[t - 1] if t > 0 else start).T @ inner
        d_bias += inner.sum(axis=0)
        adjoint = inner @ W.T
    return float(np.mean(trace**2)), d_W_in, d_W, d_bias
