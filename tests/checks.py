"""Checks that several test modules share: values, gradients and their derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tests.derivatives import (
    central_gradient,
    random_directions,
    second_directional_derivative,
)


def evaluate(outputs: Any, inputs: dict | None = None, mode: Any = None, **kwargs: Any) -> Any:
    """Compile `outputs` as a function of the variables in `inputs` and call it on their values."""
    inputs = inputs or {}
    kwargs.setdefault("on_unused_input", "ignore")
    function = pytensor.function(list(inputs), outputs, mode=mode, **kwargs)
    return function(*inputs.values())


def in_python(inputs: Sequence, outputs: Any) -> Callable:
    """Return a function whose loops run in plain Python: nothing to compile, for few steps."""
    function = pytensor.function(
        list(inputs), outputs, mode="FAST_COMPILE", on_unused_input="ignore"
    )

    def call(*values: Any) -> Any:
        # A loop is compiled, or not, when it runs for the first time.
        with pytensor.config.change_flags(scanlib__perform="python"):
            return function(*values)

    return call


def assert_same(actual: Sequence, expected: Sequence, rtol: float = 1e-9, atol: float = 1e-11):
    """Compare lists of arrays: number, dtype, shape and values."""
    assert len(actual) == len(expected)
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        e = np.asarray(e)
        assert a.dtype == e.dtype, f"output {k}: dtype {a.dtype}, expected {e.dtype}"
        assert a.shape == e.shape, f"output {k}: shape {a.shape}, expected {e.shape}"
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol, err_msg=f"output {k}")


def assert_derivatives(
    cost: Any,
    inputs: dict,
    reference: Callable,
    mode: Any,
    order: int = 2,
    rtol: float = 1e-6,
    **grad_options: Any,
) -> list[np.ndarray]:
    """Hold a cost, its gradient and its Hessian against central differences of `reference`.

    Parameters
    ----------
    cost : TensorVariable
        Scalar cost, a graph of the variables in `inputs`.
    inputs : dict
        Float variables and the values to differentiate at.
    reference : callable
        NumPy function of the same values that returns the cost. It is the only source of the
        expected numbers: the second derivative is not a difference of the compiled gradient.
    mode : Mode
        Mode to compile with.
    order : {1, 2}
        Highest derivative to check. The second is checked as ``u' H v`` for random ``u``, ``v``.
    rtol : float
        Tolerance relative to the largest element of each gradient.
    **grad_options
        Passed on to ``pytensor.grad``.

    Returns
    -------
    list of ndarray
        The compiled gradient.
    """
    variables, values = list(inputs), list(inputs.values())
    gradient = pytensor.grad(cost, variables, **grad_options)
    outputs = [cost, *gradient]
    u, v = random_directions(values, seed=1), random_directions(values, seed=2)
    if order == 2:
        along_u = sum(pt.sum(g * d) for g, d in zip(gradient, u, strict=True))
        hessian_u = pytensor.grad(along_u, variables, disconnected_inputs="ignore")
        outputs.append(sum(pt.sum(h * d) for h, d in zip(hessian_u, v, strict=True)))

    results = evaluate(outputs, inputs, mode)
    np.testing.assert_allclose(results[0], reference(*values), rtol=1e-9, err_msg="cost")
    expected = central_gradient(reference, values)
    for variable, actual, wanted in zip(variables, results[1:], expected, strict=False):
        assert actual.shape == wanted.shape, f"gradient of {variable}: shape"
        scale = 1.0 + np.abs(wanted).max(initial=0.0)
        np.testing.assert_allclose(
            actual, wanted, rtol=0, atol=rtol * scale, err_msg=f"gradient of {variable}"
        )
    if order == 2:
        curvature = second_directional_derivative(reference, values, u, v)
        scale = 1.0 + abs(float(curvature))
        np.testing.assert_allclose(
            results[-1], curvature, rtol=0, atol=3e-6 * scale, err_msg="second derivative"
        )
    return results[1 : 1 + len(variables)]


def keeping_inputs(function):
    """Return a function that calls another and checks that its inputs come back unchanged."""

    def call(*values):
        before = [np.asarray(value).tobytes() for value in values]
        results = function(*values)
        for value, held in zip(values, before, strict=True):
            assert np.asarray(value).tobytes() == held, "an input was changed"
        return results

    return call
