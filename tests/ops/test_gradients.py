"""Gradients, to second order, against finite differences of the plain Python loop.

Steps and costs are written once, as functions of a module that has ``tanh``, ``sum`` and the like:
NumPy for the reference and ``pytensor.tensor`` for the loop under test.
"""

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.gradient import DisconnectedInputError, grad_clip, pushforward
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import toposort
from pytensor.ifelse import ifelse

import scanlib
from scanlib.ops.graph import applies
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives, evaluate
from tests.derivatives import (
    central_gradient,
    directional_derivative,
    random_directions,
    second_directional_derivative,
)
from tests.modes import MODES
from tests.reference import reference_scan

rng = np.random.default_rng(20240229)


def check(
    mode,
    step,
    cost,
    sequences=(),
    states=(),
    non_sequences=(),
    order=2,
    until=False,
    n_steps=None,
    go_backwards=False,
    **grad_options,
):
    """Check the derivatives of a cost of a loop with respect to all its float inputs.

    Parameters
    ----------
    mode : Mode
    step : callable
        ``step(xp)`` returns the step function, whose list of values ends with the condition if
        `until` is set.
    cost : callable
        ``cost(xp, *traces)`` returns a scalar.
    sequences, states, non_sequences : sequence
        Arrays, pairs of an array and its taps, or None for an output.
    """
    leaves = []

    def lay_out(wrap):
        def entry(spec, key):
            if isinstance(spec, tuple):
                return {key: wrap(spec[0]), "taps": spec[1]}
            return None if spec is None else wrap(spec)

        return {
            "sequences": [entry(spec, "input") for spec in sequences],
            "outputs_info": [entry(spec, "initial") for spec in states],
            "non_sequences": [entry(spec, "") for spec in non_sequences],
            "n_steps": n_steps,
            "go_backwards": go_backwards,
        }

    def new_variable(value):
        leaves.append((pt.tensor(dtype=value.dtype, shape=(None,) * value.ndim), value))
        return leaves[-1][0]

    def symbolic_step(*args):
        values = list(step(pt)(*args))
        return (values[:-1], scanlib.until(values[-1])) if until else values

    traces, updates = scanlib.scan(symbolic_step, **lay_out(new_variable), return_list=True)
    assert not updates
    inputs = {variable: value for variable, value in leaves if value.dtype == "float64"}
    fixed = {variable: value for variable, value in leaves if value.dtype != "float64"}

    def reference(*floats):
        values = iter(floats)
        loop = lay_out(lambda value: next(values) if value.dtype == "float64" else value)
        return cost(np, *reference_scan(step(np), until=until, **loop))

    symbolic_cost = cost(pt, *traces)
    if fixed:
        givens = {variable: pt.constant(value) for variable, value in fixed.items()}
        symbolic_cost = clone_replace(symbolic_cost, givens)
    return assert_derivatives(symbolic_cost, inputs, reference, mode, order, **grad_options)


def tanh_step(xp):
    return lambda x, h, a: [xp.tanh(a * h + x)]


def sum_of_squares(xp, *traces):
    return sum(xp.sum(trace**2) for trace in traces)


