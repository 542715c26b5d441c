"""What surrounds loops under the PyTorch linker: torch's own derivatives and batches."""

import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import get_mode
from pytensor.graph.fg import FunctionGraph

import scanlib
from tests.checks import in_python

torch = pytest.importorskip("torch", reason="the PyTorch linker needs PyTorch")

rng = np.random.default_rng(29)
REFUSED = "take the gradient with pytensor.grad"


def function_of_tensors(inputs, output):
    """Return the translation of a graph, as a function from tensors to a tensor."""
    from pytensor.link.pytorch.dispatch import pytorch_funcify

    import scanlib.backends.torch

    assert scanlib.backends.torch
    fgraph = FunctionGraph(inputs, [output], clone=True)
    get_mode("PYTORCH").optimizer.rewrite(fgraph)
    function = pytorch_funcify(fgraph)
    return lambda *tensors: function(*tensors)[0]


def affine():
    x = pt.dmatrix("x")
    h = scanlib.scan(lambda x, h: 0.37 * h + x, x, pt.zeros(2), return_updates=False)
    return function_of_tensors([x], h)


def until(rows):
    """A loop whose results' shapes depend on values."""
    x = pt.dmatrix("x")
    h = scanlib.scan(
        lambda x, h: (h + x, scanlib.until(h.sum() > 4)), x, pt.zeros(2), return_updates=False
    )
    return function_of_tensors([x], rows(h))


LOOPS = {"known": affine, "until": lambda: until(lambda h: h)}


@pytest.mark.parametrize("loop", list(LOOPS))
class TestDerivatives:
    """Torch refuses them, and takes none for zero."""

    def values(self):
        return torch.tensor(np.abs(rng.normal(size=(6, 2))))

    def test_backwards(self, loop):
        function, x = LOOPS[loop](), self.values().requires_grad_()
        cost = function(x).sum() + x.sum()  # the second term has a gradient that torch knows
        with pytest.raises(NotImplementedError, match=REFUSED):
            cost.backward()

    def test_forwards(self, loop):
        function, x = LOOPS[loop](), self.values()
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.func.jvp(function, (x,), (x,))

    def test_of_functions(self, loop):
        function, x = LOOPS[loop](), self.values()
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.func.grad(lambda x: function(x).sum())(x)
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.func.vmap(torch.func.grad(lambda x: function(x).sum()))(x[None])

    def test_values_do_not_need_them(self, loop):
        function, x = LOOPS[loop](), self.values()
        wanted = function(x)
        np.testing.assert_array_equal(function(x.requires_grad_()).detach(), wanted)
        with torch.no_grad():
            assert not function(x).requires_grad


class TestBatches:
    def test_last_rows_of_loops_that_end(self):
        function = until(lambda h: h[-1])
        x = torch.tensor(np.abs(rng.normal(size=(4, 6, 2))))
        x[0] *= 10
        found = torch.func.vmap(function)(x)
        for row, values in zip(found, x, strict=True):
            np.testing.assert_array_equal(row, function(values))

    def test_rows_of_different_numbers(self):
        x = torch.tensor(np.abs(rng.normal(size=(4, 6, 2))))
        x[0] *= 10
        with pytest.raises(ValueError, match="different numbers of steps"):
            torch.func.vmap(until(lambda h: h))(x)

    def test_axes(self):
        function, x = affine(), torch.tensor(rng.normal(size=(6, 4, 2)))
        found = torch.func.vmap(function, in_dims=1, out_dims=2)(x)
        nested = torch.func.vmap(torch.func.vmap(function, 1, 1))(torch.stack([x, 2 * x]))
        for k in range(4):
            np.testing.assert_array_equal(found[:, :, k], function(x[:, k]))
            np.testing.assert_array_equal(nested[1, :, k], function(2 * x[:, k]))


def test_remainders():
    z, w = pt.lvector("z"), pt.dvector("w")
    outputs = [z % 3, (-z) % 3, z % -3, w % -0.7]
    values = np.arange(-4, 5), np.arange(-2, 2, 0.3)
    with torch.compiler.set_stance("force_eager"):
        found = pytensor.function([z, w], outputs, mode="PYTORCH")(*values)
    expected = in_python([z, w], outputs)(*values)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other)


