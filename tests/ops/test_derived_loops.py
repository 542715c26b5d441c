"""Loops built from derivatives: Jacobians, Hessians, pushforwards, and loops with random draws."""

from copy import deepcopy

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.gradient import NullTypeGradError, pushforward
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.scan.utils import until
from pytensor.tensor.random.op import RNGConsumerOp

import scanlib
from tests.checks import assert_derivatives, evaluate
from tests.derivatives import (
    central_gradient,
    directional_derivative,
    random_directions,
    second_directional_derivative,
)
from tests.modes import MODES
from tests.reference import reference_scan


def tanh_loop(x, h0, a, **options):
    """Return the trace of a small recurrence, as a graph."""
    trace, _ = scanlib.scan(lambda x, h, a: pt.tanh(a * h + x), x, h0, a, **options)
    return trace


def tanh_reference(x, h0, a):
    return reference_scan(lambda x, h, a: [np.tanh(a * h + x)], [x], [h0], [a])[0]


class TestGradientsInsideTheStep:
    """Non-sequences reach the step as the variables they are, with their graph."""

    @pytest.mark.slow
    def test_jacobian(self, mode):
        x = pt.vector("x")
        y = x**2 * x[0]
        J, updates = scanlib.scan(
            lambda i, y, x: pytensor.grad(y[i], x),
            sequences=pt.arange(y.shape[0]),
            non_sequences=[y, x],
        )
        assert not updates
        value = np.array([2.0, 3.0, 5.0])
        expected = np.diag(2 * value * value[0])
        expected[:, 0] += value**2
        np.testing.assert_allclose(evaluate(J, {x: value}, mode), expected, rtol=1e-12)

    @pytest.mark.slow
    def test_jacobian_of_captured_variables(self, mode):
        x = pt.vector("x")
        y = pt.sin(x) * x[::-1]
        J, _ = scanlib.scan(lambda i: pytensor.grad(y[i], x), sequences=pt.arange(y.shape[0]))
        value = np.array([0.4, 1.3, -0.7])
        expected = np.diag(np.cos(value) * value[::-1]) + np.fliplr(np.diag(np.sin(value)))
        np.testing.assert_allclose(evaluate(J, {x: value}, mode), expected, rtol=1e-12)

    @pytest.mark.slow
    def test_hessian(self, mode):
        x = pt.vector("x")
        gradient = pytensor.grad(pt.sum(x**3) * x[1], x)
        H, _ = scanlib.scan(
            lambda i, gradient, x: pytensor.grad(gradient[i], x),
            sequences=pt.arange(gradient.shape[0]),
            non_sequences=[gradient, x],
        )
        value = np.array([0.5, -1.2, 0.8])
        expected = np.diag(6 * value * value[1])
        expected[1] += 3 * value**2
        expected[:, 1] += 3 * value**2
        np.testing.assert_allclose(evaluate(H, {x: value}, mode), expected, rtol=1e-12)

    def test_jacobian_of_a_loop(self, mode):
        x, h0, a = pt.vector("x"), pt.scalar("h0"), pt.scalar("a")
        trace = tanh_loop(x, h0, a)
        J, _ = scanlib.scan(
            lambda i, trace, x: pytensor.grad(trace[i], x),
            sequences=pt.arange(trace.shape[0]),
            non_sequences=[trace, x],
        )
        values = {x: np.array([0.3, -0.2, 0.6]), h0: 0.4, a: 0.8}
        columns = [
            directional_derivative(lambda x: tanh_reference(x, 0.4, 0.8), [values[x]], [unit])
            for unit in np.eye(3)
        ]
        np.testing.assert_allclose(
            evaluate(J, values, mode), np.stack(columns, axis=1), rtol=1e-7, atol=1e-9
        )

    @pytest.mark.slow
    def test_gradient_steps(self, mode):
        """Descend along a gradient taken inside the step, and differentiate the descent."""
        target, rate = pt.vector("target"), pt.scalar("rate")

        def descend(theta, target, rate):
            loss = pt.sum((pt.tanh(theta) - target) ** 2)
            return theta - rate * pytensor.grad(loss, theta)

        theta, _ = scanlib.scan(
            descend, outputs_info=pt.zeros_like(target), non_sequences=[target, rate], n_steps=4
        )

        def reference(target, rate):
            theta = np.zeros_like(target)
            for _ in range(4):
                t = np.tanh(theta)
                theta = theta - rate * 2 * (t - target) * (1 - t**2)
            return np.sum(theta**2)

        values = {target: np.array([0.3, -0.5]), rate: np.array(0.2)}
        assert_derivatives(pt.sum(theta[-1] ** 2), values, reference, mode)