class TestFirstAndSecondOrder:
    @pytest.mark.slow
    def test_single_state(self, mode):
        check(
            mode, tanh_step, sum_of_squares, [rng.normal(size=6)], [np.array(0.3)], [np.array(0.8)]
        )

    @pytest.mark.slow
    def test_rows_that_are_vectors(self, mode):
        def step(xp):
            return lambda x, h, W: [xp.tanh(xp.dot(h, W) + x)]

        x, h0, W = rng.normal(size=(4, 3)), rng.normal(size=3), 0.5 * rng.normal(size=(3, 3))
        check(mode, step, sum_of_squares, [x], [h0], [W])

    @pytest.mark.slow
    def test_several_states(self, mode):
        def step(xp):
            def one_step(x, u, v, a, b):
                return [xp.tanh(a * u + b * v * x), xp.sin(u - v) + b, u * v]

            return one_step

        states = [np.array(0.3), np.array(-0.2), None]
        parameters = [np.array(0.8), np.array(0.4)]
        check(mode, step, sum_of_squares, [rng.normal(size=5)], states, parameters)

    @pytest.mark.slow
    def test_taps(self, mode):
        def step(xp):
            def one_step(x_next, x_last, h_3, h_1, a):
                return [xp.tanh(a * h_3 + 0.5 * h_1 * x_next) + x_last**2]

            return one_step

        sequence, state = (rng.normal(size=8), [1, -1]), (rng.normal(size=3), [-3, -1])
        check(mode, step, sum_of_squares, [sequence], [state], [np.array(0.7)])

    def test_initial_rows_that_no_step_reads(self, mode):
        def step(xp):
            return lambda h_2, a: [xp.sin(a * h_2)]

        state = (rng.normal(size=4), [-2])
        gradient = check(mode, step, sum_of_squares, [], [state], [np.array(0.7)], n_steps=3)
        assert gradient[0][:2].all()
        assert not gradient[0][2:].any()

    @pytest.mark.slow
    def test_go_backwards(self, mode):
        def step(xp):
            return lambda x, x_next, h, a: [xp.tanh(a * h + x * x_next)]

        sequence = (rng.normal(size=7), [0, 1])
        check(
            mode,
            step,
            lambda xp, h: xp.sum(h**2) + h[-1],
            [sequence],
            [np.array(0.3)],
            [np.array(0.8)],
            n_steps=4,
            go_backwards=True,
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("limit", [-1.0, 2.0, 1e9], ids=["first", "middle", "never"])
    def test_until(self, mode, limit):
        def step(xp):
            return lambda x, h, a: [h * a + x, h * a + x > limit]

        check(
            mode,
            step,
            lambda xp, h: xp.sum(h**2) * h[-1],
            [np.linspace(0.3, 0.9, 8)],
            [np.array(0.2)],
            [np.array(0.8)],
            until=True,
        )

    @pytest.mark.slow
    def test_until_with_taps_and_outputs(self, mode):
        def step(xp):
            def one_step(h_1, h_2, a):
                h = xp.sin(a * h_1) + 0.8 * h_2
                return [h, h**2 * a, h > 1.6]

            return one_step

        state = (np.array([0.4, 0.5]), [-1, -2])
        check(
            mode, step, sum_of_squares, [], [state, None], [np.array(0.9)], until=True, n_steps=20
        )

    @pytest.mark.slow
    def test_integer_and_disconnected_outputs(self, mode):
        def step(xp):
            def one_step(x, k, h, count, a, b):
                return [xp.tanh(a * h + x * k), count + k, k * 2, xp.sin(b * h), x]

            return one_step

        check(
            mode,
            step,
            lambda xp, h, count, doubled, wave, echo: xp.sum(h * count) + xp.sum(h * doubled),
            [rng.normal(size=5), np.array([1, 2, 0, 3, 1])],
            [np.array(0.3), np.array(2), None, None, None],
            [np.array(0.8), np.array(0.5)],
            disconnected_inputs="ignore",
        )

    @pytest.mark.parametrize("checkpoint", [None, 2])
    def test_integers_that_make_integers(self, checkpoint, python_kernels, fast_mode):
        """As for all of PyTensor's operations, an integer result has no derivative."""
        x, k, start = pt.vector("x"), pt.lvector("k"), pt.lscalar("start")
        (h, count, doubled), _ = scanlib.scan(
            lambda x, k, h, count: [h * x, count + k, 2 * count],
            [x, k],
            [np.float64(1.0), start, None],
            checkpoint=checkpoint,
        )
        cost = pt.sum(h * count) + pt.sum(doubled * 0.5)
        f = pytensor.function([x, k, start], pytensor.grad(cost, [x, k, start]), mode=fast_mode)
        by_x, *others = f(np.array([1.0, 2.0, 3.0]), [1, 2, 3], 1)
        np.testing.assert_allclose(by_x, [2 + 8 + 42, 4 + 21, 14])
        for zero, shape in zip(others, [(3,), ()], strict=True):
            assert zero.dtype == "float64"
            assert zero.shape == shape
            assert not zero.any()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "cost",
        [
            lambda xp, h: h[-1] ** 2,
            lambda xp, h: h[2] ** 3,
            lambda xp, h: xp.sum(h[:-1] ** 2),
            lambda xp, h: xp.sum(h[::-2] ** 2),
            lambda xp, h: xp.sum(xp.cumsum(h) ** 2),
        ],
        ids=["last", "middle", "but_last", "strided", "all"],
    )
    def test_cost_on_some_steps(self, fast_mode, cost):
        x, h0, a = rng.normal(size=6), np.array(0.3), np.array(0.8)
        check(fast_mode, tanh_step, cost, [x], [h0], [a])

    @pytest.mark.slow
    @pytest.mark.parametrize("steps", [0, 1, 2])
    def test_few_steps(self, mode, steps):
        x, h0, a = rng.normal(size=(steps, 2)), rng.normal(size=2), np.array(0.8)
        gradient = check(mode, tanh_step, sum_of_squares, [x], [h0], [a])
        assert [g.shape for g in gradient] == [(steps, 2), (2,), ()]

    @pytest.mark.slow
    def test_few_steps_with_taps(self, mode):
        def step(xp):
            return lambda h_1, h_3, a: [xp.sin(a * h_1 + h_3)]

        state = (rng.normal(size=(3, 2)), [-1, -3])
        check(mode, step, sum_of_squares, [], [state], [np.array(0.7)], n_steps=1)

    @pytest.mark.slow
    @pytest.mark.parametrize("backwards", [False, True])
    def test_echoes(self, mode, backwards):
        def step(xp):
            def one_step(x, u_1, u_2, v, w, a):
                return [v, w, x * a, u_2]

            return one_step

        states = [(np.array([0.3, 0.1]), [-1, -2]), np.array(-0.2), np.array(0.7), None]
        cost = lambda xp, u, v, w, z: xp.sum(u**3) + xp.sum(v**2) + xp.sum(w) * xp.sum(z**2)  # noqa: E731
        check(
            mode,
            step,
            cost,
            [rng.normal(size=5)],
            states,
            [np.array(0.8)],
            go_backwards=backwards,
        )


