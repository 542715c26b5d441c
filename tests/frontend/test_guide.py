"""The examples of PyTensor's scan guide, with the results that the guide prints."""

from copy import deepcopy

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.utils import MissingInputError
from pytensor.scan.utils import until as pytensor_until

import scanlib
from tests.reference import reference_scan


def test_power(mode):
    k = pt.iscalar("k")
    A = pt.vector("A")
    result, updates = scanlib.scan(
        fn=lambda prior_result, A: prior_result * A,
        outputs_info=pt.ones_like(A),
        non_sequences=A,
        n_steps=k,
    )
    power = pytensor.function([A, k], result[-1], updates=updates, mode=mode)
    assert power(range(10), 2).tolist() == [0, 1, 4, 9, 16, 25, 36, 49, 64, 81]
    np.testing.assert_allclose(
        power(range(10), 4), [0, 1, 16, 81, 256, 625, 1296, 2401, 4096, 6561], rtol=1e-14
    )


def test_polynomial(mode):
    coefficients = pt.vector("coefficients")
    x = pt.scalar("x")
    components, updates = scanlib.scan(
        fn=lambda coefficient, power, free_variable: coefficient * (free_variable**power),
        outputs_info=None,
        sequences=[coefficients, pt.arange(10000)],
        non_sequences=x,
    )
    assert not updates
    polynomial = pytensor.function([coefficients, x], components.sum(), mode=mode)
    value = polynomial(np.asarray([1, 0, 2], dtype=np.float32), 3)
    assert value == 19.0
    assert value == 1.0 * (3**0) + 0.0 * (3**1) + 2.0 * (3**2)


def test_triangular_sequence(mode):
    up_to = pt.iscalar("up_to")

    def accumulate_by_adding(arange_val, sum_to_date):
        return sum_to_date + arange_val

    seq = pt.arange(up_to)
    result, updates = scanlib.scan(
        fn=accumulate_by_adding,
        outputs_info=pt.as_tensor_variable(np.asarray(0, seq.dtype)),
        sequences=seq,
    )
    triangular = pytensor.function([up_to], result, updates=updates, mode=mode)
    assert triangular(15).tolist() == [n * (n + 1) // 2 for n in range(15)]
    assert triangular(15).tolist() == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66, 78, 91, 105]
    assert triangular(0).shape == (0,)


def test_set_value_at_position(mode):
    location = pt.imatrix("location")
    values = pt.vector("values")
    output_model = pt.matrix("output_model")

    def set_value_at_position(a_location, a_value, output_model):
        zeros = pt.zeros_like(output_model)
        zeros_subtensor = zeros[a_location[0], a_location[1]]
        return pt.set_subtensor(zeros_subtensor, a_value)

    result, updates = scanlib.scan(
        fn=set_value_at_position,
        outputs_info=None,
        sequences=[location, values],
        non_sequences=output_model,
    )
    assign = pytensor.function([location, values, output_model], result, updates=updates, mode=mode)
    placed = assign(
        np.asarray([[1, 1], [2, 3]], dtype=np.int32),
        np.asarray([42, 50], dtype=np.float32),
        np.zeros((5, 5), dtype=np.float32),
    )
    expected = np.zeros((2, 5, 5))
    expected[0, 1, 1], expected[1, 2, 3] = 42, 50
    assert placed.tolist() == expected.tolist()


class TestGibbsSampling:
    """A chain of ten steps, held against the same chain drawn by NumPy's own generators."""

    def setup_method(self):
        rng = np.random.default_rng(203940)
        self.values = rng.uniform(size=(2, 2)), rng.uniform(size=(2,)), rng.uniform(size=(2,))
        self.W, self.bvis, self.bhid = (pytensor.shared(value) for value in self.values)
        self.stream = pt.random.RandomStream(1234)

    def numpy_chain(self, sample, generators, steps=10):
        """Continue the chain, advancing the generators."""
        W, bvis, bhid = self.values
        hidden_rng, visible_rng = generators
        for _ in range(steps):
            hidden = hidden_rng.binomial(1, 1 / (1 + np.exp(-(sample @ W + bhid))))
            sample = visible_rng.binomial(1, 1 / (1 + np.exp(-(hidden @ W.T + bvis))))
        return sample

    def generators(self, updates):
        """Return copies of the generators, in the order of the draws of one step."""
        created = [rng for rng, _ in self.stream.state_updates if rng in updates]
        assert len(created) == len(updates) == 2
        return [deepcopy(rng.get_value(borrow=True)) for rng in created]

    def check(self, sample, values, updates, mode):
        generators = self.generators(updates)
        gibbs10 = pytensor.function([sample], values[-1], updates=updates, mode=mode)
        start = np.asarray([1, 0], dtype=sample.dtype)
        drawn = []
        for _ in range(8):
            drawn.append(gibbs10(start))
            assert drawn[-1].tolist() == self.numpy_chain(start, generators).tolist()
            assert drawn[-1].dtype == sample.dtype
        assert len({tuple(row) for row in drawn}) > 1, "the generators did not advance"

    @pytest.mark.slow
    def test_shared_variables_found(self, mode):
        def one_step(vsample):
            hmean = pt.sigmoid(pt.dot(vsample, self.W) + self.bhid)
            hsample = self.stream.binomial(1, hmean, size=hmean.shape)
            vmean = pt.sigmoid(pt.dot(hsample, self.W.T) + self.bvis)
            return self.stream.binomial(1, vmean, size=vsample.shape)

        sample = pt.lvector()
        values, updates = scanlib.scan(one_step, outputs_info=sample, n_steps=10)
        self.check(sample, values, updates, mode)

    def explicit_step(self, vsample, W, bvis, bhid):
        hmean = pt.sigmoid(pt.dot(vsample, W) + bhid)
        hsample = self.stream.binomial(size=hmean.shape, n=1, p=hmean)
        vmean = pt.sigmoid(pt.dot(hsample, W.T) + bvis)
        # The guide asks for the draw in floatX; PyTensor now wants this to be said as a cast.
        visible = self.stream.binomial(size=vsample.shape, n=1, p=vmean)
        return visible.astype(pytensor.config.floatX)

    @pytest.mark.slow
    def test_shared_variables_given(self, mode):
        sample = pt.vector()
        values, updates = scanlib.scan(
            fn=self.explicit_step,
            outputs_info=sample,
            non_sequences=[self.W, self.bvis, self.bhid],
            n_steps=10,
        )
        self.check(sample, values, updates, mode)

    def test_without_updates_the_draws_repeat(self, fast_mode):
        sample = pt.vector()
        values, _ = scanlib.scan(
            fn=self.explicit_step,
            outputs_info=sample,
            non_sequences=[self.W, self.bvis, self.bhid],
            n_steps=10,
        )
        gibbs10 = pytensor.function([sample], values, mode=fast_mode)
        assert gibbs10([1, 0]).tolist() == gibbs10([1, 0]).tolist()

    def test_strict_finds_what_is_missing(self):
        def one_step(vsample):
            return self.explicit_step(vsample, self.W, self.bvis, self.bhid)

        self.W.name = "W_of_the_machine"
        with pytest.raises((MissingInputError, ValueError), match="W_of_the_machine"):
            scanlib.scan(one_step, outputs_info=pt.vector(), n_steps=10, strict=True)

    def test_strict_accepts_what_is_given(self, fast_mode):
        sample = pt.vector()
        values, updates = scanlib.scan(
            self.explicit_step,
            outputs_info=sample,
            non_sequences=[self.W, self.bvis, self.bhid],
            n_steps=10,
            strict=True,
        )
        self.check(sample, values, updates, fast_mode)


