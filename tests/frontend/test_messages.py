"""Messages that say what a step is called with, and names of what comes out of a loop."""

import functools
import io
import math
import operator
import pickle

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import scipy.special
from pytensor.scan.utils import until as classic_until

import scanlib
from scanlib.ops.scan import Scan

pytestmark = pytest.mark.all_forms
payment, amounts = pt.dvector("payment"), pt.dvector("amounts")
balance, rate = pt.dscalar("balance"), pt.dscalar("rate")
CALLED = "the step is called with 2 arguments: payment (row of sequences[0]), "
CALLED += "balance[t-1] (outputs_info[0]); "
IN_ORDER = "write one parameter for each, in this order"


class Steps:
    """Callables of several kinds that take one argument, or what they are given."""

    def method(self, a):
        return a

    @classmethod
    def of_class(cls, a):
        return a

    @staticmethod
    def static(a):
        return a

    def __call__(self, a):
        return a


def keyword(a, b, *, factor):
    return a * b * factor


TAKES = {
    "few": (lambda b: b, "`<lambda>` takes 1"),
    "many": (lambda p, b, c: b, "`<lambda>` takes 3"),
    "none": (lambda: balance, "`<lambda>` takes 0"),
    "partial": (functools.partial(lambda p, b: b, 1.0), "`<lambda>` takes 1"),
    "method": (Steps().method, "`method` takes 1"),
    "class method": (Steps.of_class, "`of_class` takes 1"),
    "static method": (Steps.static, "`static` takes 1"),
    "instance": (Steps(), "`Steps` takes 1"),
    "default": (lambda p, b, c, d=1: b, "`<lambda>` takes 3 to 4"),
    "star": (lambda p, b, c, *rest: b, "`<lambda>` takes 3 or more"),
    "keyword": (keyword, "`keyword` takes 2, and needs the keywords factor"),
}


@pytest.mark.parametrize("kind", TAKES)
def test_wrong_number_of_arguments(kind):
    step, takes = TAKES[kind]
    with pytest.raises(TypeError) as error:
        scanlib.scan(step, payment, balance, name="balance")
    assert str(error.value).startswith(f"scan `balance`: {CALLED}{takes}; {IN_ORDER}")


RIGHT = {
    "default": lambda p, b, c=2.0: p + b * c,
    "star": lambda *rows: sum(rows),
    "partial": functools.partial(keyword, factor=2.0),
    "keyword": lambda p, b, *, c=2.0: p + b * c,
    "no signature": pt.add,
}


@pytest.mark.parametrize("kind", RIGHT)
def test_steps_that_fit(kind):
    step = RIGHT[kind]
    trace = scanlib.scan(step, payment, balance, return_updates=False)
    after = float(step(2.0, 3.0).eval()) if kind == "no signature" else step(2.0, 3.0)
    assert trace.eval({payment: [2.0], balance: 3.0}).tolist() == [after]


def test_all_that_a_step_receives():
    with pytest.raises(TypeError) as error:
        scanlib.scan(
            lambda a: a,
            [{"input": payment, "taps": [-1, 0]}, pt.dvector()],
            [None, {"initial": pt.dvector("h"), "taps": [-2, -1]}, 0.0],
            [rate, 1.0],
        )
    given = [
        "payment[t-1] (tap -1 of sequences[0])",
        "payment[t] (tap 0 of sequences[0])",
        "row of sequences[1]",
        "h[t-2] (outputs_info[1])",
        "h[t-1] (outputs_info[1])",
        "outputs_info[2] at t-1",
        "rate (non_sequences[0])",
        "non_sequences[1]",
    ]
    assert f"scan: the step is called with 8 arguments: {', '.join(given)}; " in str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda step: scanlib.map(step, payment),
        lambda step: scanlib.filter(step, payment),
        lambda step: scanlib.reduce(step, payment, balance),
        lambda step: scanlib.foldl(step, payment, balance),
        lambda step: scanlib.foldr(step, payment, balance),
        lambda step: scanlib.scan_checkpoints(step, payment, balance),
    ],
    ids=["map", "filter", "reduce", "foldl", "foldr", "scan_checkpoints"],
)
def test_other_loops_say_it_too(call):
    with pytest.raises(TypeError, match=r"called with . arguments?: payment .*takes 3; write one"):
        call(lambda a, b, c: a)


