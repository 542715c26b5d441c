"""Mistakes that are found where they are made: what is said of them, and what is no mistake."""

import warnings

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import get_default_mode
from pytensor.scan.utils import until as classic_until

import scanlib
from scanlib.config import check_flags
from scanlib.ops.errors import SequenceLengthError
from tests.checks import in_python

pytestmark = pytest.mark.all_forms
X = pt.vector("x")


def first(*arguments):
    return arguments[0] + 1


class TestGenerators:
    """A step that draws returns the generator that follows."""

    rng = pt.random.rng("rng")
    shared = pt.random.shared_rng(seed=1, name="seeds")

    def same_numbers(self, step, *parts, **arguments):
        with pytest.raises(ValueError, match="every step would draw the same numbers") as error:
            scanlib.scan(step, n_steps=3, name="walk", **arguments)
        message = str(error.value)
        assert message.startswith("scan `walk`: the step draws from ")
        assert not [part for part in parts if part not in message], message

    def test_given_whole(self):
        self.same_numbers(
            lambda h, rng: h + rng.normal()[1],
            "`rng` (non_sequences[0]) and does not return the next one",
            "draw = rng.normal(...)\n    return ..., next_rng  # with rng in outputs_info",
            outputs_info=0.0,
            non_sequences=self.rng,
        )

    def test_from_outside(self):
        step = lambda h: h + self.rng.normal()[0].normal(h)[1]  # noqa: E731
        self.same_numbers(step, "the generator `rng` and", outputs_info=0.0)
        # Also where the number is read by a condition alone.
        until = lambda h: (h + 1, scanlib.until(self.rng.normal()[1] > 0))  # noqa: E731
        self.same_numbers(until, "`rng`", outputs_info=0.0)

    def test_returned_as_it_was(self):
        self.same_numbers(
            lambda h, rng: (h + rng.normal()[1], rng),
            "(outputs_info[1]) and returns it as it was",
            "draw = rng.normal(...)\n    return ..., next_rng\n",
            outputs_info=[0.0, self.rng],
        )

    def test_another_one_than_the_carried(self):
        def step(h, _):
            following, draw = self.rng.normal()
            return h + draw, following

        self.same_numbers(step, "`rng` and does not", outputs_info=[0.0, self.rng])

    def test_shared(self):
        self.same_numbers(
            lambda h: h + self.shared.normal()[1],
            "the shared generator `seeds` and does not return its update",
            "next_rng, draw = seeds.normal(...)\n    return ..., {seeds: next_rng}",
            outputs_info=0.0,
        )

    def test_of_a_distribution(self):
        self.same_numbers(
            lambda h: h + pt.random.normal(),
            "the shared generator without a name",
            "return ..., {rng: next_rng}  # with PyMC: ..., pymc.pytensorf.collect_default_updates",
            outputs_info=0.0,
        )

    @pytest.mark.parametrize(
        "function, line",
        [
            ("map", "return ..., next_rng  # with rng in outputs_info of scanlib.scan"),
            ("filter", "return ..., next_rng  # with rng in outputs_info of scanlib.scan"),
            ("reduce", "return ..., next_rng  # with rng in outputs_info"),
            ("loop", "return (..., next_rng), y  # with rng in init"),
        ],
    )
    def test_lines_for_other_loops(self, function, line):
        """`map` and `filter` have no state that hands a generator on."""
        rng = pt.random.rng("rng")
        steps = {
            "map": lambda x: x + rng.normal()[1],
            "filter": lambda x: x > rng.normal()[1],
            "reduce": lambda x, h: h + x + rng.normal()[1],
            "loop": lambda h, x: (h + x + rng.normal()[1], None),
        }
        given = {"reduce": (X, 0.0), "loop": (0.0, X)}.get(function, (X,))
        with pytest.raises(ValueError, match="draw the same numbers") as error:
            getattr(scanlib, function)(steps[function], *given)
        assert f"    next_rng, draw = rng.normal(...)\n    {line}\n" in str(error.value)

    @pytest.mark.filterwarnings("ignore:Calling a RandomVariable", "ignore:RandomVariable Ops")
    def test_none_given(self):
        self.same_numbers(
            lambda h: pt.random.normal(h), "that of a draw without rng=", outputs_info=0.0
        )
        with pytest.raises(ValueError, match=r"rng=rng, return_next_rng=True\)\n.*rng in init"):
            scanlib.loop(lambda h, _: (h + pt.random.normal(), None), 0.0, length=3)

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_updates_of_an_inner_loop_that_are_dropped(self):
        stream = pt.random.RandomStream(3)

        def step(h, keep=False):
            inner, updates = scanlib.scan(lambda k: k + stream.normal(), None, 0.0, n_steps=2)
            return (h + inner[-1], updates) if keep else h + inner[-1]

        self.same_numbers(step, "or of a loop in the step", outputs_info=0.0)
        scanlib.scan(lambda h: step(h, keep=True), outputs_info=0.0, n_steps=3)

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_what_is_no_mistake(self):
        """Numbers differ from step to step, or were drawn once, before the loop."""
        stream = pt.random.RandomStream(5)
        once = self.rng.normal()[1]

        def carried(h, rng):
            rng, first = rng.normal()
            rng, second = rng.normal(first)
            return h + second, rng

        def updated(h):
            following, draw = self.shared.normal()
            return h + draw, {self.shared: following}

        walks = []
        for step, info in [
            (carried, [0.0, self.rng]),
            (updated, 0.0),
            (lambda h: h + stream.normal(), 0.0),
            (lambda h: h + once, 0.0),
            (lambda h, rng: (h + 1, rng), [0.0, self.rng]),
        ]:
            walk, _ = scanlib.scan(step, outputs_info=info, n_steps=3)
            walks.append(walk[0] if isinstance(walk, list) else walk)
        *moving, drawn_once, counted = in_python([self.rng], walks)(np.random.default_rng(1))
        for walk in moving:
            assert len(set(np.diff(walk, prepend=0.0))) == 3
        assert np.ptp(np.diff(drawn_once, prepend=0.0)) < 1e-12
        assert counted.tolist() == [1, 2, 3]

    @pytest.mark.parametrize("checkpoint", [None, 2])
    def test_gradients_inside_a_step(self, checkpoint):
        """They take a loop that draws once more, with the generator that it had."""
        z = pt.dvector("z")

        def scale(h, rng):
            rng, draw = rng.normal(size=2)
            return h * draw, rng

        y, _ = scanlib.scan(
            scale, None, [z, self.rng], n_steps=3, return_updates=False, checkpoint=checkpoint
        )
        jacobian = scanlib.map(
            lambda i, y, z: pytensor.grad(y[i], z), pt.arange(2), [y[-1], z], return_updates=False
        )
        function = in_python([z, self.rng], jacobian)
        draws = np.random.default_rng(1).normal(size=(3, 2))
        found = function(np.array([1.0, 2.0]), np.random.default_rng(1))
        np.testing.assert_allclose(found, np.diag(draws.prod(0)))