def turned(xp, y):
    return xp.concatenate([y[1:], y[:1]])


# Of x, h (4,), W (4, 4), a (4,) and c. Their gradients write rows of unknown length beside
# arrays of length one.
JOINED = {
    "turned": lambda xp, x, h, W, a, c: turned(xp, (y := a * xp.tanh(W @ h) + c * x) - xp.mean(y)),
    "by numbers": lambda xp, x, h, W, a, c: turned(
        xp, (y := c * xp.tanh(W @ h + a) * x) - y.mean()
    ),
    "one replaced": lambda xp, x, h, W, a, c: xp.concatenate(
        [xp.stack([c * x]), (W @ (a * h))[1:]]
    ),
    "mean of both": lambda xp, x, h, W, a, c: turned(xp, xp.tanh(W @ h) * x) + xp.mean(h * a * c),
}


@pytest.mark.parametrize("name", JOINED)
def test_joined_and_broadcast_parts(name, mode):
    def step(xp):
        return lambda *arguments: [JOINED[name](xp, *arguments)]

    parameters = 0.5 * rng.normal(size=(4, 4)), rng.normal(size=4), np.array(0.7)
    check(mode, step, sum_of_squares, [rng.normal(size=3)], [rng.normal(size=4)], parameters)


@pytest.mark.all_forms
@pytest.mark.parametrize("name", ["c", "py"])
@pytest.mark.parametrize("base, other", [("x", "one"), ("one", "x"), ("x", "x")])
def test_sum_with_a_written_array(base, other, name):
    """Also outside of loops: a rewrite of PyTensor 3.0 loses which of the two is broadcast."""
    variables = {"x": pt.dvector("x"), "one": pt.dvector("one", shape=(1,))}
    values = {"x": np.arange(4.0), "one": np.array([2.0])}
    out = pt.zeros_like(variables[base])[:1].set(3.0) + variables[other]
    optimized = Mode(linker=MODES[name].linker, optimizer="fast_run")
    f = pytensor.function([*variables.values()], out, mode=optimized, on_unused_input="ignore")
    expected = np.zeros_like(values[base])
    expected[:1] = 3.0
    np.testing.assert_array_equal(f(*values.values()), expected + values[other])


