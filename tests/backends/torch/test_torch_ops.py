"""PyTensor's own Ops around loops under the PyTorch linker: what leaves a step, or is made for it.

Expected values are NumPy's and SciPy's, row by row.
"""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytensor.tensor.linalg as linalg
import pytest
import scipy.linalg
import scipy.special
from pytensor.graph.replace import vectorize_graph

import scanlib
from scanlib._compat import IfElse

torch = pytest.importorskip("torch", reason="the PyTorch linker needs PyTorch")

rng = np.random.default_rng(31)


@pytest.fixture(autouse=True)
def eager(request):
    """PyTensor's functions without `torch.compile`, which takes seconds for each."""
    stance = "default" if "compiled" in request.node.name else "force_eager"
    with torch.compiler.set_stance(stance):
        yield


V = rng.normal(size=(4, 3))
A = rng.normal(size=(4, 3, 3))
PLACES = rng.integers(0, 3, size=(4, 3))
# By the dtype of rows: named values, and functions of them in PyTensor and in NumPy.
VALUES = {
    "v": V,
    "s": A @ A.transpose(0, 2, 1) + np.eye(3),
    "i": PLACES,
    "b": PLACES > 1,
    "c": V + 1j * V[::-1],
    "f": V.astype("float32"),
    "k": (40 * PLACES).astype("int8"),
    "u": (100 * PLACES).astype("uint8"),
    "w": (20_000 * PLACES).astype("uint16"),
    "h": V.astype("float16"),
}
FUNCTIONS = {
    "gamma": (lambda v: pt.gamma(pt.abs(v)), lambda v: scipy.special.gamma(abs(v))),
    "trigamma": (
        lambda v: pt.tri_gamma(pt.abs(v)),
        lambda v: scipy.special.polygamma(1, abs(v)),
    ),
    "Bessel": (lambda v: pt.jv(2, v), lambda v: scipy.special.jv(2, v)),
    "incomplete beta": (
        lambda v: pt.betainc(pt.abs(v), 2.0, 0.3),
        lambda v: scipy.special.betainc(abs(v), 2.0, 0.3),
    ),
    "half away": (
        lambda v: pt.round(v * 3, mode="half_away_from_zero"),
        lambda v: np.trunc(v * 3 + np.copysign(0.5, v)),
    ),
    "softplus": (lambda v: pt.softplus(30 * v), lambda v: np.logaddexp(30 * v, 0)),
    "sign of NaN": (lambda v: pt.sign(pt.log(v)), lambda v: np.sign(np.log(v))),
    "half precision": (lambda h: pt.erfcx(h), lambda h: scipy.special.erfcx(h).astype(h.dtype)),
    "logarithms of integers": (lambda i: pt.log(i + 2), lambda i: np.log(i + 2)),
    "quotients of integers": (lambda i: 1 / (i + 2), lambda i: 1 / (i + 2)),
    "sums of int8": (lambda k: pt.add(k, k, k), lambda k: k + k + k),
    "sums of truth values": (lambda b: pt.add(b, b, b), lambda b: b),
    "several dtypes": (lambda i, f: pt.lt(i, f) + i * f, lambda i, f: (i < f) + i * np.float64(f)),
    "uint16": (lambda w: w.max() - w // 7, lambda w: w.max() - w // 7),
    "uint8 along an axis": (lambda u: u.sum(), lambda u: u.sum()),
    "joined dtypes": (lambda i, f: pt.concatenate([i, f]), lambda i, f: np.concatenate([i, f])),
    "softmax of integers": (
        lambda i: pt.special.softmax(i, axis=-1),
        lambda i: scipy.special.softmax(i.astype(float)),
    ),
    "conjugates": (lambda c: pt.conj(c), lambda c: np.conj(c)),
    "complex numbers": (lambda v, f: pt.complex(v, f), lambda v, f: v + 1j * f),
    "factors": (lambda s: linalg.cholesky(s), np.linalg.cholesky),
    "solutions": (
        lambda s, v: linalg.solve(s, v, assume_a="pos"),
        lambda s, v: np.linalg.solve(s, v),
    ),
    "exponentials": (lambda s: linalg.expm(s / 9), lambda s: scipy.linalg.expm(s / 9)),
    "small places": (lambda v, u: v[u // 100], lambda v, u: v[u // 100]),
    "a small place": (lambda v, u: v[u[0] // 100], lambda v, u: v[u[0] // 100]),
    "changed at small places": (
        lambda v, k: pt.inc_subtensor(v[k // 40], 1.0),
        lambda v, k: v + np.bincount(k // 40, minlength=3),
    ),
    "columns by places": (
        lambda s, i: pt.inc_subtensor(s[:, i], 1.0),
        lambda s, i: s + np.bincount(i, minlength=3),
    ),
    "places in a sorted array": (
        lambda v: pt.searchsorted(pt.sort(v), v),
        lambda v: np.argsort(np.argsort(v)),
    ),
}


def arguments(function):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return list(names)


def placeholders(rows):
    return {
        name: pt.TensorType(x.dtype, shape=(None, *x.shape[1:]) if rows else x.shape[1:])(name)
        for name, x in VALUES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a map", "outside"])
@pytest.mark.filterwarnings("ignore")
def test_ops_without_conversions(where):
    """In a loop that becomes one batch, and in the graph around loops."""
    rows = where == "a map"
    inputs = placeholders(rows)
    outputs = []
    for function, _ in FUNCTIONS.values():
        given = [inputs[name] for name in arguments(function)]
        value = scanlib.map(function, given, return_updates=False) if rows else function(*given)
        outputs.append(value)
    values = VALUES if rows else {name: x[1] for name, x in VALUES.items()}
    used = [n for n in inputs if any(n in arguments(f) for f, _ in FUNCTIONS.values())]
    compiled = pytensor.function([inputs[n] for n in used], outputs, mode="PYTORCH")
    results = compiled(*(values[n] for n in used))
    for (name, (function, expected)), out, found in zip(
        FUNCTIONS.items(), outputs, results, strict=True
    ):
        given = [values[n] for n in arguments(function)]
        wanted = (
            np.array([expected(*items) for items in zip(*given, strict=True)])
            if rows
            else expected(*given)
        )
        assert found.dtype == out.type.dtype, name
        tolerance = 2e-3 if out.type.dtype == "float16" else 1e-12
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-12, err_msg=name)


def recurrence():
    """A loop with functions that torch does not have in it, before it, and after it."""
    v, w = pt.dmatrix("v"), pt.dvector("w")

    def step(v, h, w):
        following = 0.5 * h + pt.gamma(pt.abs(v) + 1) * pt.gamma(w)
        return following, pt.gammainc(pt.abs(v), 0.3), pt.tri_gamma(following)

    traces = scanlib.scan(step, v, [pt.zeros(3), None, None], non_sequences=w, return_updates=False)
    cost = sum(trace.sum() for trace in traces)
    return [v, w], [*traces, *pytensor.grad(cost, [v, w])]


def expected_recurrence(v, w):
    drive = scipy.special.gamma(abs(v) + 1) * scipy.special.gamma(w)
    h, states = np.zeros(3), []
    for row in drive:
        h = 0.5 * h + row
        states.append(h)
    states = np.array(states)
    owed, total = np.zeros(3), np.zeros_like(v)
    for t in reversed(range(len(v))):
        owed = 0.5 * owed + 1 + scipy.special.polygamma(2, states[t])
        total[t] = owed
    by_w = (total * drive * scipy.special.psi(w)).sum(0)
    a = abs(v)
    step = 1e-5  # SciPy has no derivative of gammainc by its first argument
    slope = (scipy.special.gammainc(a + step, 0.3) - scipy.special.gammainc(a - step, 0.3)) / (
        2 * step
    )
    by_v = np.sign(v) * (total * drive * scipy.special.psi(a + 1) + slope)
    outputs = scipy.special.gammainc(a, 0.3), scipy.special.polygamma(1, states)
    return [states, *outputs, by_v, by_w]


def check_recurrence(function):
    values = V, np.array([0.4, 1.1, 2.3])
    for found, wanted in zip(function(*values), expected_recurrence(*values), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("perform", ["auto", "python"])
def test_functions_in_and_around_a_loop(perform):
    """By the compiled loop, and by functions of tensors, which other devices run."""
    with pytensor.config.change_flags(scanlib__perform=perform):
        check_recurrence(pytensor.function(*recurrence(), mode="PYTORCH"))


@pytest.mark.slow
def test_functions_in_a_compiled_graph():
    check_recurrence(pytensor.function(*recurrence(), mode="PYTORCH"))


def test_batches_of_torch():
    from pytensor.compile.mode import get_mode
    from pytensor.graph.fg import FunctionGraph
    from pytensor.link.pytorch.dispatch import pytorch_funcify

    import scanlib.backends.torch

    assert scanlib.backends.torch
    v = pt.dvector("v")
    graph = FunctionGraph([v], [pt.jv(2, v)], clone=True)
    get_mode("PYTORCH").optimizer.rewrite(graph)
    function = pytorch_funcify(graph)
    found = torch.func.vmap(lambda v: function(v)[0])(torch.tensor(V))
    np.testing.assert_allclose(found, scipy.special.jv(2, V))


def test_batches_of_parts():
    """Sizes that a tensor says, which `torch.vmap` does not read."""
    x, sizes, rows = pt.dvector("x"), pt.lvector("sizes"), pt.dmatrix("rows")
    parts = pt.split(x, splits_size=sizes, n_splits=2)
    outputs = vectorize_graph([parts[0], parts[1] * 2], {x: rows})
    function = pytensor.function([rows, sizes], outputs, mode="PYTORCH")
    one, two = function(V, [1, 2])
    np.testing.assert_array_equal(one, V[:, :1])
    np.testing.assert_array_equal(two, 2 * V[:, 1:])


def test_choices_of_whole_arrays():
    v, n = pt.dvector("v"), pt.lscalar("n")
    chosen = IfElse(n_outs=1)(n > 0, v, -v)
    doubled = scanlib.map(lambda x: 2 * x, chosen, return_updates=False)
    function = pytensor.function([v, n], [chosen, doubled], mode="PYTORCH")
    for n, sign in ((1, 1), (0, -1)):
        one, two = function(V[0], n)
        np.testing.assert_array_equal(one, sign * V[0])
        np.testing.assert_array_equal(two, 2 * sign * V[0])


def test_what_has_no_tensors_is_refused_by_name():
    x = pytensor.sparse.csr_matrix("x", dtype="float64")
    with pytest.raises(NotImplementedError, match=r"DenseFromSparse|dense_from_sparse"):
        pytensor.function([x], pytensor.sparse.dense_from_sparse(x), mode="PYTORCH")


class TestRandomDraws:
    """Drawn by NumPy, whose generators go through torch untouched."""

    def test_of_a_stream(self):
        stream = pt.random.RandomStream(seed=3)
        x = pt.dvector("x")
        h, updates = scanlib.scan(
            lambda x, h: 0.5 * h + x + stream.normal(0, 1), x, np.float64(0.0)
        )
        (generator,) = updates
        numpy_generator = np.random.default_rng()
        numpy_generator.bit_generator.state = generator.get_value().bit_generator.state
        function = pytensor.function([x], h, updates=updates, mode="PYTORCH")
        for _ in range(2):
            state, wanted = 0.0, []
            for x_t in np.arange(4.0):
                state = 0.5 * state + x_t + numpy_generator.normal()
                wanted.append(state)
            np.testing.assert_allclose(function(np.arange(4.0)), wanted)

    def test_of_a_generator_that_is_handed_on(self):
        generator = pytensor.shared(np.random.default_rng(1))

        def step(h, generator):
            after, draw = pt.random.normal(rng=generator).owner.outputs
            return [h + draw, after]

        h, last = scanlib.scan(
            step, outputs_info=[pt.constant(0.0), generator], n_steps=3, return_updates=False
        )
        function = pytensor.function([], [h, last], mode="PYTORCH")
        wanted = np.random.default_rng(1)
        draws = wanted.normal(size=3)
        for _ in range(2):  # without an update the generator stays where it is
            found, after = function()
            np.testing.assert_allclose(found, np.cumsum(draws))
            assert after.bit_generator.state == wanted.bit_generator.state

    def test_outside_of_loops(self):
        noise, a = (
            pt.random.normal(0, 1, size=5, rng=pytensor.shared(np.random.default_rng(8))),
            0.9,
        )
        h = scanlib.scan(lambda e, h: a * h + e, noise, np.float64(0.0), return_updates=False)
        state, wanted = 0.0, []
        for e in np.random.default_rng(8).normal(size=5):
            state = 0.9 * state + e
            wanted.append(state)
        np.testing.assert_allclose(pytensor.function([], h, mode="PYTORCH")(), wanted)

    def test_gradients(self):
        stream, a = pt.random.RandomStream(seed=7), pt.dscalar("a")
        h, updates = scanlib.scan(
            lambda h: a * h + stream.normal(0, 1), outputs_info=np.float64(1.0), n_steps=6
        )
        (generator,) = updates
        draws = np.random.default_rng()
        draws.bit_generator.state = generator.get_value().bit_generator.state
        outputs = [h[-1], pytensor.grad(h[-1], a)]
        function = pytensor.function([a], outputs, updates=updates, mode="PYTORCH")
        state, slope = 1.0, 0.0
        for draw in draws.normal(size=6):
            slope = state + 0.5 * slope
            state = 0.5 * state + draw
        np.testing.assert_allclose(function(0.5), [state, slope])

    @pytest.mark.slow
    def test_in_a_compiled_graph(self):
        stream = pt.random.RandomStream(seed=9)
        h, updates = scanlib.scan(
            lambda h: (h + stream.uniform(0, 1), scanlib.until(h > 2)),
            outputs_info=np.float64(0.0),
            n_steps=50,
        )
        (generator,) = updates
        draws = np.random.default_rng()
        draws.bit_generator.state = generator.get_value().bit_generator.state
        function = pytensor.function([], [h, 2 * h[-1]], updates=updates, mode="PYTORCH")
        for _ in range(2):
            wanted, before = [], 0.0
            while before <= 2:
                before = wanted[-1] if wanted else 0.0
                wanted.append(before + draws.uniform())
            found, last = function()
            np.testing.assert_allclose(found, wanted)
            np.testing.assert_allclose(last, 2 * wanted[-1])