class TestConstantsAsStates:
    """The dtype of a constant integer is an accident: it counts as a Python integer."""

    @pytest.mark.parametrize("initial", [pt.constant(0), pt.as_tensor(0), pt.constant(300) - 300])
    def test_a_counter_does_not_overflow(self, initial):
        step = lambda n: n + 1  # noqa: E731
        if initial.owner is not None:  # an expression has the dtype that it has
            assert scanlib.scan(step, None, initial, n_steps=3)[0].dtype == initial.dtype
            return
        count, _ = scanlib.scan(step, outputs_info=initial, n_steps=300)
        total = scanlib.reduce(lambda k, n: n + k, np.arange(300), initial, return_updates=False)
        count, total = in_python([], [count[-1], total])()
        assert (count, total) == (300, 299 * 150)
        assert count.dtype == total.dtype == np.int64

    def test_a_float_state(self):
        """Promoted once or twice: `h` reads the float that `g` becomes."""
        for x in (pt.fvector("x"), pt.dvector("x")):
            info = [pt.constant(2, name="two"), pt.constant(1)]
            (h, g), _ = scanlib.scan(lambda x, h, g: (g, h + x), x, info)
            assert h.dtype == g.dtype == x.dtype
            values = in_python([x], [h, g])(np.array([0.5, 1.5], x.dtype))
            np.testing.assert_array_equal(values, [[1, 2.5], [2.5, 2.5]])

    def test_dtypes_that_were_chosen(self):
        for initial in (
            np.int8(0),
            np.array(0, "int8"),
            pt.constant(0, dtype="uint8"),
            pt.bscalar(),
        ):
            kept, _ = scanlib.scan(lambda n: n, outputs_info=initial, n_steps=3)
            assert kept.dtype == initial.dtype
        wider = pt.constant(0, dtype="int16")  # not the smallest, so somebody chose it
        assert scanlib.scan(lambda n: n + 1, outputs_info=wider, n_steps=3)[0].dtype == "int16"