def test_read_of_a_repeated_value():
    """A rewrite of PyTensor 3.0 replaces such a read by itself, again and again."""
    x, one = pt.dvector("x"), pt.dvector("one", shape=(1,))
    f = pytensor.function([x, one], x[1:].set(one)[1:] * 2, mode=Mode("py", "fast_run"))
    np.testing.assert_array_equal(f(np.arange(4.0), [3.0]), [6.0, 6.0, 6.0])


class TestByIntegers:
    """An integer that a step makes a real number of has a derivative, as everywhere in PyTensor.

    What is an integer as a result has none: a state, and a row of a sequence.
    """

    VALUES = (np.array([1.5, -0.5, 0.8, 1.1, 0.4]), np.array([2, 1, 3]), np.array(2))

    @staticmethod
    def cost(xp, x, h):
        return xp.sum(h * x) + h[-1] ** 2

    def reference(self, x, k, m):
        (h,) = reference_scan(
            lambda x, h, k, m: [0.2 * h * m + np.sum(k * x * x)], [x], [0.5], [k, m]
        )
        return self.cost(np, x, h)

    def loop(self, dtype="int32", **options):
        x, k, m = pt.vector("x"), pt.vector("k", dtype=dtype), pt.scalar("m", dtype=dtype)
        h = scanlib.scan(
            lambda x, h, k, m: 0.2 * h * m + pt.sum(k * x * x),
            x,
            np.float64(0.5),
            [k, m],
            return_updates=False,
            **options,
        )
        return [x, k, m], self.cost(pt, x, h)

    @pytest.mark.parametrize(
        "dtype, options",
        [("int8", {}), ("uint16", {"checkpoint": 2}), ("int64", {"truncate_gradient": 5})],
        ids=str,
    )
    def test_sequences_and_non_sequences(self, dtype, options, python_kernels, fast_mode):
        inputs, cost = self.loop(dtype, **options)
        gradient = pytensor.grad(cost, inputs)
        assert [g.type.dtype for g in gradient] == ["float64"] * 3
        values = [value.astype(v.dtype) for value, v in zip(self.VALUES, inputs, strict=True)]
        expected = central_gradient(self.reference, [value.astype(float) for value in values])
        actual = evaluate(gradient, dict(zip(inputs, values, strict=True)), fast_mode)
        for got, wanted in zip(actual, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)

    @pytest.mark.slow
    def test_second_order_and_pushforward(self, python_kernels, fast_mode):
        inputs, cost = self.loop()
        values = [np.asarray(value, dtype=float) for value in self.VALUES]
        u, v = random_directions(values, seed=1), random_directions(values, seed=2)
        along = sum(pt.sum(g * d) for g, d in zip(pytensor.grad(cost, inputs), u, strict=True))
        curvature = sum(pt.sum(g * d) for g, d in zip(pytensor.grad(along, inputs), v, strict=True))
        tangents = [
            pushforward(cost, inputs, u, use_op_pushforward=direct) for direct in (False, True)
        ]
        given = [value.astype(i.dtype) for value, i in zip(self.VALUES, inputs, strict=True)]
        second, *moved = evaluate(
            [curvature, *tangents], dict(zip(inputs, given, strict=True)), fast_mode
        )
        np.testing.assert_allclose(
            second, second_directional_derivative(self.reference, values, u, v), rtol=1e-5
        )
        np.testing.assert_allclose(
            moved, [directional_derivative(self.reference, values, u)] * 2, rtol=1e-7
        )

    def test_factor_of_a_power(self, mode):
        """The initial value is an integer as well, and becomes a real number."""
        h0, k = pt.iscalar("h0"), pt.iscalar("k")
        h = scanlib.scan(
            lambda h, k: 1.0 * h * k,
            outputs_info=h0,
            non_sequences=k,
            n_steps=2,
            return_updates=False,
        )
        gradient = pytensor.grad(h[-1], [h0, k])
        values = {h0: np.array(3, dtype="int32"), k: np.array(2, dtype="int32")}
        assert evaluate(gradient, values, mode) == [4.0, 12.0]

    def test_places_and_lengths_have_none(self, fast_mode):
        """What only says where or how many is not connected."""
        x, i, n = pt.vector("x"), pt.lscalar("i"), pt.lscalar("n")
        h = scanlib.scan(
            lambda h, i, n: h * x[i] + pt.ones(n).sum(),
            outputs_info=np.float64(0.5),
            non_sequences=[i, n],
            n_steps=2,
            return_updates=False,
        )
        for variable in (i, n):
            with pytest.raises(DisconnectedInputError):
                pytensor.grad(h[-1], variable)
        by_x = evaluate(
            pytensor.grad(h[-1], x),
            {x: np.array([3.0, 2.0]), i: np.array(1), n: np.array(2)},
            fast_mode,
        )
        np.testing.assert_allclose(by_x, [0, 2 + 2 * 0.5 * 2])


