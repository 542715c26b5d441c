"""Steps whose slices have another size at each step."""

import random

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.ops.execution import LoopOp
from tests.checks import assert_derivatives, assert_same, in_python
from tests.exploration import half
from tests.modes import MODES

rng = np.random.default_rng(5)
N = 5
A, h, k, x = pt.dmatrix("A"), pt.dvector("h"), pt.lvector("k"), pt.dvector("x")
VALUES = {A: rng.normal(size=(N, N)) + 3 * np.eye(N), h: rng.normal(size=N)}


def scan(*args, **kwargs):
    return scanlib.scan(*args, return_updates=False, **kwargs)


def assert_kernels(function):
    loops = [node for node in function.maker.fgraph.toposort() if isinstance(node.op, LoopOp)]
    assert loops
    assert all(program_of(node.op, node) is not None for node in loops)


def renewal(i, h):
    """Infections of a day from those of up to three days before."""
    n = pt.minimum(i, 3)
    return h[i].set(1.2 * (h[i - n : i][::-1] * A[0, :n]).sum() + 0.1)


def plain_renewal(i, h, A):
    n = min(i, 3)
    h[i] = 1.2 * (h[i - n : i][::-1] * A[0, :n]).sum() + 0.1


def substitution(i, h):
    return h[i].set((h[i] - A[i, :i] @ h[:i]) / A[i, i])


def plain_substitution(i, h, A):
    h[i] = (h[i] - A[i, :i] @ h[:i]) / A[i, i]


def block(i, h):
    m = pt.minimum(i + 1, 3)
    return h[:m].set(pt.linalg.solve(A[:m, :m], h[:m]))


def plain_block(i, h, A):
    m = min(i + 1, 3)
    h[:m] = np.linalg.solve(A[:m, :m], h[:m])


def inner(i, h):
    """A loop over a slice, whose history is read, and one whose number of steps is bounded."""
    trace = scan(lambda a, g: pt.tanh(g + a), h[:i], np.float64(0.2))
    steps = scan(lambda g: 0.5 * g, None, h[i], n_steps=pt.minimum(i, 3))
    return h[i].inc(trace.sum() + (steps**2).sum())


def plain_inner(i, h, A):
    g, total, s = 0.2, 0.0, h[i]
    for a in h[:i]:
        g = np.tanh(g + a)
        total += g
    for _ in range(min(i, 3)):
        s = 0.5 * s
        total += s**2
    h[i] += total


def rotated(i, h):
    weights = pt.arange(pt.minimum(i, 4))
    return pt.concatenate([h[i:], h[:i] * 0.5]) + (h[: weights.shape[0]] * weights).sum()


def plain_rotated(i, h, A):
    n = min(i, 4)
    h[:] = np.concatenate([h[i:], h[:i] * 0.5]) + (h[:n] * np.arange(n)).sum()


def limited(i, h):
    """A size that another one, which changes as well, limits."""
    m = pt.minimum(i, h[: i - 1].shape[0])
    return h[i].inc((pt.zeros(m) + h[:m]).sum())


def plain_limited(i, h, A):
    h[i] += h[: min(i, len(h[: i - 1]))].sum()


STEPS = [
    (renewal, plain_renewal),
    (substitution, plain_substitution),
    (block, plain_block),
    (inner, plain_inner),
    (rotated, plain_rotated),
    (limited, plain_limited),
]


@pytest.mark.parametrize("step, plain", STEPS, ids=lambda value: value.__name__)
def test_values_and_gradients(step, plain, mode):
    last = scan(step, pt.arange(h.shape[0]), h)[-1]
    cost = (last**2).sum()

    def reference(A, h):
        h = h.copy()
        for i in range(len(h)):
            plain(i, h, A)
        return (h**2).sum()

    used = {v: VALUES[v] for v in (A, h) if v in pytensor.graph.traversal.ancestors([cost])}
    plain_cost = reference if A in used else lambda h: reference(None, h)
    assert_derivatives(cost, used, plain_cost, mode, order=1)
    if mode is not MODES["py"]:
        assert_kernels(pytensor.function([*used], pytensor.grad(cost, [*used]), mode=mode))


def test_elimination(mode):
    """Rows below a pivot and columns to its right, as in a factorization by hand."""

    def step(i, A):
        factors = A[i + 1 :, i] / A[i, i]
        return A[i + 1 :, i:].inc(-pt.outer(factors, A[i, i:]))

    U = scan(step, pt.arange(A.shape[0]), A)[-1]
    cost = pt.log(abs(pt.diagonal(U))).sum()
    values = {A: VALUES[A]}
    assert_derivatives(cost, values, lambda A: np.linalg.slogdet(A)[1], mode, order=1)


