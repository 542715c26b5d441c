"""Axes along which a step computes every item from its own past alone."""

import pytensor.tensor as pt
import pytest

from scanlib.ops.kept_axes import independent_axes

h, w, v = pt.matrix("h"), pt.matrix("w"), pt.vector("v")
cube = pt.tensor3("cube")
STEPS = {
    "elementwise": (h, pt.tanh(2 * h + v), [0, 1]),
    "rows by a matrix": (h, pt.tanh(h @ w), [0]),
    "columns by a matrix": (h, pt.dot(w, h), [1]),
    "rows of a batch": (cube, cube @ w, [0, 1]),
    "a function of rows": (h, pt.vectorize(lambda row: pt.dot(w, row), "(d)->(d)")(h), [0]),
    "softmax": (cube, pt.special.softmax(cube, axis=-1), [0, 1]),
    "sorted": (cube, pt.sort(cube, axis=1) + pt.argsort(cube, axis=-2), [0, 2]),
    "a sum": (h, h + h.sum(axis=0, keepdims=True), [1]),
    "a transpose": (h, h + h.T, []),
    "a row back to front": (h, h[::-1], [1]),
    "shifted": (h, pt.concatenate([h[:, 1:], h[:, :1]], axis=1), [0]),
    "a row written": (h, pt.set_subtensor(h[0], h[1]), [1]),
    "a column written": (h, pt.set_subtensor(h[:, 0], h[:, 1]), [0]),
    "one column for all": (h, pt.broadcast_to(h[:, :1], h.shape), [0]),
    "running sums": (h, pt.cumsum(h, axis=0), [1]),
    "its size": (h, h / h.shape[0], [0, 1]),
    "another state's place": (h, pt.as_tensor_variable(w), [0, 1]),
    "reshaped": (h, pt.reshape(h, h.shape), []),
    "gathered": (h, h[:, pt.argsort(v)], []),
    "a matrix by itself": (h, h @ h, []),
    "outer": (v, pt.outer(v, v).sum(axis=0), []),
}


@pytest.mark.all_forms
@pytest.mark.parametrize("name", STEPS)
def test_independent_axes(name):
    state, after, expected = STEPS[name]
    assert independent_axes([[state]], [after]) == expected


def test_several_states():
    c = pt.matrix("c")
    assert independent_axes([[h], [c]], [h * c, c + h]) == [0, 1]
    assert independent_axes([[h], [c]], [h @ w, c + h]) == [0]
    assert independent_axes([[h], [c]], [h, c.T + h]) == []
    assert independent_axes([[h], [v]], [h + v, 2 * v]) == []