class TestKnownLengths:
    three, five = np.ones(3), pt.vector("five", shape=(5,))

    def lengths(self, *sequences, **options):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            y, _ = scanlib.scan(first, list(sequences), **options)
        assert all(warning.filename == __file__ for warning in seen)
        return [str(warning.message) for warning in seen], y

    def test_differ(self):
        (message,), y = self.lengths(self.three, self.five)
        assert message == (
            "scan: the sequences have different lengths: sequences[0] has 3 rows, `five` has 5 "
            "rows; the loop takes 3 steps and leaves rows unread. If you mean that, give "
            "n_steps=3, or cut what is longer: five[:3]"
        )
        assert in_python([self.five], y)(np.ones(5)).shape == (3,)
        (message,), _ = self.lengths(self.five, self.three, X, go_backwards=True)
        assert "at most 3 steps" in message
        assert "n_steps" not in message
        assert message.endswith("cut what is longer: five[-3:]")

    @pytest.mark.filterwarnings("error")
    def test_under_strict(self):
        for checkpoint in (None, 2, scanlib.Memory(1000)):
            options = {"strict": True, "name": "s", "checkpoint": checkpoint}
            with pytest.raises(ValueError, match=r"scan `s`: the sequences have different lengths"):
                scanlib.scan(first, [self.three, self.five], **options)
            scanlib.scan(first, [self.three, self.five], n_steps=3, **options)

    def test_taps(self):
        """A sequence as long as another is left over by the other's taps."""
        lagged = {"input": self.five, "taps": [-1, 0]}
        for others in [
            [np.ones(5)],
            [np.ones(4)],
            [np.ones(4), np.ones(5)],
            [self.five[1:], self.five],
            [X, X[1:]],
            [{"input": np.ones(5), "taps": [-2]}],
            [{"input": np.ones(6), "taps": [-2, 0]}],
        ]:
            assert not self.lengths(lagged, *others)[0]
        (message,), _ = self.lengths(lagged, self.three)
        assert "`five` has 5 rows, enough for 4 steps with taps [-1, 0]" in message
        assert message.endswith("cut what is longer: five[:4]")

    def test_taps_that_reach_too_far(self):
        (message,), y = self.lengths({"input": np.ones(3), "taps": [-5, 0]})
        assert message == (
            "scan: sequences[0] has 3 rows, enough for 0 steps with taps [-5, 0]; the loop takes "
            "no step"
        )
        assert in_python([], y)().shape == (0,)
        with pytest.warns(UserWarning, match=r"loop: xs has 3 rows, .* the loop takes no step"):
            scanlib.loop(lambda h, x: (h + x[5], None), 0.0, scanlib.lags(np.ones(3), 5))
        assert not self.lengths({"input": np.ones(0), "taps": [-5, 0]})[0]

    def test_silence(self):
        assert not self.lengths(self.three, self.five, n_steps=3)[0]
        assert not self.lengths(self.three, self.five[:3])[0]
        assert not self.lengths(X, self.five)[0]

    def test_loops_of_common_shapes(self):
        sequences = [self.three, self.five]
        add = lambda a, b, h: a + b + h  # noqa: E731
        for build in [
            lambda: scanlib.map(first, sequences),
            lambda: scanlib.reduce(add, sequences, 0.0),
            lambda: scanlib.foldl(add, sequences, 0.0),
            lambda: scanlib.foldr(add, sequences, 0.0),
            lambda: scanlib.filter(lambda a, b: a > b, sequences),
            lambda: scanlib.scan_checkpoints(first, sequences),
        ]:
            with pytest.warns(UserWarning, match="sequences have different lengths") as seen:
                build()
            assert [warning.filename for warning in seen] == [__file__]

    def test_fewer_than_n_steps(self):
        with pytest.raises(SequenceLengthError, match=r"scan: sequences\[0\] has 3 rows, but the "):
            scanlib.scan(first, self.three, n_steps=4)
        taps = {"input": self.five, "taps": [-1, 1]}
        assert in_python([self.five], scanlib.scan(first, taps, n_steps=3)[0])(np.ones(5)).size == 3
        with pytest.raises(SequenceLengthError, match="`five` has 5 rows, enough for 3 steps with"):
            scanlib.scan(first, taps, n_steps=4)


