"""Special functions of SciPy's in steps: kernels call them by their addresses."""

import numpy as np
import pytensor
import pytensor.scalar.math as psm
import pytensor.tensor as pt
import pytest
from pytensor.tensor.elemwise import Elemwise
from scipy import special

import scanlib
from scanlib.backends.handler.programs import program_of_node
from scanlib.kernels.scipy_routines import Routine, special_function
from tests.modes import MODES

# By name in PyTensor: SciPy's function, and numbers for its arguments.
FUNCTIONS = {
    "gamma": (special.gamma, [[0.5, 3.2, -1.5]]),
    "gammaln": (special.gammaln, [[0.5, 3.2, 40.0]]),
    "psi": (special.psi, [[0.5, 3.2, -1.5]]),
    "erfinv": (special.erfinv, [[0.5, -0.2, 0.99]]),
    "erfcinv": (special.erfcinv, [[0.5, 1.2, 0.01]]),
    "erfcx": (special.erfcx, [[0.5, -1.2, 30.0]]),
    "i0": (special.i0, [[0.5, -1.2, 3.0]]),
    "j1": (special.j1, [[0.5, -1.2, 3.0]]),
    "jv": (special.jv, [[0.5, 1.0, 2.0], [0.5, 1.2, 3.0]]),
    "ive": (special.ive, [[0.5, 1.0, 2.0], [0.5, 1.2, 3.0]]),
    "gammainc": (special.gammainc, [[0.5, 1.0, 2.0], [0.5, 1.2, 3.0]]),
    "gammaincc": (special.gammaincc, [[0.5, 1.0, 2.0], [0.5, 1.2, 3.0]]),
    "betainc": (special.betainc, [[0.5, 1.0, 2.0], [0.5, 1.2, 3.0], [0.1, 0.5, 0.9]]),
    "owens_t": (special.owens_t, [[0.5, 1.0, 2.0], [0.5, 1.2, 3.0]]),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_functions(name, dtype, mode):
    function, numbers = FUNCTIONS[name]
    op = Elemwise(getattr(psm, name))
    xs = [pt.vector(f"x{k}", dtype=dtype) for k in range(len(numbers))]
    start = np.zeros((), dtype)
    trace = scanlib.scan(lambda *xs: 0.5 * xs[-1] + op(*xs[:-1]), xs, start, return_updates=False)
    values = [np.array(own, dtype) for own in numbers]
    expected, level = [], 0.0
    for row in zip(*values, strict=True):
        level = 0.5 * level + function(*row)
        expected.append(level)
    found = pytensor.function(xs, trace, mode=mode)(*values)
    assert found.dtype == trace.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-12 if dtype == "float64" else 1e-5)


def test_kernels_have_them_whatever_the_step():
    """Derivatives of likelihoods of counts, in an elementwise step and in one that is none."""
    x, h = pt.dvector("x"), pt.dvector("h")
    steps = [(lambda x, h: 0.5 * h + pt.psi(x), 1.0), (lambda x, h: h[::-1] + pt.psi(x + h), h)]
    for step, start in steps:
        trace = scanlib.scan(step, x, start, return_updates=False)
        graph = pytensor.function([x, h], trace, mode=MODES["c"], on_unused_input="ignore").maker
        (loop,) = (n for n in graph.fgraph.apply_nodes if type(n.op).__name__.endswith("Scan"))
        program = program_of_node(loop)
        assert [type(function) for function in program.functions] == [Routine]


def test_what_is_no_function_of_scipys():
    assert special_function(psm.erf.__class__(name="e"), 2) is None  # of one argument
    assert special_function(pt.exp.scalar_op, 1) is None
    assert special_function(psm.tri_gamma, 1) is None
    assert special_function(psm.psi, 1).address() != special_function(psm.gamma, 1).address()