class TestChoices:
    """Gradients through an `ifelse` that has more results than are read, or integer ones."""

    @pytest.mark.parametrize("kind", ["integer", "unread", "nested"])
    def test_against_a_plain_loop(self, kind, python_kernels, fast_mode):
        def step(choose, tanh):
            def one_step(x, h, a):
                up, down = (h * a, x * x * a), (tanh(h + x), x)
                if kind == "integer":
                    value, count = choose(x > 0, (up[0], 2), (down[0], 1))
                    return value * count
                if kind == "unread":
                    return choose(x > 0, up, down)[0]
                both = choose(h > 0.5, up, down)
                return choose(x > 0, both, (both[1], both[0]))[0]

            return one_step

        def choose(condition, then, other):
            pairs = zip(then, other, strict=True)
            then, other = zip(*(map(pt.as_tensor_variable, pair) for pair in pairs), strict=True)
            return ifelse(condition, list(then), list(other))

        x, a = pt.vector("x"), pt.scalar("a")
        h = scanlib.scan(step(choose, pt.tanh), x, np.float64(0.7), a, return_updates=False)

        def reference(x, a):
            one_step = step(lambda condition, then, other: then if condition else other, np.tanh)
            trace = reference_scan(lambda *args: [one_step(*args)], [x], [0.7], [a])[0]
            return np.sum(trace**2)

        assert_derivatives(
            pt.sum(h**2),
            {x: np.array([0.4, -0.3, 0.8, -0.6, 0.2]), a: np.array(1.3)},
            reference,
            fast_mode,
        )

    def test_pushforward(self, fast_mode):
        x, a = pt.vector("x"), pt.scalar("a")
        h = scanlib.scan(
            lambda x, h, a: ifelse(x > 0, [h * a, pt.constant(1)], [h + x, pt.constant(2)])[0],
            x,
            np.float64(0.5),
            a,
            return_updates=False,
        )
        moved = pushforward(h[-1], [x, a], [pt.ones(3), pt.constant(2.0)], use_op_pushforward=True)
        value = evaluate(moved, {x: np.array([1.0, -1.0, 2.0]), a: np.array(2.0)}, fast_mode)
        # h = (0.5 a + x_1) a
        np.testing.assert_allclose(value, 2.0 * (2 * 0.5 * 2.0 - 1.0) + 2.0)


def test_what_does_not_move_takes_no_part_in_forward_mode(fast_mode):
    """At first no arm was pulled: the root has an infinite slope there, and stays where it is."""
    rewards, scale = pt.dmatrix("rewards"), pt.dscalar("scale")

    def bandit(carry, reward):
        pulls, sums = carry
        index = sums + scale * pt.sqrt(pulls)
        arm = pt.argmax(index)
        return (pulls[arm].inc(1.0), sums[arm].inc(reward[arm])), index[arm]

    _, found = scanlib.loop(bandit, (pt.zeros(2), pt.zeros(2)), rewards)
    inputs = [rewards, scale]
    directions = [pt.zeros_like(rewards), pt.constant(1.0)]
    moved = pushforward(found, inputs, directions, use_op_pushforward=True)
    values = {rewards: np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]]), scale: np.array(0.5)}
    np.testing.assert_allclose(evaluate(moved, values, fast_mode), np.sqrt([0.0, 1.0, 2.0]))