def _no_return(*arguments):
    pass


@pytest.mark.parametrize(
    "build",
    [
        lambda: scanlib.scan(_no_return, X),
        lambda: scanlib.map(_no_return, X),
        lambda: scanlib.reduce(_no_return, X, 0.0),
        lambda: scanlib.foldl(_no_return, X, 0.0),
        lambda: scanlib.foldr(_no_return, X, 0.0),
        lambda: scanlib.filter(_no_return, X),
        lambda: scanlib.scan_checkpoints(_no_return, X),
    ],
)
def test_a_step_without_return(build):
    with pytest.raises(TypeError, match=r"returned None: it has no `return`.*\{\} if there are"):
        build()


def _pair(carry, row=None):
    return carry + (0.0 if row is None else row), carry


def _oscillator(y, _=None):
    return [y[1], -y[0]]


@pytest.mark.parametrize(
    "build, message",
    [
        # As one calls them in JAX.
        (lambda: scanlib.loop(_pair, 0.0, 10), r"integer 10; .* write length=10;"),
        (lambda: scanlib.loop(_pair, 0.0, np.int64(10)), r"write length=10;"),
        (lambda: scanlib.loop(_pair, 0.0, pt.iscalar("n")), r"write length=n;"),
        (lambda: scanlib.loop(_pair, 0.0, 10.0), r"xs is a scalar"),
        (
            lambda: scanlib.scan(_pair, 0.0, X),
            r"like jax\.lax\.scan is scanlib\.loop\(step",
        ),
        (
            lambda: scanlib.scan(_pair, X, X),
            r"\(carry, y\) are for scanlib\.loop\(step",
        ),
        (lambda: scanlib.scan(_pair, {"h": 0.0}, X), r"; scanlib\.loop takes trees"),
        (lambda: scanlib.map(lambda x: (x, None), X), r"\(carry, None\) are for scanlib\.loop"),
        # Nothing to iterate over.
        (lambda: scanlib.loop(_pair, 0.0, []), r"xs=\[\] holds no array; .* is np\.zeros\(0\)"),
        (lambda: scanlib.scan(_pair, [], 0.0), r"sequences=\[\] holds no array; .* is np\.zeros"),
        (
            lambda: scanlib.loop(lambda _, x: (x, x), None, X),
            r"(?s)holds nothing; .* return None, y",
        ),
        (
            lambda: scanlib.loop(_pair, 0.0, X, until=lambda h: None),
            r"loop: until `<lambda>` returns None; return the condition",
        ),
        (
            lambda: scanlib.loop(_pair, scanlib.lags(0.0, 2), X),
            r"init is a scalar, lags\(\.\.\., 2\) needs 2 rows: the values of the steps before",
        ),
        # A list, or an array of NumPy, where one vector is meant.
        (
            lambda: scanlib.scan(lambda y: np.array([y[1], -y[0]]), None, X, n_steps=3),
            "pt.stack in",
        ),
        (
            lambda: scanlib.loop(lambda y, _: (np.stack([*y[:2]]), y), np.ones(2), length=3),
            "pt.stack in",
        ),
        (lambda: scanlib.scan(_oscillator, None, X, n_steps=3), r"one vector write pt\.stack\("),
        (lambda: scanlib.loop(lambda y, _: (_oscillator(y), y), X, length=3), r"pt\.stack\("),
        (lambda: scanlib.loop(_oscillator, X, length=3), r"pt\.stack\("),
    ],
)
def test_calls_of_the_first_hour(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


def test_a_step_that_returns_updates_alone():
    total = pytensor.shared(0.0, name="total")
    outputs, updates = scanlib.scan(lambda x: {total: total + x}, X)
    assert outputs is None
    pytensor.function([X], updates=updates, mode="FAST_COMPILE")([1.0, 2.0])
    assert total.get_value() == 3.0
    assert scanlib.map(lambda x: {}, X) == (None, {})


@pytest.mark.parametrize(
    "returned, advice",
    [
        (scanlib.until, r"of type type\. Write until\(condition\)"),
        (classic_until, r"of type type\. Write until\(condition\)"),
        ("a", r"got 'a' of type str\. Text cannot be stacked over time; leave it out"),
        (1.0, r"got 1\.0 of type float\. Wrap constants"),
        (np.ones(2), r"of type ndarray\. Wrap constants"),
    ],
)
def test_what_is_no_variable(returned, advice):
    for result in returned, [X.sum(), returned]:
        with pytest.raises(TypeError, match=advice):
            scanlib.scan(lambda v, result=result: result, X)


OPTIONS = [
    ({"mode": "NONSENSE"}, ValueError, r"mode must be None, .* \(C, CVM, .*\), got 'NONSENSE'"),
    ({"mode": 5}, TypeError, "mode must be None, .* got 5; leave it out"),
    ({"name": 5}, TypeError, "name must be a string, got 5 of type int"),
    ({"go_backwards": "no"}, TypeError, "go_backwards must be True or False, got 'no' of type str"),
    ({"strict": None}, TypeError, "strict must be True or False, got None"),
    ({"return_list": 1}, TypeError, "return_list must be True or False, got 1 of type int"),
    ({"return_updates": "no"}, TypeError, "return_updates must be True or False"),
    ({"truncate_gradient": 0.5}, TypeError, "truncate_gradient must be an integer, got 0.5"),
    ({"truncate_gradient": 0}, ValueError, "truncate_gradient must be at least 1, or -1 .* got 0"),
    ({"truncate_gradient": -5}, ValueError, "truncate_gradient must be at least 1, .* got -5"),
    (
        {"non_sequences": {"w": X}},
        TypeError,
        r"non_sequences is a dict with the keys \['w'\]; give",
    ),
    ({"checkpoint": 0}, ValueError, "checkpoint must be a length of at least 1 step, got 0"),
    ({"checkpoint": (2, 3)}, ValueError, r"checkpoint=\(2, 3\): nested segments get shorter"),
    ({"checkpoint": scanlib.Memory(10)}, ValueError, r"scan: checkpoint=Memory\(10\) is too litt"),
]


@pytest.mark.parametrize("options, error, message", OPTIONS, ids=lambda value: str(value)[:30])
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        scanlib.scan(lambda x, h: h * x, X, pt.scalar("h"), **options)


def test_options_that_are_right():
    for options in [
        {"mode": "FAST_COMPILE"},
        {"mode": get_default_mode(), "name": "s", "go_backwards": np.True_},
        {"checkpoint": scanlib.Memory(1000), "strict": True, "n_steps": np.array(3)},
    ]:
        assert scanlib.scan(lambda x, h: h * x, X, pt.scalar("h"), **options)[0].ndim == 1


@pytest.mark.parametrize("steps", [np.int8(3), np.array(3), pt.iscalar(), pt.constant(3)], ids=str)
def test_numbers_of_steps(steps):
    assert scanlib.scan(first, outputs_info=0.0, n_steps=steps)[0].ndim == 1


def test_numbers_of_steps_of_other_packages():
    for package, make in [("jax.numpy", "int32"), ("torch", "tensor")]:
        try:
            three = getattr(__import__(package, fromlist=["x"]), make)(3)
        except ImportError:
            continue
        y, _ = scanlib.scan(first, outputs_info=0.0, n_steps=three)
        assert in_python([], y)().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "condition, message",
    [
        (True, r"is the Python value True; give np\.array\(True\) .* pt\.eq"),
        ("x", "must be a PyTensor variable"),
        (pt.random.rng("rng"), "must be a scalar, got RandomGeneratorType"),
    ],
)
def test_conditions(condition, message):
    with pytest.raises(TypeError, match=f"the condition of `until` {message}"):
        scanlib.until(condition)