def test_an_error_of_the_step_stays_what_it_is():
    def broken(p, b):
        return (lambda: p)(b)

    with pytest.raises(TypeError, match=r"takes 0 positional arguments but 1 was given"):
        scanlib.scan(broken, payment, balance)


def with_factor(step):
    """Return a step that passes on more than it is given, as decorators do."""

    @functools.wraps(step)
    def wrapped(*rows):
        return step(2.0, *rows)

    return wrapped


def test_an_error_of_the_step_says_what_it_was_called_with():
    rows = np.ones((4, 2))
    with pytest.raises(ValueError, match="Incompatible") as caught:
        scanlib.scan(lambda x, h: h + x, rows, np.zeros(3), name="sizes")
    (note,) = caught.value.__notes__
    assert note.startswith("scan `sizes`: the step is called before the loop runs, with symbolic")
    assert note.endswith("row of sequences[0]: (2,) float64; outputs_info[0] at t-1: (3,) float64.")
    with pytest.raises(TypeError) as other:
        scanlib.loop(lambda c, x: (x if c[0] > 0 else c[1], None), (0.0, rows), rows)
    (note,) = other.value.__notes__
    assert "the carry (init), tuple, to be read as v[0]: scalar float64, (4, 2) float64; " in note
    assert "a row (xs): (2,) float64." in note
    assert "In place of `if` write pt.where(condition, a, b)" in note
    with pytest.raises(IndexError) as second:
        scanlib.map(lambda i: rows[i], np.arange(4))
    assert "as_tensor(table)[i]" in second.value.__notes__[0]
    with pytest.raises(RecursionError) as third:  # what PyTensor makes of it
        scanlib.map(lambda row: row["price"], rows)
    assert third.value.__notes__[0].endswith("The items of a row have numbers, x[0], not names.")


@pytest.mark.parametrize(
    "xs, step, way",
    [
        ((payment, np.ones((4, 2))), lambda c, v: (c + v, v), "tuple, to be read as v[0]: scalar"),
        (scanlib.lags(payment, 1), lambda c, v: (c + v, v), "Lags, to be read as v[0]."),
        ({"x": payment}, lambda c, v: (c + v["y"], v), "a dict with the keys 'x': scalar"),
    ],
    ids=["tuple", "lags", "dict"],
)
def test_the_note_says_how_rows_are_read(xs, step, way):
    with pytest.raises((TypeError, KeyError)) as caught:
        scanlib.loop(step, 0.0, xs)
    assert f"a row (xs), {way}" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "walk",
    [
        lambda y: pt.stack([b := y[0], b]) if len(y) else y,
        lambda y: pt.stack(list(y)),
        lambda y: (lambda a, b: pt.stack([b, a]))(*y),
    ],
    ids=["len", "for", "unpack"],
)
def test_the_note_says_how_vectors_are_taken_apart(walk):
    with pytest.raises((TypeError, ValueError)) as caught:
        scanlib.loop(lambda y, _: (walk(y), None), payment, length=3)
    note = caught.value.__notes__[0]
    assert "write y[0], y[1] for `a, b = y`" in note
    assert "`max`" not in note