class TestNestedLoops:
    @pytest.mark.slow
    def test_power_of_each_row(self, mode):
        A, h0 = pt.vector("A"), pt.scalar("h0")

        def outer(a, h):
            powers, _ = scanlib.scan(lambda p: p * a + h, outputs_info=pt.ones(()), n_steps=3)
            return pt.tanh(powers[-1] + h)

        h, _ = scanlib.scan(outer, sequences=A, outputs_info=h0)

        def reference(A, h):
            total = 0.0
            for a in A:
                p = 1.0
                for _ in range(3):
                    p = p * a + h
                h = np.tanh(p + h)
                total += h**2
            return total

        values = {A: np.array([0.3, -0.5, 0.2, 0.4]), h0: np.array(0.2)}
        assert_derivatives(pt.sum(h**2), values, reference, mode)

    @pytest.mark.slow
    def test_inner_loop_over_a_row_with_a_state_of_its_own(self, mode):
        X, a = pt.matrix("X"), pt.scalar("a")

        def outer(x, h):
            inner, _ = scanlib.scan(
                lambda xi, g: pt.sin(g * a + xi), sequences=x, outputs_info=h, go_backwards=True
            )
            return inner[-1]

        h, _ = scanlib.scan(outer, sequences=X, outputs_info=a)

        def reference(X, a):
            h, total = a, 0.0
            for x in X:
                for xi in x[::-1]:
                    h = np.sin(h * a + xi)
                total += h**2
            return total

        values = {X: rng.normal(size=(3, 2)), a: np.array(0.6)}
        assert_derivatives(pt.sum(h**2), values, reference, mode)


class TestTruncation:
    @pytest.mark.parametrize("truncate", [1, 2, 5, 6, 50, -1])
    def test_against_a_hand_written_sweep(self, mode, truncate):
        x, h0, a = pt.vector("x"), pt.scalar("h0"), pt.scalar("a")
        h, _ = scanlib.scan(tanh_step(pt), [x], h0, a, truncate_gradient=truncate)
        cost = pt.sum(h**2) + h[-1]
        values = {x: rng.normal(size=6), h0: 0.4, a: 0.8}
        actual = evaluate(pytensor.grad(cost, [x, h0, a]), values, mode)

        trace = [0.4]
        for row in values[x]:
            trace.append(np.tanh(0.8 * trace[-1] + row))
        walked = 6 if truncate == -1 else min(truncate, 6)
        g_x, g_a, carry = np.zeros(6), 0.0, 0.0
        for t in reversed(range(6 - walked, 6)):
            g_h = carry + 2 * trace[t + 1] + (t == 5)
            slope = g_h * (1 - trace[t + 1] ** 2)
            g_x[t] = slope
            g_a += slope * trace[t]
            carry = slope * 0.8
        g_h0 = carry if walked == 6 else 0.0
        for got, wanted in zip(actual, [g_x, g_h0, g_a], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)


def test_connection_through_a_chain_of_states():
    x, y, z = pt.scalar("x"), pt.scalar("y"), pt.scalar("z")
    (u, v, w), _ = scanlib.scan(
        lambda u, v, w, x, y, z: [u * x, v + u * y, w * z],
        outputs_info=[pt.ones(()), pt.ones(()), pt.ones(())],
        non_sequences=[x, y, z],
        n_steps=3,
    )
    pytensor.grad(v[-1], [x, y])
    pytensor.grad(w[-1], z)
    for cost, variable in [(u, y), (u, z), (v, z), (w, x)]:
        with pytest.raises(DisconnectedInputError):
            pytensor.grad(cost[-1], variable)


def test_single_precision_stays_single(mode):
    x, h0, a = pt.fvector("x"), pt.fscalar("h0"), pt.fscalar("a")
    h, _ = scanlib.scan(tanh_step(pt), [x], h0, a)
    values = {x: np.ones(4, "float32"), h0: np.float32(0.3), a: np.float32(0.8)}
    gradient = evaluate(pytensor.grad(h[-1], [x, h0, a]), values, mode)
    expected = central_gradient(
        lambda x, h, a: reference_scan(tanh_step(np), [x], [h], [a])[0][-1],
        [np.float64(value) for value in values.values()],
    )
    for got, wanted in zip(gradient, expected, strict=True):
        assert got.dtype == "float32"
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("where", ["in the step", "in the step, twice", "outside"])
def test_clipped_gradient_of_a_parameter(where, python_kernels, fast_mode):
    x, w = pt.vector("x"), pt.vector("w")
    outside = grad_clip(w, -0.1, 0.1)

    def step(x, h, w):
        if where == "outside":
            return h * x + outside
        clipped = grad_clip(w, -0.1, 0.1)
        return h * x + (clipped if where == "in the step" else grad_clip(clipped * x, -0.2, 0.3))

    trace = scanlib.scan(step, x, pt.zeros(3), w, return_updates=False)
    gradient = evaluate(
        pytensor.grad(trace[-1].sum(), w), {x: np.ones(4), w: np.ones(3)}, fast_mode
    )
    np.testing.assert_allclose(gradient, 0.1 if where == "outside" else 0.4)


