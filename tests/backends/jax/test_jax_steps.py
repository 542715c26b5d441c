"""Numbers of steps under the JAX linker: given, computed, and ended by a condition."""

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import assert_derivatives, assert_same, in_python
from tests.jax_loops import compiled
from tests.reference import reference_scan

pytest.importorskip("jax", reason="jax is not installed")

from pytensor.compile.mode import get_mode
from pytensor.tensor.elemwise import Elemwise

from scanlib.backends.jax.bounded import UnknownLengthError
from scanlib.backends.jax.known_numbers import computed

JAX = get_mode("JAX")
rng = np.random.default_rng(11)


def decay(**options):
    """Return a loop ``h ← sin(a h) + 1`` of one matrix state; it is not elementwise."""
    a, h0 = pt.dmatrix("a"), pt.dvector("h0")
    h = scanlib.scan(
        lambda h, a: pt.sin(a @ h) + 1.0, outputs_info=h0, non_sequences=a, return_updates=False,
        **options,
    )  # fmt: skip
    return [a, h0], h


def decay_reference(a, h, steps):
    rows = []
    for _ in range(steps):
        h = np.sin(a @ h) + 1.0
        rows.append(h)
    return np.array(rows)


class TestNumberOfSteps:
    values = 0.3 * rng.normal(size=(2, 2)), rng.normal(size=2)

    def test_given_as_an_input(self):
        n = pt.lscalar("n")
        inputs, h = decay(n_steps=n)
        function = compiled([*inputs, n], [h, h.mean(), h.sum() / n])
        for steps in (1, 4):
            rows = decay_reference(*self.values, steps)
            results = function(*self.values, steps)
            assert_same([np.asarray(r) for r in results], [rows, rows.mean(), rows.sum() / steps])

    def test_the_shortest_sequence(self):
        x, y = pt.dvector("x"), pt.dvector("y")
        out = scanlib.scan(lambda x, y: x + 2 * y, [x, y], return_updates=False)
        function = compiled([x, y], [out, *pytensor.grad((out**2).sum(), [x, y])])
        for m, n in ((5, 3), (3, 5), (4, 4), (0, 2)):
            a, b = rng.normal(size=m), rng.normal(size=n)
            k = min(m, n)
            rows = a[:k] + 2 * b[:k]
            da, db = np.zeros(m), np.zeros(n)
            da[:k], db[:k] = 2 * rows, 4 * rows
            assert_same([np.asarray(r) for r in function(a, b)], [rows, da, db])

    def test_computed_and_bounded_by_nothing(self):
        v = pt.dvector("v")
        inputs, h = decay(n_steps=pt.sum(v > 0))
        for result in (h, h[-1]):
            with pytest.raises(UnknownLengthError, match="number of steps is computed"):
                compiled([*inputs, v], result)(*self.values, [1.0])

    def test_computed_and_bounded_by_a_sequence(self):
        v, x = pt.dvector("v"), pt.dvector("x")
        n = pt.sum(v > 0)
        h = scanlib.scan(
            lambda x, h: pt.sin(h) + x, x, pt.constant(0.0), n_steps=n, return_updates=False
        )
        cost = (h**2).sum()
        function = compiled([x, v], [h, cost, pytensor.grad(cost, x)])
        plain = in_python([x, v], [h, cost, pytensor.grad(cost, x)])
        values = rng.normal(size=5)
        for flags in ([1.0, -1.0, 2.0, 3.0], [1.0], [1.0] * 5):
            expected = plain(values, flags)
            steps = sum(flag > 0 for flag in flags)
            (rows,) = reference_scan(lambda x, h: [np.sin(h) + x], [values], [0.0], n_steps=steps)
            np.testing.assert_allclose(expected[0], rows)
            assert_same([np.asarray(r) for r in function(values, flags)], expected)

    def test_gradient_of_shorter_sequences_backwards(self):
        """Rows in a larger array, reversed: not by a scatter, of which XLA's compiler dies."""
        x, y = pt.dvector("x"), pt.dvector("y")
        h = scanlib.scan(
            lambda x, y, h: x * y + 0.5 * h,
            [x, y], pt.constant(0.0), go_backwards=True, return_updates=False,
        )  # fmt: skip

        def reference(x, y):
            (rows,) = reference_scan(
                lambda x, y, h: [x * y + 0.5 * h], [x[-3:], y], [0.0], go_backwards=True
            )
            return (rows**2).sum()

        values = {x: rng.normal(size=5), y: rng.normal(size=3)}
        assert_derivatives((h**2).sum(), values, reference, JAX)

    def test_negative(self):
        n = pt.lscalar("n")
        inputs, h = decay(n_steps=n)
        with pytest.raises(scanlib.ops.errors.StepCountError, match="must not be negative"):
            compiled([*inputs, n], h)(*self.values, -1)

    def test_last_row_of_no_steps(self):
        n = pt.lscalar("n")
        inputs, h = decay(n_steps=n)
        with pytest.raises(IndexError):
            compiled([*inputs, n], h[-1])(*self.values, 0)