def test_sizes_that_differ_at_a_step(fast_mode):
    trace = scan(lambda i, j: (h[:i] * x[:j]).sum(), [pt.arange(k.shape[0]), k])
    function = pytensor.function([k, h, x], trace, mode=fast_mode)
    assert_kernels(function)
    assert_same([function([0, 1, 2], np.ones(5), np.ones(3))], [np.array([0.0, 1.0, 2.0])])
    with pytest.raises(ValueError, match=r"at step 2: .*sizes 2 and 3"):
        function([0, 1, 3], np.ones(5), np.ones(3))


@pytest.mark.parametrize("m", [-1000, 0, 4])
def test_sizes_that_are_bounded_by_arithmetic(fast_mode, m):
    """A bound below zero asks for no memory, and takes none from others."""
    most = pt.lscalar("most")

    def step(k, h):
        low = pt.maximum(k, 1)
        before = pt.cumsum(h)
        sizes = pt.minimum(k, most) + 1, 6 - low, pt.clip(k, 0, 2) - (-most), 9 + -low
        sizes = *sizes, low // 2, k % 3
        parts = [pt.arange(pt.maximum(n, 0)).sum() for n in sizes]
        return pt.tanh(before - pt.cumsum(before)[::-1] + 0.01 * sum(parts))

    trace = scan(step, k, h)
    function = pytensor.function([k, h, most], trace, mode=fast_mode)
    assert_kernels(function)
    numbers, state = [3, 0, -2, 7], np.ones(200)
    expected = []
    for number in numbers:
        low, before = max(number, 1), np.cumsum(state)
        sizes = min(number, m) + 1, 6 - low, np.clip(number, 0, 2) + m, 9 - low
        sizes = *sizes, low // 2, number % 3
        parts = [np.arange(max(n, 0)).sum() for n in sizes]
        state = np.tanh(before - np.cumsum(before)[::-1] + 0.01 * sum(parts))
        expected.append(state)
    assert_same([function(numbers, np.ones(200), m)], [expected], rtol=1e-12)


def test_loops_over_ranges_two_levels_down(fast_mode):
    """Chain products: the cheapest of all ways to cut a span, for spans longer and longer."""
    sizes = pt.dvector("sizes")
    n = sizes.shape[0] - 1

    def of_length(length, costs):
        def from_start(i, costs):
            def cut(k, best):
                product = sizes[i] * sizes[i + k + 1] * sizes[i + length + 1]
                return pt.minimum(best, costs[i, i + k] + costs[i + k + 1, i + length] + product)

            cheapest = scan(cut, pt.arange(length), pt.constant(np.inf))[-1]
            return costs[i, i + length].set(cheapest)

        return scan(from_start, pt.arange(n - length), costs)[-1]

    costs = scan(of_length, pt.arange(1, n), pt.zeros((n, n)))[-1]
    function = pytensor.function([sizes], costs[0, n - 1], mode=fast_mode)
    assert_kernels(function)
    for given in ([30.0, 35, 15, 5, 10, 20, 25], [2.0, 3, 4]):
        plain = np.zeros((len(given), len(given)))
        for length in range(1, len(given) - 1):
            for i in range(len(given) - 1 - length):
                plain[i, i + length] = min(
                    plain[i, i + k]
                    + plain[i + k + 1, i + length]
                    + given[i] * given[i + k + 1] * given[i + length + 1]
                    for k in range(length)
                )
        assert function(given) == plain[0, len(given) - 2]


LENGTHS = pytensor.shared(np.array([2, 0, 6, 1]), name="lengths")


def _triangle(i, h):
    """A loop over all before, whose values are all read: its gradient stores them."""
    trace = scan(lambda j, g: pt.tanh(g + x[j] * h), pt.arange(i), pt.zeros(()))
    return h / 2 + (trace**2).sum()


def _plain_triangle(i, h, x):
    g = total = 0.0
    for j in range(i):
        g = np.tanh(g + x[j] * h)
        total += g**2
    return h / 2 + total


def _weights(i, h):
    return pt.tanh(h + (0.9 ** pt.arange(i)[::-1] * x[:i]).sum() + pt.zeros(i + 1).shape[0] / 7)


def _plain_weights(i, h, x):
    return np.tanh(h + (0.9 ** np.arange(i)[::-1] * x[:i]).sum() + (i + 1) / 7)


