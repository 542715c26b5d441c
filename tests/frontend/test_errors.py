"""Bad input: a clear error that names the argument, on every linker, before anything is read."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.utils import MissingInputError
from pytensor.scan.utils import until as pytensor_until

import scanlib
from tests.checks import evaluate

# A bad type is a TypeError and a bad value is a ValueError; where both readings are natural,
# either will do.
REJECTED = (TypeError, ValueError)


def names(error: pytest.ExceptionInfo, *parts: str) -> None:
    """Check that the message mentions all of `parts`, not counting what PyTensor appends."""
    message = str(error.value).split("Apply node that caused the error")[0]
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"


class TestNumberOfSteps:
    def test_nothing_says_how_many(self):
        with pytest.raises(ValueError, match="n_steps"):
            scanlib.scan(lambda h: h + 1, outputs_info=pt.scalar("h0"))

    @pytest.mark.all_forms
    @pytest.mark.parametrize("n_steps", [2.5, 3.0, np.float64(3.0), "3"], ids=repr)
    def test_not_an_integer(self, n_steps):
        with pytest.raises(REJECTED, match="n_steps"):
            scanlib.scan(lambda h: h + 1, outputs_info=pt.scalar("h0"), n_steps=n_steps)

    def test_symbolic_float(self):
        with pytest.raises(REJECTED, match=r"n_steps(.|\n)*float64"):
            scanlib.scan(lambda h: h + 1, outputs_info=pt.scalar("h0"), n_steps=pt.dscalar("n"))

    def test_symbolic_vector(self):
        for n in pt.lvector("n"), pt.dvector("n"):
            with pytest.raises(REJECTED, match=r"n_steps must be a scalar, such as x\.shape\[0\]"):
                scanlib.scan(lambda h: h + 1, outputs_info=pt.scalar("h0"), n_steps=n)

    @pytest.mark.all_forms
    @pytest.mark.parametrize("n_steps", [-1, np.int64(-3), np.array(-2)], ids=repr)
    def test_negative(self, n_steps):
        with pytest.raises(ValueError, match=r"n_steps(.|\n)*-\d"):
            scanlib.scan(lambda h: h + 1, outputs_info=pt.scalar("h0"), n_steps=n_steps)

    @pytest.mark.parametrize("with_sequence", [False, True])
    def test_negative_at_run_time(self, mode, with_sequence):
        n, x, h0 = pt.lscalar("n"), pt.vector("x"), pt.scalar("h0")
        h, _ = scanlib.scan(
            lambda *args: args[0] + 1.0,
            sequences=[x] if with_sequence else [],
            outputs_info=h0,
            n_steps=n,
        )
        with pytest.raises(ValueError, match="n_steps") as error:
            evaluate(h, {n: -2, x: np.ones(4), h0: 1.0}, mode)
        names(error, "-2")


class TestSequences:
    def test_shorter_than_n_steps(self, mode):
        rates, days, n = pt.vector("rates"), pt.vector("days"), pt.iscalar("n")
        total, _ = scanlib.scan(
            lambda d, r, s: s + r * d, [days, rates], pt.as_tensor(0.0), n_steps=n
        )
        f = pytensor.function([rates, days, n], total, mode=mode)
        np.testing.assert_allclose(f(np.ones(3), np.ones(7), 3), [1, 2, 3])
        with pytest.raises(ValueError, match="rates") as error:
            f(np.ones(3), np.ones(7), 5)
        names(error, "3", "5")
        with pytest.raises(ValueError, match="days") as error:
            f(np.ones(30), np.ones(17), 18)
        names(error, "17", "18")

    @pytest.mark.slow
    def test_names_with_braces_and_quotes(self, mode):
        rates, n = pt.vector('rates{0} "%s"'), pt.iscalar("n")
        h, _ = scanlib.scan(lambda r, h: h + r, rates, 0.0, n_steps=n, name="sum {of} \\ é")
        with pytest.raises(ValueError, match="rates") as error:
            evaluate(h, {rates: np.ones(3), n: 11}, mode)
        names(error, 'scan `sum {of} \\ é`: sequence `rates{0} "%s"` gives 3 rows', "n_steps=11")
        with pytest.raises(IndexError) as missing:
            evaluate(h[-1], {rates: np.ones(0), n: 0}, mode)
        assert "{{" not in str(missing.value)

    def test_equal_loops_have_their_own_names(self, mode):
        """Also where the compiled code of an equal loop is found again."""
        for name in ("first", "second"):
            rates, n = pt.vector(f"rates of the {name}"), pt.iscalar("n")
            h, _ = scanlib.scan(lambda r, h: h + 2 * r, rates, 0.0, n_steps=n, name=name)
            with pytest.raises(ValueError, match="rates") as error:
                evaluate(h, {rates: np.ones(3), n: 11}, mode)
            names(error, f"scan `{name}`", f"`rates of the {name}`")

    def test_shorter_than_n_steps_without_a_state(self, mode):
        rates, n = pt.matrix("rates"), pt.iscalar("n")
        squares, _ = scanlib.scan(lambda r: r**2, rates, n_steps=n)
        with pytest.raises(ValueError, match="rates") as error:
            evaluate(squares, {rates: np.ones((3, 2)), n: 11}, mode)
        names(error, "3", "11")

    def test_shorter_than_n_steps_with_taps(self, mode):
        rates, h0 = pt.vector("rates"), pt.scalar("h0")
        h, _ = scanlib.scan(
            lambda early, late, h: h + early * late,
            sequences={"input": rates, "taps": [-2, 1]},
            outputs_info=h0,
            n_steps=4,
        )
        f = pytensor.function([rates, h0], h, mode=mode)
        assert f(np.ones(7), 0.0).tolist() == [1, 2, 3, 4]
        with pytest.raises(ValueError, match="rates") as error:
            f(np.ones(6), 0.0)
        names(error, "4")

    def test_shorter_than_n_steps_in_a_gradient(self, mode):
        rates, n = pt.vector("rates"), pt.iscalar("n")
        h, _ = scanlib.scan(lambda r, h: h * r, rates, pt.as_tensor(1.0), n_steps=n)
        gradient = pytensor.grad(h[-1], rates)
        with pytest.raises(ValueError, match="rates"):
            evaluate(gradient, {rates: np.ones(3), n: 5}, mode)

    def test_shorter_than_n_steps_by_its_type(self, mode):
        rates = pt.tensor("rates", shape=(3,), dtype="float64")

        def build_and_run():
            h, _ = scanlib.scan(lambda r, h: h * r, rates, pt.as_tensor(1.0), n_steps=5)
            evaluate(h, {rates: np.ones(3)}, mode)

        with pytest.raises(ValueError, match="rates") as error:
            build_and_run()
        names(error, "3", "5")

    def test_shorter_than_its_taps(self, mode):
        x = pt.vector("x")
        y, _ = scanlib.scan(
            lambda a, b: a + b, sequences={"input": x, "taps": [-3, 0]}, n_steps=None
        )
        assert evaluate(y, {x: np.ones(3)}, mode).shape == (0,)
        assert evaluate(y, {x: np.ones(1)}, mode).shape == (0,)

    @pytest.mark.all_forms
    @pytest.mark.parametrize("taps", [0.5, "ab", np.array(0.5), pt.lscalar("k")])
    def test_taps_that_are_no_integers(self, taps):
        with pytest.raises(TypeError, match=r"a tap of sequences\[0\] must be an integer"):
            scanlib.scan(lambda x: x, {"input": pt.vector("x"), "taps": taps})

    def test_non_sequence_that_is_no_array(self):
        with pytest.raises(TypeError, match=r"non_sequences\[1\]"):
            scanlib.scan(lambda x, a, b: x, pt.vector("x"), non_sequences=[1.0, None])

    def test_without_a_time_axis(self):
        with pytest.raises(REJECTED, match=r"rate|sequences\[0\]"):
            scanlib.scan(lambda x: x + 1, sequences=pt.scalar("rate"))

    def test_without_an_input(self):
        with pytest.raises(REJECTED, match="sequences"):
            scanlib.scan(lambda x: x + 1, sequences={"taps": [0]})


# A state is named by its initial value's name or by its place among the arguments.
STATE = r"y0|outputs_info\[0\]"


class TestInitialStates:
    def test_too_few_rows(self, mode):
        y0 = pt.vector("y0")
        y, _ = scanlib.scan(
            lambda a, b: a + b, outputs_info={"initial": y0, "taps": [-3, -1]}, n_steps=4
        )
        f = pytensor.function([y0], y, mode=mode)
        assert f([1.0, 2.0, 3.0]).tolist() == [4, 6, 9, 13]
        with pytest.raises(ValueError, match=STATE) as error:
            f([1.0, 2.0])
        names(error, "2", "3")

    def test_too_few_rows_without_steps(self, mode):
        y0, n = pt.vector("y0"), pt.iscalar("n")
        y, _ = scanlib.scan(
            lambda a, b: a + b, outputs_info={"initial": y0, "taps": [-3, -1]}, n_steps=n
        )
        with pytest.raises(ValueError, match=STATE):
            evaluate(y, {y0: np.ones(2), n: 0}, mode)

    def test_too_few_rows_by_their_type(self, fast_mode):
        y0 = pt.tensor("y0", shape=(2,), dtype="float64")

        def build_and_run():
            y, _ = scanlib.scan(
                lambda a: a + 1.0, outputs_info={"initial": y0, "taps": [-3]}, n_steps=4
            )
            evaluate(y, {y0: np.ones(2)}, fast_mode)

        with pytest.raises(ValueError, match=STATE) as error:
            build_and_run()
        names(error, "2", "3")

    def test_rows_without_a_time_axis(self):
        info = {"initial": pt.scalar("y0"), "taps": [-2]}
        with pytest.raises(REJECTED, match=STATE):
            scanlib.scan(lambda a: a + 1.0, outputs_info=info, n_steps=4)

    @pytest.mark.all_forms
    @pytest.mark.parametrize("taps", [[0], [1], [-1, 0], [-2, 3]], ids=str)
    def test_tap_of_the_future(self, taps):
        with pytest.raises(ValueError, match="tap"):
            scanlib.scan(
                lambda *taps: sum(taps),
                outputs_info={"initial": pt.vector("y0"), "taps": taps},
                n_steps=4,
            )

    def test_duplicate_taps(self):
        with pytest.raises(ValueError, match="tap"):
            scanlib.scan(
                lambda *taps: sum(taps),
                outputs_info={"initial": pt.vector("y0"), "taps": [-2, -1, -2]},
                n_steps=4,
            )

    def test_taps_without_an_initial_value(self):
        with pytest.raises(ValueError, match="initial"):
            scanlib.scan(lambda a: a + 1, outputs_info={"taps": [-1]}, n_steps=4)

    def test_a_bool_of_python(self):
        """It may be what `==` says of two variables."""
        x = pt.dvector("x")
        with pytest.raises(TypeError, match=r"np\.array\(True\).*pt\.eq"):
            scanlib.scan(lambda x, all_up: all_up & (x > 0), x, True)
        up = scanlib.scan(lambda x, up: up & (x > 0), x, np.array(True), return_updates=False)
        assert up.dtype == "bool"

    def test_unknown_key(self):
        with pytest.raises(REJECTED, match="tapps"):
            scanlib.scan(
                lambda a: a + 1, outputs_info={"initial": pt.scalar(), "tapps": [-1]}, n_steps=4
            )


class TestStatesThatChangeType:
    def test_dtype(self):
        level, step = pt.lscalar("level"), pt.tensor("step", shape=(), dtype="uint64")
        with pytest.raises(REJECTED, match="level") as error:
            scanlib.scan(
                lambda h, s: h.astype("uint64") + s,
                outputs_info=level,
                non_sequences=step,
                n_steps=3,
            )
        names(error, "int64", "uint64")

    def test_rank_grows(self):
        level, x = pt.scalar("level"), pt.vector("x")
        with pytest.raises(REJECTED, match="level"):
            scanlib.scan(lambda h, x: h + x, outputs_info=level, non_sequences=x, n_steps=3)

    def test_rank_shrinks(self):
        with pytest.raises(REJECTED, match="level"):
            scanlib.scan(lambda h: h.sum(), outputs_info=pt.vector("level"), n_steps=3)

    @pytest.mark.parametrize("taps", [[-1], [-2, -1]], ids=str)
    def test_shape_at_the_first_step(self, mode, taps):
        level = pt.vector("level") if taps == [-1] else pt.matrix("level")
        trace, _ = scanlib.scan(
            lambda *h: pt.concatenate([h[-1], [1.0]]),
            outputs_info={"initial": level, "taps": taps},
            n_steps=3,
        )
        with pytest.raises(ValueError, match="level") as error:
            evaluate(trace, {level: np.ones((2, 4)[-level.ndim :])}, mode)
        names(error, "step", "0", "4", "5")

    def test_shape_at_a_later_step(self, mode):
        sizes, level = pt.lvector("sizes"), pt.vector("level")
        trace, _ = scanlib.scan(
            lambda n, h: pt.ones((n,)) * h.sum(), sequences=sizes, outputs_info=level
        )
        f = pytensor.function([sizes, level], trace, mode=mode)
        assert f([2, 2, 2], [1.0, 1.0]).shape == (3, 2)
        with pytest.raises(ValueError, match="level") as error:
            f([2, 2, 2, 7, 2], [1.0, 1.0])
        names(error, "step", "3", "7", "2")

    def test_a_row_of_length_one_is_not_repeated(self, mode):
        sizes, level = pt.lvector("sizes"), pt.vector("level")
        trace, _ = scanlib.scan(
            lambda n, h: pt.ones((n,)) * h.sum(), sequences=sizes, outputs_info=level
        )
        with pytest.raises(ValueError, match="level") as error:
            evaluate(trace, {sizes: [3, 1], level: np.ones(3)}, mode)
        names(error, "step", "1")

    def test_shape_of_an_output(self, mode):
        sizes = pt.lvector("sizes")
        trace, _ = scanlib.scan(lambda n: pt.ones((n,)), sequences=sizes)
        f = pytensor.function([sizes], trace, mode=mode)
        assert f([4, 4]).shape == (2, 4)
        with pytest.raises(ValueError, match="step") as error:
            f([4, 4, 5])
        names(error, "2", "4", "5")


class TestStepFunctions:
    def test_captured_variable_under_strict(self):
        rate = pt.scalar("rate")
        with pytest.raises((MissingInputError, ValueError), match="rate"):
            scanlib.scan(lambda h: h * rate, outputs_info=pt.scalar("h0"), n_steps=3, strict=True)

    def test_captured_shared_variable_under_strict(self):
        rate = pytensor.shared(2.0, name="rate")
        with pytest.raises((MissingInputError, ValueError), match="rate"):
            scanlib.scan(lambda h: h * rate, outputs_info=pt.scalar("h0"), n_steps=3, strict=True)

    @pytest.mark.parametrize("until", [scanlib.until, pytensor_until], ids=["scanlib", "pytensor"])
    def test_until_is_not_last(self, until):
        h0 = pt.scalar("h0")
        with pytest.raises(ValueError, match=r"until|last"):
            scanlib.scan(lambda h: (until(h > 3), h + 1), outputs_info=h0, n_steps=3)
        with pytest.raises(ValueError, match=r"until|last"):
            scanlib.scan(lambda h: [h + 1, until(h > 3), {}], outputs_info=h0, n_steps=3)

    def test_until_is_not_a_scalar(self):
        with pytest.raises((*REJECTED, AssertionError)):
            scanlib.scan(
                lambda h: (h + 1, scanlib.until(h > 3)), outputs_info=pt.vector("h0"), n_steps=3
            )

    def test_update_of_what_is_not_shared(self):
        rate = pt.scalar("rate")
        with pytest.raises(REJECTED, match=r"(?i)update|shared"):
            scanlib.scan(lambda h: (h * rate, {rate: rate + 1}), outputs_info=1.0, n_steps=3)

    @pytest.mark.parametrize(
        "update", [lambda a: a + 0.5, lambda a: pt.stack([a, a])], ids=["dtype", "rank"]
    )
    def test_update_of_another_type(self, update):
        a = pytensor.shared(1, name="counter")
        with pytest.raises(REJECTED, match="counter"):
            scanlib.scan(lambda: {a: update(a)}, n_steps=3)

    @pytest.mark.all_forms
    @pytest.mark.parametrize(
        "value", ["text", object(), [["text"]]], ids=["text", "object", "nested"]
    )
    def test_returning_what_is_not_a_variable(self, value):
        with pytest.raises(REJECTED, match=r"(?i)fn|return"):
            scanlib.scan(lambda h: value, outputs_info=pt.scalar("h0"), n_steps=3)

    @pytest.mark.parametrize("count", [1, 3])
    def test_wrong_number_of_outputs(self, count):
        with pytest.raises(ValueError, match="outputs_info") as error:
            scanlib.scan(
                lambda a, b: [a + b] * count,
                outputs_info=[pt.scalar("a0"), pt.scalar("b0")],
                n_steps=3,
            )
        names(error, str(count), "2")


@pytest.mark.parametrize("mode", ["NUMBA", "CVM"])
def test_names_may_hold_braces(mode):
    """As names of formulas do; numbers go into the places behind them."""
    x, h0, n = pt.dvector("x_{t}"), pt.dmatrix("h_{0}"), pt.lscalar("n")
    trace = scanlib.scan(
        lambda x, h: x + h, x, {"initial": h0, "taps": [-2]}, n_steps=n, name="f{}",
        return_updates=False,
    )  # fmt: skip
    function = pytensor.function([x, h0, n], trace, mode=mode)
    with pytest.raises(
        ValueError, match=r"scan `f\{\}`: sequence `x_\{t\}` gives 3 rows, but .*=4 "
    ):
        function(np.ones(3), np.ones((2, 5)), 4)
    with pytest.raises(ValueError, match=r"state `h_\{0\}` needs 2 initial rows .*, got 1"):
        function(np.ones(3), np.ones((1, 5)), 3)