class TestUntil:
    @staticmethod
    def loop():
        x, a = pt.dvector("x"), pt.dscalar("a")
        h = scanlib.scan(
            lambda x, h, a: (pt.tanh(a * h + x), scanlib.until(h > 0.5)),
            x, pt.constant(0.0), non_sequences=a, return_updates=False,
        )  # fmt: skip
        return [x, a], h

    @staticmethod
    def reference(x, a):
        return reference_scan(
            lambda x, h, a: [np.tanh(a * h + x), h > 0.5], [x], [0.0], [a], until=True
        )[0]

    cases = (np.linspace(0.1, 0.9, 8), np.array([2.0, 0.1, 0.3, 0.2]), np.full(5, -1.0))

    def test_rows(self):
        """The whole trace comes back with its true length, and so do slices of it."""
        inputs, h = self.loop()
        function = compiled(inputs, [h, h[1:], h[-1], h.shape[0], 2 * h + 1])
        for x in self.cases:
            rows = self.reference(x, 0.7)
            expected = [rows, rows[1:], rows[-1], np.int64(len(rows)), 2 * rows + 1]
            for actual, wanted in zip(function(x, 0.7), expected, strict=True):
                np.testing.assert_allclose(np.asarray(actual), wanted, rtol=1e-12)
                assert np.shape(actual) == wanted.shape

    def test_calls_again(self):
        """Arguments of the same shapes run the program that is there already."""
        inputs, h = self.loop()
        function = compiled(inputs, [h, h[1:]])
        for a in (0.7, 0.7, 0.2, 0.7):
            rows = self.reference(self.cases[0], a)
            for actual, wanted in zip(function(self.cases[0], a), (rows, rows[1:]), strict=True):
                np.testing.assert_allclose(np.asarray(actual), wanted, rtol=1e-12)

    def test_step_products(self):
        inputs, h = self.loop()
        function = compiled(
            inputs, [h.sum(), h.max(), h.min(), h.prod(), h.mean(), (h > 0).any(), (h > 0).all()]
        )
        for x in self.cases:
            rows = self.reference(x, 0.7)
            expected = [
                rows.sum(), rows.max(), rows.min(), rows.prod(), rows.mean(),
                (rows > 0).any(), (rows > 0).all(),
            ]  # fmt: skip
            for actual, wanted in zip(function(x, 0.7), expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-12)

    def test_derivatives(self):
        inputs, h = self.loop()
        cost = (h**2).sum() * h[-1]

        def plain(x, a):
            rows = self.reference(x, a)
            return (rows**2).sum() * rows[-1]

        values = dict(zip(inputs, (self.cases[0], np.array(0.7)), strict=True))
        assert_derivatives(cost, values, plain, JAX)

    def test_explain(self):
        inputs, h = self.loop()
        (loop,) = scanlib.explain(compiled(inputs, h)).loops
        assert "by lax.while_loop on other devices" in loop.runs
        with pytensor.config.change_flags(scanlib__cuda=False):
            (loop,) = scanlib.explain(compiled(inputs, h)).loops
        compiled_here = "as compiled code that XLA calls on the CPU; "
        assert loop.runs.removeprefix(compiled_here).startswith("by lax.while_loop")
        assert loop.runs.startswith(compiled_here) == bool(pytensor.config.cxx)