@pytest.mark.parametrize(
    "wrong, advice",
    [
        (lambda v, h: h if h > 0 else v, "In place of `if` write pt.where(condition, a, b)"),
        (max, "of `max` and np.maximum pt.maximum; `until` ends the loop."),
        (np.maximum, "of `max` and np.maximum pt.maximum; `until` ends the loop."),
        (lambda v, h: pt.where(0 < v < h, v, h), "of `a < b < c` (a < b) & (b < c)"),
        (lambda v, h: pt.where(v == h, v, h), "of `and`, `or`, `not` write &, |, ~"),
        (lambda v, h: float(h), "In place of `float` and `int` write pt.cast"),
        (lambda v, h: math.exp(h), "of `math` functions of pytensor.tensor, such as pt.exp"),
        (lambda v, h: sum(h for _ in range(v)), "of `range` another loop; pt.as_tensor(table)[i]"),
        (lambda v, h: h * len(f"{v:.2f}"), "symbols where Python wants values."),
        (
            lambda v, h: np.dot(np.eye(2), pt.stack([h, v])) * v,
            "NumPy knows no symbols: write functions of pytensor",
        ),
        (lambda v, h: np.where(v > h, v, h), "NumPy knows no symbols: write functions of pytensor"),
        (lambda v, h: pt.ones(3)[v], "pt.cast(i, 'int64') for an index"),
        (lambda v, h: h + None, "None has no value: without `xs` a row is None"),
        (lambda v, h: np.ones(3)[h.astype(int)], "; pt.as_tensor(table)[i] reads a list"),
        (lambda v, h: operator.setitem(h, 0, v), "write h = h[i].set(v) in place of h[i] = v"),
        (lambda v, h: h.at[0].set(v), "write h = h[i].set(v) in place of h[i] = v and h.at[i]"),
        (lambda v, h: scipy.special.expit(h), "Functions of NumPy, SciPy, JAX and PyTorch know no"),
        (lambda v, h: np.linalg.inv(h), "Functions of NumPy, SciPy, JAX and PyTorch know no"),
        (lambda v, h: round(h), "of `round` pt.round"),
        (lambda v, h: pt.cast(h, "int64") >> 1, "no << and >>: write v * 2**k and v // 2**k"),
        (lambda v, h: 1 << pt.cast(h, "int64"), "no << and >>: write v * 2**k and v // 2**k"),
        (lambda v, h: h.unsqueeze(0), "methods that arrays of NumPy have, such as v.astype"),
        (lambda v, h: h + scanlib.lags(v, 1), "write v[1] for the one before"),
        (lambda v, h: pt.exp(None), "None has no value: without `xs` a row is None"),
        (lambda v, h: h.sum(dim=0), "NumPy's names: axis in place of dim"),
        (lambda v, h: pt.ones(3)[v / 2], "Write i // 2 in place of i / 2"),
        (lambda v, h: h.reshape(2, 2), "The new shape is one tuple: v.reshape((2, -1))"),
        (lambda v, h: pt.softmax(h), "pt.special.softmax and pt.special.log_softmax"),
        (lambda v, h: h + pt.random.rng().normal(), "A draw is a pair, the next generator and"),
        (lambda v, h: h.sum("day"), "What starts without named dims has none in the first call"),
    ],
)
def test_the_note_says_what_stands_for_python(wrong, advice):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        scanlib.scan(lambda v, h: wrong(v, h), payment, balance)
    assert advice in caught.value.__notes__[0]


@pytest.mark.parametrize("until", [scanlib.until, classic_until])
@pytest.mark.parametrize("nested", [True, False])
def test_a_condition_has_the_third_place(until, nested):
    step = lambda h, v: ((h, v) if nested else h, until(h > v))  # noqa: E731
    with pytest.raises(TypeError, match=r"or \(carry, y, stop\).*`until` in the place of y"):
        scanlib.loop(step, balance, payment)


def test_the_note_names_no_other_packages_where_the_error_is_of_pytensor():
    with pytest.raises(TypeError, match="Cost must be a scalar") as caught:
        scanlib.scan(lambda v, h: pytensor.grad(h * pt.ones(2), h), payment, balance)
    assert "know no symbols" not in caught.value.__notes__[0]


@pytest.mark.parametrize("wrong", [lambda v: scanlib.until(v, v), lambda v: pt.exp(v).set(0, 1)])
def test_the_note_adds_nothing_where_the_error_says_it(wrong):
    with pytest.raises(TypeError, match=r"takes .* positional arguments but") as caught:
        scanlib.scan(lambda v, h: wrong(v), payment, balance)
    assert caught.value.__notes__[0].endswith("float64.")


def test_an_error_of_an_inner_loop_says_itself_what_to_do():
    with pytest.raises(TypeError, match="the step returns") as caught:
        scanlib.map(lambda row: scanlib.scan(lambda v, h: [row], row, 0.0), np.ones((3, 2)))
    assert caught.value.__notes__[0].endswith("row of sequences[0]: (2,) float64.")