@pytest.mark.parametrize("step, plain", [(_triangle, _plain_triangle), (_weights, _plain_weights)])
@pytest.mark.parametrize(
    "rows, numbers",
    [
        (pt.arange(1, x.shape[0]), range(1, 6)),
        (pt.arange(x.shape[0] - 1, 0, -2), range(5, 0, -2)),
        (pt.arange(x.shape[0])[1:][::-1], range(5, 0, -1)),
        (LENGTHS, (2, 0, 6, 1)),
        (LENGTHS[:0], ()),
        (pt.constant(np.array([2, 1, 3])), (2, 1, 3)),
    ],
    ids=["range", "falling", "slice", "data", "none", "constant"],
)
def test_sizes_by_rows_of_a_sequence(fast_mode, step, plain, rows, numbers):
    """Memory is taken for the largest of all."""
    value, start = pt.scalar("start"), np.array(0.3)
    trace = scan(step, rows, pt.ones(()) * value)
    cost, data = (trace**2).sum(), rng.normal(size=6)
    values = {value: start, x: data}

    def reference(h, x):
        total = 0.0
        for i in numbers:
            h = plain(i, h, x)
            total += h**2
        return total

    assert_derivatives(cost, values, reference, fast_mode, order=1)
    gradients = pytensor.grad(cost, [value, x], disconnected_inputs="ignore")
    if len(numbers):
        assert_kernels(pytensor.function([value, x], gradients, mode=fast_mode))


def test_memory_for_sizes_whose_largest_are_of_different_steps(fast_mode):
    """An array by both would have 10^12 numbers; those that steps make have 10^6."""
    columns = pt.lvector("columns")

    def step(rows, columns, total):
        return total + pt.cumsum(pt.zeros((rows, columns)) + total, axis=0).sum() / 1e6

    trace = scan(step, [k, columns], pt.ones(()))
    function = pytensor.function([k, columns], trace, mode=fast_mode)
    assert_same([function([10**6, 1], [1, 10**6])], [np.array([500_001.5, 1_000_003.0])])


# Generated steps


def place(choice, i, j, n):
    """Return where a slice begins or ends."""
    kinds = [i, j, pt.minimum(i, j), i - j, -j, n - i, None, choice.randint(-3, 3)]
    return choice.choice(kinds)


def part(choice, array, i, j):
    n = array.shape[0]
    by = choice.choice([None, None, 1, 2, -1, -2])
    return array[place(choice, i, j, n) : place(choice, i, j, n) : by]


CHANGES = (
    lambda y, z: pt.sin(y),
    lambda y, z: pt.cumsum(y),
    lambda y, z: pt.concatenate([y, z[:2]])[1:],
    lambda y, z: pt.zeros(y.shape[0]) + y * y,
    lambda y, z: pt.sort(y),
    lambda y, z: (y[:, None] * z[None, :2]).sum(1),
    lambda y, z: y * z[: y.shape[0]] if y is z else y[: z.shape[0]] * z[: y.shape[0]],
    lambda y, z: scan(lambda a, g: pt.tanh(0.5 * g + a), y, np.float64(0.0)),
)
WRITES = (
    lambda h, y, i, j: 0.5 * h + pt.tanh(y.sum()),
    lambda h, y, i, j: h[i % h.shape[0]].set(pt.tanh(pt.dot(y, y))),
    lambda h, y, i, j: h[:j].set(h[:j][::-1] * 0.5 + pt.tanh(y.sum())),
    lambda h, y, i, j: h[-j:].inc(0.1 * h[-j:] * (y**2).sum()),
)


@pytest.mark.parametrize("seed", half(0, 40))
def test_generated_steps(seed, fast_mode):
    choice = random.Random(seed)

    def step(i, j, v, h):
        y, z = (part(choice, choice.choice([h, x, A[:, 0], A[i % 3]]), i, j) for _ in range(2))
        for _ in range(choice.randint(1, 2)):
            y = choice.choice(CHANGES)(y, z)
        return choice.choice(WRITES)(h, y, i, j) + 0.1 * v

    traces = scan(step, [pt.arange(k.shape[0]), k, x], h)
    cost = (traces[-1] ** 2).sum() + traces.sum()
    outputs = [traces, *pytensor.grad(cost, [h, x, A], disconnected_inputs="ignore")]
    inputs, values = [k, x, h, A], []
    for size in (1, 6):
        own = np.random.default_rng(seed + size)
        numbers = own.integers(0, 5, size), own.normal(size=size), own.normal(size=7)
        values.append((*numbers, own.normal(size=(4, 4))))
    plain = in_python(inputs, outputs)
    function = pytensor.function(inputs, outputs, mode=fast_mode, on_unused_input="ignore")
    assert_kernels(function)
    for given in values:
        assert_same(function(*given), plain(*given))