class TestNumbersOfLengths:
    """Numbers that are computed from the length of a loop that ends by a condition."""

    @pytest.fixture(scope="class")
    def function(self):
        x = pt.dvector("x")
        h = scanlib.scan(
            lambda x, h: (h + x, scanlib.until(h + x > 3)), x, pt.constant(0.0),
            return_updates=False,
        )  # fmt: skip
        done = h.shape[0]
        rest = x.shape[0] - done

        def halved(steps):
            return scanlib.scan(
                lambda k: 0.5 * k + 1, None, h[-1], n_steps=steps, return_updates=False
            )

        outputs = [pt.zeros(rest) + 2, halved(rest), halved(rest)[-1], halved(done * rest)]
        return compiled([x], outputs)

    @pytest.mark.parametrize("size, done", [(1.0, 4), (0.5, 7), (2.0, 2)])
    def test_lengths_that_are_subtracted_or_multiplied(self, function, size, done):
        """The greatest length is not what gives the greatest number."""
        rest = 10 - done
        row = np.array(size * done)
        rows = [row := 0.5 * row + 1 for _ in range(40)]
        found = [np.asarray(result) for result in function(np.full(10, size))]
        expected = [np.full(rest, 2.0), rows[:rest], rows[rest - 1], rows[: done * rest]]
        assert_same(found, [np.array(value) for value in expected])


class TestSizesInAStep:
    """Sizes that no type knows, which a step computes from shapes."""

    def test_rolled_rows(self):
        x, n = pt.matrix("x", dtype="bool"), pt.lscalar("n")

        def step(x):
            counts = sum(pt.roll(x.astype("int8"), k, axis) for k in (-1, 1) for axis in (0, 1))
            return pt.eq(counts, 2)

        out = scanlib.scan(step, outputs_info=x, n_steps=n, return_updates=False)
        values = rng.random((5, 6)) < 0.5
        expected, rows = values, []
        for _ in range(4):
            counts = sum(np.roll(expected.astype(int), k, axis) for k in (-1, 1) for axis in (0, 1))
            expected = counts == 2
            rows.append(expected)
        np.testing.assert_array_equal(compiled([x, n], out)(values, 4), rows)

    def test_the_gradient_of_joined_rows(self):
        x, w, h0 = pt.dtensor3("x"), pt.dmatrix("w"), pt.dmatrix("h0")

        def step(x, h, w):
            return pt.tanh(pt.concatenate([x, h], axis=1) @ w)

        h = scanlib.scan(step, x, h0, w, return_updates=False)

        def reference(x, h, w):
            total = 0.0
            for row in x:
                h = np.tanh(np.concatenate([row, h], axis=1) @ w)
                total += (h**2).sum()
            return total

        values = [rng.normal(size=size) for size in ((4, 2, 3), (2, 2), (5, 2))]
        inputs = dict(zip((x, h0, w), values, strict=True))
        assert_derivatives((h**2).sum(), inputs, reference, JAX)


def test_known_numbers_beside_small_constants():
    """A Composite computes with Python's numbers, which NumPy refuses beside smaller integers."""
    number = ps.int64("number")
    one_more = ps.Composite([number], [number + ps.constant(np.int8(1))])
    node = Elemwise(one_more)(pt.lscalar()).owner
    assert computed(node, (256,)) == [257]
