"""What is said of a step that fails: the loop, the operation, the step and the sizes."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import OPT_FAST_RUN, Mode
from pytensor.raise_op import Assert

from scanlib import loop, scan

MODES = {
    "numba": "NUMBA",
    "c": Mode("cvm", OPT_FAST_RUN),
    "python": Mode("py", OPT_FAST_RUN),
    "FAST_COMPILE": "FAST_COMPILE",
}
P, F, x = pt.dmatrix("P"), pt.dmatrix("F"), pt.dvector("x")
places = pt.lvector("places")
ONES = {"P": np.ones((4, 3)), "F": np.ones((4, 5)), "x": np.ones(3), "places": np.array([0, 7])}


def rotated(h, x):
    return pt.tanh(pt.concatenate([h[1:], h[:1]]) + x)


def sum_of_three(i, h):
    return h[i - 5].set(pt.specify_shape(h[i : i + 3], 3).sum())


def three_written(i, h):
    return h[i : i + 3].set([1.0, 2.0, 3.0])


def checked(i, h):
    return Assert("the place {i} is not below 5")(h + 1.0, i < 5)


# The step, its sequences, initial value and non-sequences; what it raises, and the message.
FAILURES = {
    "product": (
        (lambda P, F: pt.tanh(F @ P), None, P, F),
        (ValueError, "F @ P at step 0: (4, 5) times (4, 3)"),
    ),
    "product of what was computed before": (
        (lambda h, F: pt.tanh(h @ F * 0.9), None, x, F),
        (ValueError, "F.T @ x at step 0: (5, 4) times (3, 1)"),
    ),
    "sum": (
        (rotated, None, pt.zeros(4), x),
        (ValueError, "at step 0: Incompatible Elemwise input shapes, sizes 4 and 3 along axis 0"),
    ),
    "index": (
        (lambda i, h, x: h + x[i], places, pt.zeros(()), x),
        (IndexError, "x[places] at step 1: index 7 is out of bounds for axis 0 with size 3"),
    ),
    "index of a row": (
        (lambda i, h, x: pt.tanh(h) @ pt.ones((2, 2)) + x[-i], places, pt.zeros(2), x),
        (IndexError, "] at step 1: index -7 is out of bounds for axis 0 with size 3"),
    ),
    "slice": (
        (sum_of_three, places, pt.zeros(8), None),
        (AssertionError, "at step 1: SpecifyShape: axis 0 has size 1, expected 3"),
    ),
    "written slice": (
        (three_written, places, pt.zeros(8), None),
        (
            ValueError,
            "at step 1: cannot assign an array of another shape to a slice: sizes 1 and 3",
        ),
    ),
    "written numbers that are equal": (
        (lambda i, h: h[:2].set(2 * np.ones(3)), places, x, None),
        (
            ValueError,
            "at step 0: cannot assign an array of another shape to a slice: sizes 2 and 3",
        ),
    ),
    "equal numbers at places": (
        (lambda i, h: h[pt.arange(2) * (i < 9)].inc(np.ones(3)), places, x, None),
        (
            ValueError,
            "at step 0: cannot assign an array of another shape to a slice: sizes 2 and 3",
        ),
    ),
    "singular": (
        (lambda P, F: pt.linalg.inv(P[:3] * 0.0), None, P[:3], F),
        (np.linalg.LinAlgError, " at step 0: Matrix is singular to machine precision."),
    ),
    "assertion": (
        (checked, places, pt.zeros(2), None),
        (AssertionError, " at step 1: the place {i} is not below 5"),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", FAILURES)
def test_messages(failure, mode):
    (step, sequences, initial, other), (error, message) = FAILURES[failure]
    n_steps = 2 if sequences is None else None
    y, _ = scan(step, sequences, [initial], other, n_steps=n_steps, name="walk")
    f = pytensor.function([P, F, x, places], y, mode=MODES[mode], on_unused_input="ignore")
    with pytest.raises(error) as raised:
        f(*ONES.values())
    (text, *_) = str(raised.value).split("\n")
    assert text.startswith("scan `walk`: ")
    assert message in text


@pytest.mark.all_forms
@pytest.mark.parametrize("mode", ["numba", "c"])
def test_matrix_recurrences_say_which_sizes_differ(mode):
    W, rows, start = pt.dmatrix("W"), pt.dmatrix("rows"), pt.dvector("start")
    trace, _ = scan(lambda row, h, W: W @ h + row, rows, start, W, name="var")
    f = pytensor.function([W, rows, start], trace, mode=MODES[mode])
    assert f(np.eye(3), np.ones((5, 3)), np.ones(3)).shape == (5, 3)
    for shapes, message in {
        ((4, 4), (5, 3), (3,)): "the matrix `W` has 4 rows, but the state has 3 items",
        ((3, 4), (5, 3), (3,)): "the matrix `W` has 4 columns, but the state has 3 items",
        ((3, 3), (5, 4), (3,)): (
            "what is added to the state has size 4 along axis 0, "
            "but the state has size 3 along axis 0"
        ),
    }.items():
        with pytest.raises(ValueError, match="scan `var`: ") as error:
            f(*map(np.ones, shapes))
        assert message in str(error.value)
    _, trace = loop(lambda h, row: (W @ h + row, h), start, rows)
    f = pytensor.function([W, rows, start], trace, mode=MODES[mode])
    with pytest.raises(ValueError, match="loop: the matrix `W` has 4 rows"):
        f(np.ones((4, 4)), np.ones((5, 3)), np.ones(3))