@pytest.mark.slow
def test_update_of_a_shared_variable(mode):
    a, w = pytensor.shared(1.5), pt.scalar("w")
    _, updates = scanlib.scan(lambda w: {a: a * w}, non_sequences=w, n_steps=4)
    assert_derivatives(updates[a], {w: np.array(0.9)}, lambda w: 1.5 * w**4, mode)


REWRITTEN = {
    "elementwise": lambda x, h, w: pt.tanh(h * w[0, 0]) + x,
    "matrix recurrence": lambda x, h, w: w @ h + x,
    "any other": lambda x, h, w: pt.tanh(w @ h + x),
}


@pytest.mark.filterwarnings("ignore:A Supervisor feature")
@pytest.mark.parametrize("name", REWRITTEN)
def test_of_graphs_that_were_rewritten(name):
    """Lowered loops, and what stands around them, are differentiated as what they were."""
    x, w = pt.matrices("x", "w")
    trace = scanlib.scan(REWRITTEN[name], x, pt.zeros(3), w, return_updates=False)
    cost = (trace[-1] ** 2).sum()
    rewritten = rewrite_graph(cost, include=("fast_run",), exclude=("inplace",))
    function = pytensor.function([x, w], rewritten)
    values = [rng.normal(size=(5, 3)), 0.5 * rng.normal(size=(3, 3))]
    slopes = pytensor.function([x, w], pytensor.grad(rewritten, [x, w]))(*values)
    for slope, expected in zip(slopes, central_gradient(function, values), strict=True):
        np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-7)


def test_extremes_of_products_along_an_axis():
    """A derivative asks which item an extreme is; products of all steps at once round otherwise."""
    P, reward = pt.tensor3("P"), pt.matrix("reward")

    def improve(value, _):
        better = pt.max(reward + 0.9 * (P @ value).T, axis=1)
        return better, (), pt.max(pt.abs(better - value)) < 1e-3

    value, _, _ = scanlib.loop(improve, pt.zeros(12), length=500)
    function = pytensor.function(
        [P, reward], [(value**2).sum(), *pytensor.grad((value**2).sum(), [P, reward])]
    )
    data = np.random.default_rng(1)
    P_value, reward_value = data.random((3, 12, 12)), data.normal(size=(12, 3))
    P_value /= P_value.sum(axis=-1, keepdims=True)

    def cost(P, reward):
        value, change = np.zeros(12), 1.0
        while change >= 1e-3:
            better = np.max(reward + 0.9 * (P @ value).T, axis=1)
            value, change = better, np.max(np.abs(better - value))
        return (value**2).sum()

    got, *slopes = function(P_value, reward_value)
    np.testing.assert_allclose(got, cost(P_value, reward_value))
    for slope, expected in zip(
        slopes, central_gradient(cost, [P_value, reward_value]), strict=True
    ):
        np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-5)


def test_what_is_tested_for_equal_infinities_is_read_where_it_was_stored():
    W, x = pt.matrix("W"), pt.matrix("x")

    def step(h, x):
        shifted = pt.tanh(W @ h)
        return pt.logaddexp(shifted, x), shifted

    _, shifted = scanlib.loop(step, pt.zeros(3), x)
    gradient = pytensor.grad((shifted**2).sum(), x)
    (backward,) = (
        node for node in toposort([gradient])
        if isinstance(node.op, Scan) and node.op.signature.reverse
    )  # fmt: skip
    assert not any(applies(node, ps.Tanh) for node in backward.op.body.toposort())