@pytest.mark.parametrize("direct", [True, False], ids=["op", "twice_pullback"])
class TestPushforward:
    VALUES = (np.array([0.3, -0.2, 0.6, 0.1]), np.array(0.4), np.array(0.8))

    def test_every_step(self, mode, direct):
        inputs = [pt.vector("x"), pt.scalar("h0"), pt.scalar("a")]
        tangents = random_directions(self.VALUES, seed=3)
        jvp = pushforward(tanh_loop(*inputs), inputs, tangents, use_op_pushforward=direct)
        np.testing.assert_allclose(
            evaluate(jvp, dict(zip(inputs, self.VALUES, strict=True)), mode),
            directional_derivative(tanh_reference, self.VALUES, tangents),
            rtol=1e-8,
        )

    @pytest.mark.slow
    def test_of_a_gradient(self, mode, direct):
        inputs = [pt.vector("x"), pt.scalar("h0"), pt.scalar("a")]
        u, v = random_directions(self.VALUES, seed=3), random_directions(self.VALUES, seed=4)
        gradient = pytensor.grad(pt.sum(tanh_loop(*inputs) ** 2), inputs)
        hvp = pushforward(gradient, inputs, u, use_op_pushforward=direct)
        curvature = sum(pt.sum(h * d) for h, d in zip(hvp, v, strict=True))
        expected = second_directional_derivative(
            lambda *args: np.sum(tanh_reference(*args) ** 2), self.VALUES, u, v
        )
        actual = evaluate(curvature, dict(zip(inputs, self.VALUES, strict=True)), mode)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)

    def test_taps_outputs_and_one_tangent(self, fast_mode, direct):
        """Several outputs, one of them an integer; only one input moves."""
        x, k, h0, a = pt.vector("x"), pt.lvector("k"), pt.vector("h0"), pt.scalar("a")
        (h, wave, _), _ = scanlib.scan(
            lambda x, k, h_1, h_3, a: [pt.tanh(a * h_3 + x * k), pt.sin(h_1 * a), k + 1],
            sequences=[x, k],
            outputs_info=[{"initial": h0, "taps": [-1, -3]}, None, None],
            non_sequences=a,
            go_backwards=True,
        )
        values = {
            x: np.array([0.3, -0.2, 0.6, 0.1]),
            k: np.array([1, 2, 0, 1]),
            h0: np.array([0.1, 0.5, -0.4]),
            a: np.array(0.8),
        }
        jvp = pushforward([h, wave], [a], [pt.constant(1.5)], use_op_pushforward=direct)

        def reference(a):
            def step(x, k, h_1, h_3, a):
                return [np.tanh(a * h_3 + x * k), np.sin(h_1 * a)]

            info = [{"initial": values[h0], "taps": [-1, -3]}, None]
            return np.stack(
                reference_scan(step, [values[x], values[k]], info, [a], go_backwards=True)
            )

        np.testing.assert_allclose(
            np.stack(evaluate(jvp, values, fast_mode)),
            directional_derivative(reference, [values[a]], [np.array(1.5)]),
            rtol=1e-8,
        )