@pytest.mark.parametrize("function", ["scan", "map", "loop"])
def test_a_step_that_yields(function):
    given = {"scan": (payment, 0.0), "map": (payment, 2.0), "loop": (0.0, payment)}[function]

    def step(v, h):
        yield h

    with pytest.raises(TypeError, match=f"^{function}: the step `step` returns a generator; write"):
        getattr(scanlib, function)(step, *given)


def test_updates_where_outputs_are_meant():
    pair = scanlib.scan(lambda p, b: p + b, payment, balance)
    for call in [lambda: pytensor.function([payment, balance], pair), lambda: pt.sum(pair)]:
        with pytest.raises((TypeError, NotImplementedError), match="with return_updates=False"):
            call()


def test_decorated_steps():
    doubled = scanlib.map(with_factor(lambda k, p: k * p), payment, return_updates=False)
    assert doubled.eval({payment: [1.0, 3.0]}).tolist() == [2.0, 6.0]
    with pytest.raises(TypeError, match="not callable"):
        scanlib.map(with_factor(lambda k, p: p(k)), payment)


def test_number_of_results():
    with pytest.raises(ValueError, match="returned 3") as error:
        scanlib.scan(lambda p, b, c: (b, c, p), payment, [balance, 0.0], name="loan")
    assert str(error.value) == (
        "scan `loan`: outputs_info describes 2 outputs, balance (outputs_info[0]), "
        "outputs_info[1]; `<lambda>` returned 3; give one entry per output, None for those that "
        "no step reads"
    )


@pytest.mark.parametrize(
    "step, came",
    [
        (lambda P: P[:, :3], r"\(4, 3\) float64; give an initial value of the shape"),
        (lambda P: P.sum(), "scalar float64; give an initial value of the shape"),
        (lambda P: P[:1], r"\(1, 4\) float64; broadcast the returned value"),
        (lambda P: P.astype("complex64"), r"\(4, 4\) complex64, and neither .*, 'float64'\)"),
    ],
    ids=["size", "rank", "one", "dtype"],
)
@pytest.mark.parametrize(
    "function, loop",
    [
        ("scan", lambda step, P: scanlib.scan(step, None, P, n_steps=3, name="Riccati")),
        (
            "reduce",
            lambda step, P: scanlib.reduce(lambda x, P: step(P), payment, P, name="Riccati"),
        ),
        ("foldr", lambda step, P: scanlib.foldr(lambda x, P: step(P), payment, P, name="Riccati")),
        (
            "scan_checkpoints",
            lambda step, P: scanlib.scan_checkpoints(step, None, P, n_steps=3, name="Riccati"),
        ),
    ],
)
def test_results_that_do_not_fit_their_state(step, came, function, loop):
    P = pt.tensor("P", shape=(4, 4), dtype="float64")
    starts = rf"{function} `Riccati`: state `P` starts as \(4, 4\) float64, the step returns "
    with pytest.raises(TypeError, match=f"^{starts}{came}"):
        loop(step, P)


@pytest.mark.parametrize("function", ["map", "reduce", "foldl", "foldr", "filter"])
def test_messages_begin_with_the_function_that_was_called(function):
    initial = [0.0] if function in ("reduce", "foldl", "foldr") else []

    def call(step):
        return getattr(scanlib, function)(step, payment, *initial)

    for step in (lambda *given: None, lambda: payment, "no step"):
        with pytest.raises(TypeError, match=f"^{function}: "):
            call(step)
    # A loop inside of the step is another one.
    with pytest.raises(TypeError, match=r"^scan: the step function returned None"):
        call(lambda *given: scanlib.scan(lambda: None, n_steps=3))
    with pytest.raises(TypeError, match=r"^scan: the step function returned None"):
        scanlib.scan(lambda: None, n_steps=3)


def wave(i, h):
    return pt.tanh(h) + amounts[i]


U = {"return_updates": False, "name": "walk"}
places = pt.lvector("places")
CALLED_AS = {
    "scan": lambda: scanlib.scan(wave, places, balance, **U),
    "map": lambda: scanlib.map(lambda i: amounts[i], places, **U),
    "reduce": lambda: scanlib.reduce(wave, places, balance, **U),
    "foldl": lambda: scanlib.foldl(wave, places, balance, **U),
    "foldr": lambda: scanlib.foldr(wave, places, balance, **U),
    "filter": lambda: scanlib.filter(lambda i: amounts[i] > 0, places, name="walk"),
    "scan_checkpoints": lambda: scanlib.scan_checkpoints(wave, places, balance, **U),
    "loop": lambda: scanlib.loop(lambda h, i: (wave(i, h), None), balance, places, name="walk")[0],
}


