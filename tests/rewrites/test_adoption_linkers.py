"""Loops of `pytensor.scan`, adopted, under the JAX and PyTorch linkers: values and gradients.

Of `torch.compile`, all loops go through what reads the function and makes one graph of it and of
its shapes. Torch's own compiler, which takes up to two minutes for a loop, runs for a few.
"""

import functools

import numpy as np
import pytensor
import pytest
from pytensor.compile.mode import get_mode

from tests.checks import assert_same
from tests.derivatives import central_gradient
from tests.legacy_loops import LOOPS
from tests.rewrites.test_adoption import assert_all_adopted, variables

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# As many rows as steps were taken, in a place of a longer array: an error that says so.
VALUES_ALONE = {("JAX", "outputs_until"), ("JAX", "outputs_until_that_never_comes")}
COMPILED_BY_TORCH = {"garch", "two_taps", "outputs_until"}


@pytest.fixture(params=[("JAX", "jax"), ("PYTORCH", "torch")], ids=lambda pair: pair[0])
def linker(request, monkeypatch):
    linker, package = request.param
    imported = pytest.importorskip(package)
    if linker == "PYTORCH" and request.getfixturevalue("name") not in COMPILED_BY_TORCH:
        graphs = functools.partial(imported.compile, backend="aot_eager")
        monkeypatch.setattr(imported, "compile", graphs)
    return linker


def cost_of(outputs):
    """A scalar that needs no length of an output: JAX does not know those of `until`."""
    return sum((value * value).sum() + value.sum() for value in outputs)


@pytest.mark.parametrize("name", LOOPS)
def test_values_and_gradients(name, linker):
    case = LOOPS[name]
    inputs = variables(case)
    expected = [np.asarray(value) for value in case.plain(*case.values)]
    outputs = case.build(*inputs)
    gradients = []
    if case.order and (linker, name) not in VALUES_ALONE:
        gradients = pytensor.grad(cost_of(outputs), inputs, disconnected_inputs="ignore")
    mode = get_mode(linker).including("scanlib_adopt")
    function = pytensor.function(
        inputs, [*outputs, *gradients], mode=mode, on_unused_input="ignore"
    )
    assert_all_adopted(function.maker.fgraph)
    results = [np.asarray(value) for value in function(*case.values)]
    rtol = 1e-5 if case.values[0].dtype == "float32" else 1e-9
    assert_same(results[: len(outputs)], expected, rtol=rtol)
    if gradients:

        def plain(*values):
            return cost_of([np.asarray(value) for value in case.plain(*values)])

        wanted = central_gradient(plain, case.values)
        for found, known in zip(results[len(outputs) :], wanted, strict=True):
            np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-6)