class TestRandomDraws:
    """The gradient sees the draws of the forward pass, reconstructed by NumPy's generators."""

    @staticmethod
    def drawn(generator, steps, size):
        return [generator.normal(size=size) for _ in range(steps)]

    @staticmethod
    def walk(h, a, noise):
        total = 0.0
        for z in noise:
            h = np.tanh(a * h + a**2 * z)
            total = total + np.sum(h**2)
        return total

    def test_random_stream(self, mode):
        stream = pt.random.RandomStream(99)
        h0, a = pt.vector("h0"), pt.scalar("a")
        h, updates = scanlib.scan(
            lambda h, a: pt.tanh(a * h + a**2 * stream.normal(size=h.shape)),
            outputs_info=h0,
            non_sequences=a,
            n_steps=5,
        )
        (shared,) = updates
        generator = deepcopy(shared.get_value(borrow=True))
        cost = pt.sum(h**2)
        f = pytensor.function(
            [h0, a], [cost, *pytensor.grad(cost, [h0, a])], updates=updates, mode=mode
        )
        start, rate = np.array([0.2, -0.4]), np.array(0.7)
        costs = []
        for _ in range(2):
            noise = self.drawn(generator, 5, 2)
            value, *gradient = f(start, rate)
            costs.append(float(value))
            np.testing.assert_allclose(value, self.walk(start, rate, noise), rtol=1e-12)
            expected = central_gradient(
                lambda h, a, noise=noise: self.walk(h, a, noise), [start, rate]
            )
            for got, wanted in zip(gradient, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-7, atol=1e-9)
        assert costs[0] != costs[1]

    def explicit_loop(self, rng, h0, a):
        def step(h, rng, a):
            next_rng, z = pt.random.normal(size=h.shape, rng=rng).owner.outputs
            return [pt.tanh(a * h + a**2 * z), next_rng]

        traces, updates = scanlib.scan(step, outputs_info=[h0, rng], non_sequences=a, n_steps=5)
        assert not updates
        return traces

    def test_explicit_generator(self, mode):
        rng = pt.random.type.random_generator_type("rng")
        h0, a = pt.vector("h0"), pt.scalar("a")
        h, last_rng = self.explicit_loop(rng, h0, a)
        assert last_rng.type == rng.type
        start, rate = np.array([0.2, -0.4]), np.array(0.7)
        noise = self.drawn(np.random.default_rng(5), 5, 2)
        cost = pt.sum(h**2)
        given = np.random.default_rng(5)
        value, *gradient, after = evaluate(
            [cost, *pytensor.grad(cost, [h0, a]), last_rng], {rng: given, h0: start, a: rate}, mode
        )
        np.testing.assert_allclose(value, self.walk(start, rate, noise), rtol=1e-12)
        expected = central_gradient(lambda h, a: self.walk(h, a, noise), [start, rate])
        for got, wanted in zip(gradient, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-7, atol=1e-9)
        unused = np.random.default_rng(5)
        self.drawn(unused, 5, 2)
        assert after.normal() == unused.normal()
        assert given.normal() == noise[0][0], "the generator that was given must not advance"

    @pytest.mark.slow
    def test_second_order(self, fast_mode):
        rng = pytensor.shared(np.random.default_rng(5))
        h0, a = pt.vector("h0"), pt.scalar("a")
        h, _ = self.explicit_loop(rng, h0, a)
        noise = self.drawn(np.random.default_rng(5), 5, 2)
        assert_derivatives(
            pt.sum(h**2),
            {h0: np.array([0.2, -0.4]), a: np.array(0.7)},
            lambda h, a: self.walk(h, a, noise),
            fast_mode,
        )

    def test_generator_state_as_an_update(self, mode):
        rng = pytensor.shared(np.random.default_rng(5))
        h0, a = pt.vector("h0"), pt.scalar("a")
        h, last_rng = self.explicit_loop(rng, h0, a)
        f = pytensor.function([h0, a], h, updates={rng: last_rng}, mode=mode)
        generator = np.random.default_rng(5)
        for _ in range(2):
            noise = self.drawn(generator, 5, 1)
            got = f(np.array([0.2]), 0.7)
            np.testing.assert_allclose(
                np.sum(got**2), self.walk(np.array([0.2]), 0.7, noise), rtol=1e-12
            )

    def test_draws_around_a_stored_state(self, mode):
        """A draw that depends on a stored state is stored as the forward loop computes it."""
        rng = pytensor.shared(np.random.default_rng(5))
        x, w = pt.vector("x"), pt.scalar("w")

        def step(x, level, w):
            moved = 0.5 * level + x
            next_rng, z = pt.random.normal(moved, 1.0, rng=rng).owner.outputs
            return [moved, w * z], {rng: next_rng}

        (_, scaled), _ = scanlib.scan(step, x, [np.float64(0.0), None], w)
        value = np.array([1.0, -2.0, 0.5])
        with pytensor.config.change_flags(on_opt_error="raise"):
            _, gradient = evaluate(
                [scaled, pytensor.grad(pt.sum(scaled), w)], {x: value, w: np.array(2.0)}, mode
            )
        generator, level, total = np.random.default_rng(5), 0.0, 0.0
        for row in value:
            level = 0.5 * level + row
            total += generator.normal(level, 1.0)
        np.testing.assert_allclose(gradient, total, rtol=1e-12)

    @pytest.mark.parametrize("given", ["state", "update"])
    def test_a_loop_says_where_it_leaves_its_generators(self, given):
        """So that PyMC finds the updates of a graph's draws, in a batch as well."""
        rng, h0, a = pytensor.shared(np.random.default_rng(5)), pt.scalar("h0"), pt.scalar("a")

        def step(h, rng=rng):
            next_rng, z = pt.random.normal(rng=rng).owner.outputs
            return h + a * z, {rng: next_rng} if given == "update" else next_rng

        info = [h0] if given == "update" else [h0, rng]
        h, updates = scanlib.scan(step, outputs_info=info, n_steps=5)
        h, last = (h, updates[rng]) if given == "update" else h
        assert isinstance(last.owner.op, RNGConsumerOp)
        assert last.owner.op.update(last.owner) == {rng: last}
        _, moved = vectorize_graph([h, last], {a: pt.vector("as")})
        assert moved.owner.op.update(moved.owner) == {rng: moved}
        plain = tanh_loop(pt.vector("x"), pt.scalar("h0"), a).owner.inputs[0].owner
        assert not isinstance(plain.op, RNGConsumerOp)
        (gradient,) = pytensor.grad(pt.sum(h), [a])
        loops = [v.owner.op for v in ancestors([gradient]) if v.owner and "Scan" in str(v.owner.op)]
        assert any(not isinstance(op, RNGConsumerOp) for op in loops)

    @pytest.mark.parametrize("linker", ["numba", "py"])
    def test_generators_move_as_in_loops_of_pytensor(self, linker):
        """A condition reads the draws, so they are drawn, though no result is read."""
        ends = []
        for scan in (scanlib.scan, pytensor.scan):
            rng = pytensor.shared(np.random.default_rng(5))

            def step(h, rng):
                next_rng, z = pt.random.uniform(rng=rng).owner.outputs
                return [h + z, next_rng], until(h + z > 3)

            initial = pt.constant(0.0, dtype="float64")
            _, last = scan(step, outputs_info=[initial, rng], n_steps=30, return_updates=False)
            pytensor.function([], [], updates={rng: last}, mode=MODES[linker])()
            ends.append(rng.get_value().uniform())
        assert ends[0] == ends[1] != np.random.default_rng(5).uniform()

    def test_undefined_gradients_stay_where_they_are(self, fast_mode):
        """A draw has no derivative by its mean; what does not reach the mean has one."""
        rng = pytensor.shared(np.random.default_rng(5))
        x, w = pt.vector("x"), pt.scalar("w")

        def step(x, h, w):
            next_rng, drawn = pt.random.normal(0.5 * h + x, 1.0, rng=rng).owner.outputs
            return [drawn, w * drawn], {rng: next_rng}

        (h, scaled), _ = scanlib.scan(step, x, [np.float64(0.0), None], w)
        cost = pt.sum(scaled)
        drawn, gradient = evaluate(
            [h, pytensor.grad(cost, w)], {x: np.ones(4), w: np.array(2.0)}, fast_mode
        )
        np.testing.assert_allclose(gradient, np.sum(drawn), rtol=1e-12)
        with pytest.raises(NullTypeGradError, match="normal"):
            pytensor.grad(cost, x)

    @pytest.mark.parametrize("checkpoint", [None, 2])
    def test_a_draw_around_the_state(self, checkpoint, fast_mode):
        """There is no gradient by what is drawn around; others have one along the other paths."""
        rng = pytensor.shared(np.random.default_rng(5))
        h0, a = pt.scalar("h0"), pt.scalar("a")

        def step(h, a):
            next_rng, drawn = pt.random.normal(h, 1.0, rng=rng).owner.outputs
            return a * h + drawn, {rng: next_rng}

        h, _ = scanlib.scan(step, [], h0, a, n_steps=3, checkpoint=checkpoint)
        values = {h0: np.array(0.3), a: np.array(0.8)}
        trace, last, every = evaluate(
            [h, pytensor.grad(h[-1], a), pytensor.grad(pt.sum(h), a)], values, fast_mode
        )
        np.testing.assert_allclose([last, every], [trace[1], 0.3 + trace[0] + trace[1]])
        with pytest.raises(NullTypeGradError, match="normal"):
            pytensor.grad(h[-1], h0)

    def test_pushforward(self, fast_mode):
        """Draws stay what they are where their parameters move."""
        rng = pytensor.shared(np.random.default_rng(5))
        a = pt.scalar("a")

        def step(h, a):
            next_rng, drawn = pt.random.normal(a * h, 1.0, rng=rng).owner.outputs
            return a * h + 0.1 * drawn, {rng: next_rng}

        h, _ = scanlib.scan(step, [], np.float64(0.3), a, n_steps=3)
        moved = pushforward(h, [a], [pt.constant(1.0)], use_op_pushforward=True)
        trace, tangents = evaluate([h, moved], {a: np.array(0.8)}, fast_mode)
        before, tangent, expected = 0.3, 0.0, []
        for after in trace:
            tangent = before + 0.8 * tangent
            expected.append(tangent)
            before = after
        np.testing.assert_allclose(tangents, expected, rtol=1e-12)