def test_updates_of_a_shared_variable(mode):
    a = pytensor.shared(1)
    values, updates = scanlib.scan(lambda: {a: a + 1}, n_steps=10)
    assert values is None
    b = a + 1
    c = updates[a] + 1
    f = pytensor.function([], [b, c], updates=updates, mode=mode)
    assert [int(v) for v in f()] == [2, 12]
    assert a.get_value() == 11
    assert [int(v) for v in f()] == [12, 22]
    assert a.get_value() == 21


def test_updates_that_are_not_applied(mode):
    a = pytensor.shared(1)
    _, updates = scanlib.scan(lambda: {a: a + 1}, n_steps=10)
    f = pytensor.function([], [a + 1, updates[a] + 1], mode=mode)
    for _ in range(2):
        assert [int(v) for v in f()] == [2, 12]
        assert a.get_value() == 1


def test_recurrent_network_with_taps(mode):
    def one_step(
        u_tm4, u_t, x_tm3, x_tm1, y_tm1, W, W_in_1, W_in_2, W_feedback, W_out, tanh=pt.tanh
    ):
        x_t = tanh(x_tm1 @ W + u_t @ W_in_1 + u_tm4 @ W_in_2 + y_tm1 @ W_feedback)
        y_t = x_tm3 @ W_out
        return [x_t, y_t]

    weights = [pt.matrix(name) for name in ("W", "W_in_1", "W_in_2", "W_feedback", "W_out")]
    u, x0, y0 = pt.matrix("u"), pt.matrix("x0"), pt.vector("y0")
    (x_vals, y_vals), updates = scanlib.scan(
        fn=one_step,
        sequences={"input": u, "taps": [-4, -0]},
        outputs_info=[{"initial": x0, "taps": [-3, -1]}, y0],
        non_sequences=weights,
        strict=True,
    )
    assert not updates
    f = pytensor.function([u, x0, y0, *weights], [x_vals, y_vals], mode=mode)

    rng = np.random.default_rng(7)
    n_in, n_hidden, n_out = 2, 4, 3
    shapes = [(n_hidden, n_hidden), (n_in, n_hidden), (n_in, n_hidden), (n_out, n_hidden)]
    arrays = [rng.normal(size=shape) for shape in [*shapes, (n_hidden, n_out)]]
    u_value = rng.normal(size=(9, n_in))
    x0_value, y0_value = rng.normal(size=(3, n_hidden)), rng.normal(size=n_out)

    expected = reference_scan(
        lambda *args: one_step(*args, tanh=np.tanh),
        sequences=[{"input": u_value, "taps": [-4, 0]}],
        outputs_info=[{"initial": x0_value, "taps": [-3, -1]}, y0_value],
        non_sequences=arrays,
    )
    actual = f(u_value, x0_value, y0_value, *arrays)
    assert actual[0].shape == (5, n_hidden)
    assert actual[1].shape == (5, n_out)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-12)


@pytest.mark.parametrize("until", [scanlib.until, pytensor_until], ids=["scanlib", "pytensor"])
def test_powers_of_two_until(mode, until):
    def power_of_2(previous_power, max_value):
        return previous_power * 2, until(previous_power * 2 > max_value)

    max_value = pt.scalar()
    values, _ = scanlib.scan(
        power_of_2, outputs_info=pt.constant(1.0), non_sequences=max_value, n_steps=1024
    )
    f = pytensor.function([max_value], values, mode=mode)
    assert f(45).tolist() == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    assert f(0).tolist() == [2.0]
    assert f(64).tolist() == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