def test_flags_that_are_none(monkeypatch):
    check_flags()
    monkeypatch.setattr(pytensor.config, "scanlib__treads", 4, raising=False)
    with pytest.raises(ValueError, match=r"scanlib__treads is no flag .* write scanlib__threads"):
        scanlib.map(first, X)


def test_warnings_point_at_the_line_of_the_user():
    with pytest.warns(UserWarning, match="only its last value is returned") as seen:
        scanlib.scan(lambda s: s, outputs_info=pytensor.sparse.csr_matrix("s"), n_steps=2)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("fill, dtype", [(0.5, "float32"), (0, "int8")])
@pytest.mark.parametrize(
    "change", [lambda h, i, v: h[i].set(v), lambda h, i, v: h[i].inc(v)[0].set(0)]
)
def test_what_is_rounded_into_a_filled_array_is_a_warning(fill, dtype, change):
    """PyTensor fills arrays in the smallest dtype, and casts what is written into them."""
    with pytest.warns(UserWarning, match=f"init is {dtype}, .* float64, is rounded; .* dtype='fl"):
        scanlib.loop(lambda h, x: (change(h, 1, x), None), pt.full(3, fill), pt.dvector())


def test_what_inner_loops_round_into_a_filled_array_is_a_warning():
    """The table of `for i: for j: D[i, j] = …`, whose first item is set before the loops."""
    x = pt.dvector("x")
    size = x.shape[0]

    def fill(table, i):
        def step(table, j):
            return (table[i + 1, j + 1].set(x[j] + table[i, j]), None)

        return scanlib.loop(step, table, pt.arange(size))

    with pytest.warns(UserWarning, match=r"init is float32, .* float64, is rounded"):
        scanlib.loop(fill, pt.full((size + 1, size + 1), np.inf)[0, 0].set(0), pt.arange(size))


def test_arrays_that_hold_what_is_written_are_no_warning():
    with warnings.catch_warnings(action="error"):
        for initial in (pt.zeros(3), pt.full(3, 0.5, dtype="float64"), np.ones(3, "float32")):
            scanlib.loop(lambda h, x: (h[1].set(x), None), initial, pt.dvector())
        scanlib.loop(lambda h, x: (0.1 * h + x, None), pt.full(3, 0.5), pt.dvector())