@pytest.mark.parametrize("function", CALLED_AS)
def test_messages_of_running_loops_begin_with_it_too(function):
    run = pytensor.function(
        [places, amounts, balance], CALLED_AS[function](), mode="FAST_COMPILE",
        on_unused_input="ignore",
    )  # fmt: skip
    with pytest.raises(IndexError, match=rf"^{function} `walk`: .* at step 1: index 7 is out of"):
        run([1, 7, 2], [1.0, 2.0, 3.0], 0.5)


@pytest.mark.parametrize("function", ["reduce", "foldl", "foldr"])
def test_last_rows_of_no_steps(function):
    last = getattr(scanlib, function)(lambda p, b: p + pt.tanh(b), payment, balance, **U)
    run = pytensor.function([payment, balance], last, mode="FAST_COMPILE")
    with pytest.raises(IndexError, match=rf"^{function} `walk`: a row was read .* fewer than 1 "):
        run([], 0.5)


def test_the_function_that_was_called_does_not_count():
    """Equal loops are one, with the words of one of them."""
    outputs = [CALLED_AS["foldl"](), CALLED_AS["scan"](), CALLED_AS["reduce"]()]
    function = pytensor.function([places, amounts, balance], outputs, mode="FAST_COMPILE")
    (loop,) = [node.op for node in function.maker.fgraph.toposort() if isinstance(node.op, Scan)]
    assert loop.labels.function in ("foldl", "scan", "reduce")
    assert pickle.loads(pickle.dumps(loop)).labels == loop.labels


# Names


def trace_of(initial, name=None, step=lambda p, b: b * 1.5 + p):
    return scanlib.scan(step, payment, initial, name=name, return_updates=False)


def printed(graph):
    file = io.StringIO()
    pytensor.dprint(graph, file=file)
    return file.getvalue()


NAMED = {
    "key": (trace_of({"initial": pt.dscalar("start"), "name": "balance"}, "loan"), "balance"),
    "initial value": (trace_of(balance, "loan"), "balance[t]"),
    "loop": (trace_of(0.0, "balance"), "balance"),
    "map": (scanlib.map(lambda p: p + 1, payment, name="later", return_updates=False), "later"),
}


@pytest.mark.parametrize("source", NAMED)
def test_a_result_prints_as_what_it_is(source):
    trace, name = NAMED[source]
    day = pt.lscalar("day")
    texts = [str(part) for part in (trace, trace[-1], trace[::2], trace[1:][0], trace[day])]
    rows = name.removesuffix("[t]")
    assert texts == [name, *(f"{rows}[{i}]" for i in ("-1", "::2", "1:][0", "day"))]
    assert f"'{rows}[-1]'" in printed(trace[-1])


def test_inputs_are_found_by_their_names():
    """No result has the name of an input."""
    x, h0, w = pt.dvector("x"), pt.dscalar("h0"), pt.dscalar("w")
    start = pt.dvector("start")

    def scanned(step, *given):
        return scanlib.scan(step, *given, return_updates=False)

    trace = scanned(lambda v, h: h + v, x, h0)
    final, ys = scanlib.loop(lambda c, v: ({"h0": c["h0"] + v}, {"x": c["h0"]}), {"h0": h0}, x)
    pair = {"x": [1.0, 2.0], "h0": 1.0}
    for result, given, expected in (
        (trace, pair, [2.0, 4.0]),
        (trace[-1] * 2, pair, 8.0),
        (final["h0"], pair, 4.0),
        (ys["x"], pair, [1.0, 2.0]),
        (scanlib.reduce(lambda v, h: h + v, x, h0, return_updates=False), pair, 4.0),
        (scanned(lambda v: w, x), {"x": [1.0, 2.0], "w": 3.0}, [3.0, 3.0]),
        (
            scanned(lambda v, a, b: a + b + v, x, {"initial": start, "taps": [-2, -1]}),
            {"x": [1.0, 2.0], "start": [1.0, 2.0]},
            [4.0, 8.0],
        ),
    ):
        np.testing.assert_array_equal(result.eval(given, mode="FAST_COMPILE"), expected)
    assert start.name == "start"