# What PyTensor has no conversions for, and the split of loops takes out of them.
TAKEN_OUT = {
    "the greatest item": lambda a, v, b: pt.argmax(v),
    "of a matrix": lambda a, v, b: pt.argmax(a),
    "of each column": lambda a, v, b: pt.argmax(a, axis=0),
    "of truth values": lambda a, v, b: pt.argmax(b),
    "the first of equal ones": lambda a, v, b: pt.argmax(pt.zeros_like(v)),
    "the first NaN": lambda a, v, b: pt.argmax(pt.switch(b, np.nan, v)),
    "a diagonal": lambda a, v, b: pt.diagonal(a),
    "logarithms": lambda a, v, b: pt.log1mexp(-pt.abs(v) - 0.1),
    "rounded numbers": lambda a, v, b: pt.round(v * 4),
    "powers": lambda a, v, b: pt.abs(v) ** v,
    "powers of integers": lambda a, v, b: pt.round(v * 4).astype("int64") ** 2,
    "cubes": lambda a, v, b: v**3,
}


def test_what_leaves_a_loop():
    a, v, b = pt.dtensor3("a"), pt.dmatrix("v"), pt.matrix("b", dtype="bool")
    outputs = [scanlib.map(f, [a, v, b], return_updates=False) for f in TAKEN_OUT.values()]
    outputs += [pt.argmax(a, axis=(0, 2)), a.argmax()]
    flags = np.array([[0, 0, 0], [0, 1, 1], [1, 0, 0], [0, 0, 1]], dtype=bool)
    values = rng.normal(size=(4, 3, 3)), rng.normal(size=(4, 3)), flags
    with torch.compiler.set_stance("force_eager"):
        found = pytensor.function([a, v, b], outputs, mode="PYTORCH")(*values)
    expected = in_python([a, v, b], outputs)(*values)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other)


def test_loops_of_pytensor():
    """A Jacobian is a loop of `pytensor.scan`, which adoption takes over, that of a loop always."""
    x = pt.dvector("x")
    h = scanlib.scan(lambda h: 1.1 * pt.sin(h), outputs_info=x, n_steps=5, return_updates=False)
    jacobians = [pytensor.gradient.jacobian(y, x) for y in (h[-1], pt.sin(x))]
    with pytest.raises(NotImplementedError, match=r"scanlib\.enable"):
        pytensor.function([x], jacobians[1], mode="PYTORCH")
    with scanlib.enabled(True):
        both = pytensor.function([x], jacobians, mode="PYTORCH")
    value = np.array([0.1, 0.2, 0.3])
    slopes, place = np.ones(3), value
    for _ in range(5):
        slopes, place = 1.1 * np.cos(place) * slopes, 1.1 * np.sin(place)
    with torch.compiler.set_stance("force_eager"):
        one = pytensor.function([x], jacobians[0], mode="PYTORCH")(value)
        np.testing.assert_allclose(one, np.diag(slopes))
        for found, diagonal in zip(both(value), (slopes, np.cos(value)), strict=True):
            np.testing.assert_allclose(found, np.diag(diagonal))


@pytest.mark.slow
def test_rules_are_there_where_the_dispatch_is_imported_after_the_loops():
    """Code that rewrites a graph and converts it by itself, without the linker."""
    code = (
        "import numpy as np, pytensor.tensor as pt, scanlib\n"
        "x = pt.dvector('x')\n"
        "h = scanlib.scan(lambda x, h: 0.5 * h + x, x, pt.zeros(()), return_updates=False)\n"
        "import torch\n"
        "from pytensor.compile.mode import get_mode\n"
        "from pytensor.graph.fg import FunctionGraph\n"
        "from pytensor.link.pytorch.dispatch.basic import pytorch_funcify\n"
        "graph = FunctionGraph([x], [h], clone=True)\n"
        "get_mode('PYTORCH').optimizer.rewrite(graph)\n"
        "(found,) = pytorch_funcify(graph)(torch.ones(2, dtype=torch.float64))\n"
        "assert found.tolist() == [1.0, 1.5]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