def test_several_results():
    def step(p, b):
        interest = b * rate
        interest.name = "interest"
        return b + p, interest, p * 2, b * 2

    results = trace_of([0.0, None, None, {"name": "twice"}], "loan", step)
    assert [str(result) for result in results] == ["loan.0", "interest", "loan.2", "twice"]
    nameless = scanlib.scan(lambda p, b: b + p, payment, 0.0, return_updates=False)
    assert (str(nameless), nameless.name) == ("Scan{loop}.0", None)
    last = scanlib.reduce(lambda p, b: b + p, payment, balance, return_updates=False)
    assert str(last) == "balance[-1]"


def test_direct_functions_are_printed_by_their_names():
    matrix = pt.dmatrix("matrix")
    assert str(scanlib.linear_scan(0.5, matrix)[-1]) == "linear_scan[-1]"
    assert str(scanlib.cummax(matrix, axis=1)[:, 0]) == "cummax[:, 0]"


def test_names_of_the_user_stay():
    trace = trace_of(balance)
    trace.name = "mine"
    assert (str(trace[-1]), str(balance)) == ("mine[-1]", "balance")
    last = trace[-1]
    last.name = "last"
    assert (str(last), str(trace)) == ("last", "mine")
    assert isinstance(trace.owner.inputs[0].owner.op, Scan), "the whole history"
    assert trace.owner.inputs[0].name is None
    assert str(pickle.loads(pickle.dumps(trace))[-1]) == "mine[-1]"
    assert trace.clone().name == "mine"


def test_names_do_not_count():
    ours = trace_of({"initial": balance, "name": "first"}, "first")
    theirs = trace_of({"initial": balance, "name": "second"}, "second")
    assert ours.owner.inputs[0].owner.op == theirs.owner.inputs[0].owner.op
    function = pytensor.function([payment, balance], [ours, theirs], mode="FAST_COMPILE")
    assert sum(isinstance(node.op, Scan) for node in function.maker.fgraph.toposort()) == 1


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "CVM"])
def test_names_reach_what_is_compiled(mode):
    trace = trace_of(balance, "loan", lambda p, b: pt.sin(b) + p)
    function = pytensor.function([payment, balance], [trace, trace[-1]], mode=mode)
    for name in ("Scan{loan}", "'balance[t]'", "'balance[-1]'"):
        assert name in printed(function)
    assert "balance" in scanlib.explain(function).details()


def test_names_reach_profiles():
    trace = trace_of(balance, "loan", lambda p, b: pt.sin(b) + p)
    function = pytensor.function([payment, balance], trace, mode="FAST_COMPILE", profile=True)
    function([1.0], 1.0)
    summary = io.StringIO()
    function.profile.summary(file=summary)
    assert "Scan{loan}" in summary.getvalue()


def test_names_of_matrix_recurrences():
    a, b = pt.dmatrix("a"), pt.dmatrix("b")
    trace = scanlib.scan(
        lambda b, h, a: a @ h + b, b, pt.zeros(3), a, name="filtered", return_updates=False
    )
    (loop,) = scanlib.explain(trace, mode="CVM").loops
    assert (loop.op, loop.name) == ("LinearScan", "filtered")
    function = pytensor.function([a, b], trace[-1], mode="CVM")
    assert "LinearScan{filtered, " in printed(function)


def test_name_that_is_no_string():
    with pytest.raises(TypeError, match=r"the name of outputs_info\[0\] must be a string, got 5"):
        trace_of({"initial": balance, "name": 5})


def test_a_condition_that_python_has_compared():
    for options, step in [
        ({"until": lambda h: h == 3}, lambda h, _: (h + 1, None)),
        ({}, lambda h, _: (h + 1, None, h == 3)),
    ]:
        by = "`until` returns" if options else "the step returns"
        with pytest.raises(TypeError, match=f"the condition that {by} is the Python value False"):
            scanlib.loop(step, 0, length=9, **options)
